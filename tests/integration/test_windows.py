"""FAILURES K13: windows, first tokens that stay, sinks, softcap, ALiBi, scale and the exact window, all together, by layer, on
sequences that are longer than the pool: what is attended to is what is left, and the rest is given back, whatever is done."""

import json
import os
import tempfile
import time
import unittest

import numpy as np
import tqkv
from daemon import BUILD, FAKE_GPU, PATIENCE_S, Daemon
from rows_case import EXACT, attention_row, distance
from tqkv import Status

HEADS, KV_HEADS, K_DIM, V_DIM, CHUNK = 6, 2, 32, 48, 30
WINDOWS, SINK_TOKENS, RING = (40, 100, 40), 5, 32
OPTIONS = ({"softcap": 2.5, "scale": 0.3, "alibi": (0.1, 0.2, 0.3, 0.02, 0.01, 0), "sinks": None},
           {"softcap": 3, "scale": 0.2, "alibi": None, "sinks": (1, 0.5, 0.25, 2, 3, -1)},
           {"softcap": 0, "scale": 0.1, "alibi": (0.01, -0.02, 0.3, 0.02, 0.01, 0), "sinks": (0, 0, 1, 1, 2, 2)})
POOL = {"name": "all", "layers": 3, "q_heads": HEADS, "kv_heads": KV_HEADS, "k_head_dim": K_DIM, "v_head_dim": V_DIM,
        "k": "tq4", "v": "f32", "block_size": 16, "blocks": [24, 36], "tokens_max": 4000, "window": WINDOWS, "sink_tokens": SINK_TOKENS,
        "exact_tokens": RING, "exact_blocks": 8, **{name: [layer[name] for layer in OPTIONS] for name in OPTIONS[0]}}
