"""Independent implementation of the row formats in numpy, written from FORMATS.md; make_rows.py makes golden rows of it.

A new format is one more class with encode(row), which gives None for a row that is refused, and decode(row bytes).
"""
import json
import math
import pathlib
import struct

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
DIMS = (16, 64, 80, 96, 128, 192, 256)
SEED = 42
F32 = np.float32
F64 = np.float64


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


def normals(seed, n):
    """n >= 16 normal numbers in float64."""
    outputs = mt19937(seed)

    def uniform():
        high = next(outputs)
        return ((high << 32 | next(outputs)) & 2**53 - 1) * 2.0**-53

    def transform(first):
        for j in range(first, first + 8):
            u1, u2 = 1 - buf[j], buf[j + 8]
            r = math.sqrt(-2 * math.log(u1))
            buf[j] = r * math.cos(2 * math.pi * u2)
            buf[j + 8] = r * math.sin(2 * math.pi * u2)

    buf = [uniform() for _ in range(n)]
    for first in range(0, n - 15, 16):
        transform(first)
    if n % 16:
        buf[n - 16 :] = [uniform() for _ in range(16)]
        transform(n - 16)
    return np.array(buf)


# ---- rotations (FORMATS 2) ----


def butterflies(x):
    """Unnormalised Sylvester transform of a power of two, strides 1, 2, 4, ..."""
    x = x.copy()
    stride = 1
    while stride < len(x):
        pairs = x.reshape(-1, 2, stride)
        a, b = pairs[:, 0].copy(), pairs[:, 1].copy()
        pairs[:, 0] = a + b
        pairs[:, 1] = a - b
        stride *= 2
    return x


def blocks(d):
    """Ranges of descending powers of two that add up to d."""
    first = 0
    while first < d:
        size = 1 << (d - first).bit_length() - 1
        yield slice(first, first + size)
        first += size


def block_butterflies(x):
    return np.concatenate([butterflies(x[part]) for part in blocks(len(x))])


def block_factors(d):
    return np.concatenate(
        [np.full(part.stop - part.start, F32(1.0 / math.sqrt(part.stop - part.start))) for part in blocks(d)]
    )


class Rht:
    """y = s2 * (1/sqrt(d)) H (s1 * x), every operation rounded to float32."""

    def __init__(self, d, seed):
        outputs = mt19937(seed)
        self.s1 = signs(outputs, d)
        self.s2 = signs(outputs, d)
        self.factor = F32(1.0 / math.sqrt(d))

    def forward(self, x):
        return self.s2 * (butterflies(self.s1 * x) * self.factor)

    def backward(self, y):
        return self.s1 * (butterflies(self.s2 * y) * self.factor)


class Qr:
    """Q of a Gaussian matrix. A sum is taken over increasing index in float64, then rounded once."""

    made = {}

    def __init__(self, d, seed):
        if (d, seed) not in self.made:
            q, r = np.linalg.qr(normals(seed, d * d).reshape(d, d))
            q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
            if np.linalg.det(q) < 0:
                q[:, 0] = -q[:, 0]
            self.made[d, seed] = q.astype(F32)
        self.matrix = self.made[d, seed]

    @staticmethod
    def product(matrix, x):
        total = np.zeros(len(x))
        for column, value in zip(matrix.T.astype(F64), x.astype(F64)):
            total += column * value
        return total.astype(F32)

    def forward(self, x):
        return self.product(self.matrix, x)

    def backward(self, y):
        return self.product(self.matrix.T, y)


class Block:
    """Forward H(sign * x), backward sign * H(y), normalised; blocks of powers of two."""

    def __init__(self, d, seed):
        self.signs = signs(mt19937(seed), d)
        self.factors = block_factors(d)

    def forward(self, x):
        return block_butterflies(self.signs * x) * self.factors

    def backward(self, y):
        return self.signs * (block_butterflies(y) * self.factors)


def is_power_of_two(d):
    return d & d - 1 == 0


ROTATIONS = {"rht": Rht, "qr": Qr, "block": Block}


def matrix_of(kind, d, seed):
    rotation = ROTATIONS[kind](d, seed)
    return np.array([rotation.backward(unit) for unit in np.eye(d, dtype=F32)])


