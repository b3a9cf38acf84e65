"""Bytes to tuples and back, from the tables of PROTOCOL.md. Knows no sockets.

Every struct is a Layout. A test reads PROTOCOL.md and compares each field of each layout with it.
"""

import struct
from collections import namedtuple

from ._crc32c import crc32c
from .errors import NO_ITEM, SCOPES, Status, TqkvError, status_is_retryable, status_text

MAGIC = b"TKV1"
VERSION = 1
HEADER_BYTES = 64
ALIGN_BYTES = 64
ITEM_BYTES = 32
ITEMS_MAX = 256
STRUCTS_BYTES_MAX = 12288
ABSENT = 0xFFFFFFFFFFFFFFFF
PLANNED = 0xFFFFFFFF

RESPONSE, BODY_CRC, TIMINGS = 1, 2, 4

OPCODES = {
    1: "HELLO", 2: "PING", 3: "GOAWAY", 4: "CANCEL", 16: "POOL_INFO", 17: "OPEN", 18: "ATTACH", 19: "CLOSE",
    20: "TELL", 32: "APPEND", 33: "DECODE", 34: "APPEND_DECODE", 35: "READ", 36: "TRUNCATE", 37: "FREE", 38: "FORK",
    48: "PUBLISH", 49: "MATCH", 50: "PIN", 51: "UNPIN", 52: "SPILL", 53: "PREFETCH", 64: "UPDATE_SLOTS",
    65: "DECODE_TABLE",
}
HELLO, PING, GOAWAY, CANCEL, POOL_INFO, OPEN, ATTACH, CLOSE, TELL = 1, 2, 3, 4, 16, 17, 18, 19, 20
APPEND, DECODE, APPEND_DECODE, READ, TRUNCATE, FREE, FORK = 32, 33, 34, 35, 36, 37, 38
PUBLISH, MATCH, PIN, UNPIN = 48, 49, 50, 51
UPDATE_SLOTS, DECODE_TABLE = 64, 65
SPILL, PREFETCH = 52, 53

ITEM_CREATE, ITEM_EVICTABLE = 1, 2
ROWS_LSE = 1
ROWS_Q_ROTATED, ROWS_OUT_ROTATED = 2, 4
ROWS_NO_SINKS = 8
TELL_PER_LAYER = 1
READ_EXACT = 1
PREFIX_PROBE, PREFIX_EVICTABLE = 1, 2
PREFIX_TEXT_BYTES_MAX = 64
OPEN_CLIENT_TABLES = 1

_FORMATS = {"u8": "B", "u16": "H", "u32": "I", "u64": "Q", "f32": "f"}


class Layout:
    """A struct of the protocol: '<type> <name>' parts in order; 'name[n]' is an array, 'reserved' is padding."""

    def __init__(self, name, text):
        self.name = name
        self.fields = []  # (offset, type with count, name)
        formats, offset = ["<"], 0
        for part in text.split(","):
            kind, field = part.split()
            base, _, count = kind.partition("[")
            n = int(count.rstrip("]") or 1)
            n_bytes = struct.calcsize(_FORMATS[base]) * n
            self.fields.append((offset, kind, field))
            # Reserved bytes are written as 0 and ignored when read. A byte array is one value.
            formats.append(f"{n_bytes}x" if field == "reserved" else f"{n}s" if count else _FORMATS[base])
            offset += n_bytes
        self.size = offset
        self._struct = struct.Struct("".join(formats))
        assert self._struct.size == self.size
        self.tuple = namedtuple(name, [field for _, _, field in self.fields if field != "reserved"])

    def pack(self, **values):
        return self.pack_tuple(self.tuple(**values))

    def pack_tuple(self, values):
        return self._struct.pack(*values)

    def unpack(self, data, offset=0, n_bytes=None):
        """n_bytes: how many the sender wrote. Fewer than ours: as if zeros followed; more: the tail is ignored."""
        if n_bytes is None or n_bytes >= self.size:
            return self.tuple._make(self._struct.unpack_from(data, offset))
        return self.tuple._make(self._struct.unpack(bytes(data[offset:offset + n_bytes]).ljust(self.size, b"\0")))


