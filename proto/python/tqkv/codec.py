"""Row codec: packs K and V rows in this process, byte for byte as the daemon stores them.

    codec = tqkv.codec.RowCodec("tq4", 128)
    packed = codec.encode(rows)              # [.., 128] float32 to [.., codec.row_bytes] uint8
    rows = codec.decode(packed)

A row that cannot be stored raises BadRow with its index. PoolCodec is the codec of all layers of a pool, from the
pool's canonical JSON. Every operation that reaches a byte is rounded alone, in the order that the format prescribes.
"""

import json

import numpy as np

from . import _pool_hashes
from ._formats import RECIPES, Dense, Fp8, Recipe, Tq, Tqp, Vn, high_channel_count
from ._rotation import F32, Codebook, Matrix, rotation, solve

__all__ = ["BadRow", "Codebook", "PoolCodec", "RowCodec", "high_channel_count", "rotation", "solve"]
HEAD_DIMS = range(16, 257, 16)


class BadRow(ValueError):
    """A row that cannot be stored, or bytes that are no row. `row` counts over all rows of the call."""

    def __init__(self, row, what):
        super().__init__(f"row {row}: {what}")
        self.row = row


def _bits_of(name, prefix, allowed):
    text = name[len(prefix):]
    is_number = name.startswith(prefix) and text.isdigit() and text == str(int(text))
    return int(text) if is_number and int(text) in allowed else 0


class RowCodec:
    """One row format at one head dimension.

    rotation: None (the dimension's default), "rht", "qr", or a matrix of float32 [d, d]. Options that the format does
    not have raise ValueError.
    """

    def __init__(self, name, head_dim, *, rotation=None, seed=42, group=None, norm_correction=False, high_channels=None,
                 recipe_scale=None, projection=None):
        if head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim {head_dim}: expected a multiple of 16 from 16 to 256")
        if recipe_scale not in (None, "exact", "published"):
            raise ValueError(f"recipe_scale {recipe_scale!r}: expected 'exact' or 'published'")
        tq, tqp = _bits_of(name, "tq", range(1, 9)), _bits_of(name, "tqp", range(2, 6))
        vn = _bits_of(name, "v", (2, 3, 4, 8))
        for option, is_given, is_taken in (
            ("group", group is not None, vn),
            ("norm_correction", norm_correction, tq),
            ("high_channels", high_channels is not None, name in RECIPES),
            ("recipe_scale", recipe_scale is not None, name in RECIPES),
            ("projection", projection is not None, tqp),
        ):
            if is_given and not is_taken:
                raise ValueError(f"row format {name!r} takes no {option}")
        if name in ("f32", "f16", "bf16"):
            self._format = Dense(name, head_dim)
        elif name == "fp8":
            self._format = Fp8(head_dim)
        elif vn:
            self._format = Vn(head_dim, vn, 32 if group is None else group)
        elif name in RECIPES:
            self._format = Recipe(name, head_dim, high_channels, recipe_scale or "exact")
        elif tq or tqp:
            turn = _turn_of(rotation, head_dim, seed)
            self._format = (Tq(head_dim, tq, turn, norm_correction) if tq else
                            Tqp(head_dim, tqp, turn, None if projection is None else np.asarray(projection, F32)))
        else:
            raise ValueError(f"unknown row format {name!r}")
        self.name, self.head_dim, self.row_bytes = name, head_dim, self._format.row_bytes

    def encode_some(self, rows):
        """(bytes [n, row_bytes], which of the n rows cannot be stored): their bytes mean nothing."""
        x = np.ascontiguousarray(rows, F32)
        if x.ndim < 1 or x.shape[-1] != self.head_dim:
            raise ValueError(f"rows of shape {x.shape}: expected [.., {self.head_dim}]")
        x = x.reshape(-1, self.head_dim)
        if len(x) == 0:
            return np.zeros((0, self.row_bytes), np.uint8), np.zeros(0, bool)
        bad = ~np.isfinite(x).all(axis=1)
        with np.errstate(all="ignore"):
            packed, refused = self._format.encode(np.where(bad[:, None], F32(0), x))
        return packed, bad | refused

    def encode(self, rows):
        """[.., head_dim] numbers to [.., row_bytes] uint8."""
        packed, bad = self.encode_some(rows)
        if bad.any():
            raise BadRow(int(np.argmax(bad)), f"it cannot be stored as {self.name}")
        return packed.reshape(*np.shape(rows)[:-1], self.row_bytes)

    def decode(self, packed):
        """[.., row_bytes] uint8 to [.., head_dim] float32."""
        data = np.ascontiguousarray(packed)
        if data.dtype != np.uint8 or data.ndim < 1 or data.shape[-1] != self.row_bytes:
            raise ValueError(
                f"packed rows of shape {data.shape} and {data.dtype}: expected [.., {self.row_bytes}] of uint8")
        if data.size == 0:
            return np.zeros((*data.shape[:-1], self.head_dim), F32)
        data = data.reshape(-1, self.row_bytes)
        with np.errstate(all="ignore"):
            valid = self._format.valid(data)
            if not valid.all():
                raise BadRow(int(np.argmin(valid)), f"the bytes are no row of {self.name}")
            return self._format.decode(data).reshape(*np.shape(packed)[:-1], self.head_dim)


