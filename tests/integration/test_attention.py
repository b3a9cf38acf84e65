"""Attention options, several query rows, and merging: a daemon against numpy, and two daemons against one."""

import ctypes as c
import json
import os
import random
import tempfile
import unittest

import numpy as np
import tqkv
from daemon import BUILD, FAKE_GPU, IS_SANITIZED, Daemon
from rows_case import EXACT, attention_row, distance
from tqkv import Status

HEADS, KV_HEADS, D = 6, 2, 32
OPTIONS = {
    "plain": {},
    "window": {"window": [24, 0]},
    "first": {"window": [24, 40], "sink_tokens": 5, "groups": [[0], [1]]},
    "cap": {"softcap": [1.5, 0]},
    "alibi": {"alibi": [0.5, 0.25, 0.125, 0.0625, -0.01, 0]},
    "sinks": {"sinks": [[0.5, -1, 2, 0, 7, -30], None]},
    "scale": {"scale": [0.4, 0.1]},
    "all": {"window": [24, 70], "sink_tokens": [3, 1], "softcap": [2, 3], "alibi": [[0.1, 0.2, 0.3, 0.02, 0.01, 0], None],
            "sinks": [1, 0.5, 0.25, 2, 3, -1], "scale": 0.3},
}


def pool(name, **options):
    return {"name": name, "layers": 2, "q_heads": HEADS, "kv_heads": KV_HEADS, "k_head_dim": D, "v_head_dim": 48,
            "k": "tq4", "v": "f32", "block_size": 16, "blocks": 64, **options}


def of_layer(options, layer):
    """What attention_row() takes."""
    out = {}
    for name, value in options.items():
        if name == "groups":
            continue
        by_layer = isinstance(value, list) and (name not in ("sinks", "alibi") or value[0] is None
                                                or isinstance(value[0], list))
        value = value[layer] if by_layer else value
        out[name] = value if value is not None or name in ("sinks", "alibi") else 0
    if not out.get("window"):
        out["sink_tokens"] = 0
    return out


