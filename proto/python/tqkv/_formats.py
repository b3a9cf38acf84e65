"""The row formats: encode and decode of [rows, d]. encode gives the bytes and which rows cannot be stored."""

import math

import numpy as np

from ._rotation import (F32, F64, Codebook, Hadamard, Matrix, block_butterflies, butterflies, by_block, is_power_of_two,
                        outputs, qr, signs)

NORM_MIN = F32(1e-12)
PROJECTION_SEED_OFFSET = 1000
RECIPE_SEED, RECIPE_SIGNS_SEED = 20250428, 20250428 + 10000
RECIPES = {"turboquant25": (0.25, 2, 1), "turboquant35": (0.5, 3, 2)}  # share of high channels, bits high, bits low


def packed_bytes(n, bits):
    return (n * bits + 7) // 8


def pack(codes, bits):
    """[rows, n] codes to [rows, bytes], low bits first."""
    stream = np.unpackbits(codes.astype(np.uint8)[..., None], axis=-1, count=bits, bitorder="little")
    return np.packbits(stream.reshape(len(codes), -1), axis=-1, bitorder="little")


def unpack(data, n, bits):
    stream = np.unpackbits(data, axis=-1, bitorder="little")[:, :n * bits].reshape(len(data), n, bits)
    return np.packbits(stream, axis=-1, bitorder="little")[..., 0]


def _length(x):
    """Squares in float64 added as a tree over the next power of two, one root, one rounding."""
    s = np.zeros((len(x), 1 << (x.shape[1] - 1).bit_length()))
    s[:, :x.shape[1]] = x.astype(F64) ** 2
    while s.shape[1] > 1:
        half = s.shape[1] // 2
        s = s[:, :half] + s[:, half:]
    return np.sqrt(s[:, 0]).astype(F32)


def _bytes_of(numbers, dtype):
    """[rows] or [rows, n] numbers as bytes [rows, ..]."""
    numbers = np.ascontiguousarray(numbers.reshape(len(numbers), -1), dtype)
    return numbers.view(np.uint8).reshape(len(numbers), -1)


def _numbers_of(data, dtype):
    return np.ascontiguousarray(data).view(dtype).astype(F32)


class Dense:
    def __init__(self, name, d):
        self.name, self.d = name, d
        self.row_bytes = d * (4 if name == "f32" else 2)

    def encode(self, x):
        if self.name == "f32":
            return _bytes_of(x, "<f4"), np.zeros(len(x), bool)
        if self.name == "f16":
            return _bytes_of(x.astype("<f2"), "<f2"), (np.abs(x) >= 65520).any(axis=1)
        bits = np.ascontiguousarray(x, "<f4").view("<u4").astype(np.uint64)
        half = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        return _bytes_of(half, "<u2"), ((half & np.uint64(0x7F80)) == 0x7F80).any(axis=1)

    def decode(self, data):
        if self.name == "bf16":
            wide = np.ascontiguousarray(data).view("<u2").astype("<u4") << np.uint32(16)
            return wide.view("<f4").astype(F32)
        return _numbers_of(data, "<f4" if self.name == "f32" else "<f2")

    def valid(self, data):
        return np.isfinite(self.decode(data)).all(axis=1)


class Fp8:
    """[codes e4m3][scale f32]"""

    NUMBERS = np.array([c * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)])

    def __init__(self, d):
        self.name, self.d, self.row_bytes = "fp8", d, d + 4

    def encode(self, x):
        scale = np.maximum(np.abs(x).max(axis=1) / F32(448), NORM_MIN)
        y = x / scale[:, None]
        size = np.abs(y.astype(F64))
        # A number of exponent e is a multiple of 2^(e - 3), subnormals of 2^-9; frexp counts from 1/2.
        unit = np.ldexp(1.0, np.maximum(np.frexp(size)[1] - 4, -9))
        size = np.minimum(np.rint(size / unit) * unit, 448)
        sign = np.where(np.signbit(y), np.uint8(128), np.uint8(0))
        codes = np.searchsorted(self.NUMBERS, size).astype(np.uint8) | sign
        return np.concatenate((codes, _bytes_of(scale, "<f4")), axis=1), np.zeros(len(x), bool)

    def decode(self, data):
        codes = data[:, :self.d]
        numbers = np.append(self.NUMBERS, np.nan).astype(F32)[codes & 127]
        return np.where(codes & 128, -numbers, numbers) * _numbers_of(data[:, self.d:], "<f4")

    def valid(self, data):
        scale = _numbers_of(data[:, self.d:], "<f4")[:, 0]
        return ((data[:, :self.d] & 127) != 127).all(axis=1) & np.isfinite(scale) & ~(scale < 0)


def _norms_valid(norms):
    return (np.isfinite(norms) & ~(norms < 0)).all(axis=1)


