"""Rows and several clients: fencing, reconnecting, pipelining, cancelling, deadlines, checksums, and the examples."""

import os
import pathlib
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import frames
import numpy as np
import tqkv
from daemon import ROOT, Daemon
from rows_case import EXACT, SMALL, Rows, attention, distance
from tqkv import Status


class Connections(Rows):
    def test_a_second_client_takes_the_session(self):
        """The first gets NOT_OWNER, and may take it back; lengths are learned by attaching."""
        first = self.client.open("odd", "shared")
        k, v = self.rows(first, 20)
        first.append(1, 0, k, v)
        with tqkv.Client(self.daemon.addr) as other:
            self.raises(Status.EXISTS, other.open, "odd", "shared")
            second = other.attach("shared")
            self.assertEqual(second.append(1, 0, k, v), 40)
            for call in (lambda: first.append(1, 0, k, v), lambda: first.decode(1, 0, self.query(first)),
                         lambda: first.read(1, 0, n=1), lambda: first.truncate(1, 0), lambda: first.free(1),
                         first.lengths, first.ping):
                self.raises(Status.NOT_OWNER, call)
            back = self.client.attach("shared")
            self.assertEqual(back.append(1, 0, k, v), 60)
            self.raises(Status.NOT_OWNER, second.lengths)
        self.raises(Status.NOT_FOUND, self.client.attach, "another")
        back.close()

    def test_a_tcp_client_is_another_tenant(self):
        """Names of sessions belong to the tenant."""
        with self.client.open("odd", "mine"), tqkv.Client(self.daemon.tcp) as other:
            self.raises(Status.NOT_FOUND, other.attach, "mine")
            with other.open("odd", "mine") as session:
                session.append(1, 0, *self.rows(session, 1))

    def test_an_answer_means_visible(self):
        """FAILURES W7: the first thing a second connection does is to decode the row that was just acknowledged."""
        session = self.client.open("tq4", "visible")
        for i in range(20):
            k, v = self.rows(session, 3)
            session.append(1, 0, k, v)
            with tqkv.Client(self.daemon.addr) as other:
                # By hand, so that not even TELL comes before DECODE.
                seen = other._new_session(None, "visible", other._open(18, "", "visible", time.monotonic() + 30))
                q = self.query(seen)
                out = seen.decode(1, 0, q)
                rows = seen.read(1, 0)
                self.assertEqual(len(rows[0]), 3 * (i + 1))
                self.assertLess(distance(out, attention(q, *rows)[0]), EXACT)
            session = self.client.attach("visible")
        session.close()

    def test_reconnect_goes_on_where_it_was(self):
        """Rows survive a lost connection; sequences whose layers differ are cut to the shortest."""
        session = self.client.open("odd", "survivor")
        k, v = self.rows(session, 30, layers=3)
        session.append_layers(1, k[:, :20], v[:, :20])
        session.append(1, 0, k[0, 20:], v[0, 20:])
        report = self.client.reconnect()
        self.assertEqual(report[2:], (1, 1, 1, 1))
        self.assertEqual(session.append_layers(1, k[:, 20:], v[:, 20:]), 30)
        q = self.query(session)
        self.assertLess(distance(session.decode(1, 0, q), attention(q, k[0], v[0])[0]), EXACT)
        session.close()

    def test_pipelined_appends(self):
        """50 frames without waiting, then a decode that sees them all; both transports, with body checksums too."""
        for address, options in ((self.daemon.addr, {}), (self.daemon.tcp, {}), (self.daemon.addr, {"body_crc": True}),
                                 (self.daemon.tcp, {"body_crc": True, "timings": True})):
            with self.subTest(address=address, **options), tqkv.Client(address, **options) as client, \
                    client.open("odd") as session:
                k, v = self.rows(session, 100)
                q = self.query(session)
                with client.pipeline() as p:
                    futures = [p.append(1, 0, k[2 * i:2 * i + 2], v[2 * i:2 * i + 2]) for i in range(50)]
                    out = p.decode(1, 0, q)
                    lengths = p.lengths()
                    back = p.read(1, 0, 0, 100)
                self.assertEqual([future.result() for future in futures], [2 * i + 2 for i in range(50)])
                self.assertLess(distance(out.result(), attention(q, k, v)[0]), EXACT)
                self.assertEqual(lengths.result(), {1: (100, 0, 0)})
                self.assertTrue(np.array_equal(back.result()[0], k))
                session.truncate(1, 50)
                session.append(1, 0, k[50:], v[50:])
                self.assertLess(distance(session.decode(1, 0, q), attention(q, k, v)[0]), EXACT)
                if options.get("timings"):
                    self.assertGreater(session.timings["kernel_us"], 0)

    def test_pipelined_traffic_larger_than_all_buffers(self):
        """20 MB in and 20 MB out at the same time: nobody waits for the other for ever."""
        with self.client.open("wide") as session:
            k, v = (tqkv.to_bf16(part) for part in self.rows(session, 100))
            session.append(1, 0, k, v)
            with session.pipeline() as p:
                futures = []
                for i in range(25):
                    futures.append(p.append(2, 0, k, v))
                    futures.append(p.read(1, 0, 0, 100, dtype="f32"))
                    if i % 5 == 4:
                        futures.append(p.truncate(2, 0))
            self.assertTrue(np.array_equal(futures[1].result()[0], tqkv.from_bf16(k)))

    def test_cancel(self):
        """Either dropped without a trace, or too late and stored."""
        with self.client.open("tq4") as session:
            k, v = self.rows(session, 1000)
            outcomes = set()
            for _ in range(30):
                with session.pipeline() as p:
                    work = [p.append_layers(i, np.stack([k[:300]] * 2), np.stack([v[:300]] * 2)) for i in (1, 2)]
                    future = p.append(3, 0, k[:2], v[:2])
                    outcome = future.cancel()
                    error = future.exception()
                    self.assertEqual([part.exception() for part in work], [None, None])
                outcomes.add(outcome)
                told = session.lengths()
                if outcome == "dropped":
                    self.assertEqual(error.status, Status.CANCELLED)
                    self.assertEqual(max(told.get(3, (0,))), 0)
                else:
                    self.assertIsNone(error)
                    self.assertEqual(told[3][0], 2)
                session.free(list(told))
                if "dropped" in outcomes:
                    break
            self.assertIn("dropped", outcomes)

    def test_work_whose_deadline_passed_is_not_begun(self):
        """FAILURES W10: deadline_us counts from the end of the header. Nothing is stored, the rest goes on."""
        row = np.zeros((1, 2, 64), np.float32).tobytes()
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            session = raw.open(b"tq4", name=b"late")
            for sequence, deadline_us, status in ((1, 10_000, Status.DEADLINE), (2, 60 * 10**6, 0), (3, 0, 0)):
                frame = frames.rows(frames.APPEND, session, [(sequence, 0, 1, 0, 1)], k=row, v=row,
                                    deadline_us=deadline_us)
                raw.send(frame[:64])
                time.sleep(0.05)
                self.assertEqual(raw.call(frame[64:]).status, status)
        with self.client.attach("late") as session:
            lengths = session.lengths()
            self.assertEqual((max(lengths.get(1, (0,))), lengths[2], lengths[3]), (0, (1, 0), (1, 0)))

    def test_body_checksums(self):
        """A reply to a frame with one has one, whatever the operation; a wrong one closes and changes nothing."""
        row = np.zeros((1, 2, 48), np.float32).tobytes()
        with frames.Raw(self.daemon.addr) as raw:
            raw.hello()
            session = raw.open(b"odd", name=b"summed")
            k, v = row, row[:256]
            tell = frames.frame(frames.TELL, struct.pack("<QII", 0, 16, 1), session=session)
            for name, plain in (("append", frames.rows(frames.APPEND, session, [(1, 0, 1, 0, 1)], k=k, v=v)),
                                ("read", frames.frame(frames.READ, struct.pack("<QIIIIBBHI", 1, 0, 1, 0, 1, 1, 1, 0, 0),
                                                      session=session)),
                                ("tell", tell), ("ping", frames.frame(frames.PING)),
                                ("truncate", frames.frame(frames.TRUNCATE, items=[struct.pack("<QI20x", 1, 1)],
                                                          session=session))):
                with self.subTest(name):
                    raw.send(with_crc(plain))
                    header = raw.receive(64)
                    flags, _, _, _, n_body = struct.unpack_from("<IIQQQ", header, 8)
                    body = raw.receive(n_body)
                    self.assertTrue(flags & 2, "no BODY_CRC in the reply")
                    self.assertEqual(struct.unpack_from("<I", header, 56)[0], frames.crc32c(body))
        for plain, at in ((frames.rows(frames.APPEND, session, [(1, 1, 1, 0, 0)], k=k, v=v), -1),
                          (frames.frame(frames.TRUNCATE, items=[struct.pack("<QI20x", 1, 1)], session=session), -24)):
            with self.subTest(at), frames.Raw(self.daemon.addr) as raw:
                raw.hello()
                attach = struct.pack("<HHHHIIIIQ32x", 0, 6, 0, 0, 0, 0, 0, 0, 0)
                self.assertEqual(raw.call(frames.frame(frames.ATTACH, attach, payload=b"summed")).status, 0)
                damaged = bytearray(with_crc(plain))
                damaged[at] ^= 1
                self.assertEqual(raw.call(bytes(damaged)).status, Status.BAD_CRC)
                self.assertTrue(raw.is_closed())
        with self.client.attach("summed") as session:
            self.assertEqual(session.lengths(), {1: (1, 0, 0)})


