"""Snapshots of real processes: what a client decodes before and after a restart is the same, bit for bit."""

import errno
import os
import pathlib
import signal
import subprocess
import tempfile
import time
import unittest

import numpy as np

import test_tiers
import tqkv
from daemon import BUILD, DEMO, EXACT, PATIENCE_S, Daemon

OTHER = DEMO.replace("v=tq4", "v=tq3")


def rows(seed, n_tokens, head_dim=64, heads=2):
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n_tokens, heads, head_dim)).astype(np.float32),
            rng.standard_normal((n_tokens, heads, head_dim)).astype(np.float32))


def fill(session):
    """Sequences 1 and 2 on both layers, 3 on the first one only."""
    for layer in range(2):
        k, v = rows(layer, 100)
        session.append(1, layer=layer, k=k, v=v)
    k, v = rows(3, 40)
    session.append_layers(2, k=np.stack([k, k]), v=np.stack([v, v]))
    k, v = rows(7, 21)
    session.append(3, layer=0, k=k, v=v)


def outputs(session):
    q = np.random.default_rng(99).standard_normal((4, 64)).astype(np.float32)
    return [session.decode(sequence, layer=layer, q=q).tobytes()
            for sequence, layer in ((1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))]


def ctl(daemon, *args):
    return subprocess.run([str(BUILD / "server/tqkvctl"), "--http", daemon.http, *args], capture_output=True,
                          text=True, timeout=PATIENCE_S)


