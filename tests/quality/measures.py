"""What is measured of a setting. Every function returns what JSON can hold."""

import functools
import math

import numpy as np

from model import Past, attention
from settings import EXACT, RandomRows, Setting, ZeroKeys

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
NAMES = ("Harriet", "Edmund", "Beatrice", "Oliver", "Winifred")
OUTLIER_CHANNELS = 4
QUESTION = "Write a long story about a lighthouse keeper, his daughter and a ship that is lost in a storm."


class Measures:
    """Text, model and what several measures share, computed when it is first asked for.

    ids: of the text. n_tokens: of it for perplexity, in windows of window tokens. exact: measures of exact rows by
    their key, as the report keeps them.
    """

    def __init__(self, model, ids, calibration_ids, seed, *, n_tokens, window, n_part, n_capture, n_greedy, n_haystack,
                 exact):
        self.model, self.ids, self.calibration_ids, self.seed = model, ids, calibration_ids, seed
        self.n_tokens, self.window, self.n_part, self.n_capture = n_tokens, window, n_part, n_capture
        self.n_greedy, self.n_haystack, self.exact = n_greedy, n_haystack, exact
        if len(ids) < n_tokens + n_haystack:
            raise ValueError(f"the text has {len(ids)} tokens, expected {n_tokens + n_haystack}")

    def setting(self, *args, **options):
        return Setting(*args, n_layers=self.model.n_layers, head_dim=self.model.head_dim, **options)

    def controls(self):
        return {"all keys zero": ZeroKeys(), "random rows": RandomRows(self.seed)}

    # ---- perplexity ----

    def _compare(self, losses, best, key):
        exact = self.exact.get(key)
        told = {"loss": float(losses.mean()), "n": len(losses)}
        if exact is not None:
            gap = losses - np.array(exact["losses"])
            told["gap"] = float(gap.mean())
            told["gap_error"] = float(gap.std() / math.sqrt(len(gap)))
            told["agree"] = float((best == np.array(exact["best"])).mean())
        return told

    def _keep(self, losses, best):
        return {"losses": np.round(losses, 6).tolist(), "best": best.tolist(), "loss": float(losses.mean()),
                "n": len(losses)}

    def text(self, setting, key="text"):
        """Loss over the whole text, window by window; a window's first token has no prediction."""
        parts = [self.model.measure(self.ids[first:first + self.window], setting)
                 for first in range(0, self.n_tokens, self.window)]
        losses, best = (np.concatenate([part[i] for part in parts]) for i in (0, 1))
        return self._keep(losses, best) if setting is EXACT else self._compare(losses, best, key)

    def part(self, setting, nudge=0.0):
        """Loss over the first n_part tokens. nudge: relative change of the embedding, far below what it can mean."""
        x = self.model.llama.embedding[np.asarray(self.ids[:self.n_part])] * np.float32(1 + nudge)
        losses, best = self.model.measure(self.ids[:self.n_part], setting, x=x)
        return self._keep(losses, best) if setting is EXACT else self._compare(losses, best, "part")

    @functools.cached_property
    def _hidden(self):
        kept = []
        ids = self.ids[:self.n_capture]
        x = self.model.hidden(ids, EXACT, keep=kept)
        return kept, float(self.model.predictions(x, ids)[0].mean())

    def one_layer(self, layer, **formats):
        """The rise of the loss over the first n_capture tokens when one layer alone is compressed."""
        kept, exact_loss = self._hidden
        ids = self.ids[:self.n_capture]
        losses, _ = self.model.measure(ids, self.setting(**formats, layers={layer}), from_layer=layer, x=kept[layer])
        return float(losses.mean()) - exact_loss

    # ---- attention ----

    @functools.cached_property
    def _capture(self):
        kept, _ = self._hidden
        return [self.model.qkv(layer, x, 0) for layer, x in enumerate(kept)]

    def layers(self, setting):
        """Per layer: relative L2 error and mean cosine of the attention output, over exact q, k and v."""
        errors, cosines = [], []
        for layer, (q, k, v) in enumerate(self._capture):
            exact = attention(q, *(rows.transpose(1, 0, 2) for rows in (k, v))).astype(np.float64)
            got = attention(q, *(setting.rows(layer, side, rows).transpose(1, 0, 2) for side, rows in
                                 (("k", k), ("v", v)))).astype(np.float64)
            errors.append(float(np.linalg.norm(got - exact) / np.linalg.norm(exact)))
            lengths = np.linalg.norm(got, axis=-1) * np.linalg.norm(exact, axis=-1)
            cosines.append(float(((got * exact).sum(axis=-1) / np.maximum(lengths, 1e-30)).mean()))
        return {"error": errors, "cosine": cosines}

    # ---- generation ----

    @functools.cached_property
    def _question(self):
        tokenizer = self.model.tokenizer
        begin, end = (tokenizer.pieces.index(f"<|im_{what}|>") for what in ("start", "end"))
        return [begin, *tokenizer.encode(f"user\n{QUESTION}"), end, *tokenizer.encode("\n"), begin,
                *tokenizer.encode("assistant\n")]

    def answer(self):
        """What exact rows answer to a question, greedily: the yardstick of greedy()."""
        return {"ids": self.model.greedy(self._question, self.n_greedy)}

    def greedy(self, setting):
        """Agreement of each next token with the exact answer, given the tokens before; and the first difference.

        Up to the first difference this is what free generation would do.
        """
        prompt, made = self._question, self.exact["answer"]["ids"]
        _, best = self.model.measure(prompt + made, setting)
        same = best[len(prompt) - 1:-1] == np.array(made)
        first = int(np.argmin(same)) if not same.all() else len(made)
        return {"agree": float(same.mean()), "first_difference": first}

    @functools.cached_property
    def _haystack(self):
        encode, decode = self.model.tokenizer.encode, self.model.tokenizer.decode
        hay = self.ids[self.n_tokens:self.n_tokens + self.n_haystack]
        rng = np.random.default_rng(self.seed)
        codes = ["".join(map(str, rng.integers(0, 10, 5))) for _ in NAMES]
        ends = [i + 1 for i, token in enumerate(hay) if decode([token]).endswith(b".")]
        ids, last = [], 0
        for depth, name, code in zip(DEPTHS, NAMES, codes):
            at = min(ends, key=lambda end: abs(end - depth * len(hay)))
            ids += hay[last:at] + encode(f" The secret number of {name} is {code}.")
            last = at
        questions = [(encode(f"\n\nThe secret number of {name} is"), encode(f" {code}"))
                     for name, code in zip(NAMES, codes)]
        return ids + hay[last:], questions

    def needles(self, setting):
        """Five numbers in a text, asked for one by one: digits that come back as the likeliest, of 5, per depth."""
        ids, questions = self._haystack
        past = Past(self.model.n_layers)
        self.model.hidden(ids, setting, past)
        right, losses = [], []
        for question, answer in questions:
            here = Past(self.model.n_layers)
            here.rows, here.n_tokens = list(past.rows), past.n_tokens
            loss, best = self.model.predictions(self.model.hidden(question + answer, setting, here), question + answer)
            # The first token of an answer is the blank before the digits.
            right.append(int((best[len(question):-1] == np.array(answer[1:])).sum()))
            losses.append(float(loss[len(question):].mean()))
        return {"right": right, "loss": losses}

    # ---- keys with a constant part ----

    @functools.cached_property
    def _calibration(self):
        """K rows of another text, per layer [tokens, kv_heads, dim]."""
        kept = []
        self.model.hidden(self.calibration_ids, EXACT, keep=kept)
        return [self.model.qkv(layer, x, 0)[1] for layer, x in enumerate(kept)]

    def center(self, bias=None):
        """The mean of the keys of another text, as `tqkvctl calibrate` measures it."""
        means = np.stack([k.astype(np.float64).mean(axis=0).astype(np.float32) for k in self._calibration])
        return means if bias is None else means + bias

    def bias(self, size):
        """A constant for some channels of every head, in units of the spread of the head's keys; random signs."""
        rng = np.random.default_rng((self.seed, 1))
        bias = np.zeros((self.model.n_layers, self.model.kv_heads, self.model.head_dim), np.float32)
        for layer, k in enumerate(self._calibration):
            for head in range(self.model.kv_heads):
                spread = np.sqrt(((k[:, head] - k[:, head].mean(axis=0)) ** 2).mean())
                channels = rng.choice(self.model.head_dim, OUTLIER_CHANNELS, replace=False)
                bias[layer, head, channels] = size * spread * rng.choice([-1, 1], OUTLIER_CHANNELS)
        return bias
