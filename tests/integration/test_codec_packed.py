"""Rows that a client packs: libtqkv, the Python package and the daemon make the same bytes of the same numbers.

libtqkv is the shared library itself, called through ctypes, so what an application links is what is tested.
"""

import ctypes as c
import json
import os
import pathlib
import tempfile
import unittest

import numpy as np
import tqkv
from daemon import IS_SANITIZED, Daemon
from tqkv import codec

F32, PACKED = 1, 16
GEOMETRY = {"layers": 3, "q_heads": 4, "kv_heads": 2, "block_size": 16, "blocks": 64}
CENTER = np.random.default_rng(8).standard_normal((3, 2, 64), np.float32).tolist()
MATRIX = codec.rotation("qr", 32, 5).matrix.tolist()
POOLS = {
    "tq4": {"head_dim": 64, "k": "tq4", "v": "tq4"},
    "qr": {"k_head_dim": 80, "v_head_dim": 96, "k": "tqp3", "v": "tq2", "norm_correction": True},
    "mixed": {"head_dim": 64, "k": ["bf16", "tq3", "tq8"], "v": ["v4", "fp8", "f16"], "group": 20, "per_layer": True},
    "preset": {"head_dim": 128, "preset": "k8v4", "exact_layers": 1},
    "recipe": {"head_dim": 128, "k": "turboquant25", "v": "turboquant25", "recipe_scale": "published"},
    "center": {"head_dim": 64, "k": "tq4", "v": "v4", "k_center": CENTER},
    "window": {"head_dim": 64, "k": "tq4", "v": "v4", "exact_tokens": 32},
    "given": {"head_dim": 32, "k": "tq4", "v": "tqp3", "rotation": "file", "rotation_matrix": MATRIX},
}


class Error(c.Structure):
    _fields_ = [("status", c.c_int), ("scope", c.c_int), ("is_retryable", c.c_bool), ("is_local", c.c_bool),
                ("is_outcome_unknown", c.c_bool), ("retry_after_ms", c.c_uint32), ("item", c.c_uint32),
                ("offset", c.c_uint32), ("expected", c.c_uint64), ("got", c.c_uint64), ("message", c.c_char * 512)]


class OpenParams(c.Structure):
    _fields_ = [("pool", c.c_char_p), ("session_name", c.c_char_p), ("pool_json", c.c_char_p),
                ("fingerprint", c.c_uint64), ("lease_ms", c.c_uint32), ("reserve_blocks", c.c_uint32),
                ("sequences_max", c.c_uint32), ("tokens_max", c.c_uint32), ("priority", c.c_uint16),
                ("flags", c.c_uint16)]


class Item(c.Structure):
    _fields_ = [("sequence", c.c_uint64), ("position", c.c_uint32), ("n_tokens", c.c_uint32), ("q_len", c.c_uint32),
                ("flags", c.c_uint32)]


class Rows(c.Structure):
    _fields_ = [("items", c.POINTER(Item)), ("n_items", c.c_uint32), ("layer_first", c.c_uint32),
                ("n_layers", c.c_uint32), ("k", c.c_void_p), ("v", c.c_void_p), ("q", c.c_void_p),
                ("k_bytes", c.c_uint64), ("v_bytes", c.c_uint64), ("q_bytes", c.c_uint64), ("k_dtype", c.c_uint8),
                ("v_dtype", c.c_uint8), ("q_dtype", c.c_uint8), ("out_dtype", c.c_uint8), ("flags", c.c_uint32),
                ("scale", c.c_float), ("window", c.c_uint32)]


class ItemResult(c.Structure):
    _fields_ = [("sequence", c.c_uint64), ("status", c.c_int), ("length", c.c_uint32), ("n_tokens", c.c_uint32),
                ("q_len", c.c_uint32), ("layer", c.c_uint32), ("row", c.c_uint32), ("retry_after_ms", c.c_uint32)]


