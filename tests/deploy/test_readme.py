"""The commands of README.md, as a reader would type them, in an empty folder beside the built tree."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import unittest

ROOT = pathlib.Path(os.environ["KV_SOURCE_ROOT"])
BUILD = pathlib.Path(os.environ["TQKV_BUILD"])
SCRATCH = pathlib.Path(os.environ["TQKV_SCRATCH"])
CAPTURE = next((ROOT / "tests/golden/captures").glob("*.safetensors"))
PATIENCE_S = 120
# Run until they are interrupted, measure for a while, need a device, fetch packages, want a second daemon.
NOT_HERE = re.compile(r"tqkvctl top|bench (cpu|kernels)|install-packages|deploy/quickstart|tests/\w+/run|tqkvd --listen")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)


class Readme(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = SCRATCH / "reader"
        cls.folder.mkdir()
        # The daemon as the README starts it, at another address, with a folder for snapshots as its options say.
        command = next(text for text in blocks("sh") if "tqkvd --listen" in text)
        cls.log = cls.folder / "log"
        cls.env = dict(os.environ, PATH=f"{BUILD}/server:{os.environ['PATH']}", PYTHONPATH=str(ROOT / "proto/python"))
        with cls.log.open("wb") as log:
            cls.daemon = subprocess.Popen(
                ["bash", "-c", f"exec {cls.elsewhere(command)} --http 127.0.0.1:0 --snapshot-dir {cls.folder}"],
                stderr=log, stdout=log, stdin=subprocess.DEVNULL, cwd=cls.folder, env=cls.env)
        end = time.monotonic() + PATIENCE_S
        found = None
        while not found and time.monotonic() < end and cls.daemon.poll() is None:
            found = re.search(r"control API on http://(\S+)", cls.log.read_text())
            time.sleep(0.05)
        assert found, cls.log.read_text()
        cls.http = found.group(1)
        cls.env.update(TQKV_ADDR=f"unix:{cls.folder}/tqkvd.sock", TQKV_HTTP=cls.http)

    @classmethod
    def tearDownClass(cls):
        cls.daemon.send_signal(signal.SIGTERM)
        assert cls.daemon.wait(PATIENCE_S) == 0, cls.log.read_text()

    @classmethod
    def elsewhere(cls, text):
        text = text.rstrip().replace("build/server/", f"{BUILD}/server/").replace("/tmp/tqkvd.sock", f"{cls.folder}/tqkvd.sock")
        return text.replace("127.0.0.1:7871", getattr(cls, "http", "127.0.0.1:7871"))

    def run_it(self, *command):
        done = subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S,
                              stdin=subprocess.DEVNULL)
        self.assertEqual(done.returncode, 0, f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def test_python(self):
        python = next((one for one in ("/usr/bin/python3", shutil.which("python3")) if one and subprocess.run(
            [one, "-c", "import numpy"], capture_output=True).returncode == 0), None)
        if not python:
            self.skipTest("no python3 with numpy (Debian: python3-numpy)")
        for text in blocks("python"):
            self.assertIn("(4, 64)", self.run_it(python, "-c", self.elsewhere(text)))

    def test_commands(self):
        """Every line with tqkvctl or curl; capital words stand for what the reader puts there."""
        n_run = 0
        words = {"FILE": str(CAPTURE), "C": str(self.folder / "center"), "NAME": "mine", "L": "18", "T": "200"}
        for text in blocks("sh"):
            for line in self.elsewhere(text).replace("\\\n", " ").splitlines() if "curl" not in text else [self.elsewhere(text)]:
                line = re.sub(r"  +#.*", "", line)
                if NOT_HERE.search(line) or not re.match(r"tqkvctl |curl ", line):
                    continue
                line = line.replace("tests/golden", f"{ROOT}/tests/golden")
                line = re.sub(r"(?<=\s)(FILE|C|NAME|L|T)(?=\s|$)", lambda match: words[match.group(1)], line)
                with self.subTest(line=line):
                    out = self.run_it("bash", "-c", line)
                    self.assertTrue(out.strip(), line)
                    self.assertNotIn('"status":4', out)
                    n_run += 1
        self.assertGreater(n_run, 8)
