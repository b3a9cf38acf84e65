"""Random numbers, rotations and codebooks of the row formats, as float32, bit for bit.

Every operation that reaches a stored byte is rounded alone, in the order that the format prescribes.
"""

import functools
import math

import numpy as np

F32, F64 = np.float32, np.float64


def outputs(seed, n):
    """The first n 32-bit outputs of MT19937 seeded with init_genrand(seed mod 2^32)."""
    return np.random.RandomState(seed % 2**32).randint(0, 2**32, size=n, dtype=np.uint32)


def signs(words):
    return np.where(words & 1, F32(1), F32(-1))


def _normals(seed, n):
    n_drawn = n + (16 if n % 16 else 0)
    words = outputs(seed, 2 * n_drawn).astype(np.uint64)
    uniform = ((words[0::2] << np.uint64(32) | words[1::2]) & np.uint64(2**53 - 1)).astype(F64) * 2.0**-53
    buf = uniform[:n].tolist()

    def transform(first):
        # One by one: vectorised logarithms and cosines may round otherwise than those of libm.
        for j in range(first, first + 8):
            r, angle = math.sqrt(-2 * math.log(1 - buf[j])), 2 * math.pi * buf[j + 8]
            buf[j], buf[j + 8] = r * math.cos(angle), r * math.sin(angle)

    for first in range(0, n - 15, 16):
        transform(first)
    if n % 16:
        buf[n - 16:] = uniform[n:].tolist()
        transform(n - 16)
    return np.array(buf)


def butterflies(x):
    """Unnormalised Hadamard transform of the last axis, a power of two; strides 1, 2, 4, .."""
    n = x.shape[-1]
    stride = 1
    while stride < n:
        pairs = x.reshape(*x.shape[:-1], n // (2 * stride), 2, stride)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = np.stack((a + b, a - b), axis=-2).reshape(x.shape)
        stride *= 2
    return x


def _blocks(d):
    """Descending powers of two that add up to d, as slices."""
    first, parts = 0, []
    while first < d:
        size = 1 << (d - first).bit_length() - 1
        parts.append(slice(first, first + size))
        first += size
    return parts


def block_butterflies(x):
    return np.concatenate([butterflies(x[..., part]) for part in _blocks(x.shape[-1])], axis=-1)


def by_block(d, of_size):
    """A float32 for each channel that depends on the size of its block."""
    sizes = [part.stop - part.start for part in _blocks(d)]
    return np.concatenate([np.full(size, F32(of_size(size))) for size in sizes])


class Hadamard:
    """rht (signs on both sides, one block) and block (signs before, blocks of powers of two)."""

    def __init__(self, kind, d, seed):
        words = outputs(seed, 2 * d)
        self.d, self.seed = d, seed
        self.before = signs(words[:d])
        self.after = signs(words[d:]) if kind == "rht" else np.ones(d, F32)
        self.factors = by_block(d, lambda size: 1 / math.sqrt(size))

    def forward(self, x):
        return self.after * (block_butterflies(self.before * x) * self.factors)

    def backward(self, y):
        return self.before * (block_butterflies(self.after * y) * self.factors)


class Matrix:
    """A dense matrix; products are sums in float64 over ascending index, rounded once."""

    def __init__(self, matrix, seed):
        self.matrix = np.ascontiguousarray(matrix, F32)
        self.d, self.seed = len(self.matrix), seed

    @staticmethod
    def _product(matrix, x):
        total = np.zeros(x.shape, F64)
        for j in range(len(matrix)):
            total += x[..., j:j + 1].astype(F64) * matrix[:, j].astype(F64)
        return total.astype(F32)

    def forward(self, x):
        return self._product(self.matrix, x)

    def backward(self, y):
        return self._product(self.matrix.T, y)


@functools.lru_cache(maxsize=64)
def qr(d, seed):
    q, r = np.linalg.qr(_normals(seed, d * d).reshape(d, d))
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)
    if np.linalg.det(q) < 0:
        q[:, 0] = -q[:, 0]
    return Matrix(q.astype(F32), seed)


