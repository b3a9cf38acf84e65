"""What becomes of K and V between the model and its attention: row formats, through libtqkv, and the controls."""

import ctypes
import json
import os

import numpy as np
from tqkv import _pool_hashes, codec

F32, BF16_BYTES = 1, 2
# core/preset.c; the run compares them with what the daemon says.
PRESETS = {"k8v4": ("fp8", "v4"), "4bit": ("tq4", "v4"), "k3v4": ("tq3", "v4"), "3bit": ("tq3", "v3"),
           "k3v2": ("tq3", "v2"), "2bit": ("tq2", "v2")}


class Format:
    """A row format of one KV head: the bytes that the daemon stores, by the library that makes them for clients."""

    _library = None

    def __init__(self, name, head_dim, norm_correction=False):
        self.head_dim = head_dim
        self.error = ctypes.create_string_buffer(4096)
        if Format._library is None:
            Format._library = ctypes.CDLL(os.path.join(os.environ["TQKV_BUILD"], "proto/client/libtqkv.so.0"))
        options = {"norm_correction": True} if norm_correction else {}
        made = codec.RowCodec(name, head_dim, **options)
        self.row_bytes = made.row_bytes
        hashes = _pool_hashes.side_hashes([[made]])
        pool = {"block_size": 16, "groups": [[0]], "k": name, "k_head_dim": head_dim, "kv_heads": 1, "layers": 1,
                "model": "", "q_heads": 1, "scale": "3f800000", "v": "f32", "v_head_dim": head_dim, **options}
        if hashes["rotation"]:
            pool["k_rotation"] = {"kind": "rht", "matrix": hashes["rotation"], "seed": 42}
        pool.update({f"k_{member}": hashes[member] for member in ("codebook", "projection", "channels")
                     if hashes[member]})
        if name.startswith("v"):
            pool["group"] = 32
        if name in codec.RECIPES:
            pool["recipe_scale"] = "exact"
        self._codec = ctypes.c_void_p()
        text = json.dumps(pool, sort_keys=True, separators=(",", ":")).encode()
        self._call("tqkv_codec_create_from_pool_json", text, None, ctypes.byref(self._codec))

    def _call(self, name, *args):
        if getattr(Format._library, name)(*args, self.error) != 0:
            raise RuntimeError(f"{name}: {self.error.raw}")

    def _convert(self, name, source, target, n):
        self._call(name, self._codec, 0, False, F32, source.ctypes.data_as(ctypes.c_void_p),
                   ctypes.c_size_t(source.nbytes), n, target.ctypes.data_as(ctypes.c_void_p),
                   ctypes.c_size_t(target.nbytes))
        return target

    def pack(self, rows):
        """[.., head_dim] to [.., row_bytes]."""
        rows = np.ascontiguousarray(rows, np.float32)
        packed = np.empty((*rows.shape[:-1], self.row_bytes), np.uint8)
        return self._convert("tqkv_codec_encode", rows, packed, rows.size // self.head_dim)

    def through(self, rows):
        """Rows encoded and decoded, [.., head_dim]."""
        packed = self.pack(rows)
        decoded = np.empty((*packed.shape[:-1], self.head_dim), np.float32)
        return self._convert("tqkv_codec_decode", packed, decoded, decoded.size // self.head_dim)


_formats = {}


def format_of(name, head_dim, norm_correction=False):
    key = (name, head_dim, norm_correction and name.startswith("tq") and not name.startswith("tqp"))
    if key not in _formats:
        _formats[key] = Format(*key)
    return _formats[key]


class Setting:
    """K and V formats by layer, and what is done besides.

    k, v: a format's name, or None for exact rows. layers: the only ones that are not exact, None for all. exact_layers:
    so many at both ends are bf16. recent: so many newest tokens are seen exactly. center, bias [layers, kv_heads, dim]:
    subtracted before K is stored and added again; added to K before anything else (softmax does not see it).
    """

    def __init__(self, k=None, v=None, *, layers=None, exact_layers=0, recent=0, norm_correction=False, center=None,
                 bias=None, n_layers=30, head_dim=64):
        self.k, self.v, self.layers, self.recent = k, v, layers, recent
        self.norm_correction, self.center, self.bias, self.head_dim = norm_correction, center, bias, head_dim
        self.bf16 = {layer for end in range(exact_layers) for layer in (end, n_layers - 1 - end)}

    def format(self, layer, side):
        name = self.k if side == "k" else self.v
        if name is None or (self.layers is not None and layer not in self.layers):
            return None
        return format_of("bf16" if layer in self.bf16 else name, self.head_dim, self.norm_correction)

    def rows(self, layer, side, rows):
        made = self.format(layer, side)
        if side == "k" and self.bias is not None:
            rows = rows + self.bias[layer]
        if made is None:
            return rows
        if side == "k" and self.center is not None:
            return made.through(rows - self.center[layer]) + self.center[layer]
        return made.through(rows)

    def token_bytes(self, n_layers, kv_heads):
        """Of a token on all layers; exact rows count as bf16."""
        made = [self.format(layer, side) for layer in range(n_layers) for side in "kv"]
        return kv_heads * sum(self.head_dim * BF16_BYTES if one is None else one.row_bytes for one in made)


class ZeroKeys(Setting):
    """Control: nothing of the keys is left, attention is a plain mean of the values."""

    def rows(self, layer, side, rows):
        return np.zeros_like(rows) if side == "k" else rows


class RandomRows(Setting):
    """Control: rows of random direction and the model's own norms."""

    def __init__(self, seed):
        super().__init__()
        self.seed = seed

    def rows(self, layer, side, rows):
        rng = np.random.default_rng((self.seed, layer, side == "v"))
        random = rng.standard_normal(rows.shape, np.float32)
        return random * (np.linalg.norm(rows, axis=-1, keepdims=True) / np.linalg.norm(random, axis=-1, keepdims=True))


EXACT = Setting()