# ---- codebooks (FORMATS 3) ----


class Codebook:
    """Float32 centroids and interior boundaries from the exact table; one bit has a closed form."""

    table = {}

    def __init__(self, d, bits):
        if not self.table:
            for e in json.loads((HERE / "exact_codebooks.json").read_text(encoding="ascii")):
                self.table[e["d"], e["bits"]] = [float(text) for text in e["positive_centroids"]]
        if (d, bits) in self.table:
            positive = np.array(self.table[d, bits])
        else:  # the mean of the positive half: 2 C / (d - 1)
            assert bits == 1
            log_c = math.lgamma(d / 2) - math.lgamma((d - 1) / 2) - math.log(math.pi) / 2
            positive = np.array([2 * math.exp(log_c) / (d - 1)])
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


def half_bytes(values):
    """float16, nearest-even, with subnormals; None where one would be infinite."""
    values = np.atleast_1d(values)
    if np.any(np.abs(values) >= 65520):
        return None
    return values.astype("<f2").tobytes()


def halves(data):
    return np.frombuffer(data, dtype="<f2").astype(F32)


# ---- formats (FORMATS 5) ----


class Format:
    """Columns of cases.txt that most formats leave alone."""

    rotation_name = "-"
    group = 0
    norm_correction = 0
    channels = None

    def decode_published(self, data):
        return None


class Dense32(Format):
    name = "f32"

    def __init__(self, d):
        self.d = d

    def encode(self, row):
        return row.astype("<f4").tobytes()

    def decode(self, data):
        return np.frombuffer(data, dtype="<f4")


class Half(Format):
    name = "f16"

    def __init__(self, d):
        self.d = d

    def encode(self, row):
        return half_bytes(row)

    def decode(self, data):
        return halves(data)


class Bfloat16(Format):
    """Nearest-even by arithmetic: a bfloat16 of exponent e is a multiple of 2^(e - 7), subnormals of 2^-133."""

    name = "bf16"

    def __init__(self, d):
        self.d = d

    @staticmethod
    def round(x):
        x = float(x)
        _, exponent = np.frexp(x)  # x = m 2^exponent, 0.5 <= |m| < 1
        unit = 2.0 ** max(int(exponent) - 8, -133)
        return float(np.copysign(np.rint(x / unit) * unit, x))

    def encode(self, row):
        rounded = [self.round(x) for x in row]
        if max(abs(x) for x in rounded) >= 2.0**128:
            return None
        return b"".join(struct.pack("<f", x)[2:] for x in rounded)

    def decode(self, data):
        padded = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        return np.frombuffer(padded, dtype="<f4")


