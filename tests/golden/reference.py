#!/usr/bin/env python3
"""Independent implementation of the row formats in numpy, written from FORMATS.md, and the maker of golden vectors.

usage: reference.py            writes rows/ beside this file
       reference.py --check    compares with what is there; exit 1 on any difference

Files: inputs_d{d}.f32 are rows of float32, {format}_d{d}.rows the encoded rows back to back, and
{format}_d{d}.decoded the rows that they decode to, as float32. Where a format is lossless or the decoded rows
follow by widening alone (f32, bf16) there is no decoded file. The rotation is rht with seed 42.

A new format is one more class with encode(row) and decode(row bytes), listed in FORMATS at the end.
"""
import json
import pathlib
import struct
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
DIMS = (16, 64, 128, 256)
SEED = 42
F32 = np.float32


# ---- random numbers (FORMATS 1) ----


def mt19937(seed):
    """Generates the 32-bit outputs of init_genrand(seed mod 2^32)."""
    state = [seed % 2**32]
    for i in range(1, 624):
        state.append((1812433253 * (state[-1] ^ state[-1] >> 30) + i) % 2**32)
    while True:
        for i in range(624):
            y = (state[i] & 0x80000000) + (state[(i + 1) % 624] & 0x7FFFFFFF)
            state[i] = state[(i + 397) % 624] ^ y >> 1
            if y % 2:
                state[i] ^= 0x9908B0DF
        for y in state:
            y ^= y >> 11
            y ^= y << 7 & 0x9D2C5680
            y ^= y << 15 & 0xEFC60000
            y ^= y >> 18
            yield y


def signs(outputs, n):
    """n draws: +1 for a set least significant bit."""
    return np.array([1.0 if next(outputs) & 1 else -1.0 for _ in range(n)], dtype=F32)


# ---- rotation rht (FORMATS 2) ----


class Rht:
    """y = s2 * (1/sqrt(d)) H (s1 * x), every operation rounded to float32."""

    def __init__(self, d, seed):
        outputs = mt19937(seed)
        self.s1 = signs(outputs, d)
        self.s2 = signs(outputs, d)
        self.factor = F32(1.0 / np.sqrt(np.float64(d)))

    @staticmethod
    def butterflies(x):
        """Unnormalised Sylvester transform, strides 1, 2, 4, ..."""
        x = x.copy()
        stride = 1
        while stride < len(x):
            pairs = x.reshape(-1, 2, stride)
            a, b = pairs[:, 0].copy(), pairs[:, 1].copy()
            pairs[:, 0] = a + b
            pairs[:, 1] = a - b
            stride *= 2
        return x

    def forward(self, x):
        return self.s2 * (self.butterflies(self.s1 * x) * self.factor)

    def backward(self, y):
        return self.s1 * (self.butterflies(self.s2 * y) * self.factor)


# ---- codebooks (FORMATS 3) ----


class Codebook:
    """Float32 centroids and interior boundaries from the exact table."""

    def __init__(self, d, bits):
        table = json.loads((HERE / "exact_codebooks.json").read_text(encoding="ascii"))
        (entry,) = [e for e in table if e["d"] == d and e["bits"] == bits]
        positive = np.array([float(text) for text in entry["positive_centroids"]])
        centroids = np.concatenate([-positive[::-1], positive])
        self.centroids = centroids.astype(F32)
        self.boundaries = ((centroids[:-1] + centroids[1:]) / 2).astype(F32)

    def index(self, y):
        """Number of interior boundaries strictly below each value."""
        return (self.boundaries[None, :] < y[:, None]).sum(axis=1)


# ---- packing (FORMATS 4) ----