class Attention(unittest.TestCase):
    """On the scalar backend; below the same on the fast one."""

    backend, bound, program = "cpu-scalar", EXACT, "server/tqkvd"

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        config = os.path.join(cls.folder.name, "tqkvd.json")
        with open(config, "w") as file:
            json.dump({"pools": [pool(name, **options) for name, options in OPTIONS.items()]}, file)
        cls.daemon = Daemon("--config", config, "--backend", cls.backend, program=cls.program)
        cls.other = Daemon("--config", config, "--backend", cls.backend, program=cls.program)
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        cls.rng = np.random.default_rng(seed)

    @classmethod
    def tearDownClass(cls):
        for daemon in (cls.daemon, cls.other):
            assert daemon.stop() == 0, daemon.log()
        cls.folder.cleanup()

    def random(self, *shape):
        return self.rng.standard_normal(shape, np.float32)

    def test_every_option_is_what_numpy_gives(self):
        """Over the rows as they are stored: alone and together, with and without sinks, narrowed, up to 16 rows."""
        with tqkv.Client(self.daemon.addr, timeout=60) as client:
            self.assertEqual(client.server.q_len_max, 16)
            for name, options in OPTIONS.items():
                with self.subTest(name), client.open(name) as session:
                    rows = [([], []) for _ in range(2)]
                    for first, end in ((0, 2), (2, 16), (16, 32), (32, 33), (33, 48), (48, 60), (60, 64), (64, 80), (80, 90)):
                        session.append_layers(1, self.random(2, end - first, KV_HEADS, D),
                                              self.random(2, end - first, KV_HEADS, 48))
                        for layer in range(2):  # as they are stored, and while they are there
                            for kept, read in zip(rows[layer], session.read(1, layer, start=first)):
                                kept.append(read)
                            k, v = (np.concatenate(parts) for parts in rows[layer])
                            self.check(session, layer, of_layer(options, layer), k, v)

    def check(self, session, layer, options, k, v):
        """Queries that the length of the sequence is for: a window's older rows are gone later on."""
        for q_len, seen, window, sinks, scale in ((2, 2, 0, True, 0), (5, 33, 0, False, 0), (3, 60, 7, True, 0.2),
                                                  (1, 90, 0, True, 0), (16, 90, 0, True, 0)):
            if seen != len(k):
                continue
            q = self.random(q_len, HEADS, D)
            out, lse = session.decode(1, layer, q, seen=seen, lse=True, window=window, sinks=sinks, scale=scale)
            for row in range(q_len):
                here = dict(options, end=seen - q_len + 1 + row)
                here["window"] = window or options.get("window", 0)
                here["scale"] = scale or options.get("scale")
                here["sinks"] = options.get("sinks") if sinks else None
                exact, exact_lse = attention_row(q[row], k, v, **here)
                self.assertLess(distance(out[row], exact), self.bound)
                self.assertLess(np.abs(lse[row] - exact_lse).max(), self.bound * (1 + np.abs(exact_lse).max()))

    def test_a_request_only_narrows(self):
        """A window wider than the layer's, more than q_len_max rows, more rows than tokens: refused."""
        with tqkv.Client(self.daemon.addr, timeout=60) as client, client.open("window") as session:
            session.append_layers(1, self.random(2, 40, KV_HEADS, D), self.random(2, 40, KV_HEADS, 48))
            q = self.random(HEADS, D)
            self.assertTrue(np.array_equal(session.decode(1, 0, q, window=24), session.decode(1, 0, q)))
            self.assertTrue(np.array_equal(session.decode(1, 1, q, window=4000), session.decode(1, 1, q)))
            with self.assertRaises(tqkv.TqkvError) as raised:
                session.decode(1, 0, q, window=25)
            self.assertEqual(raised.exception.status_name, Status.BAD_ARG.name)
            with self.assertRaises(tqkv.ArgumentError):
                session.decode(1, 0, self.random(17, HEADS, D))
            with self.assertRaises(tqkv.TqkvError) as raised:
                session.decode(1, 0, self.random(5, HEADS, D), seen=3)
            self.assertEqual(raised.exception.status_name, Status.BAD_ARG.name)
            # The step of token generation takes the same.
            k, v = self.random(3, KV_HEADS, D), self.random(3, KV_HEADS, 48)
            out = session.append_decode(1, 0, k, v, self.random(3, HEADS, D), window=3)
            self.assertEqual(out.shape, (3, HEADS, 48))

    def test_rows_of_one_item_are_separate_decodes(self):
        """FAILURES K7, over the wire: bit for bit, on every pool."""
        with tqkv.Client(self.daemon.addr, timeout=60) as client:
            for name in OPTIONS:
                with client.open(name) as session:
                    session.append_layers(1, self.random(2, 70, KV_HEADS, D), self.random(2, 70, KV_HEADS, 48))
                    for q_len in range(1, 9):
                        q = self.random(q_len, HEADS, D)
                        out, lse = session.decode(1, 0, q, lse=True)
                        for row in range(q_len):
                            one, one_lse = session.decode(1, 0, q[row], seen=70 - q_len + 1 + row, lse=True)
                            self.assertTrue(np.array_equal(out[row], one) and np.array_equal(lse[row], one_lse))

    # ---- merging ----

    def halves(self, name, cut, **options):
        """A context of 80 tokens on one daemon, and cut in two on both: outputs and lse of whole, first, second."""
        k, v, q = self.random(80, KV_HEADS, D), self.random(80, KV_HEADS, 48), self.random(HEADS, D)
        results = []
        for daemon, part, sinks in ((self.daemon, slice(None), True), (self.daemon, slice(cut), False),
                                    (self.other, slice(cut, None), True)):
            with tqkv.Client(daemon.addr, timeout=60) as client, client.open(name) as session:
                session.append(1, 0, k[part], v[part], create=True)
                results.append(session.decode(1, 0, q, lse=True, sinks=sinks, **options))
        return results

    def merge_in_c(self, parts, dtype=np.float32):
        if IS_SANITIZED:
            self.skipTest("a sanitizer's runtime cannot be loaded into Python")
        lib = c.CDLL(os.path.join(os.environ["TQKV_BUILD"], "proto", "client", "libtqkv.so"))
        outs = [np.ascontiguousarray(out, dtype) for out, _ in parts]
        lses = [np.ascontiguousarray(lse, np.float32) for _, lse in parts]
        pointers = [(c.c_void_p * len(parts))(*(part.ctypes.data for part in side)) for side in (outs, lses)]
        out, lse = np.empty((HEADS, 48), dtype), np.empty(HEADS, np.float32)
        lib.tqkv_merge.argtypes = [c.c_uint32, c.c_void_p, c.c_void_p, c.c_uint64, c.c_uint32, c.c_int, c.c_void_p,
                                   c.c_void_p, c.c_void_p]
        status = lib.tqkv_merge(len(parts), pointers[0], pointers[1], HEADS, 48, 1 if dtype == np.float32 else 2,
                                out.ctypes.data, lse.ctypes.data, None)
        self.assertEqual(status, 0)
        return out, lse

    def test_two_daemons_are_one(self):
        """A context cut anywhere, each part on a daemon of its own: merged, it is what one daemon gives."""
        for name in ("plain", "cap", "scale", "sinks"):
            for cut in (1, 16, 37, 79):
                with self.subTest(name, cut=cut):
                    whole, *parts = self.halves(name, cut)
                    for merged in (tqkv.merge(*zip(*parts)), self.merge_in_c(parts)):
                        self.assertLess(distance(merged[0], whole[0]), self.bound)
                        self.assertLess(np.abs(merged[1] - whole[1]).max(), self.bound)

    def test_merging_with_alibi(self):
        """Each part counts from its own end, so the earlier one is told how far away that is."""
        slopes = np.array(OPTIONS["alibi"]["alibi"], np.float32)
        whole, (first, first_lse), second = self.halves("alibi", 30)
        merged = tqkv.merge([first, second[0]], [first_lse - slopes * 50, second[1]])
        self.assertLess(distance(merged[0], whole[0]), self.bound)
        self.assertLess(np.abs(merged[1] - whole[1]).max(), self.bound)

    def test_parts_without_tokens(self):
        """A part that saw nothing counts for nothing, whatever is in its output; all parts empty: nothing."""
        some, nothing = self.random(HEADS, 48), np.full((HEADS, 48), np.nan, np.float32)
        lse, empty = self.random(HEADS), np.full(HEADS, -np.inf, np.float32)
        for merge in (lambda parts: tqkv.merge(*zip(*parts)), self.merge_in_c):
            out, got = merge([(nothing, empty), (some, lse)])
            self.assertTrue(np.array_equal(out, some) and np.allclose(got, lse))
            out, got = merge([(nothing, empty), (nothing, empty)])
            self.assertTrue(not out.any() and np.isneginf(got).all())
        half = some.astype(np.float16)
        self.assertTrue(np.array_equal(self.merge_in_c([(half, lse)] * 3, np.float16)[0], half))
        self.assertRaises(tqkv.ArgumentError, tqkv.merge, [some], [lse * np.float32(np.nan)])
        self.assertRaises(tqkv.ArgumentError, tqkv.merge, [some], [lse[1:]])
        self.assertRaises(tqkv.ArgumentError, tqkv.merge, [], [])


class FastAttention(Attention):
    """core/FAST.md: at most 2e-3."""

    backend, bound = "cpu", 2e-3


@unittest.skipUnless((BUILD / FAKE_GPU).exists(), "built with sanitizers, or without a C++ compiler")
class FakeGpuAttention(Attention):
    """The CUDA backend with its kernels on fibers; gpu/KERNELS.md has the bounds."""

    backend, bound, program = "cuda", 2e-5, FAKE_GPU


if __name__ == "__main__":
    unittest.main()
