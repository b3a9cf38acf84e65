"""The client against a server that drops, lies, stalls and refuses."""

import os
import threading
import time
import unittest
from unittest import mock

import numpy as np
import tqkv
from tqkv import Status
from tqkv import _wire as wire

from .common import ONE, QUERY, Errors, FakeServer, hello_reply, opened, reply, script


class Connecting(Errors):
    def test_nobody_there(self):
        """IO_ERROR with the address."""
        error = self.assert_raises(Status.IO_ERROR, tqkv.Client, "unix:/nonexistent/socket")
        self.assertIn("unix:/nonexistent/socket", str(error))
        self.assertTrue(error.is_local)

    def test_addresses(self):
        """Told apart before anything is done."""
        for address in ("", "unix:", "tcp:", "tcp:host", "tcp:host:port", "tcp::1", "tcp:h:65536", "http://h:1",
                        "/tmp/x"):
            with self.subTest(address), self.assertRaises(ValueError):
                tqkv.Client(address)

    def test_hello_says_who_we_are(self):
        """Versions, name and token are where the protocol wants them."""
        seen = []
        with FakeServer(lambda peer: seen.append(peer.hello())) as server:
            client = tqkv.Client(server.address, name="worker-1", token="s3cr3t")
            client.close()
        self.assertEqual(seen[0].op, (1, 1, 6, 8, 4, 0))
        self.assertEqual(bytes(seen[0].payload), b"s3cr3tworker-1")
        self.assertEqual(client.server.frame_bytes_max, 1 << 20)

    def test_what_is_not_given_comes_from_the_environment(self):
        """Address and token; an empty token is none."""
        seen = []
        with FakeServer(lambda peer: seen.append(peer.hello()), lambda peer: seen.append(peer.hello())) as server, \
                mock.patch.dict(os.environ, {"TQKV_ADDR": server.address, "TQKV_TOKEN": "s3cr3t"}):
            tqkv.Client().close()
            tqkv.Client(token="").close()
        self.assertEqual([bytes(hello.payload) for hello in seen], [b"s3cr3t", b""])
        with mock.patch.dict(os.environ, clear=True):
            error = self.assert_raises(Status.IO_ERROR, tqkv.Client)
            self.assertIn("unix:/run/tqkv/tqkvd.sock", str(error))

    def test_a_refused_hello_says_what_to_do(self):
        """Its reply has no text."""
        for status, token, words in ((200, "", "token="), (200, "wrong", "none of the daemon's"),
                                     (201, "read", "role data or admin"), (201, "", "unix_uids")):
            with FakeServer(lambda peer, status=status: peer.hello(status=status)) as server:
                error = self.assert_raises(Status(status), tqkv.Client, server.address, token=token)
                self.assertIn(words, str(error))

    def test_another_version(self):
        """The server's range is told, whether its reply has our request id or none."""
        for request_id in (1, 0):
            def part(peer):
                request = peer.request()
                peer.send(reply(request, hello_reply(proto=0), status=101, request_id=request_id))
            with FakeServer(part) as server:
                error = self.assert_raises(Status.VERSION_UNSUPPORTED, tqkv.Client, server.address)
                self.assertIn("1 to 1", str(error))

    def test_a_silent_server(self):
        """FAILURES W10: connecting ends at the set time."""
        with FakeServer(lambda peer: peer.receive(1 << 20)) as server:
            begun = time.monotonic()
            self.assert_raises(Status.DEADLINE, tqkv.Client, server.address, connect_timeout=0.3)
            self.assertTrue(0.29 < time.monotonic() - begun < 3)