_OPEN_REPLY = ("u64 session, u64 boot_id, u64 fingerprint, u32 lease_ms, u32 reserved_blocks, u32 n_layers, "
               "u32 block_size, u16 q_heads, u16 kv_heads, u16 k_head_dim, u16 v_head_dim, u32 sequences_max, "
               "u32 tokens_max, u64 reserved")

LAYOUTS = {name: Layout(name, text) for name, text in {
    "header": "u8[4] magic, u8 version, u8 header_length, u16 opcode, u32 flags, u32 status, u64 request_id, "
              "u64 session, u64 body_bytes, u32 op_bytes, u16 n_items, u16 item_bytes, u32 deadline_us, "
              "u32 retry_after_ms, u32 body_crc, u32 header_crc",
    "hello_req": "u16 proto_min, u16 proto_max, u16 token_bytes, u16 name_bytes, u64 features, u64 boot_id_seen, "
                 "u64 reserved",
    "hello_reply": "u16 proto, u16 proto_min, u16 proto_max, u16 n_pools, u64 boot_id, u64 features, "
                   "u64 frame_bytes_max, u64 inflight_bytes_max, u32 inflight_requests_max, u32 items_max, "
                   "u32 sessions_max, u32 sequences_max, u32 q_len_max, u32 lease_ms",
    "ping_req": "u64 reply_payload_bytes, u64 reserved",
    "ping_reply": "u16 proto, u16 proto_min, u16 proto_max, u16 n_pools, u64 boot_id",
    "cancel_req": "u64 request_id, u64 reserved",
    "cancel_reply": "u32 outcome, u8[12] reserved",
    "pool_info_req": "u16 pool_name_bytes, u16 what, u32 index, u32 layer, u32 row_first",
    "pool_info_reply": "u64 fingerprint, u32 json_bytes, u32 n_pools",
    "open_req": "u16 pool_name_bytes, u16 session_name_bytes, u16 priority, u16 flags, u32 lease_ms, "
                "u32 reserve_blocks, u32 sequences_max, u32 tokens_max, u64 fingerprint, u64[4] reserved",
    "open_reply": _OPEN_REPLY,
    "rows_req": "u32 layer_first, u32 n_layers, u32 n_tokens_total, u32 n_q_total, u8 k_dtype, u8 v_dtype, "
                "u8 q_dtype, u8 out_dtype, u32 flags, u64 k_off, u64 v_off, u64 q_off, f32 scale, u32 window, "
                "u64 fingerprint",
    "rows_item": "u64 sequence, u32 position, u32 n_tokens, u32 q_len, u16 flags, u16 reserved, u64 reserved",
    "rows_reply": "u32 n_ok, u32 n_failed, u32 n_q_total, u8 out_dtype, u8[3] reserved, u64 out_off, u64 lse_off, "
                  "u32 recv_us, u32 queue_us, u32 copy_in_us, u32 kernel_us, u32 copy_out_us, u32 total_us, "
                  "u64 reserved",
    "rows_reply_item": "u64 sequence, u32 length, u32 n_tokens, u32 q_len, u16 status, u16 layer, u32 row, "
                       "u32 retry_after_ms",
    "read_req": "u64 sequence, u32 layer_first, u32 n_layers, u32 position, u32 n_tokens, u8 k_dtype, u8 v_dtype, "
                "u16 flags, u32 reserved",
    "read_reply": "u64 sequence, u32 layer_first, u32 n_layers, u32 position, u32 n_tokens, u8 k_dtype, u8 v_dtype, "
                  "u16 flags, u32 reserved, u64 k_off, u64 v_off, u64 fingerprint, u64 reserved",
    "slots_req": "u32 layer_first, u32 n_layers, u32 n_tokens, u32 reserved, u8 k_dtype, u8 v_dtype, u16 reserved, "
                 "u32 flags, u64 k_off, u64 v_off, u64 slots_off, u64 reserved, u64 fingerprint",
    "table_req": "u32 layer, u32 n_sequences, u32 table_stride, u32 n_q_total, u16 reserved, u8 q_dtype, u8 out_dtype, "
                 "u32 flags, u64 table_off, u64 seen_off, u64 q_off, f32 scale, u32 window, u64 fingerprint",
    "tell_req": "u64 sequence_from, u32 n_sequences_max, u32 flags",
    "tell_reply": "u64 next_sequence, u64 lengths_off, u32 n_layers, u32 n_sequences_total, u32 flags, u32 reserved",
    "tell_item": "u64 sequence, u32 length_min, u32 length_max, u32 n_blocks, u32 n_shared_blocks, u16 state, "
                 "u16 flags, u32 n_exact",
    "fork_item": "u64 sequence, u32 position, u32[2] reserved, u16 flags, u16 reserved, u64 parent",
    "prefix_req": "u64 sequence, u32 n_tokens, u16 adapter_bytes, u16 salt_bytes, u32 flags, u32 ttl_ms, u64 reserved",
    "prefix_reply": "u64 sequence, u32 n_tokens, u32 n_blocks, u32 n_blocks_new, u32 reserved, u64 reserved",
    "frame_error": "u32 status, u32 scope, u32 item, u32 offset, u64 expected, u64 got, u16 detail_bytes, "
                   "u16 retryable, u32 reserved, u64 reserved",
}.items()}

