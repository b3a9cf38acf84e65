"""Row operations: which tokens go into which frame, what came back, what is sent again.

An item is one sequence of a call. A piece is a part of an item that fits into one frame; only appends are cut. A round
sends every open item; items that were refused with a retryable status are open again in the next round. A pass is all
rounds on one range of layers: there is more than one only when one token of all layers does not fit into a frame.
"""

import random
from collections import namedtuple

import numpy as np

from . import _wire as wire
from . import dtypes
from ._connection import now
from .errors import NO_LAYER, NO_ROW, ArgumentError, ItemResult, Status, TqkvError, ends_by_itself

WINDOW_FRAMES = 8  # of one blocking call in flight: enough to keep both ends busy, and a bound on memory
TIMINGS = ("recv_us", "queue_us", "copy_in_us", "kernel_us", "copy_out_us", "total_us")


class Backoff:
    """Exponential with full jitter, so that clients that were refused together do not come back together."""

    def __init__(self, first_s, max_s):
        self.first_s, self.max_s = first_s, max_s
        self.n_pauses = 0

    def pause(self, connection, retry_after_ms, deadline):
        """Waits. False: the deadline would pass, so it is over."""
        bound = min(self.first_s * 2 ** min(self.n_pauses, 20), self.max_s)
        until = now() + retry_after_ms / 1000 + random.uniform(0, bound)
        self.n_pauses += 1
        if until >= deadline:
            return False
        connection.sleep(until)
        connection.check()
        return True


class Item:
    __slots__ = ("index", "parent", "sequence", "position", "n_tokens", "q_len", "flags", "k", "v", "q", "q_at", "sent", "done",
                 "is_created", "is_over", "is_refused", "is_last_sent", "is_unknown", "status", "length", "layer",
                 "row", "retry_after_ms")

    def __init__(self, sequence, position=0, n_tokens=0, q_len=0, flags=0, k=None, v=None, q=None, parent=0):
        self.index = 0
        self.parent = parent  # FORK
        self.sequence, self.position, self.n_tokens, self.q_len = sequence, position, n_tokens, q_len
        self.flags = flags
        # K and V [layers, tokens, heads, dim], packed rows a list over the layers; q [q_len, heads, dim]
        self.k, self.v, self.q = k, v, q
        self.q_at = 0
        self.sent = self.done = 0
        self.is_created = self.is_over = self.is_refused = self.is_last_sent = self.is_unknown = False
        self.status = Status.OK
        self.length = 0
        self.layer = self.row = None
        self.retry_after_ms = 0


Piece = namedtuple("Piece", "item position n_tokens q_len flags is_last first_token")
Flight = namedtuple("Flight", "request pieces op")


