"""Where the repository is, and a server of a few lines that plays whatever part a test needs."""

import os
import pathlib
import re
import socket
import struct
import tempfile
import threading
import unittest

import numpy as np
import tqkv
from tqkv import _wire as wire

ROOT = pathlib.Path(os.environ.get("KV_SOURCE_ROOT") or pathlib.Path(__file__).resolve().parents[3])
FRAMES = ROOT / "tests/golden/frames"


def golden(name):
    """The bytes of a golden frame."""
    text = re.sub(r"#.*", "", (FRAMES / f"{name}.hex").read_text())
    return bytes.fromhex("".join(text.split()))


class Peer:
    """The server's end of one connection."""

    def __init__(self, sock):
        self.socket = sock

    def receive(self, n):
        data = bytearray()
        while len(data) < n:
            part = self.socket.recv(n - len(data))
            if not part:
                raise EOFError
            data += part
        return bytes(data)

    def request(self):
        header = wire.unpack_header(self.receive(wire.HEADER_BYTES))
        return wire.Frame(header, self.receive(header.body_bytes))

    def send(self, data):
        self.socket.sendall(data)

    def reply(self, request, op=b"", items=(), payload=b"", status=0, **header):
        self.send(reply(request, op, items, payload, status, **header))

    def error(self, request, status, retry_after_ms=0, detail=b"", scope=2, retryable=0, **header):
        op = wire.LAYOUTS["frame_error"].pack(status=status, scope=scope, item=0xFFFFFFFF, offset=40, expected=7, got=8,
                                              detail_bytes=len(detail), retryable=retryable)
        self.reply(request, op, (), detail, status, retry_after_ms=retry_after_ms, **header)

    def hello(self, boot_id=11, status=0, **limits):
        request = self.request()
        assert request.header.opcode == wire.HELLO
        self.reply(request, hello_reply(boot_id, **limits), status=status)
        return request

    def open(self, opcode=wire.OPEN, handle=0x10001, **geometry):
        request = self.request()
        assert request.header.opcode == opcode, request.header
        self.reply(request, open_reply(handle, **geometry))
        return request

    def rows(self, request, statuses=None, lengths=None, retry_after_ms=0, out=None, lse=None, **header):
        """A right answer to APPEND, DECODE, APPEND_DECODE, TRUNCATE or FREE, with these item statuses."""
        n = len(request.items)
        statuses = statuses or [0] * n
        has_rows = request.op is not None
        items = []
        for i, (item, status) in enumerate(zip(request.items, statuses)):
            length = item.position + item.n_tokens if lengths is None else lengths[i]
            items.append(wire.LAYOUTS["rows_reply_item"].pack(
                sequence=item.sequence, length=length, n_tokens=item.n_tokens if not status and has_rows else 0,
                q_len=item.q_len if not status and has_rows else 0, status=status, layer=0xFFFF, row=0xFFFFFFFF,
                retry_after_ms=retry_after_ms if status else 0))
        n_ok = sum(status == 0 for status in statuses)
        payload, out_off, lse_off = b"", wire.ABSENT, wire.ABSENT
        if out is not None:
            payload, out_off = out.tobytes(), 0
        if lse is not None:
            payload = payload.ljust(wire.align(len(payload)), b"\0")
            payload, lse_off = payload + lse.tobytes(), len(payload)
        op = wire.LAYOUTS["rows_reply"].pack(
            n_ok=n_ok, n_failed=n - n_ok, n_q_total=request.op.n_q_total if has_rows else 0,
            out_dtype=request.op.out_dtype if out is not None else 0, out_off=out_off, lse_off=lse_off, recv_us=0,
            queue_us=0, copy_in_us=0, kernel_us=0, copy_out_us=0, total_us=0)
        self.reply(request, op, items, payload, **header)

    def tell(self, request, rows, next_sequence=0, order=None):
        """rows: {sequence: lengths}"""
        rows = {sequence: rows[sequence] for sequence in order or sorted(rows) if sequence >= request.op.sequence_from}
        items = [wire.LAYOUTS["tell_item"].pack(sequence=sequence, length_min=min(lengths), length_max=max(lengths),
                                                n_blocks=1, n_shared_blocks=0, state=0, flags=0, n_exact=0)
                 for sequence, lengths in rows.items()]
        flat = [length for lengths in rows.values() for length in lengths]
        op = wire.LAYOUTS["tell_reply"].pack(next_sequence=next_sequence, lengths_off=0 if rows else wire.ABSENT,
                                             n_layers=2, n_sequences_total=len(rows), flags=1)
        self.reply(request, op, items, struct.pack(f"<{len(flat)}I", *flat))


