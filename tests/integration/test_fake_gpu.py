"""The daemon on a GPU that is not there: the CUDA backend with its kernels on fibers, and a device that faults."""

import os
import time
import unittest
import urllib.error

from daemon import BUILD, DEMO, Daemon

PROGRAM = "tests/gpu/tqkvd_fake_gpu"


@unittest.skipUnless((BUILD / PROGRAM).exists(), "built with sanitizers, or without a C++ compiler")
class FakeGpu(unittest.TestCase):
    def test_rows_through_the_daemon(self):
        """It says what it runs on, its self-test passes, and steps come back whole."""
        with Daemon("--backend", "cuda", "--pool", DEMO, program=PROGRAM) as daemon:
            self.assertIn("fake device", daemon.log())
            daemon.ctl("bench", "step", "--context", "20", "--count", "10", "--rounds", "1")
            self.assertEqual(daemon.stop(), 0)

    def test_lost_device_ends_the_process(self):
        """M5: an error of the driver makes it not ready, and it exits with 4 so that whoever started it starts it again."""
        env = dict(os.environ, TQKV_FAKE_CUDA_FAIL="3")
        with Daemon("--backend", "cuda", "--self-test-interval-ms", "1000", program=PROGRAM, env=env) as daemon:
            codes = {200}
            while daemon.process.poll() is None:
                try:
                    codes.add(daemon.request("GET", "/readyz?deep=1")[0])
                except (urllib.error.URLError, ConnectionError):
                    pass
                time.sleep(0.01)
            self.assertLessEqual(codes, {200, 503})
            self.assertEqual(daemon.process.wait(), 4)
            self.assertIn("lost", daemon.log())


if __name__ == "__main__":
    unittest.main()