class Call:
    """One row operation on any number of items."""

    def __init__(self, connection, geometry, session, op, items, *, layer_first=0, n_layers=1,
                 k_dtype=0, v_dtype=0, q_dtype=0, out_dtype=0, lse=False, scale=0.0, window=0,
                 sinks=True, fingerprint=0, rotated=0, limits=(0, 0)):
        self.connection, self.geometry, self.session = connection, geometry, session
        self.op, self.items = op, items
        self.layer_first, self.n_layers = layer_first, n_layers
        self.k_dtype, self.v_dtype, self.q_dtype, self.out_dtype = k_dtype, v_dtype, q_dtype, out_dtype
        self.lse, self.scale, self.window, self.sinks, self.fingerprint = lse, scale, window, sinks, fingerprint
        self.tokens_max, self.sequences_max = limits  # of the session, for what is said
        self.rotated = rotated  # ROWS_Q_ROTATED, ROWS_OUT_ROTATED
        self.has_rows = op in (wire.APPEND, wire.DECODE, wire.APPEND_DECODE)
        self.error = None  # of the call as a whole
        self.retry_after_ms = 0
        self.n_frames = self.n_retried = 0
        self.timings = dict.fromkeys(TIMINGS, 0)
        size = dtypes.ELEMENT_BYTES
        g = geometry
        # Bytes of one token on each layer: packed rows of two layers may have different sizes.
        self.k_bytes = self._token_bytes("k", k_dtype, g.k_head_dim)
        self.v_bytes = self._token_bytes("v", v_dtype, g.v_head_dim)
        self._begin_pass(0, n_layers)
        self.q_bytes = g.q_heads * g.k_head_dim * size[q_dtype]
        self.out_bytes = g.q_heads * g.v_head_dim * size[out_dtype]
        n_q = 0
        seen = set()
        for index, item in enumerate(items):
            item.index, item.q_at = index, n_q
            n_q += item.q_len
            if item.sequence in seen:
                raise ArgumentError(f"sequence {item.sequence} appears twice in one call")
            seen.add(item.sequence)
        self.out = self.lses = None
        if op in (wire.DECODE, wire.APPEND_DECODE):
            self.out = np.zeros((n_q, g.q_heads, g.v_head_dim), dtypes.NUMPY[out_dtype])
            self.lses = np.full((n_q, g.q_heads), -np.inf, np.float32) if lse else None

    # ---- sizes ----

    def _token_bytes(self, side, dtype, dim):
        if dtype != dtypes.PACKED:
            return [self.geometry.kv_heads * dim * dtypes.ELEMENT_BYTES[dtype]] * self.n_layers
        shapes = [[rows.shape[1:] for rows in getattr(item, side)] for item in self.items]
        for item, own in zip(self.items, shapes):
            if own != shapes[0]:
                raise ArgumentError(f"sequence {item.sequence}: packed {side} rows have other sizes than those of "
                                    f"sequence {self.items[0].sequence}")
        return [heads * row_bytes for heads, row_bytes in shapes[0]]

    def _begin_pass(self, first, n_layers):
        self.pass_first, self.pass_layers = self.layer_first + first, n_layers
        self.pass_bytes = sum(self.k_bytes[first:first + n_layers]), sum(self.v_bytes[first:first + n_layers])
        self.is_last_pass = first + n_layers == self.n_layers or not self.has_rows

    def _op_bytes(self):
        return wire.LAYOUTS["rows_req"].size if self.has_rows else 0

    def _flags(self):
        return (wire.ROWS_LSE if self.lse else 0) | (0 if self.sinks else wire.ROWS_NO_SINKS) | self.rotated

    def _segments(self, op, token_bytes, n_tokens, n_q):
        """Bytes of K, V and Q. token_bytes: of K and V of one token on the frame's layers."""
        if op == wire.DECODE:
            n_tokens = 0
        return n_tokens * token_bytes[0], n_tokens * token_bytes[1], n_q * self.q_bytes

    def _fits(self, op, token_bytes, n_items, n_tokens, n_q):
        bytes_max = self.connection.frame_bytes_max
        k, v, q = self._segments(op, token_bytes, n_tokens, n_q)
        if n_items > min(self.connection.items_max, wire.ITEMS_MAX):
            return False
        if wire.body_size(self._op_bytes(), n_items, _end_of((k, v, q))) > bytes_max:
            return False
        outputs = (n_q * self.out_bytes, n_q * self.geometry.q_heads * 4 if self.lse else 0)
        return wire.body_size(wire.LAYOUTS["rows_reply"].size, n_items, _end_of(outputs)) <= bytes_max

    def _tokens_fit(self, op, n_wanted, n_items, n_tokens, n_q):
        """How many tokens of n_wanted still fit beside n_tokens of other items."""
        low, high = 0, n_wanted
        if self._fits(op, self.pass_bytes, n_items, n_tokens + high, n_q):
            return high
        while high - low > 1:  # low fits or is 0, high does not
            middle = (low + high) // 2
            if self._fits(op, self.pass_bytes, n_items, n_tokens + middle, n_q):
                low = middle
            else:
                high = middle
        return low

    def layers_fit(self):
        """How many layers of one token fit into a frame, whichever of them."""
        if self.op != wire.APPEND or not any(item.n_tokens for item in self.items):
            return self.n_layers
        if self._fits(wire.APPEND, (sum(self.k_bytes), sum(self.v_bytes)), 1, 1, 0):
            return self.n_layers
        k, v = max(self.k_bytes), max(self.v_bytes)
        n = min(self.n_layers, self.connection.frame_bytes_max // (k + v))
        while n and not self._fits(wire.APPEND, (n * k, n * v), 1, 1, 0):
            n -= 1
        return n

    # ---- planning ----

    def _next_op(self, item):
        """Of an APPEND_DECODE too large for a frame all but the last tokens are appended first."""
        n_left = item.n_tokens - item.sent
        if self.op == wire.APPEND_DECODE and n_left > _tail(item) and not self._fits(
                wire.APPEND_DECODE, self.pass_bytes, 1, n_left, item.q_len):
            return wire.APPEND
        return self.op

    def plan(self):
        """(op, pieces) of the next frame; None when everything open is sent."""
        frame_op, pieces, n_tokens, n_q = None, [], 0, 0
        for item in self.items:
            if item.is_over or item.is_refused or item.is_last_sent:
                continue
            op = self._next_op(item)
            if frame_op is None:
                frame_op = op
            if op != frame_op:
                continue
            n_left = item.n_tokens - item.sent
            is_lead = self.op == wire.APPEND_DECODE and op == wire.APPEND
            n_wanted = n_left - _tail(item) if is_lead else n_left
            q_len = 0 if op == wire.APPEND else item.q_len
            n = self._tokens_fit(op, n_wanted, len(pieces) + 1, n_tokens, n_q + q_len) if n_wanted else 0
            fits = n > 0 or self._fits(op, self.pass_bytes, len(pieces) + 1, n_tokens, n_q + q_len)
            # Only appends are cut, and not in front of their first token.
            if not fits or (n < n_wanted and (op != wire.APPEND or n == 0)):
                if pieces:
                    break
                raise self._too_large(item, op)
            item.is_last_sent = not is_lead and n == n_left
            flags = item.flags
            if item.sent or item.is_created:
                flags &= ~wire.ITEM_CREATE
            pieces.append(Piece(item, item.position + item.sent, n, q_len, flags, item.is_last_sent, item.sent))
            item.sent += n
            n_tokens += n
            n_q += q_len
        return (frame_op, pieces) if pieces else None

    def _too_large(self, item, op):
        k, v, q = self._segments(op, self.pass_bytes, 1 if op != wire.DECODE else 0, item.q_len)
        return TqkvError(Status.TOO_LARGE, f"one token of sequence {item.sequence} takes {k + v + q} bytes of rows, "
                         f"and a frame has at most {self.connection.frame_bytes_max}", scope="request")

    # ---- frames ----

    def send(self, op, pieces, deadline, on_done=None):
        n_tokens = sum(piece.n_tokens for piece in pieces)
        n_q = sum(piece.q_len for piece in pieces)
        segments = self._segments(op, self.pass_bytes, n_tokens, n_q)
        offsets = _offsets_of(segments)
        op_bytes = self._op_bytes()
        frame = self.connection.new_frame(op_bytes, len(pieces), _end_of(segments))
        at = wire.HEADER_BYTES
        values = None
        if self.has_rows:
            has_kv, has_q = op != wire.DECODE, op != wire.APPEND
            values = wire.LAYOUTS["rows_req"].tuple(
                layer_first=self.pass_first, n_layers=self.pass_layers, n_tokens_total=n_tokens, n_q_total=n_q,
                k_dtype=self.k_dtype if has_kv else 0, v_dtype=self.v_dtype if has_kv else 0,
                q_dtype=self.q_dtype if has_q else 0, out_dtype=self.out_dtype if has_q else 0,
                flags=self._flags() if has_q else 0,
                k_off=offsets[0], v_off=offsets[1], q_off=offsets[2],
                scale=self.scale if has_q else 0.0, window=self.window if has_q else 0,
                fingerprint=self.fingerprint if has_kv else 0)
            frame[at:at + op_bytes] = wire.LAYOUTS["rows_req"].pack_tuple(values)
            at += op_bytes
        for piece in pieces:
            if op == wire.FORK:
                item = wire.LAYOUTS["fork_item"].pack(
                    sequence=piece.item.sequence, position=piece.position, flags=0,
                    parent=piece.item.parent)
            else:
                item = wire.LAYOUTS["rows_item"].pack(
                    sequence=piece.item.sequence, position=piece.position, n_tokens=piece.n_tokens,
                    q_len=piece.q_len, flags=piece.flags)
            frame[at:at + wire.ITEM_BYTES] = item
            at += wire.ITEM_BYTES
        self._fill(frame, wire.HEADER_BYTES + wire.payload_start(op_bytes, len(pieces)), segments, offsets, pieces)
        request = self.connection.submit(
            op, frame, session=self.session, op_bytes=op_bytes, op=values, deadline=deadline, on_done=on_done,
            sequences=tuple(piece.item.sequence for piece in pieces))
        self.n_frames += 1
        return Flight(request, pieces, op)

    def _fill(self, frame, start, segments, offsets, pieces):
        g = self.geometry
        memory = np.frombuffer(frame, np.uint8)
        for name, n_bytes, offset, dtype, dim in (("k", segments[0], offsets[0], self.k_dtype, g.k_head_dim),
                                                  ("v", segments[1], offsets[1], self.v_dtype, g.v_head_dim)):
            if not n_bytes:
                continue
            data = memory[start + offset:start + offset + n_bytes]
            if dtype == dtypes.PACKED:
                self._fill_packed(data, name, pieces)
                continue
            low = self.pass_first - self.layer_first
            layers = slice(low, low + self.pass_layers)
            rows = data.view(dtypes.NUMPY[dtype]).reshape(self.pass_layers, -1, g.kv_heads, dim)
            at = 0
            for piece in pieces:
                first = piece.first_token
                rows[:, at:at + piece.n_tokens] = getattr(piece.item, name)[layers, first:first + piece.n_tokens]
                at += piece.n_tokens
        if segments[2]:
            rows = memory[start + offsets[2]:start + offsets[2] + segments[2]].view(dtypes.NUMPY[self.q_dtype])
            rows = rows.reshape(-1, g.q_heads, g.k_head_dim)
            at = 0
            for piece in pieces:
                rows[at:at + piece.q_len] = piece.item.q
                at += piece.q_len

    def _fill_packed(self, data, side, pieces):
        at = 0
        for layer in range(self.pass_first - self.layer_first, self.pass_first - self.layer_first + self.pass_layers):
            for piece in pieces:
                first = piece.first_token
                rows = getattr(piece.item, side)[layer][first:first + piece.n_tokens]
                data[at:at + rows.size] = rows.reshape(-1)
                at += rows.size

    # ---- replies ----

    def take(self, flight, reply, error):
        """Enters what one frame brought. Replies of one call are entered in the order of their frames."""
        if error is not None:
            self._take_error(flight, error)
            return
        try:
            self._take_reply(flight, reply)
        except wire.BadFrame as bad:
            error = TqkvError(bad.status, f"the reply to {wire.opcode_name(flight.op)} is malformed: {bad}",
                              outcome_unknown=True)
            self.connection.lose(error)
            self._take_error(flight, error)

    def _take_reply(self, flight, reply):
        rows = reply.op
        if len(reply.items) != len(flight.pieces):
            raise wire.BadFrame(Status.BAD_FRAME, f"{len(reply.items)} items, expected {len(flight.pieces)}")
        for piece, got in zip(flight.pieces, reply.items):
            self._check_item(piece, got)
        n_ok = sum(got.status == 0 for got in reply.items)
        if (rows.n_ok, rows.n_failed) != (n_ok, len(reply.items) - n_ok):
            raise wire.BadFrame(Status.BAD_FRAME, f"n_ok {rows.n_ok} and n_failed {rows.n_failed} do not count the "
                                "items")
        out, lses = self._outputs(flight, reply)
        for name in TIMINGS:
            self.timings[name] += getattr(rows, name)
        q_at = 0
        for piece, got in zip(flight.pieces, reply.items):
            if got.status:
                self._refuse(piece, got.status, got.length, got.layer, got.row, got.retry_after_ms,
                             ends_by_itself(got.status))
            else:
                self._accept(piece, got)
                if piece.q_len:
                    at = piece.item.q_at
                    self.out[at:at + piece.q_len] = out[q_at:q_at + piece.q_len]
                    if lses is not None:
                        self.lses[at:at + piece.q_len] = lses[q_at:q_at + piece.q_len]
            q_at += piece.q_len

    def _check_item(self, piece, got):
        wanted = (piece.n_tokens, piece.q_len) if got.status == 0 else (0, 0)
        if got.sequence != piece.item.sequence:
            raise wire.BadFrame(Status.BAD_FRAME, f"sequence {got.sequence}, expected {piece.item.sequence}")
        if 0 < got.status < Status.BAD_MAGIC:
            raise wire.BadFrame(Status.BAD_FRAME, f"item status {got.status}")
        if self.has_rows and (got.n_tokens, got.q_len) != wanted:
            raise wire.BadFrame(Status.BAD_FRAME, f"n_tokens and q_len {(got.n_tokens, got.q_len)}, expected {wanted}")

    def _outputs(self, flight, reply):
        n_q = sum(piece.q_len for piece in flight.pieces)
        if not n_q:
            return None, None
        g = self.geometry
        if reply.op.n_q_total != n_q or reply.op.out_dtype != self.out_dtype:
            raise wire.BadFrame(Status.BAD_FRAME, f"{reply.op.n_q_total} outputs of dtype {reply.op.out_dtype}, "
                                f"expected {n_q} of {self.out_dtype}")
        data = reply.segment(reply.op.out_off, n_q * self.out_bytes, "outputs")
        out = np.frombuffer(data, dtypes.NUMPY[self.out_dtype]).reshape(n_q, g.q_heads, g.v_head_dim)
        if not self.lse:
            return out, None
        data = reply.segment(reply.op.lse_off, n_q * g.q_heads * 4, "log-sum-exps")
        return out, np.frombuffer(data, "<f4").reshape(n_q, g.q_heads)

    def _accept(self, piece, got):
        item = piece.item
        if item.is_refused:
            # It was planned on top of a piece that left no trace.
            raise wire.BadFrame(Status.BAD_FRAME, f"sequence {item.sequence}: a piece was accepted after an earlier "
                                "one was refused")
        item.done += piece.n_tokens
        item.is_created = True
        item.length = got.length
        item.status = Status.OK
        item.layer = item.row = None
        item.is_over = item.is_over or piece.is_last

    def _refuse(self, piece, status, length, layer, row, retry_after_ms, is_retryable, is_unknown=False):
        item = piece.item
        if item.is_refused:
            item.is_unknown = item.is_unknown or is_unknown
            return  # later pieces of a refused item say nothing new
        item.is_refused = True
        item.is_unknown = is_unknown
        item.is_over = not is_retryable
        item.status, item.retry_after_ms = status, retry_after_ms
        if length is not None:
            item.length = length
        item.layer = None if layer in (None, NO_LAYER) else layer
        # The row counts in the caller's item, not in the piece.
        item.row = None if row in (None, NO_ROW) else row + item.done
        if is_retryable:
            self.retry_after_ms = max(self.retry_after_ms, retry_after_ms)

    def _take_error(self, flight, error):
        """The whole frame was refused, or nothing is known of it. QUOTA of a frame is one of requests in flight, and
        over when those are."""
        is_retryable = error.retryable and not error.is_local
        for piece in flight.pieces:
            self._refuse(piece, error.status, None, None, None, error.retry_after_ms, is_retryable or error.is_local,
                         error.outcome_unknown)
        if not is_retryable and self.error is None:
            self.error = error

    # ---- running ----

    def run(self, deadline, backoff_s=None):
        """Blocks until every item is over or the call failed. Raises nothing: look at error and the items.

        backoff_s: (first, longest) pause before what is refused for now is sent again; None: it is not."""
        n_step = max(self.layers_fit(), 1) if self.has_rows else 1
        n_total = self.n_layers if self.has_rows else 1
        for first in range(0, n_total, n_step):
            self._begin_pass(first, min(n_step, n_total - first))
            for item in self.items:
                item.sent = item.done = 0
                if item.status == Status.OK:
                    item.is_over = item.is_last_sent = item.is_refused = False
                else:
                    item.is_over = True  # it is not there on all layers
            self._run_pass(deadline, backoff_s)
            if self.error is not None:
                return

    def _run_pass(self, deadline, backoff_s):
        backoff = Backoff(*backoff_s) if backoff_s else None
        while True:
            self._run_round(deadline)
            again = [item for item in self.items if not item.is_over]
            if self.error is not None or not again or not backoff:
                break
            try:
                if not backoff.pause(self.connection, self.retry_after_ms, deadline):
                    break
            except TqkvError as error:
                self.error = error
                break
            for item in again:
                item.sent, item.is_last_sent, item.is_refused = item.done, False, False
            self.n_retried += len(again)
        for item in self.items:
            if not item.is_over and item.status == Status.OK:  # not reached
                item.status = self.error.status if self.error else Status.INTERNAL
            item.is_over = True

    def _run_round(self, deadline):
        flights, is_sending = [], True
        self.retry_after_ms = 0
        try:
            while is_sending or flights:
                while is_sending and len(flights) < WINDOW_FRAMES and self.error is None:
                    flight = self._launch(deadline)
                    is_sending = flight is not None
                    if flight is not None:
                        flights.append(flight)
                if self.error is not None:
                    is_sending = False
                if flights:
                    self._await(flights.pop(0), deadline)
        except BaseException:
            for flight in flights:
                self.connection.forget(flight.request)
            raise

    def _launch(self, deadline):
        pieces = []
        try:
            planned = self.plan()
            if planned is None:
                return None
            op, pieces = planned
            return self.send(op, pieces, deadline)
        except TqkvError as error:
            self._take_error(Flight(None, pieces, self.op), error)
            return None

    def _await(self, flight, deadline):
        try:
            reply = self.connection.wait(flight.request, deadline)
        except TqkvError as error:
            self.take(flight, None, error)
        else:
            self.take(flight, reply, None)

    # ---- results ----

    def results(self):
        return [ItemResult(item.index, item.sequence, int(item.status), item.length,
                           item.done if self.is_last_pass else 0, item.layer, item.row, item.retry_after_ms)
                for item in self.items]

    def _blame(self, result):
        """What the server does not say, and is known here: of a limit how much it is, of a row that cannot be stored which
        number it is, of a spill that cannot be what is missing."""
        item = self.items[result.index]
        if result.status == Status.LEN_LIMIT:
            return f" ({self.tokens_max})"
        if result.status == Status.LIMIT:
            return f": of sequences (this session may have {self.sequences_max}), or of room for their block tables"
        if result.status == Status.BAD_STATE and self.op == wire.SPILL:
            return ": the daemon has no tier, see its host_tier_bytes and file_tier_dir"
        if result.status != Status.BAD_VALUE or result.row is None or result.layer is None:
            return ""
        layer = result.layer - self.layer_first
        for side, dtype in (("k", self.k_dtype), ("v", self.v_dtype), ("q", self.q_dtype)):
            rows = getattr(item, side)
            if rows is None or dtype == dtypes.PACKED:
                continue
            rows = rows if side == "q" else rows[layer]
            if result.row >= len(rows):
                continue
            row = dtypes.to_f32(rows[result.row], dtype)
            bad = np.argwhere(~np.isfinite(row))
            if len(bad):
                head, channel = bad[0]
                return f": {side} of head {head}, channel {channel} is {row[head, channel]}"
        return ""

    def failure(self):
        """None, or the exception that tells everything about the call."""
        results = self.results()
        failed = [result for result in results if not result.ok]
        if self.error is None and not failed:
            return None
        name = wire.opcode_name(self.op)
        if self.error is not None:
            error = self.error.copy(results=results, detail=f"{name}: {self.error.detail}")
        else:
            detail = failed[0].describe(name) + self._blame(failed[0])
            if len(results) > 1:
                detail = f"{len(failed)} of {len(results)} items failed; {detail}"
            detail = f"{name}: {detail}"
            error = TqkvError(failed[0].status, detail, scope="item", is_local=False, results=results,
                              retry_after_ms=max(result.retry_after_ms for result in failed),
                              outcome_unknown=any(item.is_unknown for item in self.items))
        error.out, error.lse = self.out, self.lses
        return error


def _tail(item):
    """Tokens that an APPEND_DECODE must leave for the frame with the queries."""
    return min(item.q_len, item.n_tokens)


def _offsets_of(segments):
    offsets, at = [], 0
    for n_bytes in segments:
        offsets.append(at if n_bytes else wire.ABSENT)
        at += wire.align(n_bytes)
    return offsets


def _end_of(segments):
    """Payload bytes: segments at multiples of 64, nothing behind the last."""
    at = end = 0
    for n_bytes in segments:
        if n_bytes:
            end = at + n_bytes
        at += wire.align(n_bytes)
    return end
