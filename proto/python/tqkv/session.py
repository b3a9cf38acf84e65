"""A session: what a client owns on one pool. Its sequences are named by numbers of the caller's choice."""

from collections import namedtuple

import numpy as np

from . import _read, _tables, dtypes
from . import _wire as wire
from ._arguments import POSITION_MAX, entries_of, is_packed, n_tokens_of, outputs_of, rotated_flags, sequence_id, unify, whole
from ._rows import Call, Item
from ._sequence_ops import SequenceOps
from .codec import BadRow
from .errors import ArgumentError, Status, TqkvError


class Geometry(namedtuple("Geometry", "pool n_layers block_size q_heads kv_heads k_head_dim v_head_dim")):
    """What rows of a pool look like."""

    __slots__ = ()

    @classmethod
    def of(cls, told, pool):
        return cls(pool, *(getattr(told, name) for name in cls._fields[1:]))

    def __str__(self):
        name = f"pool {self.pool!r}" if self.pool else "the pool"
        return (f"{name} has {self.n_layers} layers, {self.q_heads} q_heads, {self.kv_heads} kv_heads, k_head_dim "
                f"{self.k_head_dim}, v_head_dim {self.v_head_dim}")


Sequence = namedtuple("Sequence", "sequence length_min length_max n_blocks n_shared_blocks state is_evictable lengths "
                      "n_exact")
Sequence.__doc__ = """One sequence as the server tells it.

lengths has one number per layer. state: "resident", "spilled" or "evicted".
"""
FLOAT32_MAX = float(np.finfo(np.float32).max)
STATES = ("resident", "spilled", "evicted")


