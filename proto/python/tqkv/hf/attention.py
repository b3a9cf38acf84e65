"""The attention function "tqkv": new tokens here, stored ones in the daemon."""

import math

import numpy as np
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..errors import ArgumentError

# Arguments of attention functions that change its result and are not served.
REFUSED = ("softcap", "s_aux", "position_bias")


def attention_mask(*args, **kwargs):
    """The mask in full, [batch, 1, queries, columns]: it tells which tokens are padding."""
    kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    return sdpa_mask(*args, **kwargs)


def attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """As transformers calls it: query [batch, q_heads, queries, dim], new keys and values [batch, kv_heads, ..]."""
    if getattr(key, "_tqkv", None) is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout,
                                      **kwargs)
    for name in REFUSED:
        if kwargs.get(name) is not None:
            raise ArgumentError(f"attention with {name} cannot be computed by tqkv")
    if dropout:
        raise ArgumentError("a cache in tqkvd is for inference: call model.eval()")
    cache, layer = key._tqkv
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    n_new = query.shape[2]
    mask = _whole_mask(attention_mask, query.shape[0], n_new, cache.get_seq_length(layer))
    real = mask[:, 0, :, -n_new:].any(dim=1).cpu().numpy()  # nobody sees padding
    past = cache.step_begins(layer, real)
    n_stored, n_seen = past.sum(axis=1), _seen_past(mask[:, 0, :, :past.shape[1]], past, real)
    step = _Step(cache, layer, query, key, value, mask[..., -n_new:], real, n_stored, n_seen, scaling)
    out = step.decode() if n_new == 1 and past.any() else step.prefill()
    return out.to(query.dtype), None


def _whole_mask(mask, batch, n_new, n_columns):
    if mask is None:
        mask = torch.ones(1, 1, n_new, n_columns, dtype=torch.bool).tril(n_columns - n_new)
    if mask.dim() != 4 or mask.shape[-2:] != (n_new, n_columns) or mask.shape[1] != 1:
        raise ArgumentError(f"the attention mask has shape {tuple(mask.shape)}, expected ({batch}, 1, {n_new}, "
                            f"{n_columns})")
    if mask.dtype != torch.bool:
        mask = mask >= 0  # numbers that are added to the scores
    return mask.expand(batch, -1, -1, -1)


def _seen_past(mask, past, real):
    """[batch, queries]: how many stored tokens each query sees. They are the newest: nothing else can be asked for."""
    seen = mask.cpu().numpy() & past[:, None, :]
    n_seen = seen.sum(axis=2)
    if past.shape[1]:
        age = np.cumsum(past[:, ::-1], axis=1)[:, ::-1]  # 1: the newest
        is_gap = np.where(seen, age[:, None, :], 0).max(axis=2) != n_seen
        if is_gap[real].any():
            raise ArgumentError("the attention mask hides stored tokens that are not the oldest: tqkv cannot compute "
                                "that")
    return n_seen


def _rows(tensor):
    """A numpy array as the client takes it, bf16 as 16-bit numbers."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor if tensor.dtype in (torch.float16, torch.float32) else tensor.float()).numpy()


class _Step:
    """One layer of one forward pass."""

    def __init__(self, cache, layer, query, key, value, mask, real, n_stored, n_seen, scaling):
        self.cache, self.layer, self.scaling, self.mask, self.real = cache, layer, scaling, mask, real
        self.n_stored, self.n_seen = n_stored, n_seen
        self.query, self.key, self.value = query, key, value
        # [batch, tokens, heads, dim]
        self.q, self.k, self.v = (_rows(part.transpose(1, 2)) for part in (query, key, value))

    def decode(self):
        """A token per sequence: stored and attended to in one round trip."""
        cache = self.cache
        cache.pipeline.flush()
        rows = np.flatnonzero(self.real[:, 0])
        seen, stored = self.n_seen[rows, 0] + 1, self.n_stored[rows] + 1
        window = 0 if (seen == stored).all() else int(seen.max())
        if window and (seen != np.minimum(stored, window)).any():
            raise ArgumentError("the rows of the batch have windows of different lengths")
        out = cache.session.append_decode_batch(
            [(cache.sequences[b], self.k[b], self.v[b], self.q[b, 0]) for b in rows], self.layer, scale=self.scaling,
            window=window)
        result = torch.zeros(len(self.real), 1, *out.shape[1:])
        result[torch.from_numpy(rows)] = torch.from_numpy(np.asarray(out)).unsqueeze(1)
        return result.to(self.query.device)

    def prefill(self):
        """New tokens among themselves here, while their rows are on their way; the stored ones in the daemon."""
        cache = self.cache
        tokens = [np.flatnonzero(row) for row in self.real]
        # Sent before the rows, so that they see what was stored until now; a sequence is once in a frame, and a frame
        # has one window.
        stored = []
        for t in range(self.real.shape[1]):
            windows = np.where(self.n_seen[:, t] == self.n_stored, 0, self.n_seen[:, t])
            asks = self.real[:, t] & (self.n_seen[:, t] > 0)
            for window in np.unique(windows[asks]):
                rows = np.flatnonzero(asks & (windows == window))
                stored.append((rows, t, cache.pipeline.decode_batch(
                    [(cache.sequences[b], self.q[b, t]) for b in rows], self.layer, lse=True, scale=self.scaling,
                    window=int(window))))
        items = [(cache.sequences[b], self.k[b, chosen], self.v[b, chosen])
                 for b, chosen in enumerate(tokens) if len(chosen)]
        if items:
            cache.pipeline.append_batch(items, self.layer)
        if not self.n_stored.any():
            return self._local()
        out, lse = self._local_with_lse()
        for rows, t, answer in stored:
            self._merge(out, lse, torch.from_numpy(rows), t, *answer.result())
        return out

    def _local(self):
        group = self.query.shape[1] // self.key.shape[1]
        key, value = (part.repeat_interleave(group, dim=1) for part in (self.key, self.value))
        # A query that sees nothing is padding; it sees itself, so that its numbers are numbers.
        mask = self.mask | torch.eye(self.mask.shape[-1], dtype=torch.bool, device=self.mask.device)
        out = torch.nn.functional.scaled_dot_product_attention(self.query, key, value, attn_mask=mask,
                                                               scale=self.scaling)
        return out.transpose(1, 2)

    def _local_with_lse(self):
        """float32 [batch, queries, q_heads, dim] and the log-sum-exp [batch, queries, q_heads]."""
        batch, q_heads, n_new, dim = self.query.shape
        kv_heads = self.key.shape[1]
        q = self.query.float().reshape(batch, kv_heads, q_heads // kv_heads, n_new, dim)
        scores = q @ self.key.float().unsqueeze(2).transpose(-1, -2) * self.scaling
        scores = scores.masked_fill(~self.mask.unsqueeze(2), -math.inf)
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - lse.clamp(min=torch.finfo(torch.float32).min).unsqueeze(-1))
        out = (weights @ self.value.float().unsqueeze(2)).reshape(batch, q_heads, n_new, -1)
        return out.transpose(1, 2).contiguous(), lse.reshape(batch, q_heads, n_new).transpose(1, 2)

    def _merge(self, out, lse, rows, t, stored_out, stored_lse):
        """Both parts of query t by their shares of the softmax, into out."""
        stored_out, stored_lse = (torch.from_numpy(np.array(part)).to(out.device) for part in (stored_out, stored_lse))
        here = torch.sigmoid(lse[rows, t] - stored_lse).unsqueeze(-1)
        out[rows, t] = here * out[rows, t] + (1 - here) * stored_out