def reply(request, op=b"", items=(), payload=b"", status=0, **header):
    """A whole frame; header fields may be forged."""
    body = bytearray(wire.body_size(len(op), len(items), len(payload)))
    body[:len(op)] = op
    for i, item in enumerate(items):
        body[len(op) + 32 * i:len(op) + 32 * (i + 1)] = item
    if payload:
        body[wire.payload_start(len(op), len(items)):] = payload
    fields = {"opcode": request.header.opcode, "flags": wire.RESPONSE, "status": status,
              "request_id": request.header.request_id, "session": request.header.session, "body_bytes": len(body),
              "op_bytes": len(op), "n_items": len(items)}
    fields.update(header)
    return wire.pack_header(fields.pop("opcode"), **fields) + bytes(body)


def hello_reply(boot_id=11, frame_bytes_max=1 << 20, inflight_bytes_max=1 << 25, inflight_requests_max=64,
                items_max=256, proto=1):
    return wire.LAYOUTS["hello_reply"].pack(
        proto=proto, proto_min=1, proto_max=1, n_pools=1, boot_id=boot_id, features=0, frame_bytes_max=frame_bytes_max,
        inflight_bytes_max=inflight_bytes_max, inflight_requests_max=inflight_requests_max, items_max=items_max,
        sessions_max=16, sequences_max=64, q_len_max=1, lease_ms=30000)


def open_reply(handle=0x10001, n_layers=2, q_heads=4, kv_heads=2, head_dim=16):
    return wire.LAYOUTS["open_reply"].pack(
        session=handle, boot_id=11, fingerprint=99, lease_ms=30000, reserved_blocks=0, n_layers=n_layers, block_size=16,
        q_heads=q_heads, kv_heads=kv_heads, k_head_dim=head_dim, v_head_dim=head_dim, sequences_max=64, tokens_max=4096)


class FakeServer:
    """Runs one function per connection, in order; a failed assertion in one fails the test that made the server.

    with FakeServer(part, ..) as server: tqkv.Client(server.address)
    """

    def __init__(self, *parts, buffer_bytes=None):
        self._folder = tempfile.TemporaryDirectory(prefix="tqkv-test.")
        path = os.path.join(self._folder.name, "socket")
        self.address = f"unix:{path}"
        self._listener = socket.socket(socket.AF_UNIX)
        if buffer_bytes:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        self._listener.bind(path)
        self._listener.listen(8)
        self._parts = parts
        self._error = None
        self._sockets = []
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            for part in self._parts:
                sock, _ = self._listener.accept()
                self._sockets.append(sock)
                try:
                    part(Peer(sock))
                except (EOFError, BrokenPipeError, ConnectionResetError):
                    pass  # the client went away
                sock.close()
        except OSError:
            pass  # the listener was closed
        except BaseException as error:  # noqa: B902 - told in __exit__
            self._error = error
            for sock in self._sockets:
                sock.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        # shutdown() wakes an accept() or recv() that still waits; close() does not.
        for sock in [self._listener, *self._sockets]:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._listener.close()
        self._thread.join(10)
        alive = self._thread.is_alive()
        self._folder.cleanup()
        if self._error is not None:
            raise self._error
        assert kind is not None or not alive, "the fake server hangs"


ONE = np.ones((1, 2, 16), np.float32)
QUERY = np.ones((4, 16), np.float32)


def script(*steps, **limits):
    """HELLO, OPEN, then each step with the next request."""
    def part(peer):
        peer.hello(**limits)
        peer.open()
        for step in steps:
            step(peer, peer.request())
    return part


def opened(server, **kwargs):
    client = tqkv.Client(server.address, **{"timeout": 5, **kwargs})
    return client, client.open("p", "name")


class Errors(unittest.TestCase):
    def assert_raises(self, status, call, *args, **kwargs):
        with self.assertRaises(tqkv.TqkvError) as raised:
            call(*args, **kwargs)
        self.assertEqual(raised.exception.status_name, status.name, raised.exception)
        return raised.exception
