"""The one run command: what it prints is right, and nothing stays behind."""

import os
import pathlib
import re
import subprocess
import time
import unittest

ROOT = pathlib.Path(os.environ["KV_SOURCE_ROOT"])
BUILD = pathlib.Path(os.environ["TQKV_BUILD"])
SCRATCH = pathlib.Path(os.environ["TQKV_SCRATCH"])
PATIENCE_S = 60


class Quickstart(unittest.TestCase):
    def setUp(self):
        self.temporary = SCRATCH / self.id().rsplit(".", 1)[1]
        self.temporary.mkdir()
        self.env = dict(os.environ, TMPDIR=str(self.temporary), TQKV_BUILD_DIR=str(BUILD))

    def run_it(self, *arguments):
        done = subprocess.run(["bash", ROOT / "deploy/quickstart", *arguments], env=self.env, capture_output=True, text=True,
                              timeout=300, stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("accounts add up", done.stdout)
        return done.stdout

    def test_leaves_nothing(self):
        self.run_it()
        self.assertEqual(list(self.temporary.iterdir()), [])

    def test_kept_until_it_is_stopped(self):
        """--keep: the printed commands work; stopping the daemon as it says removes its folder."""
        text = self.run_it("--keep")
        exports = dict(re.findall(r"(TQKV_\w+)=(\S+)", re.search(r"export (.*)", text).group(1)))
        command = re.search(r"^  (\S+/tqkvctl) occupancy$", text, re.M).group(1)
        python = re.search(r"export PATH=(\S+):\$PATH PYTHONPATH=(\S+)$", text, re.M)
        self.assertTrue((pathlib.Path(python.group(1)) / "tqkvctl").exists())
        self.assertTrue((pathlib.Path(python.group(2)) / "tqkv/__init__.py").exists())
        pid = int(re.search(r"^  kill (\d+) ", text, re.M).group(1))
        try:
            done = subprocess.run([command, "occupancy"], env=dict(self.env, **exports), capture_output=True, text=True)
            self.assertIn("demo", done.stdout, done.stderr)
            self.assertEqual(len(list(self.temporary.iterdir())), 1)
        finally:
            os.kill(pid, 15)
        end = time.monotonic() + PATIENCE_S
        while list(self.temporary.iterdir()) and time.monotonic() < end:
            time.sleep(0.1)
        self.assertEqual(list(self.temporary.iterdir()), [])

    def test_says_why_it_did_not_start(self):
        self.env["TQKV_IO"] = "nonsense"
        done = subprocess.run(["bash", ROOT / "deploy/quickstart", "--keep"], env=self.env, capture_output=True, text=True,
                              timeout=300, stdin=subprocess.DEVNULL)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("nonsense", done.stderr)
        self.assertEqual(list(self.temporary.iterdir()), [])
