"""What the daemon does with memory while it works."""

import os
import pathlib
import struct
import tempfile
import unittest

import numpy as np

import tqkv
from daemon import BUILD, DEMO, FAKE_GPU, Daemon

COUNTER = BUILD / "tests/alloc_counter.so"
# The CUDA backend's host control runs with its kernels on fibers, which take longer.
BACKENDS = [("cpu-scalar", "server/tqkvd", 100), ("cpu", "server/tqkvd", 100), ("cuda", FAKE_GPU, 20)]


class Heap(unittest.TestCase):
    def test_the_data_path_never_calls_the_heap_after_start(self):
        if not COUNTER.exists():
            self.skipTest("a sanitizer owns malloc in this build")
        with tempfile.NamedTemporaryFile() as file:
            file.write(b"\0" * 4096)
            file.flush()
            env = dict(os.environ, LD_PRELOAD=str(COUNTER), TQKV_ALLOC_COUNTER=file.name)

            def count():
                return struct.unpack("<Q", pathlib.Path(file.name).read_bytes()[:8])[0]

            for backend, program, rounds in BACKENDS:
                if not (BUILD / program).exists():
                    continue
                started = count()
                with self.subTest(backend), \
                        Daemon("--backend", backend, "--pool", DEMO, env=env, program=program) as daemon:
                    self.work(daemon, rounds=3)  # the first use of a libc function may allocate once
                    before = count()
                    self.assertGreater(before, started, "the counter is not in the process")
                    self.work(daemon, rounds)
                    self.assertEqual(count() - before, 0)

    def work(self, daemon, rounds):
        rng = np.random.default_rng(1)
        for addr in (daemon.addr, daemon.tcp):
            with tqkv.Client(addr) as client, client.open("demo") as session:
                for i in range(rounds):
                    k, v = rng.standard_normal((2, 3, 2, 64)).astype(np.float32)
                    for layer in range(2):
                        session.append(1 + i % 4, layer=layer, k=k, v=v)
                        session.decode(1 + i % 4, layer=layer, q=rng.standard_normal((4, 64)).astype(np.float32))
                    session.read(1 + i % 4, range(2), 0, 2, dtype="f32")
                    session.lengths()
                    client.ping()
                    if i % 4 == 3:
                        session.truncate(1, 2)
                        session.free(2)
                for bad in (float("nan"),):
                    with self.assertRaises(tqkv.TqkvError):
                        session.append(1, layer=0, k=np.full((1, 2, 64), bad, np.float32), v=k[:1])


if __name__ == "__main__":
    unittest.main()