HEADER = LAYOUTS["header"]

# The op struct of each operation, and its item.
REQUEST_OPS = {HELLO: "hello_req", PING: "ping_req", CANCEL: "cancel_req", POOL_INFO: "pool_info_req",
               OPEN: "open_req", ATTACH: "open_req", TELL: "tell_req", APPEND: "rows_req", DECODE: "rows_req",
               APPEND_DECODE: "rows_req", READ: "read_req", PUBLISH: "prefix_req", MATCH: "prefix_req",
               UPDATE_SLOTS: "slots_req", DECODE_TABLE: "table_req"}
REQUEST_ITEMS = {APPEND: "rows_item", DECODE: "rows_item", APPEND_DECODE: "rows_item", TRUNCATE: "rows_item",
                 FREE: "rows_item", FORK: "fork_item", PIN: "rows_item", UNPIN: "rows_item",
                 SPILL: "rows_item", PREFETCH: "rows_item"}
REPLY_OPS = {HELLO: "hello_reply", PING: "ping_reply", CANCEL: "cancel_reply", POOL_INFO: "pool_info_reply",
             OPEN: "open_reply", ATTACH: "open_reply", TELL: "tell_reply", APPEND: "rows_reply",
             DECODE: "rows_reply", APPEND_DECODE: "rows_reply", READ: "read_reply", TRUNCATE: "rows_reply",
             FREE: "rows_reply", FORK: "rows_reply", PIN: "rows_reply", UNPIN: "rows_reply",
             SPILL: "rows_reply", PREFETCH: "rows_reply",
             PUBLISH: "prefix_reply", MATCH: "prefix_reply", UPDATE_SLOTS: "rows_reply", DECODE_TABLE: "rows_reply"}
REPLY_ITEMS = {TELL: "tell_item", APPEND: "rows_reply_item", DECODE: "rows_reply_item",
               APPEND_DECODE: "rows_reply_item", TRUNCATE: "rows_reply_item", FREE: "rows_reply_item",
               FORK: "rows_reply_item", PIN: "rows_reply_item", UNPIN: "rows_reply_item",
               SPILL: "rows_reply_item", PREFETCH: "rows_reply_item",
               UPDATE_SLOTS: "rows_reply_item", DECODE_TABLE: "rows_reply_item"}


def opcode_name(opcode):
    return OPCODES.get(opcode, f"opcode {opcode}")


