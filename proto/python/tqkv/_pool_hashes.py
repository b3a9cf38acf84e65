"""What a pool's JSON has only by its hash, computed here a second time from the codecs that were made.

XXH3-128 over float32 and 16-bit numbers, little-endian, over the layers in order: of those that share a codec the
first, a codebook and a matrix once. So codebooks or matrices that are not the pool's are noticed before a row is packed.
"""

import numpy as np

from ._formats import Recipe, Tq, Tqp
from ._rotation import F32, Matrix
from ._xxh3 import xxh3_128

MEMBERS = ("rotation", "codebook", "projection", "channels")


def _matrix(turn, d):
    """The rows of what forward() multiplies with."""
    if isinstance(turn, Matrix):
        return turn.matrix.astype("<f4").tobytes()
    return np.ascontiguousarray(turn.backward(np.eye(d, dtype=F32)), "<f4").tobytes()


def _mean(rows):
    """The part of a format that has a codebook and a rotation."""
    return rows if isinstance(rows, Tq) else rows.mean if isinstance(rows, Tqp) else None


def _codebooks(rows):
    if isinstance(rows, Recipe):
        return [(group.dim, group.bits, group.codebook) for group in (rows.high, rows.low)]
    mean = _mean(rows)
    return [] if mean is None else [(mean.d, mean.bits, mean.codebook)]


def _of_codebooks(codecs):
    parts, seen = [], set()
    for codec in codecs:
        books = _codebooks(codec._format)
        parts += [np.ascontiguousarray(book.centroids, "<f4").tobytes() for d, bits, book in books
                  if (d, bits) not in seen]
        seen |= {(d, bits) for d, bits, _ in books}
    return parts


def _of_rotations(codecs):
    parts, seen = [], []
    for codec in codecs:
        mean = _mean(codec._format)
        if mean is None:
            continue
        matrix = _matrix(mean.turn, mean.d)
        # Formats that share a seed share a rotation, and layers with a seed of their own do not.
        if (mean.turn.seed, matrix) not in seen:
            seen.append((mean.turn.seed, matrix))
            parts.append(matrix)
    return parts


def _of_projections(codecs):
    return [codec._format.projection_matrix().astype("<f4").tobytes() for codec in codecs
            if isinstance(codec._format, Tqp)]


def _of_channels(layers):
    return [np.array(codec._format.high_channels + codec._format.low_channels, "<u2").tobytes()
            for heads in layers for codec in heads if isinstance(codec._format, Recipe)]


def side_hashes(layers):
    """{member: hash or None} of the codecs [layers][kv_heads] of K or V."""
    different = []
    for heads in layers:
        if heads[0] not in different:
            different.append(heads[0])
    found = dict(zip(MEMBERS, (_of_rotations(different), _of_codebooks(different), _of_projections(different),
                               _of_channels(layers))))
    return {member: xxh3_128(b"".join(parts)) if parts else None for member, parts in found.items()}


def check_side(pool, side, layers):
    """ValueError where the pool's hash of something is not that of what was made here."""
    for member, made in side_hashes(layers).items():
        told = pool.get(f"{side}_{member}")
        if member == "rotation":
            told = None if told is None else told.get("matrix")
        if told == made:
            continue
        text = f"{side}_{member} is not that of the pool: {told or 'none'}, made here {made or 'none'}"
        if member == "codebook":
            text += " (the pool has a codebook of its own, which the daemon does not tell)"
        raise ValueError(text)


def check_center(pool, center):
    if center is not None and xxh3_128(np.ascontiguousarray(center, "<f4").tobytes()) != pool["k_center"]:
        raise ValueError("k_center is not that of the pool")
