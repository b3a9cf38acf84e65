"""Sequences go to slower tiers of a real daemon and come back as they were."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np

import tqkv
from daemon import BUILD, DEMO, PATIENCE_S, Daemon


def fill(session, sequence, n_tokens=100):
    rng = np.random.default_rng(sequence)
    k = rng.standard_normal((2, n_tokens, 2, 64)).astype(np.float32)
    session.append_layers(sequence, k=k, v=-k)


def output(session, sequence):
    q = np.random.default_rng(99).standard_normal((4, 64)).astype(np.float32)
    return [session.decode(sequence, layer=layer, q=q).tobytes() for layer in range(2)]


# Every call of io_uring_setup() is denied, as container runtimes do it.
DENY_IO_URING = (sys.executable, "-c", """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
rules = ((0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000))
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
class Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_ushort), ("code", ctypes.c_void_p)]
program = Program(len(rules), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(program)) == 0
os.execv(sys.argv[1], sys.argv[1:])
""")


def mounted(folder, options):
    """A wrapper that has a small file system of its own at `folder`; None: this machine denies that."""
    words = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
             f'mount -t tmpfs -o {options} none "{folder}" && exec "$@"', "sh")
    try:
        return words if subprocess.run([*words, "true"], capture_output=True, timeout=PATIENCE_S).returncode == 0 else None
    except FileNotFoundError:
        return None


class ThereAndBack:
    """For test cases: five sequences go out to a tier and come back."""

    def until(self, daemon, condition):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            tiers = daemon.get("/v1/occupancy")["tiers"]
            if condition(tiers):
                return tiers
            time.sleep(0.01)
        raise AssertionError(f"never: {tiers}")

    def page(self, daemon):
        session = daemon.get("/v1/sessions")["sessions"][0]["id"]
        return daemon.get(f"/v1/sessions/{session}")["sequences"]

    def check_what_operators_see(self, daemon, tier, used_bytes):
        """Five sequences are spilled: their rows say so, and where; the pool counts their tokens apart from its blocks."""
        page = self.page(daemon)
        self.assertEqual([(row["state"], row["tier"], row["n_blocks"]) for row in page], [("spilled", tier, 0)] * 5)
        self.assertEqual(sum(row["tier_bytes"] for row in page), used_bytes)
        occupancy = daemon.get("/v1/occupancy")
        spilled = {"n_sequences": 5, "n_tokens": sum(row["length_min"] for row in page), "tier_bytes": used_bytes}
        self.assertEqual((occupancy["pools"][0]["spilled"], occupancy["totals"]["spilled"]), (spilled, spilled))
        session = daemon.get("/v1/sessions")["sessions"][0]["id"]
        self.assertRegex(daemon.ctl("sessions", session).stdout, rf"(?m)^ *1 +\d+ +\d+ +spilled +0 .* {tier} ")
        self.assertIn(f"spilled: {spilled['n_tokens']} tokens of 5 sequences", daemon.ctl("occupancy").stdout)

    def there_and_back(self, daemon, tier):
        with tqkv.Client(daemon.addr) as client, client.open("demo") as session:
            for sequence in range(1, 6):
                fill(session, sequence)
            before = [output(session, sequence) for sequence in range(1, 6)]
            session.spill(range(1, 6))
            tiers = self.until(daemon, lambda tiers: tiers["n_spilled_sequences"] == 5)
            self.assertGreater(tiers[f"{tier}_used_bytes"], 0)
            self.assertEqual([row.state for row in session.tell()], ["spilled"] * 5)
            blocks = daemon.get("/v1/occupancy")["pools"][0]["blocks"]
            self.assertEqual(blocks["free"], blocks["total"])
            self.check_what_operators_see(daemon, tier, tiers[f"{tier}_used_bytes"])
            session.prefetch([2, 3])
            # The others come back because somebody asks: the client waits as for a busy server.
            self.assertEqual([output(session, sequence) for sequence in range(1, 6)], before)
            tiers = self.until(daemon, lambda tiers: tiers["n_spilled_sequences"] == 0)
            self.assertEqual(tiers[f"{tier}_used_bytes"], 0)
            page = self.page(daemon)
            self.assertEqual([(row["state"], row["tier"], row["tier_bytes"]) for row in page], [("resident", None, 0)] * 5)
            self.assertEqual(daemon.get("/v1/occupancy")["pools"][0]["spilled"], {"n_sequences": 0, "n_tokens": 0, "tier_bytes": 0})
            fill_more = np.ones((2, 3, 2, 64), np.float32)
            session.append_layers(1, k=fill_more, v=fill_more)


class Tiers(ThereAndBack, unittest.TestCase):
    def test_host_memory(self):
        with Daemon("--pool", DEMO, "--host-tier-bytes", "4MiB") as daemon:
            self.there_and_back(daemon, "host")

    def test_the_exact_window_comes_back(self):
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            for tier in (("--host-tier-bytes", "4MiB"), ("--file-tier-dir", folder, "--file-tier-bytes", "4MiB")):
                with self.subTest(tier=tier[0]), Daemon("--pool", DEMO + ",exact_tokens=32,exact_blocks=16", *tier) as daemon:
                    self.there_and_back(daemon, tier[0][2:6])

    def test_a_file_that_nobody_sees(self):
        for parent in ("/dev/shm", None):  # tmpfs, and whatever holds temporary files
            if parent and not os.access(parent, os.W_OK):
                continue
            with tempfile.TemporaryDirectory(dir=parent, prefix="tqkv-test.") as folder:
                with Daemon("--pool", DEMO, "--file-tier-dir", folder, "--file-tier-bytes", "4MiB") as daemon:
                    self.there_and_back(daemon, "file")
                    self.assertRegex(daemon.log(), r"file tier in \S+ through (io_uring|a thread): 4194304 bytes, "
                                                   r"a page written and read in \d+ us")
                    self.assertEqual(os.listdir(folder), [], "the file has no name")

    def test_a_directory_that_cannot_be_used_costs_the_file_tier_only(self):
        for folder in ("/proc", "/nonexistent"):
            with Daemon("--pool", DEMO, "--file-tier-dir", folder, "--host-tier-bytes", "4MiB") as daemon:
                self.there_and_back(daemon, "host")
                self.assertRegex(daemon.log(), rf"no file tier: open {folder}/\S+: ")

    def test_a_read_only_or_full_file_system_costs_the_file_tier_only(self):
        """FAILURES S7: the line at start says why, nothing hangs, and the host tier works."""
        for options, why in (("ro", r"open \S+: Read-only file system"),
                             ("size=16k", r"write \S+: No space left on device")):
            with self.subTest(options=options), tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
                wrapper = mounted(folder, options)
                if not wrapper:
                    self.skipTest("mounting is denied here")
                with Daemon("--pool", DEMO, "--file-tier-dir", folder, "--file-tier-bytes", "4MiB", "--host-tier-bytes",
                            "4MiB", wrapper=wrapper) as daemon:
                    self.there_and_back(daemon, "host")
                    self.assertRegex(daemon.log(), rf"no file tier: {why}")
                    self.assertEqual(daemon.get("/v1/occupancy")["tiers"]["file_total_bytes"], 0)

    def test_a_file_system_that_becomes_full_refuses_what_it_cannot_hold(self):
        """FAILURES S7, P4: some sequences go out, the others stay, all of them decode."""
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            wrapper = mounted(folder, "size=192k")
            if not wrapper:
                self.skipTest("mounting is denied here")
            with Daemon("--pool", DEMO, "--file-tier-dir", folder, "--file-tier-bytes", "4MiB",
                        wrapper=wrapper) as daemon, tqkv.Client(daemon.addr) as client, client.open("demo") as session:
                for sequence in range(1, 7):
                    fill(session, sequence)
                before = [output(session, sequence) for sequence in range(1, 7)]
                session.spill(range(1, 7))
                metrics = self.until_metrics(daemon, lambda rows: rows["tqkv_spills_total"] + rows[
                    'tqkv_spills_rejected_io_total'] == 6)
                self.assertGreater(metrics["tqkv_spills_total"], 0)
                self.assertGreater(metrics["tqkv_spills_rejected_io_total"], 0)
                self.assertEqual([output(session, sequence) for sequence in range(1, 7)], before)

    def test_io_uring_denied(self):
        """FAILURES S7: a thread does it, and the line at start says so."""
        if os.environ.get("TQKV_IO") == "io_uring":
            self.skipTest("the daemon is told to use it")
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            with Daemon("--pool", DEMO, "--file-tier-dir", folder, "--file-tier-bytes", "4MiB",
                        wrapper=DENY_IO_URING) as daemon:
                self.there_and_back(daemon, "file")
                self.assertIn("through a thread: 4194304 bytes", daemon.log())
                self.assertNotIn("io io_uring", daemon.log())

    def test_readers_behind_an_append_that_is_not_done(self):
        """FAILURES K12; the same program runs against a GPU."""
        done = subprocess.run([sys.executable, pathlib.Path(__file__).parents[1] / "gpu/race.py", BUILD / "server/tqkvd",
                               "--backend", os.environ.get("TQKV_BACKEND", "cpu-scalar"), "--rounds", "100"],
                              capture_output=True, text=True, timeout=PATIENCE_S)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertRegex(done.stdout, r"^ok +100 rounds .* 2 restored")

    def until_metrics(self, daemon, condition):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            rows = daemon.metrics()
            if condition(rows):
                return rows
            time.sleep(0.02)
        raise AssertionError(f"never: { {k: v for k, v in rows.items() if 'spill' in k} }")

    def test_idle_sequences_go_by_themselves(self):
        with Daemon("--pool", DEMO, "--host-tier-bytes", "4MiB", "--spill-idle-ms", "50", "--spill-above-percent",
                    "10") as daemon, tqkv.Client(daemon.addr) as client, client.open("demo") as session:
            fill(session, 1)
            fill(session, 2)
            before = output(session, 1)
            self.until(daemon, lambda tiers: tiers["n_spilled_sequences"] >= 1)
            self.assertEqual(output(session, 1), before)
            metrics = daemon.request("GET", "/metrics", raw=True)[1]
            self.assertGreater(int(re.search(r"^tqkv_spills_total (\d+)", metrics, re.M).group(1)), 0)


if __name__ == "__main__":
    unittest.main()