class Fp8(Format):
    """[d bytes e4m3][scale f32]. A number of exponent e is a multiple of 2^(e - 3), subnormals of 2^-9."""

    name = "fp8"

    def __init__(self, d):
        self.d = d
        self.numbers = [(8 + c % 8) * 2.0 ** (c // 8 - 10) if c >= 8 else c * 2.0**-9 for c in range(127)]

    def code(self, x):
        size = abs(float(x))
        _, exponent = np.frexp(size)
        unit = 2.0 ** max(int(exponent) - 4, -9)
        size = min(float(np.rint(size / unit) * unit), 448.0)
        return self.numbers.index(size) | (0x80 if np.signbit(x) else 0)

    def encode(self, row):
        scale = max(np.max(np.abs(row)) / F32(448), F32(1e-12))
        return bytes(self.code(x) for x in row / scale) + struct.pack("<f", scale)

    def decode(self, data):
        (scale,) = struct.unpack("<f", data[-4:])
        numbers = [self.numbers[c & 0x7F] * (-1.0 if c & 0x80 else 1.0) for c in data[:-4]]
        return np.array(numbers, dtype=F32) * F32(scale)


class Tq(Format):
    """tqN: [pack(indices, N)][norm f32]"""

    def __init__(self, d, bits, rotation=None, norm_correction=0):
        self.d = d
        self.bits = bits
        self.name = f"tq{bits}"
        self.rotation_name = rotation or ("rht" if is_power_of_two(d) else "qr")
        self.rotation = ROTATIONS[self.rotation_name](d, SEED)
        self.norm_correction = norm_correction
        self.codebook = Codebook(d, bits)

    def quantise(self, row):
        size = length(row)
        if not np.isfinite(size):
            return None, None
        norm = max(size, F32(1e-12))
        return self.codebook.index(self.rotation.forward(row / norm)), norm

    def encode(self, row):
        indices, norm = self.quantise(row)
        if indices is None:
            return None
        if self.norm_correction:
            norm = norm / max(length(self.codebook.centroids[indices]), F32(1e-12))
            if not np.isfinite(norm):
                return None
        return pack(indices, self.bits) + struct.pack("<f", norm)

    def decode(self, data):
        (norm,) = struct.unpack("<f", data[-4:])
        indices = unpack(data[:-4], self.d, self.bits)
        return self.rotation.backward(self.codebook.centroids[indices]) * F32(norm)


class Tqp(Tq):
    """tqpN: [pack(indices, N-1)][pack(signs, 1)][norm f32][residual norm f32]"""

    def __init__(self, d, bits, rotation=None):
        super().__init__(d, bits - 1, rotation)
        self.name = f"tqp{bits}"
        self.s = signs(mt19937(SEED + 1000), d) if is_power_of_two(d) else None
        self.q = None if is_power_of_two(d) else Qr(d, SEED + 1000)

    def project(self, r):
        return butterflies(self.s * r) if self.q is None else self.q.forward(r)

    def encode(self, row):
        indices, norm = self.quantise(row)
        if indices is None:
            return None
        rest = row - self.rotation.backward(self.codebook.centroids[indices]) * norm
        rest_norm = length(rest)
        if not np.isfinite(rest_norm):
            return None
        plus = self.project(rest) >= 0
        return pack(indices, self.bits) + pack(plus, 1) + struct.pack("<ff", norm, rest_norm)

    def decode(self, data):
        norm, rest_norm = (F32(x) for x in struct.unpack("<ff", data[-8:]))
        split = self.d * self.bits // 8
        indices = unpack(data[:split], self.d, self.bits)
        z = unpack(data[split:-8], self.d, 1).astype(F32) * F32(2) - F32(1)
        mean = self.rotation.backward(self.codebook.centroids[indices]) * norm
        if self.q is None:
            return mean + rest_norm * F32(math.sqrt(math.pi / 2) / self.d) * (self.s * butterflies(z))
        return mean + rest_norm * F32(math.sqrt(math.pi / 2) / math.sqrt(self.d)) * self.q.backward(z)


class Vn(Format):
    """vN: [pack(codes, N)][scale f16 x groups][zero f16 x groups]"""

    def __init__(self, d, bits, group=0):
        self.d = d
        self.bits = bits
        self.name = f"v{bits}"
        self.group = group
        self.size = group or 32
        self.n_groups = -(-d // self.size)

    def encode(self, row):
        top = F32(2**self.bits - 1)
        codes, scales, zeros = [], [], []
        for first in range(0, self.d, self.size):
            v = row[first : first + self.size]
            low, high = min(v) + F32(0), max(v)
            if not np.isfinite(high - low):
                return None
            scale = max((high - low) / top, F32(1e-12))
            code = np.minimum(np.rint((v - low) / scale), top)
            codes += [int(c) for c in code] + [0] * (self.size - len(v))
            scales.append(scale)
            zeros.append(low)
        scale_bytes, zero_bytes = half_bytes(np.array(scales)), half_bytes(np.array(zeros))
        if scale_bytes is None or zero_bytes is None:
            return None
        return pack(codes, self.bits) + scale_bytes + zero_bytes

    def decode(self, data):
        split = len(data) - 4 * self.n_groups
        codes = unpack(data[:split], self.d, self.bits).astype(F32)
        scales = np.repeat(halves(data[split : split + 2 * self.n_groups]), self.size)[: self.d]
        zeros = np.repeat(halves(data[split + 2 * self.n_groups :]), self.size)[: self.d]
        return codes * scales + zeros


class RecipeGroup:
    """[pack(indices)][pack(signs)][norm f16][residual norm f16]"""

    def __init__(self, dim, bits, seed, sign_seed):
        self.dim = dim
        self.bits = bits
        self.n_bytes = (bits + 1) * dim // 8 + 4
        self.codebook = Codebook(dim, bits)
        self.rotation = Block(dim, 20250428 + seed + dim)
        self.signs = signs(mt19937(20250428 + 10000 + sign_seed + dim), dim)
        sizes = np.concatenate([np.full(part.stop - part.start, part.stop - part.start) for part in blocks(dim)])
        self.exact = (math.sqrt(math.pi / 2) / np.sqrt(dim * sizes.astype(F64))).astype(F32)
        self.published = np.full(dim, F32(math.sqrt(math.pi / 2) / dim))

    def encode(self, g):
        norm = max(length(g), F32(1e-12))
        if not norm < 65520:
            return None
        unit = g / norm
        indices = self.codebook.index(self.rotation.forward(unit))
        rest = unit - self.rotation.backward(self.codebook.centroids[indices])
        plus = block_butterflies(self.signs * rest) >= 0
        return pack(indices, self.bits) + pack(plus, 1) + half_bytes(norm) + half_bytes(length(rest))

    def decode(self, data, factors):
        norm, rest_norm = halves(data[-4:])
        split = self.dim * self.bits // 8
        indices = unpack(data[:split], self.dim, self.bits)
        z = unpack(data[split:-4], self.dim, 1).astype(F32) * F32(2) - F32(1)
        mean = self.rotation.backward(self.codebook.centroids[indices])
        return (mean + factors * rest_norm * (self.signs * block_butterflies(z))) * norm


class Recipe(Format):
    parts = {"turboquant25": (0.25, 2, 1), "turboquant35": (0.5, 3, 2)}

    def __init__(self, d, name, channels=None):
        self.d = d
        self.name = name
        ratio, high_bits, low_bits = self.parts[name]
        n_high = self.n_high(d, name)
        self.channels = channels
        self.high_list = list(range(n_high)) if channels is None else channels
        self.low_list = [i for i in range(d) if i not in self.high_list]
        self.high = RecipeGroup(n_high, high_bits, 101, 307)
        self.low = RecipeGroup(d - n_high, low_bits, 211, 401)

    @classmethod
    def n_high(cls, d, name):
        return round(d * cls.parts[name][0] / 16) * 16

    def encode(self, row):
        parts = self.high.encode(row[self.high_list]), self.low.encode(row[self.low_list])
        return None if None in parts else b"".join(parts)

    def put(self, data, high_factors, low_factors):
        row = np.zeros(self.d, dtype=F32)
        row[self.high_list] = self.high.decode(data[: self.high.n_bytes], high_factors)
        row[self.low_list] = self.low.decode(data[self.high.n_bytes :], low_factors)
        return row

    def decode(self, data):
        return self.put(data, self.high.exact, self.low.exact)

    def decode_published(self, data):
        return self.put(data, self.high.published, self.low.published)


def spread(d, name):
    """A list of high channels that is not the default; 7 divides no d."""
    return sorted((7 * i + 3) % d for i in range(Recipe.n_high(d, name)))


def formats(d):
    """Every case of one dim."""
    yield from (Dense32(d), Half(d), Bfloat16(d), Fp8(d))
    yield from (Tq(d, bits) for bits in range(1, 9))
    yield from (Tqp(d, bits) for bits in range(2, 6))
    yield from (Tq(d, bits, norm_correction=1) for bits in (1, 4))
    if d == 64:
        yield from (Tq(d, 3, "qr"), Tqp(d, 3, "qr"))
    if d >= 32:
        yield from (Vn(d, bits) for bits in (2, 3, 4, 8))
        yield from (Vn(d, 2, 48), Vn(d, 3, 48), Vn(d, 4, 20), Vn(d, 8, 20))
    yield from (Vn(d, 3, 7), Vn(d, 4, d))
    if d == 16:
        yield Vn(d, 8, 1)
    if d >= 64:
        for name in Recipe.parts:
            yield from (Recipe(d, name), Recipe(d, name, spread(d, name)))