class Tq:
    """[indices][norm f32]"""

    def __init__(self, d, bits, turn, norm_correction=False):
        self.name, self.d, self.bits, self.turn = f"tq{bits}", d, bits, turn
        self.norm_correction = norm_correction
        self.codebook = Codebook(d, bits)
        self.n_index_bytes = packed_bytes(d, bits)
        self.row_bytes = self.n_index_bytes + 4

    def quantise(self, x):
        norm = np.maximum(_length(x), NORM_MIN)
        bad = ~np.isfinite(norm)
        safe = np.where(bad, F32(1), norm)
        return self.codebook.index(self.turn.forward(x / safe[:, None])), norm, bad

    def encode(self, x):
        codes, norm, bad = self.quantise(x)
        if self.norm_correction:
            norm = norm / np.maximum(_length(self.codebook.centroids[codes]), NORM_MIN)
            bad = bad | ~np.isfinite(norm)
        return np.concatenate((pack(codes, self.bits), _bytes_of(norm, "<f4")), axis=1), bad

    def decode(self, data):
        codes = unpack(data[:, :self.n_index_bytes], self.d, self.bits)
        return self.turn.backward(self.codebook.centroids[codes]) * _numbers_of(data[:, self.n_index_bytes:], "<f4")

    def valid(self, data):
        return _norms_valid(_numbers_of(data[:, self.n_index_bytes:], "<f4"))


