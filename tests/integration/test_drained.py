"""What the last drain wrote may be the only place where its sessions are: no start loses it."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest

import tqkv
from daemon import BUILD, DEMO, EXACT, PATIENCE_S, Daemon, run_tqkvd
from test_snapshot import fill, outputs, rows

WEB = {"name": "web", "layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "k": "tq4", "v": "tq4", "block_size": 16,
       "blocks": 64}


class Case(unittest.TestCase):
    def setUp(self):
        self.dir = tempfile.TemporaryDirectory(prefix="tqkv-test.")
        self.addCleanup(self.dir.cleanup)
        self.path = pathlib.Path(self.dir.name)

    def daemon(self, *args, pool=DEMO, **kwargs):
        return Daemon("--pool", pool, "--snapshot-dir", self.path, "--snapshot-on-drain", *args, **kwargs)

    def drain_one(self, pool="demo", **options):
        """A daemon with session "conv" stops; what it decoded to."""
        with self.daemon(**options) as daemon, tqkv.Client(daemon.addr) as client:
            if pool == "web":
                self.assertEqual(daemon.request("POST", "/v1/pools", WEB)[0], 201)
            session = client.open(pool, session="conv")
            fill(session)
            before = outputs(session)
            self.assertEqual(daemon.stop(signal.SIGTERM), 0)
        self.assertEqual(self.files(), ["drain"])
        return before

    def files(self):
        return sorted(path.name.removesuffix(".tqkv") for path in self.path.glob("*.tqkv"))

    def kept(self, daemon):
        """The name that the log and the directory agree on."""
        name = re.search(r"Z error the snapshot of the last drain was not restored .* it is kept as (\S+):", daemon.log()).group(1)
        self.assertIn(f"'tqkvctl restore {name}'", daemon.log())
        self.assertRegex(name, r"^drain-unrestored-\d{8}T\d{6}Z$")
        self.assertEqual(self.files(), [name])
        return name


class Unrestored(Case):
    def test_a_pool_that_was_made_over_http_is_named_and_nothing_is_lost(self):
        before = self.drain_one("web")
        with self.daemon() as daemon:
            self.assertRegex(daemon.log(), r'Z error restoring drain failed: NOT_FOUND: .*no pool "web"')
            self.assertNotIn("no snapshot of an earlier drain", daemon.log())
            name = self.kept(daemon)
        # Drained without sessions meanwhile; what was kept is there all the same.
        self.assertEqual(self.files(), ["drain", name])
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            self.assertEqual(daemon.request("POST", "/v1/pools", WEB)[0], 201)
            daemon.ctl("restore", name)
            self.assertEqual(outputs(client.attach("conv")), before)

    def test_a_smaller_pool_is_no_damage(self):
        """LIMIT or POOL_FULL with the numbers, not CORRUPT."""
        before = self.drain_one()
        for pool, words in ((DEMO + ",tokens_max=32", r"LIMIT: .*sequence 1 has 100 tokens, pool .demo. of this daemon allows 32"),
                            (DEMO.replace("blocks=64", "blocks=8"), r"POOL_FULL: .*no block for block 8")):
            with self.daemon(pool=pool) as daemon:
                self.assertRegex(daemon.log(), "restoring drain failed: " + words)
                name = self.kept(daemon)
            (self.path / f"{name}.tqkv").rename(self.path / "drain.tqkv")
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            self.assertEqual(outputs(client.attach("conv")), before)

    def test_a_smaller_quota_keeps_it(self):
        self.drain_one()
        config = self.path / "tqkvd.json"
        config.write_text(json.dumps({"tenants": [{"tenant": "_default", "bytes": 1024}]}))
        with self.daemon("--config", config) as daemon:
            self.assertIn("restoring drain failed: QUOTA", daemon.log())
            self.kept(daemon)

    def test_a_damaged_one_is_kept(self):
        self.drain_one()
        path = self.path / "drain.tqkv"
        whole = bytearray(path.read_bytes())
        whole[len(whole) // 2] ^= 1
        path.write_bytes(whole)
        with self.daemon() as daemon:
            name = self.kept(daemon)
            self.assertEqual((self.path / f"{name}.tqkv").read_bytes(), bytes(whole))

    def test_another_one_that_is_asked_for_does_not_cost_it(self):
        """--restore comes first; the next drain would replace what is called drain."""
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            fill(client.open("demo", session="other"))
            daemon.ctl("snapshot", "other")
            client.open("demo", session="conv")
            daemon.stop(signal.SIGTERM)
        with self.daemon("--restore", "other") as daemon:
            self.assertRegex(daemon.log(), "was not restored .another snapshot was asked for.; it is kept as drain-unrestored-")
        self.assertEqual(self.files()[0], "drain")
        self.assertEqual(len(self.files()), 3)

    def test_nothing_to_restore_is_said_as_such(self):
        with self.daemon() as daemon:
            self.assertIn("Z info no snapshot of an earlier drain to restore", daemon.log())
            self.assertNotIn("Z error ", daemon.log())


    def test_a_folder_for_drains_belongs_to_one_daemon(self):
        """Another one's drain would replace what this one wrote."""
        with self.daemon():
            other = run_tqkvd("--listen", f"unix:{self.path}/other.sock", "--http", "off", "--memory", "64MiB",
                              "--snapshot-dir", self.path, "--snapshot-on-drain")
            self.assertEqual(other.returncode, 3, other.stderr)
            self.assertIn("another process writes its snapshot into", other.stderr)
        self.assertNotIn(".drain.lock", os.listdir(self.path))

    def test_a_folder_that_cannot_hold_a_drain_ends_the_start(self):
        """Permissions say yes there, and no file can be made all the same."""
        done = run_tqkvd("--listen", f"unix:{self.path}/a.sock", "--http", "off", "--memory", "64MiB", "--snapshot-dir",
                         "/proc", "--snapshot-on-drain")
        self.assertIn(done.returncode, (2, 3), done.stderr)
        self.assertIn("snapshot_dir: /proc", done.stderr)


