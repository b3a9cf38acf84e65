"""A tqkvd process for one test: its own folder, Unix socket, TCP and HTTP ports, log."""

import atexit
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

BUILD = pathlib.Path(os.environ["TQKV_BUILD"])
ROOT = pathlib.Path(os.environ["KV_SOURCE_ROOT"])
CAPTURE = next((ROOT / "tests/golden/captures").glob("*.safetensors"))
DEMO = "name=demo,layers=2,q_heads=4,kv_heads=2,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=64"
EXACT = "name=exact,layers=2,q_heads=4,kv_heads=2,head_dim=32,k=f32,v=f32,block_size=16,blocks=64"
FAKE_GPU = "tests/gpu/tqkvd_fake_gpu"  # not in every build: the CUDA backend, its kernels on fibers
BINARY = (BUILD / "server/tqkvd").read_bytes()
IS_SANITIZED = b"__asan_init" in BINARY or b"__tsan_init" in BINARY
# Sanitizers make everything slower; waits are bounds, not measurements.
PATIENCE_S = 60


class Daemon:
    """with Daemon("--pool", DEMO) as daemon: ... ; stop() returns the exit code."""

    def __init__(self, *args, folder=None, env=None, token=None, tls=None, program="server/tqkvd",
                 wrapper=()):
        """token: of every request; tls: an ssl context, where the control API speaks HTTPS; program: of the build;
        wrapper: words in front of it."""
        self.token, self.tls = token, tls
        self.folder = pathlib.Path(folder or tempfile.mkdtemp(prefix="tqkv-test."))
        self.owns_folder = folder is None
        if self.owns_folder:  # its log may be read after stop(), so it goes at the end
            atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self.path = self.folder / "tqkvd.sock"
        self.log_path = self.folder / "tqkvd.log"
        self.addr = f"unix:{self.path}"
        command = [*wrapper, BUILD / program, "--listen", self.addr, "--listen", "tcp:127.0.0.1:0", "--http",
                   "127.0.0.1:0", "--memory", "256MiB", "--io", os.environ.get("TQKV_IO", "auto"), *args]
        if "--drain-timeout-ms" not in args:
            command += ["--drain-timeout-ms", "500"]  # tests stop daemons with sessions that are there
        if "--backend" not in args:
            # Answers are compared with exact ones, within bounds that only the scalar backend keeps.
            command += ["--backend", os.environ.get("TQKV_BACKEND", "cpu-scalar")]
        self.log_file = open(self.log_path, "ab")
        self.log_start = self.log_file.tell()
        self.process = subprocess.Popen([str(part) for part in command], stderr=self.log_file,
                                        stdout=self.log_file, stdin=subprocess.DEVNULL, env=env)
        self.http = self._wait_for(r"control API on https?://(\S+)")
        self.tcp = self._wait_for(r"listening on (tcp:\S+)")
        self.wait_ready()

    def log(self):
        return self.log_path.read_bytes()[self.log_start:].decode(errors="replace")

    def check_log(self):
        """Every line begins with time and level and is printable ASCII, whatever clients called themselves or asked for."""
        for line in self.log_path.read_bytes()[self.log_start:].splitlines():
            assert re.fullmatch(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (error|warning|notice|info|debug) [\x20-\x7e]*", line), line

    def _wait_for(self, pattern):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            match = re.search(pattern, self.log())
            if match:
                return match.group(1)
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{self.log()}")

    def wait_ready(self):
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            if self.request("GET", "/readyz")[0] == 200:
                return
            time.sleep(0.02)
        raise AssertionError(f"never ready:\n{self.log()}")

    def request(self, method, path, body=None, headers=None, raw=False):
        """(status, parsed JSON or text) of one control request; an iterator's parts are sent without their length."""
        is_raw = body is None or isinstance(body, bytes) or hasattr(body, "__next__")
        data = body if is_raw else json.dumps(body).encode()
        headers = dict(headers or {})
        if data is not None:
            headers.setdefault("Content-Type", "application/json")
        if self.token:
            headers.setdefault("Authorization", f"Bearer {self.token}")
        scheme = "https" if self.tls else "http"
        request = urllib.request.Request(f"{scheme}://{self.http}{path}", data=data, method=method, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S, context=self.tls) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        if raw or not text.startswith(("{", "[")):
            return status, text
        return status, json.loads(text)

    def get(self, path):
        status, body = self.request("GET", path)
        assert status == 200, (path, status, body)
        return body

    def metrics(self):
        """{'name{labels}': value}"""
        rows = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                rows[name] = float(value)
        return rows

    def resident_bytes(self):
        pages = int(pathlib.Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def is_sanitized(self):
        """A sanitizer's shadow memory says nothing about ours, and its time neither."""
        return IS_SANITIZED

    def n_descriptors(self):
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def stop(self, signal_number=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(signal_number)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.log_file.close()

    def ctl(self, *args, check=True, timeout=PATIENCE_S * 5):
        """Runs tqkvctl against this daemon."""
        command = [BUILD / "server/tqkvctl", "--addr", self.addr, "--http", self.http, *args]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=timeout,
                              stdin=subprocess.DEVNULL)
        if check:
            assert done.returncode == 0, (args, done.returncode, done.stdout, done.stderr)
        return done

    def __enter__(self):
        return self

    def __exit__(self, *error):
        code = None
        if self.process.poll() is None:
            code = self.stop()
        if error[0] is not None:
            print(self.log())
        else:
            self.check_log()
        if self.owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)
        if error[0] is None and code not in (None, 0):
            raise AssertionError(f"tqkvd ended with {code}")


def folder_with(test, **files):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tqkv-test."))
    test.addCleanup(shutil.rmtree, folder, True)
    for name, text in files.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    return folder


def run_tqkvd(*args, env=None):
    return subprocess.run([BUILD / "server/tqkvd", *map(str, args)], capture_output=True, text=True, timeout=PATIENCE_S,
                          env=env)


def until(test, condition, what):
    end = time.monotonic() + PATIENCE_S
    while not condition():
        test.assertLess(time.monotonic(), end, what)
        time.sleep(0.02)