class Examples(unittest.TestCase):
    """What the README points at runs as it is."""

    def run_example(self, name, *args, **env):
        done = subprocess.run([sys.executable, ROOT / "proto/python/examples" / name, *args], capture_output=True,
                              text=True, timeout=300, stdin=subprocess.DEVNULL, env={**os.environ, **env})
        self.assertEqual(done.returncode, 0, (done.stdout, done.stderr))
        return done.stdout

    def test_ten_lines(self):
        with Daemon("--pool", "name=demo,layers=1,q_heads=4,kv_heads=2,head_dim=64,k=tq4,v=tq4,block_size=16,"
                    "blocks=1024") as daemon:
            self.assertIn("(4, 64) {1: (100,)}", self.run_example("ten_lines.py", daemon.addr))
            self.assertIn("(4, 64) {1: (100,)}", self.run_example("ten_lines.py", TQKV_ADDR=daemon.addr))

    def test_a_daemon_with_tokens(self):
        """What makes a pool of its own does so there, too, with what the environment says."""
        token = "admin-token-0123456789"
        with tempfile.TemporaryDirectory() as folder:
            tokens = pathlib.Path(folder, "tokens")
            tokens.write_text(f"admin ops {token}\n")
            tokens.chmod(0o600)
            with Daemon("--pool", SMALL, "--tokens-file", tokens, token=token) as daemon:
                text = self.run_example("save_restore.py", TQKV_ADDR=daemon.tcp, TQKV_HTTP=daemon.http, TQKV_TOKEN=token)
                self.assertIn("every row and every output is the same to the bit", text)

    def test_save_restore(self):
        """Every row and output comes back with the same bytes; the pool is deleted at the end."""
        with Daemon("--pool", SMALL) as daemon:
            for name in ("tq4", "v4", "bf16"):
                with self.subTest(name):
                    text = self.run_example("save_restore.py", "--addr", daemon.addr, "--http", daemon.http, "--format",
                                            name)
                    self.assertIn("every row and every output is the same to the bit", text)
            self.assertEqual([pool["name"] for pool in daemon.get("/v1/pools")["pools"]], ["small"])


def with_crc(data):
    """The frame with BODY_CRC and a body checksum."""
    head = bytearray(data[:60])
    head[8:12] = struct.pack("<I", struct.unpack_from("<I", head, 8)[0] | 2)
    head[56:60] = struct.pack("<I", frames.crc32c(data[64:]))
    return bytes(head) + struct.pack("<I", frames.crc32c(bytes(head))) + data[64:]


if __name__ == "__main__":
    unittest.main()
