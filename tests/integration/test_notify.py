"""A service manager hears of a real daemon: ready when it is, alive while it turns, stopping before it ends."""

import os
import pathlib
import socket
import tempfile
import time
import unittest

from daemon import PATIENCE_S, Daemon


class Notify(unittest.TestCase):
    def test_ready_watchdog_stopping(self):
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            path = str(pathlib.Path(folder) / "notify")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
                manager.bind(path)
                manager.settimeout(PATIENCE_S)
                env = dict(os.environ, NOTIFY_SOCKET=path, WATCHDOG_USEC="400000")
                env.pop("WATCHDOG_PID", None)
                with Daemon(env=env) as daemon:
                    self.assertEqual(manager.recv(64), b"READY=1")
                    self.assertEqual(daemon.request("GET", "/readyz")[0], 200)
                    # An idle daemon says so, too: nothing else wakes it twice in 400 ms.
                    began = time.monotonic()
                    self.assertEqual([manager.recv(64) for _ in range(4)], [b"WATCHDOG=1"] * 4)
                    self.assertGreater(time.monotonic() - began, 0.3)
                    self.assertEqual(daemon.stop(), 0)
                    last = None
                    manager.setblocking(False)
                    try:
                        while True:
                            last = manager.recv(64)
                            if last == b"STOPPING=1":
                                break
                    except BlockingIOError:
                        pass
                    self.assertEqual(last, b"STOPPING=1")