class Session(SequenceOps):
    """What a client owns on one pool. Made by Client.open() and Client.attach().

    A row is one token's K or V of all KV heads on one layer: k is [tokens, kv_heads, k_head_dim], v is
    [tokens, kv_heads, v_head_dim], q is [q_heads, k_head_dim], an output is [q_heads, v_head_dim]. A single token may
    leave out the first axis. float32, float16 and bf16 (as uint16, see tqkv.to_bf16) are sent as they are; float64 is
    rounded to float32.

    Positions: a session object knows how long its sequences are on each layer, so an append goes to the end unless it
    is told a position, and a sequence that it has not seen is created. The server checks every position: if somebody
    else changed the sequence, the append fails with POSITION and nothing is written.

    Large appends are sent in several frames, and a split item is no longer stored whole or not at all: the error's
    results tell how many tokens of each item are stored.

    Packed appends: with packed=True the rows are encoded here and sent in the pool's row format, so fewer bytes travel
    and the daemon does not quantise. They are stored as the bytes that the daemon would have made. k and v are numbers
    as above, or rows that are packed already: uint8 [tokens, kv_heads, row_bytes], as read(dtype="packed") gives them
    (of several layers: an array with a first axis, or a list over the layers). The pool's fingerprint goes with them:
    rows for another pool are refused with FORMAT_MISMATCH. The encoder is session.codec, a tqkv.codec.PoolCodec: made
    at the first use from what the daemon tells (Client.pool_codec()), or set by the caller.

    Items that are refused for now (POOL_FULL, BUSY_RETRY) are sent again, alone, with growing random pauses, until the
    call's deadline would pass; with Client(retry=False) they raise at once. QUOTA raises at once.

    The object belongs to one thread, as its client does. Leaving a `with` block ends the session and frees its rows.
    """

    def __init__(self, client, name, geometry, told):
        self._client, self.name, self.geometry = client, name, geometry
        self._lost = None  # the error that every call raises
        self._lengths = {}  # sequence: one length per layer
        self._unsure = set()  # sequences whose lengths must be asked for
        self._row_bytes = {}  # packed: (side, layer): bytes
        self.codec = None  # what packed=True encodes with
        self.timings = None  # of the last blocking row operation, with Client(timings=True): microseconds
        self._take(told)

    def _take(self, told):
        self.handle, self.fingerprint, self.lease_ms = told.session, told.fingerprint, told.lease_ms
        self.reserved_blocks = told.reserved_blocks
        self.tokens_max, self.sequences_max = told.tokens_max, told.sequences_max
        self._unsure.update(self._lengths)

    @property
    def lost(self):
        """The TqkvError that every call raises since Client.reconnect() or close(), or None: it is usable."""
        return self._lost

    def __repr__(self):
        return f"<tqkv.Session {self.name or hex(self.handle)}: {self.geometry}>"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            self.close()
        except TqkvError:
            # The caller's exception matters more, and a session that is gone already is closed.
            if kind is None and self._client.is_connected and not self._lost:
                raise

    def _check(self):
        if self._lost:
            raise self._lost.copy(outcome_unknown=False)

    # ---- arguments ----

    def _layer(self, layer):
        return whole("layer", layer, 0, self.geometry.n_layers - 1)

    def _layers_of(self, k, layer_first, packed=False):
        layer_first = whole("layer_first", layer_first, 0, self.geometry.n_layers - 1)
        if packed and isinstance(k, (list, tuple)):
            shape = (len(k), "..")  # rows of the layers may have different sizes
        else:
            shape = np.shape(k) if np.ndim(k) > 2 else (0,)
        n_layers = shape[0]
        if n_layers < 1 or layer_first + n_layers > self.geometry.n_layers:
            raise ArgumentError(f"k has shape {shape if n_layers else np.shape(k)}, expected (layers, tokens, "
                                f"{self.geometry.kv_heads}, {self.geometry.k_head_dim}) from layer {layer_first} on: "
                                f"{self.geometry}")
        return layer_first, n_layers

    def _side(self, what, values, heads, dim, n_layers, axis):
        """Rows as [layers, tokens, heads, dim]. n_layers None: one layer, without its axis."""
        array, number = dtypes.as_rows(what, values)
        layers_axis = () if n_layers is None else (n_layers,)
        n_axes = len(layers_axis) + 3
        if array.ndim == n_axes - 1 and array.shape == layers_axis + (heads, dim):
            array = array.reshape(layers_axis + (1, heads, dim))
        if array.ndim != n_axes or array.shape[:len(layers_axis)] != layers_axis or array.shape[-2:] != (heads, dim):
            wanted = ", ".join(str(part) for part in layers_axis + (axis, heads, dim))
            raise ArgumentError(f"{what} has shape {np.shape(values)}, expected ({wanted}): {self.geometry}")
        return (array[None] if n_layers is None else array), number

    def _kv(self, sequence, k, v, n_layers):
        g = self.geometry
        k = self._side("k", k, g.kv_heads, g.k_head_dim, n_layers, "tokens")
        v = self._side("v", v, g.kv_heads, g.v_head_dim, n_layers, "tokens")
        return k, v, n_tokens_of(sequence, k[0], v[0])

    def _packed_kv(self, sequence, k, v, layers, has_layer_axis, deadline):
        k = self._packed_side(sequence, "k", k, layers, has_layer_axis, deadline)
        v = self._packed_side(sequence, "v", v, layers, has_layer_axis, deadline)
        return (k, dtypes.PACKED), (v, dtypes.PACKED), n_tokens_of(sequence, k, v)

    def _packed_side(self, sequence, side, values, layers, has_layer_axis, deadline):
        """Packed rows as a list over the layers of [tokens, kv_heads, row_bytes]."""
        g = self.geometry
        if not is_packed(values):
            dim = g.k_head_dim if side == "k" else g.v_head_dim
            rows = dtypes.to_f32(*self._side(side, values, g.kv_heads, dim, len(layers) if has_layer_axis else None,
                                             "tokens"))
            return [self._encode(sequence, side, layer, part, deadline) for layer, part in zip(layers, rows)]
        parts = list(values) if has_layer_axis else [values]
        if len(parts) != len(layers):
            raise ArgumentError(f"packed {side} has {len(parts)} layers, expected {len(layers)}")
        for i, layer in enumerate(layers):
            rows = np.asarray(parts[i])
            rows = rows[None] if rows.ndim == 2 else rows
            wanted = self._packed_bytes(side, layer, deadline)
            if rows.dtype != np.uint8 or rows.ndim != 3 or rows.shape[1:] != (g.kv_heads, wanted):
                raise ArgumentError(f"packed {side} of layer {layer} has shape {rows.shape} and dtype {rows.dtype}, "
                                    f"expected (tokens, {g.kv_heads}, {wanted}) of uint8")
            parts[i] = rows
        if len({len(rows) for rows in parts}) > 1:
            raise ArgumentError(f"sequence {sequence}: packed {side} has from {min(map(len, parts))} to "
                                f"{max(map(len, parts))} tokens on its layers")
        return parts

    def _packed_bytes(self, side, layer, deadline):
        """Of one row. A frame with shorter rows could look whole, so they are not sent unchecked."""
        if (side, layer) not in self._row_bytes:
            self._row_bytes[side, layer] = self._get_codec(deadline).codec(layer, side).row_bytes
        return self._row_bytes[side, layer]

    def _get_codec(self, deadline):
        if self.codec is None:
            self.codec = self._client._codec_of(self, deadline)
        return self.codec

    def _encode(self, sequence, side, layer, rows, deadline):
        codec = self._get_codec(deadline)
        try:
            return codec.encode(layer, side, rows)
        except BadRow as error:
            raise TqkvError(Status.BAD_VALUE, f"sequence {sequence}: {side} of layer {layer}, token {error.row} cannot "
                            "be packed, and nothing was sent", scope="item") from error

    def _q(self, q):
        """(queries as [q_len, q_heads, dim], dtype, whether the caller gave the first axis)"""
        g = self.geometry
        array, number = dtypes.as_rows("q", q)
        has_axis = array.ndim == 3
        if array.ndim not in (2, 3) or array.shape[-2:] != (g.q_heads, g.k_head_dim):
            raise ArgumentError(f"q has shape {np.shape(q)}, expected ({g.q_heads}, {g.k_head_dim}) or (q_len, "
                                f"{g.q_heads}, {g.k_head_dim}): {g}")
        return array.reshape(-1, g.q_heads, g.k_head_dim), number, has_axis

    # ---- lengths ----

    def _load_lengths(self, deadline):
        sequences = self._tell(deadline)
        self._lengths = {told.sequence: list(told.lengths) for told in sequences}
        self._unsure.clear()
        return sequences

    def _settle(self, sequences, deadline):
        """Asks for the lengths of sequences that a failed call left uncertain."""
        for sequence in sequences:
            if sequence not in self._unsure:
                continue
            told = self._tell(deadline, sequence, 1)
            if told and told[0].sequence == sequence:
                self._lengths[sequence] = list(told[0].lengths)
            else:
                self._lengths.pop(sequence, None)
            self._unsure.discard(sequence)

    def _place(self, sequence, layers, position, create):
        """(position, flags) of an append."""
        known = self._lengths.get(sequence)
        if position is None:
            here = {known[layer] for layer in layers} if known else {0}
            if len(here) > 1:
                raise ArgumentError(f"sequence {sequence} has lengths from {min(here)} to {max(here)} on these layers: "
                                    "give a position, or append layer by layer")
            position = here.pop()
            if create:
                position = 0
        else:
            position = whole("position", position, 0, POSITION_MAX)
        if create is None:
            create = known is None and position == 0
        if create and position:
            raise ArgumentError(f"sequence {sequence}: a new sequence begins at position 0, not {position}")
        return position, wire.ITEM_CREATE if create else 0

    def _enter(self, item, layers, length):
        """An append is stored (or, pipelined, on its way): the sequence has this length on these layers."""
        lengths = self._lengths.setdefault(item.sequence, [0] * self.geometry.n_layers)
        for layer in layers:
            lengths[layer] = length

    # ---- calls ----

    def _append_call(self, entries, layer_first, n_layers, has_layer_axis, position, create, deadline, op=wire.APPEND,
                     out_dtype="f32", lse=False, scale=0.0, packed=False, window=0, sinks=True, evictable=False,
                     rotated=0):
        """entries: (sequence, k, v[, q])"""
        self._check()
        entries = [(sequence_id(entry[0]), *entry[1:]) for entry in entries]
        self._settle([entry[0] for entry in entries], deadline)
        layers = range(layer_first, layer_first + n_layers)
        items, has_axis = [], []
        for sequence, k, v, *q in entries:
            if packed:
                k, v, n_tokens = self._packed_kv(sequence, k, v, layers, has_layer_axis, deadline)
            else:
                k, v, n_tokens = self._kv(sequence, k, v, n_layers if has_layer_axis else None)
            at, flags = self._place(sequence, layers, position, create)
            flags |= wire.ITEM_EVICTABLE if evictable else 0
            if at + n_tokens > POSITION_MAX:
                raise ArgumentError(f"sequence {sequence}: position {at} + {n_tokens} tokens leaves 32 bits")
            item = Item(sequence, at, n_tokens, flags=flags, k=k, v=v)
            if q:
                q, q_dtype, axis = self._q(q[0])
                item.q, item.q_len = (q, q_dtype), len(q)
                has_axis.append(axis)
            items.append(item)
        call = self._call(op, items, layer_first, n_layers, out_dtype, lse, scale, window, sinks, rotated)
        return call, has_axis

    def _call(self, op, items, layer_first=0, n_layers=1, out_dtype="f32", lse=False, scale=0.0, window=0, sinks=True,
              rotated=0):
        used = {side: unify(items, side) for side in ("k", "v", "q")}
        has_q = op in (wire.DECODE, wire.APPEND_DECODE)
        for item in items:
            if item.q_len > self._client.server.q_len_max:
                raise ArgumentError(f"sequence {item.sequence}: {item.q_len} queries, the server takes "
                                    f"{self._client.server.q_len_max} per call (q_len_max)")
        scale = float(scale)
        if not 0 <= scale <= FLOAT32_MAX:
            raise ArgumentError(f"scale is {scale}, expected a positive number of float32, or 0 for the pool's")
        return Call(self._client._connection, self.geometry, self.handle, op, items, layer_first=layer_first,
                    limits=(self.tokens_max, self.sequences_max),
                    n_layers=n_layers, k_dtype=used["k"], v_dtype=used["v"], q_dtype=used["q"],
                    out_dtype=dtypes.number_of(out_dtype) if has_q else dtypes.NONE, lse=lse, scale=scale,
                    window=whole("window", window, 0, POSITION_MAX), sinks=bool(sinks),
                    rotated=rotated, fingerprint=self.fingerprint if used["k"] == dtypes.PACKED else 0)

    def _run_append(self, call, deadline):
        layers = range(call.layer_first, call.layer_first + call.n_layers)
        sequences = {item.sequence for item in call.items}
        self._unsure |= sequences  # until it is known what became of them, whatever happens
        call.run(deadline, self._client._pauses())
        for item in call.items:
            if item.status == Status.OK:
                self._enter(item, layers, item.position + item.n_tokens)
                self._unsure.discard(item.sequence)
        self._finish(call)

    def _finish(self, call):
        self.timings = call.timings
        failure = call.failure()
        if failure is not None:
            raise failure

    # ---- storing ----

    def append(self, sequence, layer, k, v, position=None, create=None, timeout=None, packed=False, evictable=False):
        """Stores rows of one sequence on one layer; returns the sequence's length on that layer.

        create: None makes the sequence when it is new to this object; True insists (EXISTS if it is not new).
        packed: the rows are packed here, or are already (uint8): see Session. evictable: from now on the server may
        give the sequence's memory to others while it is idle and blocks are short; using it then raises EVICTED, and
        its rows must be appended again. pin() keeps it.
        """
        deadline = self._client._deadline(timeout)
        call, _ = self._append_call([(sequence, k, v)], self._layer(layer), 1, False, position, create, deadline,
                                    packed=packed, evictable=evictable)
        self._run_append(call, deadline)
        return call.items[0].position + call.items[0].n_tokens

    def append_layers(self, sequence, k, v, layer_first=0, position=None, create=None, timeout=None, packed=False,
                      evictable=False):
        """Stores rows of one sequence on several layers at once: k is [layers, tokens, kv_heads, k_head_dim]."""
        deadline = self._client._deadline(timeout)
        layer_first, n_layers = self._layers_of(k, layer_first, packed)
        call, _ = self._append_call([(sequence, k, v)], layer_first, n_layers, True, position, create, deadline,
                                    packed=packed, evictable=evictable)
        self._run_append(call, deadline)
        return call.items[0].position + call.items[0].n_tokens

    def append_batch(self, items, layer=None, create=None, timeout=None, packed=False, evictable=False):
        """Stores rows of many sequences: {sequence: (k, v)} or a list of (sequence, k, v).

        layer None: on all layers, and every k and v has a first axis for them. Returns the new lengths in the order
        of the items. If items fail, the others are stored all the same; the error's item_errors names those that
        failed.
        """
        deadline = self._client._deadline(timeout)
        entries = entries_of(items, 2)
        first, n = (0, self.geometry.n_layers) if layer is None else (self._layer(layer), 1)
        call, _ = self._append_call(entries, first, n, layer is None, None, create, deadline, packed=packed,
                                    evictable=evictable)
        if not call.items:
            return []
        self._run_append(call, deadline)
        return [item.position + item.n_tokens for item in call.items]

    # ---- attention ----

    def decode(self, sequence, layer, q, seen=None, lse=False, dtype="f32", scale=0.0, timeout=None, window=0,
               sinks=True, q_rotated=False, out_rotated=False):
        """Attention of q over the stored rows of one layer: out [q_heads, v_head_dim].

        seen: how many tokens it sees; None is all. lse: also the log-sum-exp of the scores, [q_heads] (natural
        logarithm). A query that sees no token gets zeros and -inf. dtype: of the output. scale: of the scores; 0 is the
        pool's. window: sees so many tokens only, its own included; 0 is the pool's, which it may not exceed. sinks
        False: the pool's sinks take no part. q of shape [q_len, q_heads, k_head_dim]: the last row sees all, each one
        before it a token less.
        q_rotated: q is multiplied with Client.rotation_matrix(pool, layer, "k") already; out_rotated: outputs are left
        in the rotated space of "v". UNSUPPORTED where a layer's rows have no single rotation.
        """
        out = self.decode_batch([(sequence, q)], layer, seen, lse, dtype, scale, timeout, window, sinks, q_rotated,
                                out_rotated)
        has_axis = np.ndim(q) == 3
        if lse:
            return out if has_axis else (out[0][0], out[1][0])
        return out if has_axis else out[0]

    def _decode_call(self, items, layer, seen, lse, dtype, scale, window, sinks, rotated=0):
        self._check()
        if seen is not None:
            seen = whole("seen", seen, 0, POSITION_MAX)
        rows, has_axis = [], []
        for sequence, q in entries_of(items, 1):
            q, number, axis = self._q(q)
            has_axis.append(axis)
            rows.append(Item(sequence_id(sequence), wire.PLANNED if seen is None else seen, q_len=len(q), q=(q, number)))
        call = self._call(wire.DECODE, rows, self._layer(layer), 1, dtype, lse, scale, window, sinks, rotated)
        return call, has_axis

    def decode_batch(self, items, layer, seen=None, lse=False, dtype="f32", scale=0.0, timeout=None, window=0,
                     sinks=True, q_rotated=False, out_rotated=False):
        """Attention for many sequences: {sequence: q} or a list of (sequence, q).

        Returns out [queries, q_heads, v_head_dim], in the order of the items; with lse (out, lse [queries, q_heads]).
        """
        deadline = self._client._deadline(timeout)
        call, _ = self._decode_call(items, layer, seen, lse, dtype, scale, window, sinks,
                                    rotated_flags(q_rotated, out_rotated))
        if call.items:
            call.run(deadline, self._client._pauses())
            self._finish(call)
        return outputs_of(call)

    def append_decode(self, sequence, layer, k, v, q, position=None, create=None, lse=False, dtype="f32", scale=0.0,
                      timeout=None, window=0, sinks=True, packed=False, evictable=False, q_rotated=False,
                      out_rotated=False):
        """append(), then decode() over all rows with these: one round trip, the step of token generation."""
        deadline = self._client._deadline(timeout)
        call, has_axis = self._append_call([(sequence, k, v, q)], self._layer(layer), 1, False, position, create,
                                           deadline, wire.APPEND_DECODE, dtype, lse, scale, packed, window, sinks,
                                           evictable, rotated_flags(q_rotated, out_rotated))
        self._run_append(call, deadline)
        out = outputs_of(call)
        if has_axis[0]:
            return out
        return (out[0][0], out[1][0]) if lse else out[0]

    def append_decode_batch(self, items, layer, create=None, lse=False, dtype="f32", scale=0.0, timeout=None,
                            window=0, sinks=True, packed=False, evictable=False, q_rotated=False,
                            out_rotated=False):
        """append_decode() for many sequences: {sequence: (k, v, q)} or a list of (sequence, k, v, q).

        Returns as decode_batch() does.
        """
        deadline = self._client._deadline(timeout)
        call, _ = self._append_call(entries_of(items, 3), self._layer(layer), 1, False, None, create, deadline,
                                    wire.APPEND_DECODE, dtype, lse, scale, packed, window, sinks, evictable,
                                    rotated_flags(q_rotated, out_rotated))
        if call.items:
            self._run_append(call, deadline)
        return outputs_of(call)

    # ---- reading back ----

    def read(self, sequence, layers=None, start=0, n=None, dtype="f32", k=True, v=True, exact=False, timeout=None):
        """(K rows, V rows) as they are stored: [layers, tokens, kv_heads, head_dim]; None for a side not wanted.

        layers: a number (then the arrays have no axis for it), a range, or None for all. n None: to the sequence's end.
        dtype "f32", "f16", "bf16" (uint16), or "packed": the stored bytes, [layers, tokens, kv_heads, row_bytes]
        (a list over the layers where row_bytes differ). exact: from the exact window where it has the rows. Large reads are asked for in parts.
        """
        deadline = self._client._deadline(timeout)
        self._check()
        job = _read.Job(self, sequence_id(sequence), layers, start, n, dtype, k, v, exact, deadline)
        return job.result(self._client._run(job.submits(), deadline))

    # ---- client tables ----

    def update_slots(self, slots, k, v, layer=None, layer_first=0, timeout=None):
        """Stores row i in slots[i] = block * block_size + offset, of blocks 0 to reserved_blocks - 1.

        For sessions of open(client_tables=True). layer: k is [tokens, kv_heads, k_head_dim]; None: k is [layers,
        tokens, ..] from layer_first on. A negative slot skips its row; one that is not the session's refuses everything
        (SLOT_OUT_OF_RANGE, TqkvError.got is the row); of two rows with the same slot the later one stays.
        """
        deadline = self._client._deadline(timeout)
        _tables.update(self, slots, k, v, layer_first if layer is None else layer, layer is None, deadline)

    def decode_table(self, layer, q, table, seen, lse=False, dtype="f32", scale=0.0, window=0, sinks=True,
                     timeout=None, q_rotated=False, out_rotated=False):
        """Attention of n sequences: q [n, q_heads, k_head_dim] or [n, q_len, ..], table [n, blocks], seen [n].

        Token t of row i lies in block table[i][t // block_size]. Entries behind seen[i] may be anything; one before it
        that is not the session's refuses everything (SLOT_OUT_OF_RANGE, TqkvError.got is its place in the table).
        """
        return _tables.decode(self, layer, q, table, seen, lse, dtype, scale, window, sinks,
                              self._client._deadline(timeout), q_rotated, out_rotated)

    def tell(self, timeout=None):
        """Every sequence of the session as the server knows it: a list of Sequence, in the order of their numbers.

        Waits for everything that was sent before."""
        self._check()
        return self._tell(self._client._deadline(timeout))

    def lengths(self, timeout=None):
        """{sequence: (length on layer 0, on layer 1, ..)} as the server knows them."""
        return {told.sequence: told.lengths for told in self.tell(timeout)}

    def _tell_op(self, sequence_from, n_max):
        return wire.LAYOUTS["tell_req"].pack(sequence_from=sequence_from, n_sequences_max=n_max,
                                             flags=wire.TELL_PER_LAYER)

    def _tell(self, deadline, sequence_from=0, n_max=None):
        """All pages from a sequence on; at most n_max sequences if given."""
        sequences = []
        page = min(self._client.server.items_max, wire.ITEMS_MAX)
        while True:
            op = self._tell_op(sequence_from, page if n_max is None else n_max)
            request = []

            def submit():
                request[:] = [self._client._submit(wire.TELL, op, session=self.handle, deadline=deadline)]
                return request[0]

            reply = self._client._run([submit], deadline)[0]
            sequences += self._read_tell(request[0], reply)
            sequence_from = reply.op.next_sequence
            if sequence_from == 0 or n_max is not None:
                return sequences

    def _read_tell(self, request, reply):
        n_layers, last = self.geometry.n_layers, request.op.sequence_from - 1
        try:
            if reply.op.n_layers != n_layers or len(reply.items) > request.op.n_sequences_max:
                raise wire.BadFrame(Status.BAD_FRAME, f"{len(reply.items)} sequences of {reply.op.n_layers} layers")
            data = reply.segment(reply.op.lengths_off, len(reply.items) * n_layers * 4, "lengths")
            lengths = np.frombuffer(data, "<u4").reshape(len(reply.items), n_layers).tolist()
            for item in reply.items:
                if item.sequence <= last:
                    raise wire.BadFrame(Status.BAD_FRAME, f"sequence {item.sequence} after {last}")
                last = item.sequence
            # Otherwise paging would never end.
            if reply.op.next_sequence and (not reply.items or reply.op.next_sequence <= last):
                raise wire.BadFrame(Status.BAD_FRAME, f"next_sequence {reply.op.next_sequence} after {last}")
        except wire.BadFrame as error:
            self._client._bad_reply(request, str(error))
        return [Sequence(item.sequence, item.length_min, item.length_max, item.n_blocks, item.n_shared_blocks,
                         STATES[item.state] if item.state < len(STATES) else f"state {item.state}",
                         bool(item.flags & wire.ITEM_EVICTABLE), tuple(row), item.n_exact)
                for item, row in zip(reply.items, lengths)]

    # ---- the session itself ----

    def ping(self, timeout=None):
        """Renews the lease. Seconds that the answer took."""
        self._check()
        return self._client._ping(self.handle, timeout)

    def pipeline(self, timeout=None):
        """A Pipeline for this session: row operations that are sent without waiting for each other."""
        return self._client.pipeline(self, timeout)

    def close(self, timeout=None):
        """Ends the session and frees its sequences. The object is of no use afterwards, whatever happens."""
        if self in self._client._sessions:
            self._client._sessions.remove(self)
        if self._lost:
            return
        self._lost = TqkvError(Status.STALE_HANDLE, "the session was closed")
        self._client._call(wire.CLOSE, b"", session=self.handle, deadline=self._client._deadline(timeout))
