"""The row codec against golden rows of an independent implementation, byte for byte."""

import json
import unittest

import numpy as np
from tqkv import _pool_hashes, codec
from tqkv._xxh3 import xxh3_128

from .common import ROOT

ROWS = ROOT / "tests/golden/rows"
XXH3 = {
    4: "aa6e2f274640a3f43d668af6f2a44d77", 8: "6a86a3bda6af4e3d61ddbe7f31a6100d",
    9: "664c7ca18afd62558c7b67fd458a936b", 16: "7f9a218b0425449ae2ce54a7c19c730d",
    17: "66fc23f6439dbd778d96ef110fcdebb4", 32: "49a11ee743d6d342fd357cf6cb2dda18",
    33: "7228d9284a8116f6f8994653f4bfe6da", 64: "e0faf20e0e0fe0ddba7e015a54f14be1",
    100: "76b536586de98b82580b061a98a5a9b4", 128: "aec730751478556cff361dec1385710a",
    129: "98cd36ccbb5579264545b3a09738e31a", 160: "832af93acbf14d0b10963bc4f63e0de8",
    200: "26d28d07860728f6a4773493fbbe3543", 240: "5293e17bf553903d3f2c53e72293711f",
    241: "b53840fe3fedf161956cae592c67279e", 1024: "f3fc143cd81d51baa1e16f2edf2cbed6",
    1025: "90bcb44432d2e5020a6d2c17259fe4bb", 2048: "e5d454057f8dce3a1c81a12455515459",
    5000: "8a0ea3906584c057aedbe953d207917d",
}


def fnv(data):
    """FNV-1a, 64 bits."""
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return f"{state:016x}"


def cases():
    """(fields, codec options, all input rows, encoded bytes of those that are not refused)"""
    at, encoded = {}, {}
    for line in (ROWS / "cases.txt").read_text().splitlines():
        fields = line.split(" ")
        d, name, turn, group, corrected, channels, row_bytes, refused = fields[:8]
        d, n_bytes = int(d), int(row_bytes) * refused.count(".")
        rows = np.fromfile(ROWS / f"inputs_d{d}.f32", "<f4").reshape(-1, d)
        options = {}
        if turn != "-":
            options["rotation"] = turn
        if group != "0":
            options["group"] = int(group)
        if corrected == "1":
            options["norm_correction"] = True
        if channels != "-":
            options["high_channels"] = [int(c) for c in channels.split(",")]
        if name == "f32":
            yield fields, options, rows, rows.tobytes()
            continue
        if d not in encoded:
            encoded[d], at[d] = (ROWS / f"encoded_d{d}.rows").read_bytes(), 0
        yield fields, options, rows, encoded[d][at[d]:at[d] + n_bytes]
        at[d] += n_bytes


class Golden(unittest.TestCase):
    def test_every_case(self):
        """Bytes, refused rows, and the numbers that decoding gives."""
        n_cases = 0
        for fields, options, rows, expected in cases():
            with self.subTest(case=fields[:6]):
                made = codec.RowCodec(fields[1], int(fields[0]), **options)
                self.assertEqual(made.row_bytes, int(fields[6]))
                packed, bad = made.encode_some(rows)
                self.assertEqual("".join("R" if b else "." for b in bad), fields[7])
                self.assertEqual(packed[~bad].tobytes(), expected)
                self.assertEqual(fnv(made.decode(packed[~bad]).astype("<f4").tobytes()), fields[8])
                if fields[9] != "-":
                    published = codec.RowCodec(fields[1], int(fields[0]), recipe_scale="published", **options)
                    self.assertEqual(fnv(published.decode(packed[~bad]).astype("<f4").tobytes()), fields[9])
                n_cases += 1
        self.assertGreater(n_cases, 200)

    def test_rotations(self):
        for line in (ROWS / "rotations.txt").read_text().splitlines():
            kind, d, seed, expected = line.split(" ")
            turn = codec.rotation(kind, int(d), int(seed))
            matrix = turn.backward(np.eye(int(d), dtype=np.float32))
            self.assertEqual(fnv(matrix.astype("<f4").tobytes()), expected, line)

    def test_codebooks(self):
        """The table of 40 digits: within 1e-9, and the same float32."""
        for entry in json.loads((ROOT / "tests/golden/exact_codebooks.json").read_text()):
            exact = np.array([float(text) for text in entry["positive_centroids"]])
            got = codec.solve(entry["d"], entry["bits"])
            self.assertLess(np.abs(got - exact).max(), 1e-9, entry["d"])
            self.assertTrue(np.array_equal(got.astype(np.float32), exact.astype(np.float32)),
                            (entry["d"], entry["bits"]))


