"""Sequences go to slower tiers of a real daemon and come back as they were."""

import os
import pathlib
import re
import tempfile
import time
import unittest

import numpy as np

import tqkv
from daemon import DEMO, PATIENCE_S, Daemon


def fill(session, sequence, n_tokens=100):
    rng = np.random.default_rng(sequence)
    k = rng.standard_normal((2, n_tokens, 2, 64)).astype(np.float32)
    session.append_layers(sequence, k=k, v=-k)


def output(session, sequence):
    q = np.random.default_rng(99).standard_normal((4, 64)).astype(np.float32)
    return [session.decode(sequence, layer=layer, q=q).tobytes() for layer in range(2)]


class Tiers(unittest.TestCase):
    def until(self, daemon, condition):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            tiers = daemon.get("/v1/occupancy")["tiers"]
            if condition(tiers):
                return tiers
            time.sleep(0.01)
        raise AssertionError(f"never: {tiers}")

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
            session.prefetch([2, 3])
            # The others come back because somebody asks: the client waits as for a busy server.
            self.assertEqual([output(session, sequence) for sequence in range(1, 6)], before)
            tiers = self.until(daemon, lambda tiers: tiers["n_spilled_sequences"] == 0)
            self.assertEqual(tiers[f"{tier}_used_bytes"], 0)
            fill_more = np.ones((2, 3, 2, 64), np.float32)
            session.append_layers(1, k=fill_more, v=fill_more)

    def test_host_memory(self):
        with Daemon("--pool", DEMO, "--host-tier-bytes", "4MiB") as daemon:
            self.there_and_back(daemon, "host")

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