class Snapshots(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory(prefix="tqkv-test.")
        self.addCleanup(self.dir.cleanup)
        self.path = pathlib.Path(self.dir.name)

    def daemon(self, *args, pool=DEMO):
        return Daemon("--pool", pool, "--snapshot-dir", self.path, *args)

    def wait(self, daemon):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            view = daemon.get("/v1/snapshot")
            if view["state"] != "running":
                return view
            time.sleep(0.02)
        raise AssertionError("it does not end")

    def test_a_drained_daemon_goes_on_in_the_next_process(self):
        """FAILURES S6: SIGTERM, and the next start has the same sessions under another boot id; its log says how long it took."""
        with self.daemon("--snapshot-on-drain") as daemon:
            boot_id = daemon.get("/v1/info")["boot_id"]
            with tqkv.Client(daemon.addr) as client:
                session = client.open("demo", session="chat")
                fill(session)
                before, lengths = outputs(session), session.lengths()
                self.assertEqual(daemon.stop(signal.SIGTERM), 0)
        self.assertTrue((self.path / "drain.tqkv").exists())
        with self.daemon("--snapshot-on-drain") as daemon:
            self.assertRegex(daemon.log(), r"restored drain: sessions 1, sequences 3, .* in \d+ us, \d+ MiB/s")
            self.assertNotEqual(daemon.get("/v1/info")["boot_id"], boot_id)
            self.assertFalse((self.path / "drain.tqkv").exists(), "a consumed snapshot is gone")
            with tqkv.Client(daemon.addr) as client:
                session = client.attach("chat")
                self.assertEqual(session.lengths(), lengths)
                self.assertEqual(outputs(session), before)
                k, v = rows(5, 3)
                session.append(1, layer=0, k=k, v=v, position=100)

    def test_what_is_beside_rows_survives_a_restart(self):
        """FAILURES S3 and S5 over real processes: the exact window, a published prefix, forked blocks, a pin, formats
        per layer; nothing is appended before the first decode."""
        pool = DEMO.replace("layers=2", "layers=3") + ",exact_tokens=32,exact_layers=1"
        tokens, q = list(range(96)), np.random.default_rng(3).standard_normal((4, 64)).astype(np.float32)

        def everything(session):
            return ([session.decode(s, layer=layer, q=q).tobytes() for s in (1, 2, 4) for layer in range(3)],
                    [(row.sequence, row.length_max, row.n_blocks, row.n_shared_blocks, row.n_exact)
                     for row in session.tell() if row.sequence < 4])

        with self.daemon(pool=pool) as daemon, tqkv.Client(daemon.addr) as client:
            session = client.open("demo", session="chat")
            k, v = rows(1, 96)
            session.append_layers(1, k=np.stack([k, k, k]), v=np.stack([v, v, v]))
            session.fork({2: 1})
            k, v = rows(2, 7)
            session.append_layers(2, k=np.stack([k, -k, k]), v=np.stack([v, -v, v]), position=96)
            session.publish(1, tokens)
            session.pin(2)
            self.assertEqual(session.match(4, tokens), 96)
            before = everything(session)
            self.assertEqual([row[4] for row in before[1]], [32, 7])
            session.free(4)
            done = ctl(daemon, "snapshot", "s")
            self.assertRegex(done.stdout, r"1 sessions, 2 sequences, 6 published, \d+ blocks, .* MiB/s$")
        with self.daemon("--restore", "s", pool=pool) as daemon, tqkv.Client(daemon.addr) as client:
            session = client.attach("chat")
            self.assertEqual(session.match(4, tokens), 96)
            self.assertEqual(everything(session), before)
            self.assertEqual(client.open("demo").match(1, tokens + [7] * 16), 96, "another session finds it, too")
            session.unpin(2)
            with self.assertRaises(tqkv.TqkvError):
                session.unpin(2)
            self.assertEqual(daemon.get("/v1/snapshot")["n_prefixes"], 6)

    def test_tqkvctl_saves_and_restores_and_tells_how_fast(self):
        """FAILURES S8: the hooks that deploy/README.md names for a swap of models."""
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            session = client.open("demo", session="a")
            fill(session)
            before = outputs(session)
            done = ctl(daemon, "snapshot", "all", "--all")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^snapshot all: 1 sessions, 3 sequences, 0 published, \d+ blocks, .* MiB/s")
            self.assertEqual(os.stat(self.path / "all.tqkv").st_mode & 0o777, 0o600)
            done = ctl(daemon, "restore", "all")
            self.assertEqual(done.returncode, 1)
            self.assertIn("EXISTS", done.stderr)
            session.close()
            done = ctl(daemon, "restore", "all")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^restore all: 1 sessions, 3 sequences, .* MiB/s")
            self.assertEqual(outputs(client.attach("a")), before)

    def test_tables_of_a_client_are_not_saved(self):
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            tables = client.open("demo", session="tables", client_tables=True, reserve_blocks=4)
            k, v = rows(1, 20)
            tables.update_slots(layer=0, slots=np.arange(20), k=k, v=v)
            fill(client.open("demo", session="a"))
            done = ctl(daemon, "snapshot", "all", "--all")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertRegex(done.stdout, r"^snapshot all: 1 sessions, 3 sequences")
            self.assertEqual(daemon.get("/v1/snapshot")["n_skipped_sessions"], 1)
            ids = {row["name"]: row["id"] for row in daemon.get("/v1/sessions")["sessions"]}
            done = ctl(daemon, "snapshot", "one", "--session", ids["tables"])
            self.assertEqual(done.returncode, 1)
            self.assertIn("block tables of its client", done.stderr)

    def test_one_session_of_several(self):
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            for name in ("a", "b"):
                fill(client.open("demo", session=name))
            ids = {row["name"]: row["id"] for row in daemon.get("/v1/sessions")["sessions"]}
            done = ctl(daemon, "snapshot", "b-only", "--session", ids["b"])
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("1 sessions", done.stdout)
            done = ctl(daemon, "snapshot", "a-only", "--session", "a")
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("1 sessions", done.stdout)
            self.assertEqual(ctl(daemon, "snapshot", "none", "--session", "c").returncode, 2)

    def test_what_is_wrong_with_a_file_is_said_and_changes_nothing(self):
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            session = client.open("demo", session="a")
            fill(session)
            self.assertEqual(ctl(daemon, "snapshot", "s").returncode, 0)
            session.close()
            occupancy = daemon.get("/v1/occupancy")["pools"]
            whole = (self.path / "s.tqkv").read_bytes()
            damaged = bytearray(whole)
            damaged[len(damaged) // 2] ^= 4
            (self.path / "damaged.tqkv").write_bytes(damaged)
            (self.path / "short.tqkv").write_bytes(whole[:-100])
            (self.path / "empty.tqkv").write_bytes(b"")
            (self.path / "directory.tqkv").mkdir()
            os.mkfifo(self.path / "fifo.tqkv")
            os.symlink(self.path / "s.tqkv", self.path / "link.tqkv")
            for name, code in [("damaged", "CORRUPT"), ("short", "CORRUPT"), ("empty", "CORRUPT"),
                               ("directory", "IO_ERROR"), ("fifo", "IO_ERROR"), ("link", "IO_ERROR"),
                               ("absent", "NOT_FOUND")]:
                with self.subTest(name=name):
                    self.assertEqual(daemon.request("POST", "/v1/restore", {"name": name})[0], 202)
                    self.assertEqual(self.wait(daemon)["status"], code)
            for name in ("../s", "/etc/passwd", ".s", ""):
                with self.subTest(name=name):
                    status, problem = daemon.request("POST", "/v1/restore", {"name": name})
                    self.assertEqual((status, problem["code"]), (400, "BAD_ARG"))
            self.assertEqual(daemon.request("POST", "/v1/snapshot", {"name": "directory"})[0], 202)
            self.assertEqual(self.wait(daemon)["status"], "IO_ERROR")
            self.assertEqual(sorted(path.name for path in self.path.glob(".*")), [], "nothing half-written is left")
            for pool, row in zip(daemon.get("/v1/occupancy")["pools"], occupancy):
                self.assertEqual(pool["n_sessions"], row["n_sessions"])
                self.assertEqual(pool["blocks"]["free"], row["blocks"]["free"])
            self.assertEqual(ctl(daemon, "restore", "s").returncode, 0)

    def test_another_pool_is_refused_by_the_member_that_differs(self):
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            fill(client.open("demo", session="a"))
            self.assertEqual(ctl(daemon, "snapshot", "s").returncode, 0)
        # FAILURES S2: another seed, other bits, another layout.
        for pool, member in ((OTHER, "v"), (DEMO + ",seed=43", "k_rotation"), (DEMO.replace("block_size=16", "block_size=32"),
                                                                         "block_size")):
            with self.subTest(member=member), self.daemon(pool=pool) as daemon:
                done = ctl(daemon, "restore", "s")
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, rf"FORMAT_MISMATCH.*\bin {member}\b")
        with self.daemon(pool=EXACT) as daemon:
            self.assertIn("NOT_FOUND", ctl(daemon, "restore", "s").stderr)
        failed = subprocess.run([str(BUILD / "server/tqkvd"), "--listen", f"unix:{self.path}/x.sock", "--http", "off",
                                 "--memory", "64MiB", "--pool", OTHER, "--snapshot-dir", str(self.path), "--restore",
                                 "s"], capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual(failed.returncode, 3, failed.stderr)
        self.assertIn("differs from the snapshot's in v", failed.stderr)

    def test_a_full_disk(self):
        """FAILURES S1: IO_ERROR that says so, the older snapshot stays, nothing half-written is left, rows are as before."""
        wrapper = test_tiers.mounted(self.path, "size=128k")
        if not wrapper:
            self.skipTest("mounting is denied here")
        with Daemon("--pool", DEMO, "--snapshot-dir", self.path, wrapper=wrapper) as daemon, \
                tqkv.Client(daemon.addr) as client:
            session = client.open("demo", session="a")
            fill(session)
            before = outputs(session)
            self.assertEqual(ctl(daemon, "snapshot", "s").returncode, 0)
            other = client.open("demo", session="b")
            for sequence in range(1, 4):
                k, v = rows(sequence, 240)
                other.append_layers(sequence, k=np.stack([k, k]), v=np.stack([v, v]))
            for name in ("s", "t"):
                done = ctl(daemon, "snapshot", name)
                self.assertEqual(done.returncode, 1)
                self.assertRegex(done.stderr, r"IO_ERROR.*No space left on device")
            seen = pathlib.Path(f"/proc/{daemon.process.pid}/root{self.path}")
            self.assertEqual(os.listdir(seen), ["s.tqkv"])
            self.assertEqual(outputs(session), before)
            session.close()
            self.assertEqual(ctl(daemon, "restore", "s").returncode, 0)
            self.assertEqual(outputs(client.attach("a")), before)
            self.assertTrue(daemon.get("/v1/audit")["is_clean"])

    def test_without_a_directory_or_with_one_that_has_gone(self):
        with Daemon("--pool", DEMO) as daemon:
            status, problem = daemon.request("POST", "/v1/snapshot", {"name": "s"})
            self.assertEqual((status, problem["code"]), (409, "BAD_STATE"))
        gone = pathlib.Path(self.path) / "gone"
        gone.mkdir()
        with Daemon("--pool", DEMO, "--snapshot-dir", str(gone)) as daemon:
            gone.rmdir()
            self.assertEqual(daemon.request("POST", "/v1/snapshot", {"name": "s"})[0], 202)
            self.assertEqual(self.wait(daemon)["status"], "IO_ERROR")


if __name__ == "__main__":
    unittest.main()