class Rows(unittest.TestCase):
    def test_shapes_and_bad_rows(self):
        rows = np.random.default_rng(3).standard_normal((4, 5, 64), np.float32)
        made = codec.RowCodec("tq4", 64)
        packed = made.encode(rows)
        self.assertEqual((packed.shape, packed.dtype), ((4, 5, 36), np.uint8))
        self.assertEqual(made.decode(packed).shape, rows.shape)
        rows[2, 1, 7] = np.nan
        with self.assertRaises(codec.BadRow) as caught:
            made.encode(rows)
        self.assertEqual(caught.exception.row, 11)
        packed[3, 3, 35] |= 0x80  # a negative norm
        with self.assertRaises(codec.BadRow) as caught:
            made.decode(packed)
        self.assertEqual(caught.exception.row, 18)
        with self.assertRaisesRegex(ValueError, "expected .* 64"):
            made.encode(rows[..., :32])
        with self.assertRaisesRegex(ValueError, "of uint8"):
            made.decode(packed.astype(np.int8))
        self.assertEqual(made.encode(np.zeros((0, 64))).shape, (0, 36))

    def test_bits_behind_the_codes(self):
        made = codec.RowCodec("v4", 64, group=20)
        packed = made.encode(np.ones((1, 64), np.float32))
        packed[0, 39] |= 0x80
        with self.assertRaises(codec.BadRow):
            made.decode(packed)

    def test_options_that_a_format_does_not_have(self):
        for name, options in (("tq9", {}), ("tq04", {}), ("v5", {}), ("tqp1", {}), ("tq4", {"group": 32}),
                              ("v4", {"group": 65}), ("v4", {"norm_correction": True}), ("tqp3",
                                                                                         {"norm_correction": True}),
                              ("tq4", {"high_channels": [1]}), ("turboquant35", {"high_channels": [1]}),
                              ("turboquant35", {"recipe_scale": "other"}), ("tq4", {"rotation": "none"}),
                              ("tq4", {"rotation": np.eye(32)}), ("tq4", {"projection": np.eye(64)})):
            with self.assertRaises(ValueError, msg=(name, options)):
                codec.RowCodec(name, 64, **options)
        with self.assertRaises(ValueError):
            codec.RowCodec("tq4", 40)