def pack(values, bits):
    """Little-endian bit stream, one big integer."""
    stream = 0
    for i, value in enumerate(values):
        stream |= int(value) << i * bits
    return stream.to_bytes((len(values) * bits + 7) // 8, "little")


def unpack(data, n, bits):
    stream = int.from_bytes(data, "little")
    return np.array([stream >> i * bits & 2**bits - 1 for i in range(n)])


# ---- arithmetic (FORMATS 0) ----


def length(v):
    """Tree sum of squares in float64, one root, one rounding."""
    n = 1
    while n < len(v):
        n *= 2
    s = np.zeros(n)
    s[: len(v)] = v.astype(np.float64) ** 2
    while len(s) > 1:
        half = len(s) // 2
        s = s[:half] + s[half:]
    return F32(np.sqrt(s[0]))


# ---- formats (FORMATS 5) ----


class Dense32:
    name = "f32"
    has_decoded = False

    def __init__(self, d):
        self.d = d

    def encode(self, row):
        return row.astype("<f4").tobytes()

    def decode(self, data):
        return np.frombuffer(data, dtype="<f4")


class Bfloat16:
    """Nearest-even by arithmetic: a bfloat16 of exponent e is a multiple of 2^(e - 7), subnormals of 2^-133."""

    name = "bf16"
    has_decoded = False

    def __init__(self, d):
        self.d = d

    @staticmethod
    def round(x):
        x = float(x)
        _, exponent = np.frexp(x)  # x = m 2^exponent, 0.5 <= |m| < 1
        unit = 2.0 ** max(int(exponent) - 8, -133)
        return float(np.copysign(np.rint(x / unit) * unit, x))

    def encode(self, row):
        return b"".join(struct.pack("<f", self.round(x))[2:] for x in row)

    def decode(self, data):
        padded = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        return np.frombuffer(padded, dtype="<f4")


class Tq:
    """tqN: [pack(indices, N)][norm f32]"""

    has_decoded = True

    def __init__(self, d, bits):
        self.d = d
        self.bits = bits
        self.name = f"tq{bits}"
        self.rotation = Rht(d, SEED)
        self.codebook = Codebook(d, bits)

    def encode(self, row):
        norm = max(length(row), F32(1e-12))
        y = self.rotation.forward(row / norm)
        return pack(self.codebook.index(y), self.bits) + struct.pack("<f", norm)

    def decode(self, data):
        (norm,) = struct.unpack("<f", data[-4:])
        indices = unpack(data[:-4], self.d, self.bits)
        return self.rotation.backward(self.codebook.centroids[indices]) * F32(norm)


FORMATS = (Dense32, Bfloat16, lambda d: Tq(d, 4))


# ---- inputs: never from the rotation's own generator ----


class Lcg:
    """state = 6364136223846793005 state + 1442695040888963407 mod 2^64; the top 24 bits are a uniform number."""

    def __init__(self, seed):
        self.state = seed

    def bits24(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> 40

    def normal(self):
        """Near enough to a normal number, and exact in float64: twelve uniforms less six."""
        return sum(self.bits24() for _ in range(12)) / 2.0**24 - 6.0

    def normals(self, n):
        return np.array([self.normal() for _ in range(n)])


def near_tie_row(lcg, d):
    """A unit row whose coordinates lie within an ulp or so of cell boundaries once it is rotated."""
    boundaries = Codebook(d, 4).boundaries.astype(np.float64)
    y = np.array([boundaries[lcg.bits24() % 15] for _ in range(d)])
    while np.sum(y[:-1] ** 2) >= 1:
        y[np.argmax(np.abs(y[:-1]))] = boundaries[7 + lcg.bits24() % 2]
    y[-1] = np.sqrt(1 - np.sum(y[:-1] ** 2))
    return Rht(d, SEED).backward(y.astype(F32))


def bf16_edges(d):
    """Halfway cases below and above an even number, their neighbours, carries into the next exponent."""
    patterns = [
        0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3FFF8000, 0x3FFF7FFF, 0xBF808000, 0xBF818000,
        0x00008000, 0x00018000, 0x00007FFF, 0x00008001, 0x007F8000, 0x007FFFFF, 0x00800000, 0x80008000,
    ]
    words = np.array([patterns[i % len(patterns)] for i in range(d)], dtype="<u4")
    return words.view("<f4")


def inputs(d):
    """Rows of every kind that FORMATS 8 and the failure list name."""
    lcg = Lcg(20240917 + d)
    index = np.arange(d)
    one_hot = (index == d // 3).astype(F32)
    outlier = lcg.normals(d)
    outlier[d // 2] = 1000.0
    subnormal = np.array([lcg.bits24() % 4096 for _ in range(d)]) * 2.0**-149
    mixed_zeros = np.where(index % 3 == 0, -0.0, np.where(index % 3 == 1, 0.0, lcg.normals(d)))
    rows = [
        np.zeros(d),
        -np.zeros(d),
        lcg.normals(d),
        lcg.normals(d),
        lcg.normals(d),
        lcg.normals(d) * 1e-6,
        lcg.normals(d) * 50,
        lcg.normals(d) * 6e4,
        lcg.normals(d) * 1e36,
        lcg.normals(d) * 1e-14,  # length below the smallest norm
        lcg.normals(d) * 1e-12 / np.sqrt(d),  # length near it
        outlier,
        mixed_zeros,
        one_hot,
        one_hot * -6e4,
        one_hot * 3.3895314e38,  # the largest bfloat16
        one_hot * 2.0**-149,
        (index < 2).astype(F32),  # half of the coordinates are exactly 0 once rotated
        (index < d // 2).astype(F32),
        np.ones(d),
        np.where(index % 2 == 0, 1.0, -1.0),
        subnormal,
        subnormal * 2.0**100,
        bf16_edges(d),
        near_tie_row(lcg, d),
        near_tie_row(lcg, d),
        near_tie_row(lcg, d),
        near_tie_row(lcg, d) * F32(37.5),
    ]
    return np.array([np.asarray(row).astype(F32) for row in rows])


def golden():
    """Name and bytes of every golden file."""
    for d in DIMS:
        rows = inputs(d)
        yield f"inputs_d{d}.f32", rows.astype("<f4").tobytes()
        for make in FORMATS:
            codec = make(d)
            encoded = [codec.encode(row) for row in rows]
            if codec.name != "f32":  # its rows are the inputs
                yield f"{codec.name}_d{d}.rows", b"".join(encoded)
            if codec.has_decoded:
                yield f"{codec.name}_d{d}.decoded", b"".join(codec.decode(e).astype("<f4").tobytes() for e in encoded)


def main():
    is_check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not is_check:
        sys.exit(__doc__)
    n_different = 0
    for name, data in golden():
        path = HERE / "rows" / name
        if not is_check:
            path.write_bytes(data)
        elif not path.exists() or path.read_bytes() != data:
            print(f"{path}: differs from the reference")
            n_different += 1
    sys.exit(1 if n_different else 0)


if __name__ == "__main__":
    np.seterr(under="ignore")
    main()