# Per group: what the widest window and a request's 16 rows reach, the chunk, a block that is begun on each side, the sinks'.
MOST_BLOCKS = [(window + 15 + CHUNK + 15) // 16 + 2 + 1 for window in (40, 100)]


class Windows(unittest.TestCase):
    """On the scalar backend; below the same on the fast one."""

    backend, bound, program = "cpu-scalar", EXACT, "server/tqkvd"

    def setUp(self):
        self.rng = np.random.default_rng(13)
        self.folder = tempfile.TemporaryDirectory()
        config = os.path.join(self.folder.name, "tqkvd.json")
        with open(config, "w") as file:
            json.dump({"pools": [POOL]}, file)
        self.daemon = Daemon("--config", config, "--backend", self.backend, "--host-tier-bytes", "4MiB",
                             program=self.program)
        self.addCleanup(self.stop)
        # Per sequence [stored, exact] of [K, V] of [layers, tokens, ..]: the rows as they are read.
        self.kept = {}

    def stop(self):
        code = self.daemon.stop()
        self.folder.cleanup()
        assert code == 0, self.daemon.log()

    def append(self, session, sequence, n):
        """A chunk on all layers, read back while it is in the ring and no window has left it behind."""
        start = len(self.kept[sequence][0][0][0]) if sequence in self.kept else 0
        rows = [self.rng.standard_normal((3, n, KV_HEADS, dim), np.float32) for dim in (K_DIM, V_DIM)]
        session.append_layers(sequence, *rows)
        read = [session.read(sequence, start=start, n=n, exact=is_exact) for is_exact in (False, True)]
        self.kept[sequence] = [[np.concatenate((old, new), axis=1) for old, new in zip(*sides)]
                               for sides in zip(self.kept[sequence], read)] if sequence in self.kept else read

    def check(self, session, sequence):
        """Every layer, the newest token's query and two before it, against plain masks over all rows that ever were."""
        told = next(row for row in session.tell() if row.sequence == sequence)
        length, n_exact = told.length_min, told.n_exact
        q = self.rng.standard_normal((3, HEADS, K_DIM), np.float32)
        for layer, options in enumerate(OPTIONS):
            k, v = (np.concatenate((stored[layer, :length - n_exact], exact[layer, length - n_exact:length]))
                    for stored, exact in zip(*self.kept[sequence]))
            out, lse = session.decode(sequence, layer, q, lse=True)
            for row in range(3):
                wanted, wanted_lse = attention_row(q[row], k, v, end=length - 2 + row, window=WINDOWS[layer],
                                                   sink_tokens=SINK_TOKENS, **options)
                self.assertLess(distance(out[row], wanted), self.bound)
                self.assertLess(np.abs(lse[row] - wanted_lse).max(), self.bound * (1 + np.abs(wanted_lse).max()))
        return told

    def n_used(self):
        groups = self.daemon.get("/v1/occupancy")["pools"][0]["groups"]
        return [group["blocks"]["total"] - group["blocks"]["free"] for group in groups]

    def until(self, condition):
        end = time.monotonic() + PATIENCE_S
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.01)

    def test_all_together(self):
        with tqkv.Client(self.daemon.addr, timeout=60) as client, client.open("all") as session:
            for i in range(40):
                self.append(session, 1, CHUNK if i % 3 else 3 + i % CHUNK)
                if i % 8 == 0:
                    self.assertEqual(self.check(session, 1).n_exact, min(RING, len(self.kept[1][0][0][0])))
            length = session.tell()[0].length_min
            self.assertGreater(length, max(POOL["blocks"]) * 16)
            self.until(lambda: all(used <= most for used, most in zip(self.n_used(), MOST_BLOCKS)))
            self.check(session, 1)
            for layer in range(3):
                with self.assertRaises(tqkv.TqkvError) as raised:
                    session.decode(1, layer, np.ones((HEADS, K_DIM), np.float32), seen=length - 130)
                self.assertEqual(raised.exception.status_name, Status.WINDOW_GONE.name)
            self.with_a_child(session)
            self.out_and_back(session)
            self.cut(session)
            session.free([1, 2])
            self.until(lambda: self.n_used() == [0, 0])

    def with_a_child(self, session):
        """Both go on; neither sees the other's rows, and what both left behind is given back once."""
        session.fork(2, 1)
        self.kept[2] = [[side.copy() for side in kind] for kind in self.kept[1]]
        self.assertEqual(self.check(session, 2).n_exact, 0)
        for n in (1, CHUNK, 7, CHUNK, CHUNK, CHUNK):
            self.append(session, 2, n)
            self.append(session, 1, n)
            self.check(session, 1)
            self.check(session, 2)
        self.until(lambda: all(used <= 2 * most for used, most in zip(self.n_used(), MOST_BLOCKS)))

    def out_and_back(self, session):
        """A spilled sequence takes what its windows left, and its exact tokens, with it."""
        before = self.n_used()
        session.spill([1])
        self.until(lambda: session.tell()[0].state == "spilled")
        self.until(lambda: all(now < then for now, then in zip(self.n_used(), before)))
        self.check(session, 2)
        session.prefetch([1])
        self.until(lambda: session.tell()[0].state == "resident")
        self.assertEqual(self.check(session, 1).n_exact, RING)
        self.append(session, 1, 9)
        self.check(session, 1)

    def cut(self, session):
        """To where the windows still are; then to the beginning, from where it goes on as a new one."""
        length = session.tell()[0].length_min
        with self.assertRaises(tqkv.TqkvError) as raised:
            session.truncate(1, length - 60)
        self.assertEqual(raised.exception.status_name, Status.WINDOW_GONE.name)
        for n, left in ((8, length - 8), (0, 3)):
            session.truncate(1, left)
            self.kept[1] = [[side[:, :left] for side in kind] for kind in self.kept[1]]
            self.check(session, 1)
            for _ in range(4 if n else 9):
                self.append(session, 1, 25)
            self.check(session, 1)

    def test_a_published_window(self):
        """What is published is held whole: a MATCH begins with all of it, and its windows leave it behind like their own."""
        tokens = list(range(500))
        with tqkv.Client(self.daemon.addr, timeout=60) as client, client.open("all") as session:
            self.append(session, 1, CHUNK)
            self.append(session, 1, 10)
            self.assertEqual(session.publish(1, tokens[:40]), 32)
            for _ in range(5):
                self.append(session, 1, CHUNK)
            self.check(session, 1)
            self.assertEqual(session.match(3, tokens[:100]), 32)
            self.kept[3] = [[side[:, :32] for side in kind] for kind in self.kept[1]]
            self.assertEqual(self.check(session, 3).n_exact, 0)
            for _ in range(6):
                self.append(session, 3, CHUNK)
                self.check(session, 3)
            self.check(session, 1)


class FastWindows(Windows):
    """core/FAST.md: at most 2e-3."""

    backend, bound = "cpu", 2e-3


@unittest.skipUnless((BUILD / FAKE_GPU).exists(), "built with sanitizers, or without a C++ compiler")
class FakeGpuWindows(Windows):
    """The CUDA backend with its kernels on fibers; gpu/KERNELS.md has the bounds."""

    backend, bound, program = "cuda", 2e-3, FAKE_GPU


if __name__ == "__main__":
    unittest.main()