class RowsResult(c.Structure):
    _fields_ = [("items", c.POINTER(ItemResult)), ("out", c.c_void_p), ("lse", c.c_void_p),
                ("out_bytes_max", c.c_uint64), ("lse_bytes_max", c.c_uint64), ("n_ok", c.c_uint32),
                ("n_failed", c.c_uint32), ("n_frames", c.c_uint32), ("n_retried", c.c_uint32),
                ("timings", c.c_uint32 * 6)]


class Read(c.Structure):
    _fields_ = [("sequence", c.c_uint64), ("layer_first", c.c_uint32), ("n_layers", c.c_uint32),
                ("position", c.c_uint32), ("n_tokens", c.c_uint32), ("k_dtype", c.c_uint8), ("v_dtype", c.c_uint8),
                ("flags", c.c_uint16), ("k", c.c_void_p), ("v", c.c_void_p), ("k_bytes_max", c.c_uint64),
                ("v_bytes_max", c.c_uint64), ("k_bytes", c.c_uint64), ("v_bytes", c.c_uint64),
                ("fingerprint", c.c_uint64)]


def library():
    if IS_SANITIZED:
        raise unittest.SkipTest("a sanitizer's runtime cannot be loaded into Python")
    lib = c.CDLL(os.path.join(os.environ["TQKV_BUILD"], "proto/client/libtqkv.so"))
    lib.tqkv_codec_format.restype = c.c_char_p
    lib.tqkv_codec_row_bytes.restype = c.c_uint32
    for name in ("tqkv_disconnect", "tqkv_codec_destroy"):
        getattr(lib, name).restype = None
    return lib