class Deadlines(Errors):
    def test_a_blackholed_call_ends_at_the_set_time(self):
        """FAILURES W10: DEADLINE, the outcome is unknown, the connection stays, the late reply is thrown away."""
        late = threading.Event()

        def first(peer, request):
            late.wait(10)
            peer.rows(request)

        def second(peer, request):
            self.assertGreater(request.header.deadline_us, 0)
            peer.rows(request)

        with FakeServer(script(first, lambda peer, request: peer.tell(request, {1: (1, 0)}), second)) as server:
            client, session = opened(server)
            begun = time.monotonic()
            error = self.assert_raises(Status.DEADLINE, session.append, 1, 0, ONE, ONE, timeout=0.3)
            self.assertTrue(0.29 < time.monotonic() - begun < 3)
            self.assertTrue(error.outcome_unknown)
            late.set()
            # What became of the append is not guessed but asked: it was stored.
            self.assertEqual(session.append(1, 0, ONE, ONE), 2)
            client.close()

    def test_the_server_is_told_the_deadline(self):
        """In microseconds, at most what the call has; a very long one is only kept here."""
        seen = []

        def note(peer, request):
            seen.append(request.header.deadline_us)
            peer.rows(request)

        with FakeServer(script(note, note)) as server:
            client, session = opened(server)
            session.append(1, 0, ONE, ONE, timeout=20)
            session.append(1, 0, ONE, ONE, timeout=10000)
            client.close()
        self.assertTrue(10_000_000 < seen[0] <= 20_000_000, seen)
        self.assertEqual(seen[1], 0)

    def test_a_server_that_stops_reading(self):
        """A frame larger than all buffers cannot be sent: DEADLINE, not a hang."""
        with FakeServer(script(lambda peer, request: time.sleep(1.5)), buffer_bytes=4096) as server:
            client, session = opened(server)
            k = np.zeros((4000, 2, 16), np.float32)
            begun = time.monotonic()
            with session.pipeline(timeout=0.3) as p:
                futures = [p.append(sequence, 0, k, k) for sequence in (1, 2)]
                for future in futures:
                    self.assertEqual(future.exception().status, Status.DEADLINE)
            self.assertLess(time.monotonic() - begun, 15)
            client.close()

    def test_a_flood_of_other_replies_does_not_hold_up_a_deadline(self):
        """The clock is looked at although the socket is never quiet."""
        def part(peer, request):
            end = time.monotonic() + 3
            while time.monotonic() < end:
                peer.send(wire.pack_header(wire.GOAWAY, flags=1, status=404))

        with FakeServer(script(part)) as server:
            client, session = opened(server)
            begun = time.monotonic()
            self.assert_raises(Status.DEADLINE, session.append, 1, 0, ONE, ONE, timeout=0.3)
            self.assertLess(time.monotonic() - begun, 2)
            self.assertTrue(client.is_draining)
            client.close()


