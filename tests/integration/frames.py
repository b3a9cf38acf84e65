"""Frames by hand, from the byte tables of PROTOCOL.md and independent of the client package: for hostile tests."""

import socket
import struct

HEADER = struct.Struct("<4sBBHIIQQQIHHIII")
HELLO, PING, GOAWAY, CANCEL, POOL_INFO, OPEN, ATTACH, CLOSE, TELL = 1, 2, 3, 4, 16, 17, 18, 19, 20
APPEND, DECODE, APPEND_DECODE, READ, TRUNCATE, FREE, FORK, PUBLISH, MATCH = 32, 33, 34, 35, 36, 37, 38, 48, 49
F32, BF16 = 1, 3
ABSENT = 0xFFFFFFFFFFFFFFFF

_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def round_up(n):
    return (n + 63) // 64 * 64


def frame(opcode, op=b"", items=(), payload=b"", request_id=1, session=0, flags=0, deadline_us=0, magic=b"TKV1",
          version=1, header_length=8, body_bytes=None, crc=None):
    structs = op + b"".join(items)
    body = structs + (b"\0" * (round_up(len(structs)) - len(structs)) + payload if payload else b"")
    head = HEADER.pack(magic, version, header_length, opcode, flags, 0, request_id, session,
                       len(body) if body_bytes is None else body_bytes, len(op), len(items), 32 if items else 0,
                       deadline_us, 0, 0)
    return head + struct.pack("<I", crc32c(head) if crc is None else crc) + body


def hello(proto_min=1, proto_max=1, boot_id_seen=0, name=b"", token=b""):
    op = struct.pack("<HHHHQQQ", proto_min, proto_max, len(token), len(name), 0, boot_id_seen, 0)
    return frame(HELLO, op, payload=token + name)


def open_session(pool, name=b"", reserve_blocks=0, lease_ms=0, tokens_max=0, request_id=1, flags=0):
    op = struct.pack("<HHHHIIIIQ32x", len(pool), len(name), 1, flags, lease_ms, reserve_blocks, 0, tokens_max, 0)
    return frame(OPEN, op, payload=pool + name, request_id=request_id)


def rows(opcode, session, items, layer_first=0, n_layers=1, k=b"", v=b"", q=b"", request_id=1, dtype=F32, flags=0,
         **header):
    """items: (sequence, position, n_tokens, q_len, flags)."""
    k_end = round_up(len(k))
    v_end = k_end + round_up(len(v))
    pad = [part + b"\0" * (round_up(len(part)) - len(part)) for part in (k, v)]
    op = struct.pack("<IIIIBBBBIQQQfIQ", layer_first, n_layers, sum(i[2] for i in items), sum(i[3] for i in items),
                     dtype if k else 0, dtype if v else 0, dtype if q else 0, dtype if q else 0, flags,
                     0 if k else ABSENT, k_end if v else ABSENT, v_end if q else ABSENT, 0.0, 0, 0)
    packed = [struct.pack("<QIIIHHQ", i[0], i[1], i[2], i[3], i[4], 0, 0) for i in items]
    return frame(opcode, op, packed, pad[0] + pad[1] + q, request_id=request_id, session=session, **header)


class Reply:
    def __init__(self, head, body):
        (_, _, _, self.opcode, self.flags, self.status, self.request_id, self.session, _, self.op_bytes, self.n_items,
         self.item_bytes, _, self.retry_after_ms, _) = HEADER.unpack(head[:60])
        self.body = body
        self.op = body[:self.op_bytes]
        start = round_up(self.op_bytes + self.n_items * self.item_bytes)
        self.items = [body[self.op_bytes + i * self.item_bytes:][:self.item_bytes] for i in range(self.n_items)]
        self.payload = body[start:]

    def item_statuses(self):
        return [struct.unpack_from("<H", item, 20)[0] for item in self.items]

    def item_lengths(self):
        return [struct.unpack_from("<I", item, 8)[0] for item in self.items]

    def detail(self):
        return self.payload.decode(errors="replace")


class Raw:
    """A socket that speaks raw frames."""

    def __init__(self, addr, timeout=30):
        if addr.startswith("unix:"):
            # Without a time limit connect() waits for room in the listener's queue; with one it says EAGAIN.
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(addr[5:])
            self.socket.settimeout(timeout)
        else:
            host, port = addr[4:].rsplit(":", 1)
            self.socket = socket.create_connection((host, int(port)), timeout)

    def send(self, data):
        self.socket.sendall(data)

    def receive(self, n):
        data = b""
        while len(data) < n:
            part = self.socket.recv(n - len(data))
            if not part:
                raise EOFError(f"closed after {len(data)} of {n} bytes")
            data += part
        return data

    def reply(self):
        head = self.receive(64)
        assert head[:4] == b"TKV1" and crc32c(head[:60]) == struct.unpack_from("<I", head, 60)[0]
        return Reply(head, self.receive(struct.unpack_from("<Q", head, 32)[0]))

    def call(self, data):
        self.send(data)
        return self.reply()

    def hello(self):
        reply = self.call(hello())
        assert reply.status == 0, reply.status
        return reply

    def open(self, pool, **kwargs):
        reply = self.call(open_session(pool, **kwargs))
        assert reply.status == 0, (reply.status, reply.detail())
        return struct.unpack_from("<Q", reply.op)[0]

    def reset(self):
        """Closes with a TCP reset (Unix sockets: a plain close)."""
        if self.socket.family != socket.AF_UNIX:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def is_closed(self):
        """True once the peer has closed; waits for it."""
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