def align(n_bytes):
    return (n_bytes + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES


def payload_start(op_bytes, n_items, item_bytes=ITEM_BYTES):
    return align(op_bytes + n_items * item_bytes)


def body_size(op_bytes, n_items, payload_bytes):
    """A frame without payload ends right after its items."""
    return payload_start(op_bytes, n_items) + payload_bytes if payload_bytes else op_bytes + n_items * ITEM_BYTES


def pack_header(opcode, *, flags=0, status=0, request_id=0, session=0, body_bytes=0, op_bytes=0, n_items=0,
                item_bytes=ITEM_BYTES, deadline_us=0, retry_after_ms=0, body_crc=0):
    head = HEADER.pack_tuple((MAGIC, VERSION, HEADER_BYTES // 8, opcode, flags, status, request_id, session,
                              body_bytes, op_bytes, n_items, item_bytes, deadline_us, retry_after_ms, body_crc, 0))
    return head[:60] + crc32c(head[:60]).to_bytes(4, "little")


class BadFrame(Exception):
    """The peer's bytes are no frame of this protocol; status says in which way."""

    def __init__(self, status, text):
        self.status = status
        super().__init__(text)


def unpack_header(data, frame_bytes_max=None):
    header = HEADER.unpack(data)
    if header.magic != MAGIC:
        raise BadFrame(Status.BAD_MAGIC, f"magic is {bytes(header.magic)!r}, expected {MAGIC!r}")
    if header.version != VERSION or header.header_length != HEADER_BYTES // 8:
        raise BadFrame(Status.VERSION_UNSUPPORTED, f"version {header.version} with a header of "
                       f"{header.header_length * 8} bytes, expected version {VERSION} with {HEADER_BYTES}")
    crc = crc32c(bytes(data[:60]))
    if crc != header.header_crc:
        raise BadFrame(Status.BAD_CRC, f"header checksum is {header.header_crc:#010x}, expected {crc:#010x}")
    structs = header.op_bytes + header.n_items * header.item_bytes
    start = payload_start(header.op_bytes, header.n_items, header.item_bytes)
    if header.op_bytes % 16 or header.n_items > ITEMS_MAX or structs > STRUCTS_BYTES_MAX or (
            header.n_items and header.item_bytes < ITEM_BYTES):
        raise BadFrame(Status.BAD_FRAME, f"op_bytes {header.op_bytes}, n_items {header.n_items} and item_bytes "
                       f"{header.item_bytes} are out of range")
    if header.body_bytes != structs and header.body_bytes < start:
        raise BadFrame(Status.BAD_FRAME, f"body_bytes {header.body_bytes} ends inside the structs")
    if frame_bytes_max is not None and header.body_bytes > frame_bytes_max:
        raise BadFrame(Status.TOO_LARGE, f"body_bytes {header.body_bytes} is above {frame_bytes_max}")
    return header


class Frame:
    """A frame taken apart: header, op struct and items (tuples or None), payload (bytes-like)."""

    def __init__(self, header, body):
        self.header = header
        self.body = body
        is_reply = header.flags & RESPONSE
        ops, items = (REPLY_OPS, REPLY_ITEMS) if is_reply else (REQUEST_OPS, REQUEST_ITEMS)
        op, item = ops.get(header.opcode), items.get(header.opcode)
        if is_reply and header.status >= Status.BAD_MAGIC and header.opcode not in (HELLO, GOAWAY):
            op, item = "frame_error", None
        self.op = None
        if op and (header.op_bytes or is_reply):
            self.op = LAYOUTS[op].unpack(body, 0, header.op_bytes)
        self.items = []
        if item:
            at = header.op_bytes
            self.items = [LAYOUTS[item].unpack(body, at + i * header.item_bytes) for i in range(header.n_items)]
        start = payload_start(header.op_bytes, header.n_items, header.item_bytes)
        self.payload = memoryview(body)[start:]

    def segment(self, off, n_bytes, what):
        """The payload's bytes at an offset that the peer told."""
        if n_bytes == 0:
            return self.payload[:0]
        if off % ALIGN_BYTES or off + n_bytes > len(self.payload):
            raise BadFrame(Status.BAD_FRAME, f"{what} of {n_bytes} bytes at {off} are outside the payload of "
                           f"{len(self.payload)}")
        return self.payload[off:off + n_bytes]


def error_of(frame):
    """The TqkvError that a reply with a status from 100 on tells."""
    header, error = frame.header, frame.op
    if header.opcode in (HELLO, GOAWAY):
        return TqkvError(header.status, retry_after_ms=header.retry_after_ms, is_local=False)
    detail = bytes(frame.payload[:error.detail_bytes]).decode("utf-8", "replace")
    name = f"{TqkvError(header.status).status_name}: "
    if detail.startswith(name):  # the exception's text begins with it anyway
        detail = detail[len(name):]
    if header.status == Status.SESSION_EXPIRED:
        detail = (detail or status_text(header.status)) + "; any call renews one, ping too; open takes lease_ms"
    return TqkvError(
        header.status, detail or status_text(header.status),
        scope=SCOPES[error.scope] if 0 < error.scope < len(SCOPES) else None,
        retryable=bool(error.retryable) or status_is_retryable(header.status), retry_after_ms=header.retry_after_ms,
        is_local=False, item=None if error.item == NO_ITEM or header.op_bytes < 12 else error.item,
        offset=error.offset, expected=error.expected, got=error.got)