class Leases(Case):
    def test_a_restored_session_waits_for_its_client_and_a_lease_that_ends_is_logged(self):
        lease = ("--lease-ms", "4000")  # longer than draining takes, on a busy machine, too
        with self.daemon(*lease) as daemon, tqkv.Client(daemon.addr) as client:
            client.open("demo", session="conv")
            self.assertEqual(daemon.stop(signal.SIGTERM), 0)
        with self.daemon(*lease) as daemon:
            row, = daemon.get("/v1/sessions")["sessions"]
            self.assertGreater(row["lease_left_ms"], 500000)
            with tqkv.Client(daemon.addr) as client:
                client.attach("conv")
            end = time.monotonic() + PATIENCE_S
            while "Z info lease ran out: 1 sessions closed" not in daemon.log():
                self.assertLess(time.monotonic(), end)
                time.sleep(0.02)
            with tqkv.Client(daemon.addr) as client, self.assertRaises(tqkv.TqkvError) as caught:
                client.attach("conv")
            self.assertRegex(str(caught.exception), r"^SESSION_EXPIRED: [^()]*$")


class Clients(Case):
    def test_reconnect_finds_what_the_drain_wrote(self):
        """A client that stays connected hears of the drain, then finds its named session again; the other one is lost."""
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            with self.daemon(folder=folder) as daemon:
                client = tqkv.Client(daemon.addr)
                session, nameless = client.open("demo", session="conv"), client.open("demo")
                fill(session)
                before = outputs(session)
                daemon.process.send_signal(signal.SIGTERM)
                end = time.monotonic() + PATIENCE_S
                with self.assertRaises(tqkv.TqkvError) as caught:
                    while time.monotonic() < end:
                        client.ping()
                self.assertEqual(caught.exception.status_name, "IO_ERROR")
                self.assertTrue(client.is_draining)
                self.assertEqual(daemon.stop(signal.SIGTERM), 0)
            with self.daemon(folder=folder), client:
                with self.assertRaises(tqkv.TqkvError) as caught:
                    client.reconnect(keep_lengths=True)
                self.assertRegex(str(caught.exception), r"STALE_EPOCH: .*\(no name\) did not come back")
                self.assertIsNotNone(nameless.lost)
                self.assertIsNone(session.lost)
                self.assertEqual(outputs(session), before)


class Spilled(Case):
    def test_what_there_is_no_room_for_is_not_called_a_success(self):
        with self.daemon("--host-tier-bytes", "4MiB") as daemon, tqkv.Client(daemon.addr) as client:
            session = client.open("demo", session="conv")
            for round in range(2):
                for sequence in range(1, 4):
                    k, v = rows(sequence, 320)
                    session.append_layers(3 * round + sequence, k=[k, k], v=[v, v])
                if round == 0:
                    session.spill([1, 2, 3])
                    end = time.monotonic() + PATIENCE_S
                    while daemon.get("/v1/occupancy")["pools"][0]["blocks"]["free"] < 60:
                        self.assertLess(time.monotonic(), end)
            done = daemon.ctl("snapshot", "six", check=False)
            self.assertEqual(done.returncode, 1)
            self.assertIn("PARTIAL: 3 sequences are not in it", done.stderr)
            self.assertIn("1 sessions, 3 sequences", done.stdout)
            done = daemon.ctl("snapshot", "six", "--json", check=False)
            self.assertEqual((done.returncode, json.loads(done.stdout)["status"]), (1, "PARTIAL"))
            self.assertRegex(daemon.log(), "Z warning snapshot six leaves out: .* 3; sessions without a name .* 0")
            client.open("demo")
            self.assertEqual(daemon.stop(signal.SIGTERM), 0)
            self.assertRegex(daemon.log(), "Z warning snapshot drain leaves out: .* 3; sessions without a name .* 1")


class FailedDrains(Case):
    def test_a_drain_without_its_snapshot_is_told_by_the_exit_code(self):
        folder = self.path / "gone"
        folder.mkdir()
        with Daemon("--pool", DEMO, "--snapshot-dir", folder, "--snapshot-on-drain") as daemon, tqkv.Client(daemon.addr) as client:
            fill(client.open("demo", session="conv"))
            shutil.rmtree(folder)
            client.close()
            self.assertEqual(daemon.stop(signal.SIGTERM), 1)
            self.assertRegex(daemon.log(), "Z error snapshot drain failed: IO_ERROR(.|\n)*Z error drained without its snapshot")


class FailedStarts(Case):
    def start(self, *args):
        done = subprocess.run([str(BUILD / "server/tqkvd"), "--memory", "64MiB", "--pool", DEMO, "--snapshot-dir", str(self.path),
                               "--snapshot-on-drain", *args], capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertRegex(done.stderr, "cannot start: ")
        self.assertEqual(self.files(), ["drain"])

    def test_no_failing_start_uses_the_snapshot_up(self):
        before = self.drain_one()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            self.start("--listen", f"unix:{self.path}/a.sock", "--http", f"127.0.0.1:{taken.getsockname()[1]}")
        with Daemon("--pool", EXACT) as other:
            self.start("--listen", other.addr, "--http", "off")
        with self.daemon() as daemon, tqkv.Client(daemon.addr) as client:
            self.assertEqual(self.files(), [])
            self.assertEqual(outputs(client.attach("conv")), before)


if __name__ == "__main__":
    unittest.main()