def _turn_of(given, d, seed):
    if given is None or isinstance(given, str):
        return rotation(given, d, seed)
    matrix = np.asarray(given, F32)
    if matrix.shape != (d, d):
        raise ValueError(f"a rotation of shape {matrix.shape}: expected ({d}, {d})")
    return Matrix(matrix, seed)


KNOWN_MEMBERS = frozenset(
    "alibi block_size exact_tokens group groups k k_center k_channels k_codebook k_head_dim k_projection k_rotation "
    "kv_heads layers model norm_correction q_heads recipe_scale scale sink_tokens sinks softcap v v_channels v_codebook "
    "v_head_dim v_projection v_rotation window".split())


class PoolCodec:
    """The codecs of all layers of a pool, K and V, from its canonical JSON: the text, or Client.pool_info().json.

    What the JSON has only by its hash has to be given, as the daemon tells it: `matrices` {"k": .., "v": ..}, each a
    matrix or an array of one for each layer, for rotations of kind file (and for qr where the last bit counts: it is
    computed here otherwise); `k_center` [layers, kv_heads, k_head_dim]; `high_channels` {"k": .., "v": ..}
    [layers, kv_heads, n_high] where a recipe has a file. What was made is compared with the hashes of the JSON, and
    ValueError names what is not the pool's: a pool with codebooks of its own is refused.
    """

    def __init__(self, pool, *, matrices=None, k_center=None, high_channels=None):
        pool = json.loads(pool) if isinstance(pool, (str, bytes)) else pool
        unknown = sorted(set(pool) - KNOWN_MEMBERS)
        if unknown:
            raise ValueError(f"the pool has {unknown[0]!r}, which this package does not know")
        self.n_layers, self.kv_heads = pool["layers"], pool["kv_heads"]
        if ("k_center" in pool) != (k_center is not None):
            raise ValueError("k_center: the pool " + ("has one" if "k_center" in pool else "has none"))
        shape = (self.n_layers, self.kv_heads, pool["k_head_dim"])
        self.k_center = None if k_center is None else np.asarray(k_center, F32).reshape(shape)
        self._sides = {}
        for side in "kv":
            self._sides[side] = _side_codecs(pool, side, (matrices or {}).get(side), (high_channels or {}).get(side))
            _pool_hashes.check_side(pool, side, self._sides[side])
        _pool_hashes.check_center(pool, self.k_center)

    def codec(self, layer, side, head=0):
        return self._sides[side][layer][head]

    def encode(self, layer, side, rows):
        """[tokens, kv_heads, head_dim] to [tokens, kv_heads, row_bytes]; `side` is "k" or "v"."""
        rows = np.asarray(rows, F32)
        if side == "k" and self.k_center is not None:
            rows = rows - self.k_center[layer]
        return np.stack([self.codec(layer, side, h).encode(rows[:, h]) for h in range(self.kv_heads)], axis=1)

    def decode(self, layer, side, packed):
        rows = np.stack([self.codec(layer, side, h).decode(packed[:, h]) for h in range(self.kv_heads)], axis=1)
        return rows + self.k_center[layer] if side == "k" and self.k_center is not None else rows


def _side_codecs(pool, side, matrix, high_channels):
    """[layers][kv_heads] codecs; equal ones are the same object."""
    made = {}
    names = pool[side]
    turn = pool.get(side + "_rotation", {})
    if turn.get("kind") == "file" and matrix is None:
        raise ValueError(f"the pool's rotation is a given matrix: expected matrices[{side!r}]")

    def codec(layer, head):
        name = names if isinstance(names, str) else names[layer]
        options = {}
        if name.startswith("tq"):
            seed = turn["seed"] + (1000003 * layer if turn.get("per_layer") else 0)
            options["seed"] = seed % 2**32
            options["rotation"] = turn["kind"]
            if matrix is not None and turn["kind"] != "rht":
                options["rotation"] = matrix[layer] if np.ndim(matrix) == 3 else matrix
            if not name.startswith("tqp") and pool.get("norm_correction"):
                options["norm_correction"] = True
        elif name in RECIPES:
            options["recipe_scale"] = pool["recipe_scale"]
            if high_channels is not None:
                options["high_channels"] = tuple(int(c) for c in high_channels[layer][head])
        elif name.startswith("v"):
            options["group"] = pool["group"]
        key = (name, options.get("seed"), options.get("high_channels"))
        if key not in made:
            made[key] = RowCodec(name, pool[side + "_head_dim"], **options)
        return made[key]

    return [[codec(layer, head) for head in range(pool["kv_heads"])] for layer in range(pool["layers"])]