def is_power_of_two(d):
    return d & d - 1 == 0


def rotation(kind, d, seed=42):
    """rht, qr, block; None is the default of the dimension."""
    kind = kind or ("rht" if is_power_of_two(d) else "qr")
    if kind == "qr":
        return qr(d, seed % 2**32)
    if kind == "block" or (kind == "rht" and is_power_of_two(d)):
        return Hadamard(kind, d, seed)
    raise ValueError(f"no rotation {kind!r} of {d} channels")


# ---- codebooks ----

_POINTS, _WEIGHTS = np.polynomial.legendre.leggauss(24)


def _cells(bounds, d):
    """(mass, mean) of each cell between ascending bounds, the last of which is 1.

    The density is taken relative to its value at the lower end of the cell, so that nothing is lost where it is small;
    masses are in that unit.
    """
    power = (d - 3) / 2
    panels, owner = [], []
    for i in range(len(bounds) - 2):
        panels.append((bounds[i], bounds[i + 1]))
        owner.append(i)
    low, width = bounds[-2], min(1 / math.sqrt(d), (1 - bounds[-2]) / 2) / 4
    while low < 1:  # geometric panels towards 1
        high = 1.0 if low + 2 * width >= 1 else low + width
        panels.append((low, high))
        owner.append(len(bounds) - 2)
        low, width = high, 2 * width
    panels, owner = np.array(panels), np.array(owner)
    half = (panels[:, 1] - panels[:, 0])[:, None] / 2
    middle = (panels[:, 1] + panels[:, 0])[:, None] / 2
    reference = np.array(bounds[:-1])[owner][:, None]
    offset = half * _POINTS + middle - reference
    t = reference + offset
    g = ((1 - t) * (1 + t) / ((1 - reference) * (1 + reference))) ** power * (_WEIGHTS * half)
    n = len(bounds) - 1
    mass = np.bincount(owner, g.sum(axis=1), n)
    mean = np.array(bounds[:-1]) + np.bincount(owner, (offset * g).sum(axis=1), n) / mass
    return mass, mean


@functools.lru_cache(maxsize=64)
def solve(d, bits):
    """The positive half of the Lloyd-Max centroids of a coordinate of a random unit vector, in float64."""
    n, power = 2 ** (bits - 1), (d - 3) / 2
    grid = np.linspace(0, 1, 40001)
    # The best density of centroids is the cube root of the density, for many bits.
    total = np.cumsum((1 - grid**2) ** (power / 3))
    c = np.interp((np.arange(n) + 0.5) / n * total[-1], total, grid)
    for step in range(80):
        inner = (c[:-1] + c[1:]) / 2
        bounds = np.concatenate(([0.0], inner, [1.0]))
        mass, mean = _cells(bounds.tolist(), d)
        if step < 30 and n > 1:
            c = mean
            continue
        # Newton: mean(c) - c = 0; a boundary between two centroids moves with half of each.
        low, high = bounds[:-1], bounds[1:]
        at_high = ((1 - high**2) / (1 - low**2)) ** power
        by_low, by_high = (mean - low) / mass, at_high * (high - mean) / mass
        jacobian = -np.eye(n)
        for i in range(n):
            if i > 0:
                jacobian[i, i - 1] += by_low[i] / 2
                jacobian[i, i] += by_low[i] / 2
            if i + 1 < n:
                jacobian[i, i + 1] += by_high[i] / 2
                jacobian[i, i] += by_high[i] / 2
        move = np.linalg.solve(jacobian, c - mean)
        c = c + move
        if np.abs(move).max() < 1e-13:
            break
    return c


class Codebook:
    def __init__(self, d, bits):
        half = solve(d, bits)
        centroids = np.concatenate((-half[::-1], half))
        self.centroids = centroids.astype(F32)
        self.boundaries = ((centroids[:-1] + centroids[1:]) / 2).astype(F32)

    def index(self, y):
        """The number of interior boundaries strictly below each value."""
        return np.searchsorted(self.boundaries, y, side="left").astype(np.uint8)