class Replies(Errors):
    def test_one_byte_at_a_time(self):
        """Short reads make no difference."""
        def slow(peer, request):
            data = []
            peer.send = data.append
            peer.rows(request, out=np.arange(64, dtype=np.float32), lse=np.arange(4, dtype=np.float32))
            del peer.send
            for byte in data[0]:
                peer.send(bytes([byte]))

        with FakeServer(script(slow)) as server:
            client, session = opened(server)
            out, lse = session.decode(1, 0, QUERY, lse=True)
            self.assertEqual(out.tolist(), np.arange(64.0).reshape(4, 16).tolist())
            self.assertEqual(lse.tolist(), [0, 1, 2, 3])
            client.close()

    def test_a_connection_that_ends(self):
        """Between frames or inside one: IO_ERROR, and every later call says so at once."""
        for n_bytes in (0, 1, 63, 64, 70):
            def part(peer, request):
                data = []
                peer.send = data.append
                peer.rows(request)
                del peer.send
                peer.send(data[0][:n_bytes])
                raise EOFError

            with self.subTest(n_bytes), FakeServer(script(part)) as server:
                client, session = opened(server)
                error = self.assert_raises(Status.IO_ERROR, session.append, 1, 0, ONE, ONE)
                self.assertTrue(error.outcome_unknown)
                self.assertEqual(error.scope, "connection")
                self.assertEqual([result.sequence for result in error.results], [1])
                self.assertFalse(client.is_connected)
                self.assert_raises(Status.IO_ERROR, client.ping)
                client.close()

    def check_garbage(self, answer, *statuses, call=None):
        def part(peer, request):
            answer(peer, request)
            peer.receive(1)

        with FakeServer(script(part)) as server:
            client, session = opened(server)
            with self.assertRaises(tqkv.TqkvError) as raised:
                (call or (lambda session: session.append(1, 0, ONE, ONE)))(session)
            self.assertIn(raised.exception.status, statuses, raised.exception)
            self.assertTrue(raised.exception.is_local)
            self.assertFalse(client.is_connected)
            self.assertFalse(raised.exception.retryable)
            client.close()

    def test_garbage_instead_of_a_reply(self):
        """What is no frame of the protocol ends the connection, with the reason."""
        self.check_garbage(lambda peer, request: peer.send(b"HTTP/1.1 400 Bad Request" + b" " * 64), Status.BAD_MAGIC)
        self.check_garbage(lambda peer, request: peer.send(bytes(64)), Status.BAD_MAGIC)
        self.check_garbage(lambda peer, request: peer.send(b"TKV1\x02\x08" + bytes(58)), Status.VERSION_UNSUPPORTED)
        self.check_garbage(lambda peer, request: peer.send(wire.pack_header(32, flags=1)[:-1] + b"\0"), Status.BAD_CRC)
        self.check_garbage(lambda peer, request: peer.send(wire.pack_header(32, request_id=3)), Status.BAD_FRAME)
        self.check_garbage(lambda peer, request: peer.send(wire.pack_header(
            32, flags=1, request_id=3, body_bytes=1 << 21, op_bytes=64)), Status.TOO_LARGE)

    def test_replies_that_answer_something_else(self):
        """Another request, opcode, session, sequence, number of items, or count of them."""
        def forged(**header):
            return lambda peer, request: peer.rows(request, **header)

        self.check_garbage(forged(request_id=77), Status.BAD_FRAME)
        self.check_garbage(forged(request_id=0), Status.BAD_FRAME)
        self.check_garbage(forged(opcode=wire.DECODE), Status.BAD_FRAME)
        self.check_garbage(forged(status=7), Status.BAD_FRAME)
        self.check_garbage(forged(session=0x20002), Status.BAD_FRAME)
        self.check_garbage(lambda peer, request: peer.reply(request, bytes(64)), Status.BAD_FRAME)
        item = {"sequence": 1, "length": 1, "n_tokens": 1, "q_len": 0, "status": 0, "layer": 0xFFFF, "row": 0xFFFFFFFF,
                "retry_after_ms": 0}
        op = dict.fromkeys(wire.LAYOUTS["rows_reply"].tuple._fields, 0)
        for changed, counts in (({"sequence": 2}, (1, 0)), ({"n_tokens": 2}, (1, 0)), ({"status": 9}, (0, 1)),
                                ({"q_len": 1}, (1, 0)), ({}, (0, 1)), ({"status": 400}, (0, 1))):
            data = wire.LAYOUTS["rows_reply_item"].pack(**{**item, **changed})
            head = wire.LAYOUTS["rows_reply"].pack(**{**op, "n_ok": counts[0], "n_failed": counts[1]})
            self.check_garbage(lambda peer, request: peer.reply(request, head, [data]), Status.BAD_FRAME)

    def test_outputs_outside_the_payload(self):
        """No offset of the peer reaches beyond its own bytes."""
        item = wire.LAYOUTS["rows_reply_item"].pack(sequence=1, length=1, n_tokens=0, q_len=1, status=0, layer=0xFFFF,
                                                    row=0xFFFFFFFF, retry_after_ms=0)
        for out_off, n_q, dtype in ((64, 1, 1), (wire.ABSENT, 1, 1), (32, 1, 1), (0, 2, 1), (0, 1, 2)):
            op = wire.LAYOUTS["rows_reply"].pack(
                n_ok=1, n_failed=0, n_q_total=n_q, out_dtype=dtype, out_off=out_off, lse_off=wire.ABSENT, recv_us=0,
                queue_us=0, copy_in_us=0, kernel_us=0, copy_out_us=0, total_us=0)
            with self.subTest(out_off=out_off, n_q=n_q, dtype=dtype):
                self.check_garbage(lambda peer, request: peer.reply(request, op, [item], bytes(300)), Status.BAD_FRAME,
                                   call=lambda session: session.decode(1, 0, QUERY))

    def test_read_replies_that_answer_something_else(self):
        """Other tokens, or rows outside the payload."""
        for changed, k_off in (({"position": 1}, 0), ({"n_tokens": 2}, 0), ({"k_dtype": 3}, 0), ({}, 64)):
            def answer(peer, request):
                fields = {**request.op._asdict(), **changed}
                op = wire.LAYOUTS["read_reply"].pack(**fields, k_off=k_off, v_off=wire.ABSENT, fingerprint=1)
                peer.reply(request, op, (), bytes(128))

            with self.subTest(changed=changed, k_off=k_off):
                self.check_garbage(answer, Status.BAD_FRAME,
                                   call=lambda session: session.read(1, layers=0, n=1, v=False))

    def test_tell_that_would_page_for_ever(self):
        """next_sequence must move on, and sequences must be in order."""
        def tell(session):
            session.lengths()

        self.check_garbage(lambda peer, request: peer.tell(request, {5: (1, 1)}, next_sequence=5), Status.BAD_FRAME,
                           call=tell)
        self.check_garbage(lambda peer, request: peer.tell(request, {}, next_sequence=5), Status.BAD_FRAME, call=tell)
        self.check_garbage(lambda peer, request: peer.tell(request, {5: (1, 1), 4: (1, 1)}, order=(5, 4)),
                           Status.BAD_FRAME, call=tell)

    def test_a_body_with_a_wrong_checksum(self):
        """Verified whenever the reply has one."""
        self.check_garbage(lambda peer, request: peer.rows(request, flags=3, body_crc=1), Status.BAD_CRC)

    def test_an_error_of_the_server(self):
        """All fields of the frame error arrive; the connection goes on."""
        with FakeServer(script(lambda peer, request: peer.error(request, 106, detail=b"BAD_ARG: because"),
                               lambda peer, request: peer.tell(request, {}),
                               lambda peer, request: peer.rows(request))) as server:
            client, session = opened(server)
            error = self.assert_raises(Status.BAD_ARG, session.append, 1, 0, ONE, ONE)
            self.assertEqual((error.scope, error.retryable, error.is_local, error.offset, error.expected, error.got),
                             ("request", False, False, 40, 7, 8))
            self.assertEqual(str(error), "BAD_ARG: APPEND: because")
            self.assertEqual(session.append(1, 0, ONE, ONE), 1)
            client.close()

    def test_an_error_that_closes_the_connection(self):
        """Told with its own status, also when the server could not read our header (request id 0)."""
        for header in ({}, {"request_id": 0, "opcode": 0}):
            with FakeServer(script(lambda peer, request: peer.error(
                    request, 102, scope=4, detail=b"checksum", **header))) as server:
                client, session = opened(server)
                error = self.assert_raises(Status.BAD_CRC, session.append, 1, 0, ONE, ONE)
                self.assertFalse(error.is_local)
                self.assertFalse(client.is_connected)
                client.close()

    def test_an_unknown_status(self):
        """A newer server may refuse with a number that is not known here."""
        with FakeServer(script(lambda peer, request: peer.error(request, 666))) as server:
            client, session = opened(server)
            with self.assertRaises(tqkv.TqkvError) as raised:
                session.append(1, 0, ONE, ONE)
            self.assertEqual((raised.exception.status, raised.exception.status_name), (666, "status 666"))
            client.close()


