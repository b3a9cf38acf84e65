"""READ in as many replies as frame_bytes_max needs."""

from collections import namedtuple

import numpy as np

from . import _wire as wire
from . import dtypes
from .errors import ArgumentError, ArgumentTypeError, Status, TqkvError, status_text

Part = namedtuple("Part", "layer_first n_layers position n_tokens")


class Job:
    def __init__(self, session, sequence, layers, start, n, dtype, want_k, want_v, exact, deadline):
        self.session, self.sequence, self.deadline = session, sequence, deadline
        self.client = session._client
        self.flags = wire.READ_EXACT if exact else 0
        self.first, self.n_layers, self.has_axis = _layer_range(layers, session.geometry.n_layers)
        self.dtype = dtypes.number_of(dtype, may_be_packed=True)
        self.sides = [side for side, wanted in (("k", want_k), ("v", want_v)) if wanted]
        if not self.sides:
            raise ArgumentError("neither K nor V is wanted")
        self.start, self.n = _token_range(start, n)
        if self.n is None:
            self.n = max(self._length() - self.start, 0)
        self.requests = {}  # by part
        self.parts = self._plan() if self.n else []

    def _length(self):
        told = self.session._tell(self.deadline, self.sequence, 1)
        if not told or told[0].sequence != self.sequence:
            raise TqkvError(Status.NOT_FOUND, f"the session has no sequence {self.sequence}", is_local=False)
        if told[0].state == "evicted":  # it has no rows, which is not the same as a length of 0
            raise TqkvError(Status.EVICTED, f"READ: sequence {self.sequence}: {status_text(Status.EVICTED)}",
                            is_local=False)
        return min(told[0].lengths[self.first:self.first + self.n_layers])

    # ---- sizes ----

    def _row_bytes(self, side, layer):
        g = self.session.geometry
        if self.dtype != dtypes.PACKED:
            return (g.k_head_dim if side == "k" else g.v_head_dim) * dtypes.ELEMENT_BYTES[self.dtype]
        return self.session._row_bytes.get((side, layer), 0)

    def _side_bytes(self, side, part):
        layers = range(part.layer_first, part.layer_first + part.n_layers)
        row_bytes = sum(self._row_bytes(side, layer) for layer in layers)
        return row_bytes * part.n_tokens * self.session.geometry.kv_heads

    def _fits(self, part):
        """K, then V at a multiple of 64."""
        sizes = [self._side_bytes(side, part) for side in self.sides]
        end = sum(wire.align(n_bytes) for n_bytes in sizes[:-1]) + sizes[-1]
        return wire.body_size(wire.LAYOUTS["read_reply"].size, 0, end) <= self.client.server.frame_bytes_max

    def _plan(self):
        if self.dtype == dtypes.PACKED:
            self._learn_row_bytes()
        parts = []
        n_layers = self.n_layers
        if not self._fits(Part(self.first, n_layers, self.start, 1)):
            n_layers = 1  # one token of all layers is too much: a layer at a time
        for first in range(self.first, self.first + self.n_layers, n_layers):
            n_fit = self._tokens_fit(Part(first, n_layers, self.start, self.n))
            for at in range(0, self.n, n_fit):
                parts.append(Part(first, n_layers, self.start + at, min(n_fit, self.n - at)))
        return parts

    def _tokens_fit(self, part):
        if self._fits(part):
            return part.n_tokens
        low, high = 0, part.n_tokens
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._fits(part._replace(n_tokens=middle)) else (low, middle)
        if low == 0:
            raise TqkvError(Status.TOO_LARGE, "one token of one layer does not fit into a reply of "
                            f"{self.client.server.frame_bytes_max} bytes", scope="request")
        return low

    def _learn_row_bytes(self):
        """A packed row's size is what a reply with one token has."""
        asked = [(side, layer) for side in self.sides for layer in range(self.first, self.first + self.n_layers)
                 if (side, layer) not in self.session._row_bytes]

        def submit_of(side, layer):
            return lambda: self._submit(Part(layer, 1, self.start, 1), [side])

        replies = self.client._run([submit_of(*key) for key in asked], self.deadline)
        for key, reply in zip(asked, replies):
            n_bytes, rest = divmod(len(reply.payload), self.session.geometry.kv_heads)
            if rest or not n_bytes:
                raise TqkvError(Status.BAD_FRAME, f"{len(reply.payload)} bytes are no packed rows")
            self.session._row_bytes[key] = n_bytes

    # ---- frames ----

    def _submit(self, part, sides):
        op = wire.LAYOUTS["read_req"].pack(
            sequence=self.sequence, layer_first=part.layer_first, n_layers=part.n_layers, position=part.position,
            n_tokens=part.n_tokens, k_dtype=self.dtype if "k" in sides else 0,
            v_dtype=self.dtype if "v" in sides else 0, flags=self.flags)
        request = self.client._submit(wire.READ, op, session=self.session.handle, deadline=self.deadline)
        self.requests[part] = request
        return request

    def submits(self):
        return [lambda part=part: self._submit(part, self.sides) for part in self.parts]

    def result(self, replies):
        g = self.session.geometry
        numpy_type = dtypes.NUMPY[self.dtype]
        arrays = {}
        for side in self.sides:
            widths = [self._row_bytes(side, self.first + i) // numpy_type.itemsize for i in range(self.n_layers)]
            arrays[side] = [np.empty((self.n, g.kv_heads, width), numpy_type) for width in widths]
        for part, reply in zip(self.parts, replies):
            try:
                self._take(part, reply, arrays)
            except wire.BadFrame as error:
                self.client._bad_reply(self.requests[part], str(error))
        return tuple(self._shape(arrays.get(side)) for side in ("k", "v"))

    def _take(self, part, reply, arrays):
        got = reply.op
        asked = self.requests[part].op
        if got[:7] != asked[:7]:
            raise wire.BadFrame(Status.BAD_FRAME, f"rows of {got[:7]}, expected {asked[:7]}")
        for side in self.sides:
            data = reply.segment(getattr(got, f"{side}_off"), self._side_bytes(side, part), f"{side} rows")
            at = 0
            for layer in range(part.layer_first, part.layer_first + part.n_layers):
                target = arrays[side][layer - self.first]
                n_bytes = part.n_tokens * self.session.geometry.kv_heads * self._row_bytes(side, layer)
                rows = np.frombuffer(data[at:at + n_bytes], target.dtype)
                first = part.position - self.start
                target[first:first + part.n_tokens] = rows.reshape(part.n_tokens, *target.shape[1:])
                at += n_bytes

    def _shape(self, layers):
        if layers is None:
            return None
        if not self.has_axis:
            return layers[0]
        return np.stack(layers) if len({rows.shape for rows in layers}) == 1 else layers


def _layer_range(layers, n_layers):
    if layers is None:
        return 0, n_layers, True
    if isinstance(layers, (int, np.integer)) and not isinstance(layers, bool):
        first, n, has_axis = int(layers), 1, False
    elif isinstance(layers, range) and layers.step == 1 and len(layers):
        first, n, has_axis = layers.start, len(layers), True
    else:
        raise ArgumentTypeError(f"layers is {layers!r}, expected a number, a range with step 1, or None")
    if first < 0 or first + n > n_layers:
        raise ArgumentError(f"layers {first} to {first + n - 1}, the pool has {n_layers}")
    return first, n, has_axis


def _token_range(start, n):
    for what, value in (("start", start), ("n", n)):
        if value is None and what == "n":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise ArgumentTypeError(f"{what} is {value!r}, expected a whole number")
        if not 0 <= value < wire.PLANNED:
            raise ArgumentError(f"{what} is {value}, expected 0 or more")
    return int(start), None if n is None else int(n)