class Pools(unittest.TestCase):
    POOL = {"block_size": 16, "groups": [[0, 1, 2]], "k": ["tq4", "bf16", "tqp3"], "k_head_dim": 64, "kv_heads": 2,
            "k_rotation": {"kind": "rht", "seed": 7, "per_layer": True, "matrix": "0" * 32}, "layers": 3, "model": "",
            "q_heads": 2, "scale": "3e000000", "v": "v4", "v_head_dim": 32, "group": 16, "norm_correction": True}

    def pool(self, **members):
        """The JSON of a pool, with the hashes of what a daemon with the built-in codebooks has."""
        pool = {**self.POOL, **members}
        matrices = {side: np.asarray(pool.pop(f"matrix_{side}"), np.float32) if f"matrix_{side}" in pool else None
                    for side in "kv"}
        for side in "kv":
            for member, value in _pool_hashes.side_hashes(codec._side_codecs(pool, side, matrices[side], None)).items():
                if value and member == "rotation":
                    pool[f"{side}_rotation"] = {**pool[f"{side}_rotation"], "matrix": value}
                elif value:
                    pool[f"{side}_{member}"] = value
        return pool

    def rows(self, n, d):
        return np.random.default_rng(4).standard_normal((n, 2, d), np.float32)

    def test_layers_have_their_formats(self):
        pool = codec.PoolCodec(json.dumps(self.pool()))
        k, v = self.rows(3, 64), self.rows(3, 32)
        first = codec.RowCodec("tq4", 64, seed=7, norm_correction=True)
        third = codec.RowCodec("tqp3", 64, seed=7 + 2 * 1000003)
        self.assertTrue(np.array_equal(pool.encode(0, "k", k), first.encode(k)))
        self.assertTrue(np.array_equal(pool.encode(2, "k", k), third.encode(k)))
        self.assertEqual(pool.encode(1, "k", k).shape, (3, 2, 128))
        self.assertTrue(np.array_equal(pool.encode(1, "v", v), codec.RowCodec("v4", 32, group=16).encode(v)))
        self.assertTrue(np.array_equal(pool.decode(0, "k", first.encode(k)), first.decode(first.encode(k))))

    def test_what_the_json_has_by_hash(self):
        center = np.arange(3 * 2 * 64, dtype=np.float32).reshape(3, 2, 64)
        with_center = json.dumps(self.pool(k_center=xxh3_128(center.tobytes())))
        k = self.rows(3, 64)
        pool = codec.PoolCodec(with_center, k_center=center)
        plain = codec.PoolCodec(json.dumps(self.pool()))
        shifted = k + center[1]
        self.assertTrue(np.array_equal(pool.encode(1, "k", shifted), plain.encode(1, "k", shifted - center[1])))
        for text, options in ((with_center, {}), (json.dumps(self.pool()), {"k_center": center}),
                              (with_center, {"k_center": center + np.float32(1)}),
                              (json.dumps({**self.pool(), "surprise": 1}), {}),
                              (json.dumps({**self.pool(), "k_rotation": {"kind": "file", "seed": 1}}), {})):
            with self.assertRaises(ValueError):
                codec.PoolCodec(text, **options)

    def test_what_is_not_the_pools_is_refused(self):
        """Another codebook, matrix or projection on the daemon's side, or one of which it tells nothing."""
        pool = self.pool()
        for member in ("k_codebook", "k_projection"):
            self.assertIn(member, pool)
            for other in ({**pool, member: "0" * 32}, {name: pool[name] for name in pool if name != member}):
                with self.assertRaisesRegex(ValueError, f"{member} is not that of the pool"):
                    codec.PoolCodec(other)
        with self.assertRaisesRegex(ValueError, "k_rotation is not that of the pool"):
            codec.PoolCodec({**pool, "k_rotation": {**pool["k_rotation"], "matrix": "1" * 32}})
        with self.assertRaisesRegex(ValueError, "v_codebook is not that of the pool"):
            codec.PoolCodec({**pool, "v_codebook": "0" * 32})
        matrix = codec.rotation("qr", 64, 9).matrix
        given = self.pool(k="tq4", k_rotation={"kind": "file", "seed": 1}, matrix_k=matrix)
        codec.PoolCodec(given, matrices={"k": matrix})
        with self.assertRaisesRegex(ValueError, "k_rotation"):
            codec.PoolCodec(given, matrices={"k": -matrix})

    def test_xxh3_of_every_length_class(self):
        """Digests by the C library, of bytes i * 131 + i / 256 * 17 + 7."""
        data = bytes((i * 131 + (i >> 8) * 17 + 7) & 255 for i in range(5000))
        for n, expected in XXH3.items():
            self.assertEqual(xxh3_128(data[:n]), expected, n)
        self.assertRaises(ValueError, xxh3_128, b"abc")


if __name__ == "__main__":
    unittest.main()