class Packed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.lib = library()  # first: where it cannot be loaded nothing may be left running
        cls.folder = tempfile.TemporaryDirectory()
        config = pathlib.Path(cls.folder.name) / "tqkvd.json"
        config.write_text(json.dumps({"pools": [{"name": name, **GEOMETRY, **pool} for name, pool in POOLS.items()]}))
        cls.daemon = Daemon("--config", str(config))

    @classmethod
    def tearDownClass(cls):
        code = cls.daemon.stop()
        cls.folder.cleanup()
        assert code == 0, (code, cls.daemon.log())

    def setUp(self):
        self.error, self.conn = Error(), c.c_void_p()
        self.client = tqkv.Client(self.daemon.addr, timeout=60)
        self.addCleanup(self.client.close)
        self.call("tqkv_connect", self.daemon.addr.encode(), None, c.byref(self.conn))
        self.addCleanup(self.lib.tqkv_disconnect, self.conn)

    def call(self, name, *args, expected=0):
        status = getattr(self.lib, name)(*args, c.byref(self.error))
        self.assertEqual(status, expected, self.error.message)

    def c_codec(self, pool):
        made = c.c_void_p()
        self.call("tqkv_codec_create", self.conn, pool.encode(), None, 30000, c.byref(made))
        self.addCleanup(self.lib.tqkv_codec_destroy, made)
        return made

    def python_codec(self, pool, info):
        options = {}
        if "k_center" in info:
            options["k_center"] = CENTER
        if pool == "given":
            options["matrices"] = {"k": MATRIX, "v": MATRIX}
        return codec.PoolCodec(info, **options)

    def pack(self, made, layer, is_v, rows):
        rows = np.ascontiguousarray(rows)
        row_bytes = self.lib.tqkv_codec_row_bytes(made, layer, is_v)
        packed = np.zeros((*rows.shape[:2], row_bytes), np.uint8)
        self.call("tqkv_codec_encode", made, layer, is_v, F32, c.c_void_p(rows.ctypes.data), c.c_size_t(rows.nbytes),
                  len(rows), c.c_void_p(packed.ctypes.data), c.c_size_t(packed.nbytes))
        return packed

    def append(self, session, sequence, layer, k, v, dtype, expected_item=0):
        item = Item(sequence, 0, len(k), 0, 1 if layer == 0 else 0)
        result_item = ItemResult()
        result = RowsResult(items=c.pointer(result_item))
        k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
        rows = Rows(items=c.pointer(item), n_items=1, layer_first=layer, n_layers=1, k=k.ctypes.data, v=v.ctypes.data,
                    k_bytes=k.nbytes, v_bytes=v.nbytes, k_dtype=dtype, v_dtype=dtype)
        self.call("tqkv_append", session, c.byref(rows), 30000, c.byref(result))
        self.assertEqual(result_item.status, expected_item)
        return result_item

    def read(self, session, sequence, layer, n, k_bytes, v_bytes):
        """Packed K and V, one side at a time."""
        got = []
        for is_v, n_bytes in ((False, k_bytes), (True, v_bytes)):
            data = np.zeros(n_bytes, np.uint8)
            side = {"v": data.ctypes.data, "v_bytes_max": n_bytes, "v_dtype": PACKED} if is_v else {
                "k": data.ctypes.data, "k_bytes_max": n_bytes, "k_dtype": PACKED}
            read = Read(sequence=sequence, layer_first=layer, n_layers=1, position=0, n_tokens=n, **side)
            self.call("tqkv_read", session, c.byref(read), 30000)
            self.assertEqual(read.v_bytes if is_v else read.k_bytes, n_bytes)
            got.append(data)
        return got

    def open(self, pool):
        session = c.c_void_p()
        params = OpenParams(pool=pool.encode())
        self.call("tqkv_open", self.conn, c.byref(params), 30000, c.byref(session))
        return session

    def pool_json(self, pool):
        return self.client.pool_info(pool).json

    def test_three_encoders_make_the_same_bytes(self):
        """Packed by the daemon, by libtqkv and by numpy; packed rows that the daemon took are kept as they are."""
        for name in POOLS:
            with self.subTest(pool=name):
                info = self.pool_json(name)
                made, in_python, session = self.c_codec(name), self.python_codec(name, info), self.open(name)
                rng = np.random.default_rng(17)
                for layer in range(3):
                    k = rng.standard_normal((21, 2, info["k_head_dim"]), np.float32) * np.float32(3)
                    v = rng.standard_normal((21, 2, info["v_head_dim"]), np.float32)
                    packed_k, packed_v = self.pack(made, layer, False, k), self.pack(made, layer, True, v)
                    self.assertTrue(np.array_equal(packed_k, in_python.encode(layer, "k", k)))
                    self.assertTrue(np.array_equal(packed_v, in_python.encode(layer, "v", v)))
                    self.append(session, 1, layer, k, v, F32)
                    self.append(session, 2, layer, packed_k, packed_v, PACKED)
                    for sequence in (1, 2):
                        got_k, got_v = self.read(session, sequence, layer, 21, packed_k.nbytes, packed_v.nbytes)
                        self.assertTrue(np.array_equal(got_k, packed_k.ravel()), (sequence, layer))
                        self.assertTrue(np.array_equal(got_v, packed_v.ravel()), (sequence, layer))

    def test_a_bad_packed_row_is_refused_by_both(self):
        """The client does not unpack it, and the daemon does not store it."""
        made, session = self.c_codec("tq4"), self.open("tq4")
        rows = np.ones((4, 2, 64), np.float32)
        k, v = self.pack(made, 0, False, rows), self.pack(made, 0, True, rows)
        k[2, 1, 35] |= 0x80  # a negative norm
        out = np.zeros_like(rows)
        self.call("tqkv_codec_decode", made, 0, False, F32, c.c_void_p(k.ctypes.data), c.c_size_t(k.nbytes), 4,
                  c.c_void_p(out.ctypes.data), c.c_size_t(out.nbytes), expected=107)
        self.assertIn(b"token 2, KV head 1", self.error.message)
        self.assertEqual(self.append(session, 5, 0, k, v, PACKED, expected_item=107).n_tokens, 0)


if __name__ == "__main__":
    unittest.main()
