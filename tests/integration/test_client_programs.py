"""Programs over libtqkv against the daemon, on every backend: client tables, and the exact recent window."""

import os
import re
import subprocess
import tempfile
import unittest

from daemon import BUILD, FAKE_GPU, IS_SANITIZED, PATIENCE_S, ROOT, Daemon

TABLES = "name=tables,layers=2,q_heads=6,kv_heads=2,k_head_dim=48,v_head_dim=32,k=f32,v=f32,block_size=16,blocks=32"
WINDOW = "layers=2,q_heads=4,kv_heads=2,head_dim=64,block_size=16,blocks=128,exact_tokens=48,exact_blocks=16"
# What is rounded: float64 sums; 16-bit tables; float32 sums, and tiles in integers or float16 tables.
RUNS = [("tables", TABLES, {"cpu-scalar": 1e-5, "cpu": 1e-5, "cuda": 2e-5}),
        ("exact", f"name=tq3,{WINDOW},k=tq3,v=tq3", {"cpu-scalar": 1e-5, "cpu": 2e-3, "cuda": 5e-3}),
        ("exact", f"name=tq4,{WINDOW},k=tq4,v=tq4", {"cpu-scalar": 1e-5, "cpu": 2e-3, "cuda": 2e-3}),
        ("exact", f"name=tq4tq2,{WINDOW},k=tq4,v=tq2", {"cpu-scalar": 1e-5, "cpu": 2e-3, "cuda": 3e-3}),
        ("exact", f"name=mixed,{WINDOW},k=tqp3,v=v4", {"cpu-scalar": 1e-5, "cpu": 2e-3, "cuda": 2e-5})]


class ClientPrograms(unittest.TestCase):
    def run_on(self, backend, *rounds, program="server/tqkvd"):
        pools = [part for _, pool, _ in RUNS for part in ("--pool", pool)]
        with Daemon("--backend", backend, *pools, program=program) as daemon:
            for name, pool, bounds in RUNS:
                seed = int.from_bytes(os.urandom(4), "little")
                words = [BUILD / f"tests/client_{name}", daemon.addr, pool.split(",")[0].removeprefix("name="),
                         str(bounds[backend]), str(seed), *rounds]
                done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
                self.assertEqual(done.returncode, 0, f"{pool} on {backend}: {done.stdout}{done.stderr}")
            blocks = daemon.get("/v1/occupancy")["totals"]["blocks"]
            self.assertEqual(blocks["free"], blocks["total"])
            self.assertEqual(daemon.stop(), 0)

    def test_scalar(self):
        """What was sent comes back, and attention is that over it."""
        self.run_on("cpu-scalar")

    def test_fast(self):
        """The same within the bounds of the fast backend."""
        self.run_on("cpu")

    @unittest.skipUnless((BUILD / FAKE_GPU).exists(), "built with sanitizers, or without a C++ compiler")
    def test_fake_gpu(self):
        """The same on the CUDA backend, with its kernels on fibers."""
        self.run_on("cuda", "10", program=FAKE_GPU)

    @unittest.skipIf(IS_SANITIZED, "the library needs the sanitizers' own, which the example's command does not name")
    def test_the_example(self):
        """Built with the command that stands in it, against the daemon that README starts."""
        source = ROOT / "proto/client/examples/append_decode.c"
        command = re.sub(r"\\\n \*", "", re.search(r"(?m)^ \*\s+(cc (?:.*\\\n)?.*)$", source.read_text()).group(1))
        pool = re.search(r"--pool (name=demo,\S+)", (ROOT / "README.md").read_text()).group(1)
        with tempfile.TemporaryDirectory() as folder, Daemon("--pool", pool) as daemon:
            words = command.replace("build/", f"{BUILD.resolve()}/").replace("-o append_decode", f"-o {folder}/a").split()
            done = subprocess.run([*words, "-Wall", "-Wextra", "-Werror"], cwd=ROOT, capture_output=True, text=True, check=False,
                                  timeout=PATIENCE_S)
            self.assertEqual(done.returncode, 0, done.stderr)
            done = subprocess.run([f"{folder}/a", daemon.addr], capture_output=True, text=True, check=False, timeout=PATIENCE_S)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.assertRegex(done.stdout, r"^OK: 100 tokens, out\[0\]\[0\] = 0\.(4[5-9]|5[0-5])\d\n$")
            done = subprocess.run([f"{folder}/a", f"unix:{folder}/nobody"], capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stdout), (1, ""))
            self.assertIn("IO_ERROR", done.stderr)


if __name__ == "__main__":
    unittest.main()
