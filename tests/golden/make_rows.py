#!/usr/bin/env python3
"""Golden rows: what reference.py makes of rows that are hard on purpose.

usage: make_rows.py            writes rows/ beside this file
       make_rows.py --check    compares with what is there; exit 1 on any difference

inputs_d{d}.f32 are rows of float32. encoded_d{d}.rows holds, case by case in the order of cases.txt, the encoded rows
back to back. A line of cases.txt is one case:

    d format rotation group norm_correction channels row_bytes refused hash hash2

rotation is rht, qr or - (none); group 0 means the default; channels is the list of high channels of a recipe or -;
refused has one letter per input row, R where the row is refused (and has no bytes) and . elsewhere; hash is FNV-1a, 64
bits, over the float32 bytes of the decoded rows, and hash2 that of a recipe with the published scale or -. The rotation
has seed 42. A line of rotations.txt is `kind d seed hash`, the hash over the float32 matrix, row-major.
"""
import math
import sys

import numpy as np
from reference import DIMS, F32, F64, HERE, ROTATIONS, SEED, Codebook, Recipe, formats, is_power_of_two, matrix_of

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


def near_tie_unit(lcg, d, bits):
    """A unit vector whose coordinates are cell boundaries, but for the last one, which makes up the length."""
    boundaries = Codebook(d, bits).boundaries.astype(F64)
    n = len(boundaries)
    y = np.array([boundaries[lcg.bits24() % n] for _ in range(d)])
    while np.sum(y[:-1] ** 2) >= 1:
        y[np.argmax(np.abs(y[:-1]))] = boundaries[n // 2 + lcg.bits24() % 2 * (n > 1)]
    y[-1] = math.sqrt(1 - np.sum(y[:-1] ** 2))
    return y.astype(F32)


def near_tie_row(lcg, d, bits):
    """A row that lies within an ulp or so of cell boundaries once it is rotated."""
    kind = "rht" if is_power_of_two(d) else "qr"
    return ROTATIONS[kind](d, SEED).backward(near_tie_unit(lcg, d, bits))


def near_tie_recipe_row(lcg, d, name, norm):
    """The same for both groups of a recipe."""
    recipe = Recipe(d, name)
    parts = [
        group.rotation.backward(near_tie_unit(lcg, group.dim, group.bits)) * F32(norm)
        for group in (recipe.high, recipe.low)
    ]
    return np.concatenate(parts)


def patterns(d, words):
    """Bit patterns, repeated to the length of a row."""
    return np.array([words[i % len(words)] for i in range(d)], dtype="<u4").view("<f4")


# Halfway cases below and above an even number, their neighbours, carries into the next exponent.
BF16_EDGES = (
    0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001, 0x3FFF8000, 0x3FFF7FFF, 0xBF808000, 0xBF818000,
    0x00008000, 0x00018000, 0x00007FFF, 0x00008001, 0x007F8000, 0x007FFFFF, 0x00800000, 0x80008000,
)  # fmt: skip
# The same for float16: about 1, the largest number, the smallest normal and subnormal ones.
F16_EDGES = (
    0x3F801000, 0x3F803000, 0x3F800FFF, 0x3F801001, 0x477FEFFF, 0xC77FEFFF, 0x387FF000, 0xB87FF000,
    0x33000000, 0x33000001, 0x33C00000, 0xB3000000, 0x32FFFFFF, 0x38801000, 0x33800000, 0xBF803000,
)  # fmt: skip
# The same for e4m3 where the largest value is 448, so that the scale is 1.
E4M3_EDGES = (
    448.0, 17.0, 19.0, -17.0, 2.0**-10, 1.5 * 2.0**-9, 1.01 * 2.0**-10, -(2.0**-10),
    -0.0, 7.5 * 2.0**-9, 440.0, 432.0, 1.0625, -1.1875, 0.99 * 2.0**-10, -447.0,
)  # fmt: skip


def half_code_row(d, bits):
    """Groups from 0 to 2^bits - 1, so that the scale is 1, with values midway between codes."""
    top = 2**bits - 1
    values = [0.0, float(top)] + [k % top + 0.5 for k in range(30)]
    return np.array([values[i % 32] for i in range(d)])


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
        lcg.normals(d) * 2e4,
        lcg.normals(d) * 1e36,
        one_hot * 3e38 - 3e38,  # a range beyond float32, and a length
        lcg.normals(d) * 1e-14,  # length below the smallest norm
        lcg.normals(d) * 1e-12 / np.sqrt(d),  # length near it
        outlier,
        mixed_zeros,
        one_hot,
        one_hot * 65519.99,  # the largest float16, just
        one_hot * -65520.0,
        one_hot * 3.3895314e38,  # the largest bfloat16
        one_hot * 3.4028235e38,  # the largest float32
        one_hot * 2.0**-149,
        (index < 2).astype(F32),  # half of the coordinates are exactly 0 once rotated
        (index < d // 2).astype(F32),
        np.full(d, 3.14159),  # constant groups
        np.full(d, -7e-8),
        np.where(index // 32 % 2 == 0, -0.0, index // 32 * 1000.0 + 0.1),
        np.where(index % 2 == 0, 1.0, -1.0),
        5.0 + (index % 8) * 1e-9 * 2.0**20 / (1 + index // 32),  # scales about 2^-14 and below
        (index % 5) * 3e-8,  # float16 subnormals and scales that become 0
        subnormal,
        subnormal * 2.0**100,
        patterns(d, BF16_EDGES),
        patterns(d, F16_EDGES),
        np.array([E4M3_EDGES[i % 16] for i in range(d)]),
        half_code_row(d, 2),
        half_code_row(d, 3) - 3.5,
        half_code_row(d, 4),
        half_code_row(d, 8) * 0.25,
        near_tie_row(lcg, d, 1),
        near_tie_row(lcg, d, 2),
        near_tie_row(lcg, d, 3),
        near_tie_row(lcg, d, 4),
        near_tie_row(lcg, d, 4) * F32(37.5),
        near_tie_row(lcg, d, 8),
    ]
    if d >= 64:
        rows.append(near_tie_recipe_row(lcg, d, "turboquant25", 1))
        rows.append(near_tie_recipe_row(lcg, d, "turboquant35", 12.5))
    return np.array([np.asarray(row).astype(F32) for row in rows])


# ---- files ----


def fnv(data):
    """FNV-1a, 64 bits."""
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return f"{state:016x}"


def case_line(codec, encoded):
    """The line of cases.txt; `encoded` has None where a row is refused."""
    kept = [data for data in encoded if data is not None]
    decoded = b"".join(codec.decode(data).astype("<f4").tobytes() for data in kept)
    published = [codec.decode_published(data) for data in kept]
    fields = [
        codec.d,
        codec.name,
        codec.rotation_name,
        codec.group,
        codec.norm_correction,
        "-" if codec.channels is None else ",".join(str(c) for c in codec.channels),
        len(kept[0]),
        "".join("R" if data is None else "." for data in encoded),
        fnv(decoded),
        "-" if published[0] is None else fnv(b"".join(row.astype("<f4").tobytes() for row in published)),
    ]
    return " ".join(str(field) for field in fields) + "\n"


def golden():
    """Name and bytes of every golden file."""
    cases = ""
    for d in DIMS:
        rows = inputs(d)
        yield f"inputs_d{d}.f32", rows.astype("<f4").tobytes()
        all_encoded = b""
        for codec in formats(d):
            encoded = [codec.encode(row) for row in rows]
            cases += case_line(codec, encoded)
            if codec.name != "f32":  # its rows are the inputs
                all_encoded += b"".join(data for data in encoded if data is not None)
        yield f"encoded_d{d}.rows", all_encoded
    yield "cases.txt", cases.encode("ascii")
    matrices = [("qr", d, seed) for d in DIMS for seed in (SEED, SEED + 1000)]
    matrices += [("rht", d, SEED) for d in DIMS if is_power_of_two(d)]
    matrices += [("block", d, SEED) for d in (16, 48, 80, 96, 144, 240)]
    lines = [f"{kind} {d} {seed} {fnv(matrix_of(kind, d, seed).tobytes())}\n" for kind, d, seed in matrices]
    yield "rotations.txt", "".join(lines).encode("ascii")


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
    np.seterr(under="ignore", over="ignore", invalid="ignore")
    main()
