"""UPDATE_SLOTS and DECODE_TABLE: operations of a session whose caller manages block tables itself."""

import numpy as np

from . import _wire as wire
from . import dtypes
from ._arguments import rotated_flags
from .errors import ArgumentError, Status, TqkvError

SLOTS_MAX = 65536  # tokens of one call; frame_bytes_max bounds it below


def _payload(parts):
    """(offsets, bytes): the parts one after the other, each at a multiple of 64."""
    offsets, payload = [], bytearray()
    for part in parts:
        payload.extend(b"\0" * (wire.align(len(payload)) - len(payload)))
        offsets.append(len(payload))
        payload.extend(np.ascontiguousarray(part).tobytes())
    return offsets, bytes(payload)


def _item(session, request, reply, explain):
    """The one item of the reply; raises what it says. explain: what is wrong at the place that it names."""
    if len(reply.items) != 1:
        session._client._bad_reply(request, f"{len(reply.items)} items, expected 1")
    item = reply.items[0]
    if item.status != Status.OK:
        where = "" if item.row == 0xFFFFFFFF else f" at {item.row}{explain(item.status, item.row)}"
        error = TqkvError(item.status, scope="item", is_local=False, retry_after_ms=item.retry_after_ms, item=0,
                          got=0 if item.row == 0xFFFFFFFF else item.row)
        raise error.copy(detail=f"{error.detail}{where}")
    return item


def _n_slots(session):
    return session.reserved_blocks * session.geometry.block_size


def _run(session, opcode, op, payload, deadline):
    session._check()
    request = None

    def submit():
        nonlocal request
        request = session._client._submit(opcode, op, payload, session=session.handle, deadline=deadline)
        return request

    reply, = session._client._run([submit], deadline)
    return request, reply


def update(session, slots, k, v, layer_first, layers_axis, deadline):
    slots = np.asarray(slots)
    if slots.ndim != 1 or slots.dtype.kind not in "iu" or not 1 <= len(slots) <= SLOTS_MAX:
        raise ArgumentError(f"slots has shape {slots.shape} and dtype {slots.dtype}, expected 1 to {SLOTS_MAX} integers")
    if layers_axis:
        layer_first, n_layers = session._layers_of(k, layer_first)
    else:
        layer_first, n_layers = session._layer(layer_first), None
    (k, k_dtype), (v, v_dtype), n_tokens = session._kv(0, k, v, n_layers)
    if n_tokens != len(slots):
        raise ArgumentError(f"{n_tokens} rows, expected one for each of {len(slots)} slots")
    (k_off, v_off, slots_off), payload = _payload((k, v, slots.astype("<i8")))
    op = wire.LAYOUTS["slots_req"].pack(layer_first=layer_first, n_layers=n_layers or 1, n_tokens=n_tokens,
                                        k_dtype=k_dtype, v_dtype=v_dtype, flags=0, k_off=k_off, v_off=v_off,
                                        slots_off=slots_off, fingerprint=0)

    def explain(status, row):
        if status != Status.SLOT_OUT_OF_RANGE or row >= len(slots):
            return ""
        return f": slots[{row}] is {slots[row]}, the session has slots 0 to {_n_slots(session) - 1}"

    _item(session, *_run(session, wire.UPDATE_SLOTS, op, payload, deadline), explain)


def decode(session, layer, q, table, seen, lse, dtype, scale, window, sinks, deadline, q_rotated=False, out_rotated=False):
    g = session.geometry
    q, q_dtype = dtypes.as_rows("q", q)
    table, seen = np.atleast_2d(np.asarray(table)), np.atleast_1d(np.asarray(seen))
    n = len(seen)
    if q.ndim not in (3, 4) or q.shape[0] != n or q.shape[-2:] != (g.q_heads, g.k_head_dim):
        raise ArgumentError(f"q has shape {q.shape}, expected ({n}, {g.q_heads}, {g.k_head_dim}) or ({n}, q_len, "
                            f"{g.q_heads}, {g.k_head_dim}): {g}")
    if table.ndim != 2 or len(table) != n or table.dtype.kind not in "iu" or seen.dtype.kind not in "iu":
        raise ArgumentError(f"table has shape {table.shape}, expected ({n}, blocks) integers, and a length for each row")
    out_dtype = dtypes.number_of(dtype)
    (q_off, table_off, seen_off), payload = _payload((q, table.astype("<i4"), seen.astype("<u4")))
    n_q = n * (q.shape[1] if q.ndim == 4 else 1)
    op = wire.LAYOUTS["table_req"].pack(
        layer=session._layer(layer), n_sequences=n, table_stride=table.shape[1], n_q_total=n_q, q_dtype=q_dtype,
        out_dtype=out_dtype, flags=(wire.ROWS_LSE if lse else 0) | (0 if sinks else wire.ROWS_NO_SINKS)
        | rotated_flags(q_rotated, out_rotated),
        table_off=table_off, seen_off=seen_off, q_off=q_off, scale=scale, window=window, fingerprint=0)
    request, reply = _run(session, wire.DECODE_TABLE, op, payload, deadline)
    q_len = n_q // max(n, 1)

    def explain(status, place):
        stride = table.shape[1]
        if status == Status.SLOT_OUT_OF_RANGE and place < table.size:
            return (f": table[{place // stride}][{place % stride}] is {table.flat[place]}, the session has blocks 0 to "
                    f"{session.reserved_blocks - 1}")
        if status in (Status.BAD_ARG, Status.LEN_LIMIT) and place < n:
            most = min(stride * g.block_size, session.tokens_max)
            return f": seen[{place}] is {seen[place]}, expected {q_len} to {most} with {stride} blocks of {g.block_size} tokens"
        return ""

    _item(session, request, reply, explain)
    shape = q.shape[:-1] + (g.v_head_dim,)
    numpy_type = dtypes.NUMPY[out_dtype]
    try:
        out = reply.segment(reply.op.out_off, int(np.prod(shape)) * numpy_type.itemsize, "outputs")
        lses = reply.segment(reply.op.lse_off, n_q * g.q_heads * 4, "lse") if lse else None
    except wire.BadFrame as error:
        session._client._bad_reply(request, str(error))
    out = np.frombuffer(bytes(out), numpy_type).reshape(shape)
    return (out, np.frombuffer(bytes(lses), np.float32).reshape(q.shape[:-1])) if lse else out