class Reconnecting(Errors):
    def attach(self, peer, rows, boot_id=11):
        hello = peer.hello(boot_id)
        self.assertEqual(hello.op.boot_id_seen, 11)
        request = peer.open(wire.ATTACH, handle=0x90009)
        self.assertEqual(bytes(request.payload), b"name")
        peer.tell(peer.request(), rows)

    def test_the_same_daemon(self):
        """ATTACH, TELL, TRUNCATE of what is uneven, and on it goes with the new handle."""
        def second(peer):
            self.attach(peer, {1: (5, 4), 2: (3, 3)})
            request = peer.request()
            self.assertEqual(request.header.opcode, wire.TRUNCATE)
            self.assertEqual([(item.sequence, item.position) for item in request.items], [(1, 4)])
            peer.rows(request)
            for position in (4, 3):
                request = peer.request()
                self.assertEqual((request.header.session, request.items[0].position), (0x90009, position))
                peer.rows(request)

        with FakeServer(script(), second) as server:
            client, session = opened(server)
            self.assert_raises(Status.IO_ERROR, session.append, 1, 0, ONE, ONE)
            report = client.reconnect()
            self.assertEqual(report, (11, 11, 1, 1, 2, 1))
            self.assertEqual(session.append(1, 0, ONE, ONE), 5)
            self.assertEqual(session.append(2, 1, ONE, ONE), 4)
            client.close()

    def test_lengths_can_be_kept(self):
        """For clients that stream layer by layer and go on from TELL."""
        def second(peer):
            self.attach(peer, {1: (5, 4)})
            request = peer.request()
            self.assertEqual((request.header.opcode, request.items[0].position), (wire.APPEND, 4))
            peer.rows(request)

        with FakeServer(script(), second) as server:
            client, session = opened(server)
            self.assertEqual(client.reconnect(keep_lengths=True).n_truncated, 0)
            self.assertEqual(session.append(1, 1, ONE, ONE), 5)
            client.close()

    def test_another_boot_id(self):
        """FAILURES L12: STALE_EPOCH is told, sessions are gone, the connection is usable."""
        def second(peer):
            peer.hello(boot_id=12, status=302)
            request = peer.request()
            self.assertEqual((request.header.opcode, bytes(request.payload)), (wire.ATTACH, b"name"))
            peer.error(request, 300)
            peer.open()

        with FakeServer(script(), second) as server:
            client, session = opened(server)
            self.assert_raises(Status.STALE_EPOCH, client.reconnect)
            self.assertTrue(client.is_connected)
            self.assertEqual(session.lost.status, Status.STALE_EPOCH)
            self.assertIn("name did not come back", str(session.lost))
            self.assert_raises(Status.STALE_EPOCH, session.append, 1, 0, ONE, ONE)
            session.close()  # nothing is sent
            client.open("p")
            client.close()

    def restored(self, rows):
        """A restarted daemon that restored the session with these rows."""
        def second(peer):
            peer.hello(boot_id=12, status=302)
            peer.open(wire.ATTACH, handle=0x90009)
            peer.tell(peer.request(), rows)
            if rows[1][0] == 1:
                request = peer.request()
                self.assertEqual((request.header.session, request.items[0].position), (0x90009, 1))
                peer.rows(request)
            else:
                peer.open()

        return FakeServer(script(lambda peer, request: peer.rows(request)), second)

    def test_a_restarted_daemon_that_restored_a_snapshot(self):
        """The session goes on where the client knows that it was."""
        with self.restored({1: (1, 1)}) as server:
            client, session = opened(server)
            session.append(1, 0, ONE, ONE)
            report = client.reconnect(keep_lengths=True)
            self.assertEqual((report.boot_id_before, report.boot_id, report.n_attached), (11, 12, 1))
            self.assertIsNone(session.lost)
            self.assertEqual(session.append(1, 0, ONE, ONE), 2)
            client.close()

    def test_an_older_snapshot_is_not_gone_on_from_without_a_word(self):
        with self.restored({1: (0, 0)}) as server:
            client, session = opened(server)
            session.append(1, 0, ONE, ONE)
            self.assert_raises(Status.STALE_EPOCH, client.reconnect)
            self.assertIn("fewer tokens of sequence 1", str(session.lost))
            client.open("p")
            client.close()

    def test_a_ping_notices_a_restart(self):
        """FAILURES L12: behind a proxy the connection may survive the daemon."""
        def pong(peer, request):
            peer.reply(request, wire.LAYOUTS["ping_reply"].pack(proto=1, proto_min=1, proto_max=1, n_pools=1,
                                                                boot_id=12))

        with FakeServer(script(pong)) as server:
            client, _ = opened(server)
            self.assert_raises(Status.STALE_EPOCH, client.ping)
            client.close()

    def test_a_session_without_a_name_is_lost(self):
        def second(peer):
            peer.hello()
            peer.receive(1)

        with FakeServer(script(), second) as server:
            client = tqkv.Client(server.address)
            session = client.open("p")
            self.assert_raises(Status.STALE_HANDLE, client.reconnect)
            self.assert_raises(Status.STALE_HANDLE, session.lengths)
            client.close()

    def test_nobody_there_yet(self):
        """IO_ERROR, and it may be called again."""
        server = FakeServer(script())
        with server:
            client, session = opened(server)
        self.assert_raises(Status.IO_ERROR, client.reconnect)
        self.assert_raises(Status.IO_ERROR, session.lengths)


if __name__ == "__main__":
    unittest.main()