class Tqp:
    """[indices, one bit less][signs][norm f32][residual norm f32]"""

    def __init__(self, d, bits, turn, projection=None):
        self.mean = Tq(d, bits - 1, turn)
        self.name, self.d = f"tqp{bits}", d
        self.n_index_bytes = self.mean.n_index_bytes
        self.row_bytes = self.n_index_bytes + d // 8 + 8
        self.given = None if projection is None else Matrix(projection, 0)
        self.signs = self.dense = None
        if self.given is None and is_power_of_two(d):
            self.signs = signs(outputs(turn.seed + PROJECTION_SEED_OFFSET, d))
        elif self.given is None:
            self.dense = qr(d, (turn.seed + PROJECTION_SEED_OFFSET) % 2**32)

    def _project(self, rest):
        if self.signs is not None:
            return butterflies(self.signs * rest)
        return (self.given or self.dense).forward(rest)

    def projection_matrix(self):
        """S, [d, d], as its rows are multiplied with: those of a matrix that was given, unnormalised butterflies, or qr."""
        if self.signs is not None:
            return butterflies(np.eye(self.d, dtype=F32)) * self.signs
        return (self.given or self.dense).matrix

    def _back(self, z):
        """sqrt(pi/2) / d times S^T z; the rows of S have length sqrt(d), those of the qr matrix 1."""
        if self.signs is not None:
            return F32(math.sqrt(math.pi / 2) / self.d), self.signs * butterflies(z)
        if self.given:
            return F32(math.sqrt(math.pi / 2) / self.d), self.given.backward(z)
        return F32(math.sqrt(math.pi / 2) / math.sqrt(self.d)), self.dense.backward(z)

    def encode(self, x):
        codes, norm, bad = self.mean.quantise(x)
        safe = np.where(bad, F32(1), norm)
        rest = x - self.mean.turn.backward(self.mean.codebook.centroids[codes]) * safe[:, None]
        rest_norm = _length(rest)
        bad = bad | ~np.isfinite(rest_norm)
        plus = self._project(rest) >= 0
        return np.concatenate((pack(codes, self.mean.bits), pack(plus, 1), _bytes_of(norm, "<f4"),
                               _bytes_of(rest_norm, "<f4")), axis=1), bad

    def decode(self, data):
        at = self.n_index_bytes
        norms = _numbers_of(data[:, -8:], "<f4")
        z = unpack(data[:, at:at + self.d // 8], self.d, 1).astype(F32) * F32(2) - F32(1)
        mean = self.mean.turn.backward(self.mean.codebook.centroids[unpack(data[:, :at], self.d, self.mean.bits)])
        factor, back = self._back(z)
        return mean * norms[:, :1] + norms[:, 1:] * factor * back

    def valid(self, data):
        return _norms_valid(_numbers_of(data[:, -8:], "<f4"))


class Vn:
    """[codes][scales f16][zeros f16]"""

    def __init__(self, d, bits, group=32):
        if not 1 <= group <= d:
            raise ValueError(f"group {group}: expected 1 to {d}")
        self.name, self.d, self.bits, self.group = f"v{bits}", d, bits, group
        self.n_groups = -(-d // group)
        self.n_code_bytes = packed_bytes(group * self.n_groups, bits)
        self.row_bytes = self.n_code_bytes + 4 * self.n_groups

    def encode(self, x):
        top = F32(2**self.bits - 1)
        codes = np.zeros((len(x), self.n_groups * self.group), np.uint8)  # padding is 0
        scales, zeros = np.zeros((len(x), self.n_groups), F32), np.zeros((len(x), self.n_groups), F32)
        for g in range(self.n_groups):
            part = x[:, g * self.group:(g + 1) * self.group]
            zero = part.min(axis=1) + F32(0)  # -0 is stored as 0
            scale = np.maximum((part.max(axis=1) - zero) / top, NORM_MIN)
            code = np.minimum(np.rint((part - zero[:, None]) / scale[:, None]), top)
            codes[:, g * self.group:g * self.group + part.shape[1]] = np.where(np.isfinite(code), code, 0)
            scales[:, g], zeros[:, g] = scale, zero
        # A range that overflows float32 is an infinite scale.
        bad = ((scales >= 65520) | (np.abs(zeros) >= 65520)).any(axis=1)
        return np.concatenate((pack(codes, self.bits), _bytes_of(scales.astype("<f2"), "<f2"),
                               _bytes_of(zeros.astype("<f2"), "<f2")), axis=1), bad

    def _fields(self, data):
        numbers = _numbers_of(data[:, self.n_code_bytes:], "<f2")
        return numbers[:, :self.n_groups], numbers[:, self.n_groups:]

    def decode(self, data):
        scales, zeros = (np.repeat(part, self.group, axis=1)[:, :self.d] for part in self._fields(data))
        return unpack(data[:, :self.n_code_bytes], self.d, self.bits).astype(F32) * scales + zeros

    def valid(self, data):
        scales, zeros = self._fields(data)
        stream = np.unpackbits(data[:, :self.n_code_bytes], axis=-1, bitorder="little")
        return _norms_valid(scales) & np.isfinite(zeros).all(axis=1) & ~stream[:, self.d * self.bits:].any(axis=1)


class RecipeGroup:
    """[indices][signs][norm f16][residual norm f16] of some channels"""

    def __init__(self, dim, bits, seed, signs_seed, scale):
        self.dim, self.bits = dim, bits
        self.n_index_bytes = packed_bytes(dim, bits)
        self.row_bytes = self.n_index_bytes + dim // 8 + 4
        self.codebook = Codebook(dim, bits)
        self.turn = Hadamard("block", dim, RECIPE_SEED + seed + dim)
        self.signs = signs(outputs(RECIPE_SIGNS_SEED + signs_seed + dim, dim))
        root = math.sqrt(math.pi / 2)
        self.factors = by_block(dim, lambda size: root / math.sqrt(dim * size) if scale == "exact" else root / dim)

    def encode(self, x):
        norm = np.maximum(_length(x), NORM_MIN)
        bad = ~(norm < 65520)
        unit = x / np.where(bad, F32(1), norm)[:, None]
        codes = self.codebook.index(self.turn.forward(unit))
        rest = unit - self.turn.backward(self.codebook.centroids[codes])
        plus = block_butterflies(self.signs * rest) >= 0
        norms = np.stack((norm, _length(rest)), axis=1).astype("<f2")
        return np.concatenate((pack(codes, self.bits), pack(plus, 1), _bytes_of(norms, "<f2")), axis=1), bad

    def decode(self, data):
        at = self.n_index_bytes
        norms = _numbers_of(data[:, -4:], "<f2")
        z = unpack(data[:, at:at + self.dim // 8], self.dim, 1).astype(F32) * F32(2) - F32(1)
        mean = self.turn.backward(self.codebook.centroids[unpack(data[:, :at], self.dim, self.bits)])
        return (mean + self.factors * norms[:, 1:] * (self.signs * block_butterflies(z))) * norms[:, :1]

    def valid(self, data):
        return _norms_valid(_numbers_of(data[:, -4:], "<f2"))


class Recipe:
    def __init__(self, name, d, high_channels=None, scale="exact"):
        n_high = high_channel_count(name, d)
        if n_high == 0:
            raise ValueError(f"{name} has no high channels at head_dim {d}")
        high = list(range(n_high)) if high_channels is None else [int(c) for c in high_channels]
        if len(high) != n_high or high != sorted(set(high)) or high[0] < 0 or high[-1] >= d:
            raise ValueError(f"high_channels: expected {n_high} ascending channels below {d}")
        _, high_bits, low_bits = RECIPES[name]
        self.name, self.d = name, d
        self.high_channels, self.low_channels = high, sorted(set(range(d)) - set(high))
        self.high = RecipeGroup(n_high, high_bits, 101, 307, scale)
        self.low = RecipeGroup(d - n_high, low_bits, 211, 401, scale)
        self.row_bytes = self.high.row_bytes + self.low.row_bytes

    def encode(self, x):
        (high, high_bad), (low, low_bad) = (group.encode(x[:, channels]) for group, channels in (
            (self.high, self.high_channels), (self.low, self.low_channels)))
        return np.concatenate((high, low), axis=1), high_bad | low_bad

    def decode(self, data):
        row = np.zeros((len(data), self.d), F32)
        row[:, self.high_channels] = self.high.decode(data[:, :self.high.row_bytes])
        row[:, self.low_channels] = self.low.decode(data[:, self.high.row_bytes:])
        return row

    def valid(self, data):
        at = self.high.row_bytes
        return self.high.valid(data[:, :at]) & self.low.valid(data[:, at:])


def high_channel_count(recipe, d):
    return round(d * RECIPES[recipe][0] / 16) * 16
