"""Bytes: against the tables of PROTOCOL.md and the golden frames."""

import random
import re
import struct
import unittest

from tqkv import _crc32c, dtypes, errors
from tqkv import _wire as wire

from .common import FRAMES, ROOT, golden

PROTOCOL = (ROOT / "proto/PROTOCOL.md").read_text()


def table_rows(text):
    return [[cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
            for line in text.splitlines() if line.startswith("|")][2:]


class Tables(unittest.TestCase):
    """Every table that this package has typed in is the one of PROTOCOL.md."""

    def test_structs_have_the_fields_of_the_page(self):
        """Names, offsets and types of all structs, and their sizes."""
        seen = set()
        for match in re.finditer(r"### `(\w+)` \((\d+) bytes\)\n(.*?)(?=\n#|\Z)", PROTOCOL, re.S):
            name, size, text = match.groups()
            seen.add(name)
            layout = wire.LAYOUTS[name]
            self.assertEqual(layout.size, int(size), name)
            table = text[text.index("| off"):].split("\n\n")[0]
            expected = [(int(row[0]), row[1], row[2]) for row in table_rows(table)]
            self.assertEqual(layout.fields, expected, name)
        self.assertEqual(seen, set(wire.LAYOUTS))

    def test_opcodes_dtypes_and_statuses(self):
        opcodes = table_rows(PROTOCOL[PROTOCOL.index("### Opcodes"):].split("\n\n")[1])
        self.assertEqual({int(row[0]): row[1] for row in opcodes}, wire.OPCODES)
        types = table_rows(PROTOCOL[PROTOCOL.index("### dtypes"):].split("\n\n")[1])
        self.assertEqual({row[1].lower(): int(row[0]) for row in types if row[1] != "NONE"}, dtypes.BY_NAME)
        statuses = table_rows(PROTOCOL[PROTOCOL.index("### Statuses"):].split("\n\n")[1])
        self.assertEqual([(int(row[0]), row[1], row[2], row[3] == "yes", row[5]) for row in statuses],
                         [tuple(row) for row in errors.STATUSES])


HANDLE = 3 | 0x9E21 << 16 | 0x5A17C3 << 32
FINGERPRINT = 0xA1B2C3D4E5F60718
ABSENT = wire.ABSENT
ONES = struct.pack("<16f", *[1.0] * 16)
BF16_ROW, F16_ROW = bytes.fromhex("803f") * 16, bytes.fromhex("003c") * 16
ROWS = {"layer_first": 0, "n_layers": 1, "n_tokens_total": 0, "n_q_total": 0, "k_dtype": 0, "v_dtype": 0, "q_dtype": 0,
        "out_dtype": 0, "flags": 0, "k_off": ABSENT, "v_off": ABSENT, "q_off": ABSENT, "scale": 0.0, "window": 0,
        "fingerprint": 0}
NO_TIMES = dict.fromkeys(("recv_us", "queue_us", "copy_in_us", "kernel_us", "copy_out_us", "total_us"), 0)
REPLY = {"n_ok": 0, "n_failed": 0, "n_q_total": 0, "out_dtype": 0, "out_off": ABSENT, "lse_off": ABSENT, **NO_TIMES}
ITEM = {"sequence": 7, "position": 0, "n_tokens": 0, "q_len": 0, "flags": 0}
DONE = {"sequence": 7, "length": 0, "n_tokens": 0, "q_len": 0, "status": 0, "layer": 0xFFFF, "row": 0xFFFFFFFF,
        "retry_after_ms": 0}
LIMITS = {"proto_min": 1, "n_pools": 2, "boot_id": 0x1122334455667788, "features": 0, "frame_bytes_max": 1 << 20,
          "inflight_bytes_max": 4 << 20, "inflight_requests_max": 64, "items_max": 256, "sessions_max": 4096,
          "sequences_max": 65536, "q_len_max": 1, "lease_ms": 60000}
PONG = {"proto": 1, "proto_min": 1, "proto_max": 1, "n_pools": 2, "boot_id": 0x1122334455667788}
SESSION = {"session": HANDLE, "boot_id": 0x1122334455667788, "fingerprint": FINGERPRINT}
TOLD = {"sequence": 7, "length_min": 0, "length_max": 0, "n_blocks": 0, "n_shared_blocks": 0, "state": 0, "flags": 0,
        "n_exact": 0}

# What the comments of the golden frames say, written down a second time: header, op struct, items, payload.
EXPECTED = {
    "hello_req": ({"opcode": 1, "request_id": 1}, {"proto_min": 1, "proto_max": 1, "token_bytes": 0, "name_bytes": 0,
                                                   "features": 0, "boot_id_seen": 0}, [], b""),
    "hello_full_req": ({"opcode": 1, "request_id": 10, "flags": 2},
                       {"proto_min": 1, "proto_max": 3, "token_bytes": 6, "name_bytes": 8, "features": 12,
                        "boot_id_seen": 0x1122334455667788}, [], b"s3cr3tworker-1"),
    "hello_reply": ({"opcode": 1, "request_id": 1}, {"proto": 1, "proto_max": 1, **LIMITS}, [], b""),
    "append_req": ({"opcode": 32, "request_id": 12, "session": HANDLE, "flags": 4},
                   {**ROWS, "n_layers": 2, "n_tokens_total": 3, "k_dtype": 3, "v_dtype": 2, "k_off": 0, "v_off": 192},
                   [{**ITEM, "n_tokens": 2, "flags": 3}, {**ITEM, "sequence": 8, "position": 5, "n_tokens": 1}],
                   BF16_ROW * 6 + F16_ROW * 6),
    "append_reply": ({"opcode": 32, "request_id": 12, "session": HANDLE, "flags": 5},
                     {**REPLY, "n_ok": 1, "n_failed": 1, "recv_us": 10, "queue_us": 20, "copy_in_us": 30,
                      "kernel_us": 40, "copy_out_us": 5, "total_us": 105},
                     [{**DONE, "length": 2, "n_tokens": 2}, {**DONE, "sequence": 8, "length": 4, "status": 308}], b""),
    "append_decode_req": ({"opcode": 34, "request_id": 2, "session": HANDLE},
                          {**ROWS, "layer_first": 5, "n_tokens_total": 1, "n_q_total": 1, "k_dtype": 1, "v_dtype": 1,
                           "q_dtype": 1, "out_dtype": 1, "flags": 1, "k_off": 0, "v_off": 64, "q_off": 128},
                          [{**ITEM, "position": 64, "n_tokens": 1, "q_len": 1}], bytes(256)),
    "append_decode_reply": ({"opcode": 34, "request_id": 2, "session": HANDLE},
                            {**REPLY, "n_ok": 1, "n_q_total": 1, "out_dtype": 1, "out_off": 0, "lse_off": 128},
                            [{**DONE, "length": 65, "n_tokens": 1, "q_len": 1}],
                            bytes(128) + bytes.fromhex("9594854095948540")),
    "tell_reply": ({"opcode": 20, "request_id": 11, "session": HANDLE},
                   {"next_sequence": 0, "lengths_off": 0, "n_layers": 3, "n_sequences_total": 2, "flags": 1},
                   [{**TOLD, "length_min": 64, "length_max": 65, "n_blocks": 5, "n_shared_blocks": 1},
                    {**TOLD, "sequence": 9, "state": 2, "flags": 2}], struct.pack("<6I", 65, 64, 64, 0, 0, 0)),
    "read_reply": ({"opcode": 35, "request_id": 14, "session": HANDLE},
                   {"sequence": 7, "layer_first": 0, "n_layers": 2, "position": 1, "n_tokens": 3, "k_dtype": 3,
                    "v_dtype": 0, "flags": 0, "k_off": 0, "v_off": ABSENT, "fingerprint": FINGERPRINT}, [],
                   BF16_ROW * 6),
    "pool_info_reply": ({"opcode": 16, "request_id": 5},
                        {"fingerprint": FINGERPRINT, "json_bytes": 15, "n_pools": 1}, [], b'{"name":"smol"}'),
    "busy_reply": ({"opcode": 33, "request_id": 19, "session": HANDLE, "status": 402, "retry_after_ms": 25},
                   {"status": 402, "scope": 2, "item": 0xFFFFFFFF, "offset": 0, "expected": 0, "got": 0,
                    "detail_bytes": 0, "retryable": 1}, [], b""),
    "error_reply": ({"opcode": 32, "request_id": 18, "session": HANDLE, "status": 106},
                    {"status": 106, "scope": 2, "item": 1, "offset": 168, "expected": 0, "got": 5, "detail_bytes": 76,
                     "retryable": 0}, [],
                    b"BAD_ARG: CREATE starts at position 0 (item 1, offset 168, expected 0, got 5)"),
    "ping_echo_reply": ({"opcode": 2, "request_id": 3, "session": HANDLE}, PONG, [], b"hello\0\0\0"),
    "goaway": ({"opcode": 3, "status": 404}, None, [], b""),
}


def encode(frame):
    """The bytes of a frame, made from its decoded parts only."""
    header = frame.header
    replies = header.flags & wire.RESPONSE
    ops, items = (wire.REPLY_OPS, wire.REPLY_ITEMS) if replies else (wire.REQUEST_OPS, wire.REQUEST_ITEMS)
    op = b""
    if frame.op is not None:
        name = "frame_error" if type(frame.op).__name__ == "frame_error" else ops[header.opcode]
        op = wire.LAYOUTS[name].pack(**frame.op._asdict())
    structs = op + b"".join(wire.LAYOUTS[items[header.opcode]].pack(**item._asdict()).ljust(header.item_bytes, b"\0")
                            for item in frame.items)
    body = structs
    if len(frame.payload):
        body = structs.ljust(wire.align(len(structs)), b"\0") + bytes(frame.payload)
    values = header._asdict()
    for name in ("magic", "version", "header_length", "header_crc"):
        del values[name]
    values["body_bytes"], values["op_bytes"], values["n_items"] = len(body), len(op), len(frame.items)
    if header.flags & wire.BODY_CRC:
        values["body_crc"] = wire.crc32c(body)
    return wire.pack_header(values.pop("opcode"), **values) + body


class Golden(unittest.TestCase):
    def test_every_frame_is_decoded_and_made_again(self):
        """What is decoded holds everything: the same bytes come out of it."""
        names = sorted(path.stem for path in FRAMES.glob("*.hex"))
        self.assertGreater(len(names), 30)
        for name in names:
            with self.subTest(name):
                data = golden(name)
                frame = wire.Frame(wire.unpack_header(data[:64]), data[64:])
                self.assertEqual(encode(frame).hex(" "), data.hex(" "))

    def test_fields_hold_what_the_frames_say(self):
        """A writer and a reader with the same wrong order would agree with each other, but not with this table."""
        for name, (header, op, items, payload) in EXPECTED.items():
            with self.subTest(name):
                data = golden(name)
                frame = wire.Frame(wire.unpack_header(data[:64]), data[64:])
                got = frame.header._asdict()
                is_reply = not name.endswith("_req")
                wanted = {"flags": int(is_reply), "status": 0, "session": 0, "request_id": 0, "deadline_us": 0,
                          "retry_after_ms": 0, **header}
                if is_reply and "flags" in header:
                    wanted["flags"] = header["flags"]
                self.assertEqual({key: got[key] for key in wanted}, wanted)
                self.assertEqual(frame.op._asdict() if op is not None else None, op)
                self.assertEqual([item._asdict() for item in frame.items], items)
                self.assertEqual(bytes(frame.payload), payload)

    def test_damaged_headers_are_refused(self):
        """Every single flipped bit of a header is noticed, and no damage does more than raise BadFrame."""
        data = golden("append_reply")[:64]
        for bit in range(512):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            with self.assertRaises(wire.BadFrame):
                wire.unpack_header(damaged)

    def test_lengths_that_contradict_each_other_are_refused(self):
        """With a right checksum, too."""
        for fields in ({"op_bytes": 8, "body_bytes": 8}, {"n_items": 257, "body_bytes": 257 * 32},
                       {"op_bytes": 64, "n_items": 1, "item_bytes": 16, "body_bytes": 80},
                       {"op_bytes": 64, "n_items": 1, "body_bytes": 100}, {"op_bytes": 64, "body_bytes": 32},
                       {"op_bytes": 12304, "body_bytes": 12304}, {"body_bytes": (1 << 20) + 1}):
            with self.subTest(fields), self.assertRaises(wire.BadFrame):
                wire.unpack_header(wire.pack_header(32, flags=1, **fields), 1 << 20)

    def test_short_and_long_structs(self):
        """A short op struct ends in zeros, the tail of a longer one is ignored."""
        layout = wire.LAYOUTS["tell_reply"]
        data = layout.pack(next_sequence=5, lengths_off=6, n_layers=7, n_sequences_total=8, flags=9)
        self.assertEqual(layout.unpack(data[:16], 0, 16)[:5], (5, 6, 0, 0, 0))
        self.assertEqual(layout.unpack(data + b"\xff" * 16, 0, 48)[:5], (5, 6, 7, 8, 9))

    def test_reserved_bytes_are_written_as_0_and_ignored(self):
        layout = wire.LAYOUTS["rows_item"]
        data = bytearray(layout.pack(sequence=1, position=2, n_tokens=3, q_len=4, flags=1))
        self.assertEqual(bytes(data[22:]), bytes(10))
        data[22:] = b"\xff" * 10
        self.assertEqual(layout.unpack(data), (1, 2, 3, 4, 1))


class Crc32c(unittest.TestCase):
    def test_known_values(self):
        """The check value of the polynomial, and RFC 3720's 32 zeros and 32 ones."""
        self.assertEqual(wire.crc32c(b"123456789"), 0xE3069283)
        self.assertEqual(wire.crc32c(bytes(32)), 0x8A9136AA)
        self.assertEqual(wire.crc32c(b"\xff" * 32), 0x62A8AB43)
        self.assertEqual(wire.crc32c(b""), 0)

    def test_the_tree_equals_the_loop(self):
        """For lengths around words, pairs and powers of two."""
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        rng = random.Random(seed)
        for n in [4, 5, 6, 7, 8, 9, 1023, 1024, 1025, 4095, 4096, 4097, 10000 + rng.randrange(1000)]:
            data = rng.randbytes(n)
            crc = 0xFFFFFFFF
            for byte in data:
                crc = crc >> 8 ^ _crc32c._TABLE[(crc ^ byte) & 0xFF]
            self.assertEqual(_crc32c._tree(data), crc ^ 0xFFFFFFFF, n)


if __name__ == "__main__":
    unittest.main()
