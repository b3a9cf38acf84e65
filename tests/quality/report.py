"""The report: Markdown with the figures, PNG with the pictures."""

import math
import platform

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

from measures import DEPTHS, OUTLIER_CHANNELS, QUESTION  # noqa: E402
from settings import PRESETS  # noqa: E402

CONTROLS = ("all keys zero", "random rows")


def rise(told):
    """Of perplexity over exact rows, in per cent, with its standard error."""
    return 100 * math.expm1(told["gap"]), 100 * math.exp(told["gap"]) * told["gap_error"]


def rise_text(told):
    value, error = rise(told)
    return f"{value:+.0f} %" if value >= 1000 else f"{value:+.2f} ± {error:.2f} %"


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "| " + " | ".join("---" for _ in head) + " |"
    for row in rows:
        yield "| " + " | ".join(str(cell) for cell in row) + " |"
    yield ""


class Report:
    def __init__(self, out, header, results, gates, model):
        self.out, self.header, self.results, self.gates, self.model = out, header, results, gates, model
        self.bf16_bytes = 2 * 2 * model.n_layers * model.kv_heads * model.head_dim
        self.names = [key[5:] for key in results if key.startswith("main ")]
        self.formats = [name for name in self.names if name not in CONTROLS]

    def picture(self, name, figure):
        figure.tight_layout()
        figure.savefig(self.out / name, dpi=110)
        plt.close(figure)
        return [f"![{name}]({name})", ""]

    # ---- sections ----

    def intro(self):
        sizes, spot = self.header["sizes"], self.results["spot"]
        n_spot = next(iter(spot.values()))["n"]
        yield from [
            "# What every row format costs a real model", "",
            f"SmolLM2-135M-Instruct ({self.model.n_layers} layers, {self.model.q_heads} query and "
            f"{self.model.kv_heads} KV heads of {self.model.head_dim} channels), a model without a large constant "
            "part in its keys. Its weights are Q4_1 (embeddings Q8_0): every figure compares with exact float32 K and "
            "V *of the same weights*, not with the published model.", "",
            f"Text: the first {sizes['n_tokens']} tokens of `tests/quality/northanger_abbey.txt` (Jane Austen, 1817, "
            f"public domain) in windows of {sizes['window']}, as plain text. Perplexity with exact rows: "
            f"{math.exp(self.results['exact text']['loss']):.3f}. Figures under \"part\" are of the first "
            f"{sizes['n_part']} tokens (exact: {math.exp(self.results['exact part']['loss']):.3f}).", "",
            "How: a forward pass over a whole window in float32 (numpy, one thread) in which every K and V row is "
            "encoded and decoded by libtqkv before anything attends to it, the token's own row included. That is what "
            f"a daemon answers that is given one token after the other. The section \"Through the daemon\" shows "
            f"it on {n_spot} tokens. A frontend that computes the attention of its own prompt (as tqkv.hf does) has "
            "exact prompts and so smaller losses.", "",
            "± is the standard error of the difference to exact rows, token by token: of the choice of text. Beside "
            "it stands what a change of the last bit does (section \"How far a figure can be trusted\").", "",
            f"Seed {self.header['seed']}; weights sha256 {self.header['weights'][:16]}, text {self.header['text'][:16]}"
            f"; {platform.machine()}, numpy {np.__version__}.", "",
            "## Gates", ""]
        yield from table(("what", "figure", "bound", ""), [
            (what, figure, bound, "kept" if kept else "**not kept**") for what, figure, bound, kept in self.gates])

    def main_table(self):
        yield from ["## Presets, `tqN`, controls", "",
                    f"Bytes of a token on all layers; bf16 takes {self.bf16_bytes}. Rise: of perplexity over exact "
                    "rows. Agreement: share of next tokens that are the exact ones, over the text, and over "
                    f"{self.header['sizes']['n_greedy']} tokens of a greedy answer (with the first token that "
                    "differs: up to there free generation is the same). Digits: of five 5-digit numbers in a text of "
                    f"{self.header['sizes']['n_haystack']} tokens that come back. Error: relative L2 of attention "
                    "outputs, median of the layers.", ""]
        exact = math.exp(self.results["exact text"]["loss"])
        rows = [("exact float32", "", "", f"{exact:.2f}", "", "100 %", "100 %",
                 f"{sum(self.results['exact needles']['right'])}/25", "", "")]
        for name in self.names:
            told, n_bytes = self.results[f"main {name}"], self.results[f"bytes {name}"]
            is_control = name in CONTROLS
            what = "/".join(PRESETS[name]) if name in PRESETS else ""
            greedy = self.results[f"greedy {name}"]
            rows.append((f"`{name}`" + (f" ({what})" if what else ""), "" if is_control else n_bytes,
                         "" if is_control else f"{self.bf16_bytes / n_bytes:.2f}",
                         f"{math.exp(told['text']['loss']):.2f}", rise_text(told["text"]),
                         f"{100 * told['text']['agree']:.1f} %",
                         f"{100 * greedy['agree']:.1f} % ({greedy['first_difference']})",
                         f"{sum(told['needles']['right'])}/25", f"{100 * np.median(told['layers']['error']):.1f} %",
                         f"{np.median(told['layers']['cosine']):.4f}"))
        yield from table(("rows", "bytes", "compression", "perplexity", "rise", "agreement", "greedy", "digits",
                          "error", "cosine"), rows)
        yield from self._bytes_plot()

    def _bytes_plot(self):
        figure, axes = plt.subplots(figsize=(8, 4.5))
        for marker, group in (("o", [n for n in self.formats if n not in PRESETS]), ("s", list(PRESETS))):
            x = [self.results[f"bytes {name}"] for name in group]
            y = [max(rise(self.results[f"main {name}"]["text"])[0], 0.01) for name in group]
            axes.plot(x, y, marker, label="presets" if marker == "s" else "tqN")
            for name, at, value in zip(group, x, y):
                axes.annotate(name, (at, value), textcoords="offset points", xytext=(5, 4), fontsize=8)
        axes.axvline(self.bf16_bytes, color="gray", linestyle=":", label="bf16")
        axes.set(yscale="log", xlabel="bytes per token, all layers", ylabel="rise of perplexity, %",
                 title="What bytes buy")
        axes.legend()
        return self.picture("bytes.png", figure)

    def needles(self):
        exact = self.results["exact needles"]
        yield from ["## Needles by depth", "", "Digits of 5 that come back, and the loss per digit of the answer.", ""]
        rows = [("exact", exact)] + [(name, self.results[f"main {name}"]["needles"]) for name in self.names]
        yield from table(("rows", *(f"{100 * depth:.0f} %" for depth in DEPTHS)), [
            (f"`{name}`", *(f"{right} ({loss:.2f})" for right, loss in zip(told["right"], told["loss"])))
            for name, told in rows])

    def layer_maps(self):
        yield from ["## Attention by layer", "",
                    f"Over exact q, k and v of the first {self.header['sizes']['n_capture']} tokens, every layer "
                    "alone: no error is handed on.", ""]
        for what, name, scale in (("error", "layers_error.png", 100), ("cosine", "layers_cosine.png", 1)):
            values = np.array([self.results[f"main {n}"]["layers"][what] for n in self.names]) * scale
            figure, axes = plt.subplots(figsize=(11, 5))
            shown = np.log10(np.maximum(values, 1e-3)) if what == "error" else values
            image = axes.imshow(shown, aspect="auto", cmap="magma_r" if what == "error" else "magma")
            axes.set(xlabel="layer", yticks=range(len(self.names)), yticklabels=self.names,
                     title="relative L2 error of the attention output, % (logarithmic)" if what == "error" else
                     "mean cosine of the attention output")
            bar = figure.colorbar(image)
            if what == "error":
                ticks = [t for t in range(-2, 4) if shown.min() <= t <= shown.max()]
                bar.set_ticks(ticks, labels=[f"{10.0**t:g}" for t in ticks])
            yield from self.picture(name, figure)

    def sides(self):
        yield from ["## Keys and values apart", "",
                    "One side in `tqN`, the other exact (part). Error: of attention outputs, median of the layers.",
                    ""]
        bits = sorted(int(key[4:]) for key in self.results if key.startswith("k tq"))
        told = {(side, b): self.results[f"{side} tq{b}"] for side in "kv" for b in bits}
        yield from table(("bits", "only K: rise", "error", "only V: rise", "error"), [
            (b, *(cell for side in "kv" for cell in (rise_text(told[side, b]),
                                                     f"{100 * np.median(told[side, b]['error']):.1f} %")))
            for b in bits])
        figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
        for side in "kv":
            left.plot(bits, [max(rise(told[side, b])[0], 0.01) for b in bits], "o-", label=f"only {side.upper()}")
            loss = [self.results[f"layer {layer} {side}"] for layer in range(self.model.n_layers)]
            right.plot(range(self.model.n_layers), 100 * np.expm1(loss), "o-", label=f"{side.upper()} of one layer")
        left.set(yscale="log", xlabel="bits", ylabel="rise of perplexity, %", title="One side compressed")
        right.set(xlabel="layer", ylabel="rise of perplexity, %",
                  title=f"One layer in tq2, {self.header['sizes']['n_capture']} tokens")
        for axes in (left, right):
            axes.legend()
        yield from self.picture("sides.png", figure)
        yield from self._worst_layers()
        figure, panels = plt.subplots(1, 2, figsize=(12, 4))
        for axes, side in zip(panels, "kv"):
            image = axes.imshow(np.log10(np.maximum([100 * np.array(told[side, b]["error"]) for b in bits], 1e-3)),
                                aspect="auto", cmap="magma_r", vmin=-1, vmax=2.2)
            axes.set(xlabel="layer", ylabel="bits", yticks=range(len(bits)), yticklabels=bits,
                     title=f"log10 of the attention error in %, only {side.upper()}")
            figure.colorbar(image)
        yield from self.picture("sides_layers.png", figure)

    def _worst_layers(self):
        for side in "kv":
            loss = np.array([self.results[f"layer {layer} {side}"] for layer in range(self.model.n_layers)])
            worst = np.argsort(-loss)[:5]
            yield (f"Most hurt by `tq2` in {side.upper()} of one layer: " + ", ".join(
                f"layer {layer} ({100 * math.expm1(loss[layer]):+.2f} %)" for layer in worst) +
                f"; the sum over all layers of the rise is {100 * np.expm1(loss).sum():.1f} %.")
            yield ""

    def options(self):
        yield from ["## What options buy", "", "Rise of perplexity (part), K and V in `tqN`.", "",
                    "- `norm_correction`: decoded rows have the length of the originals.",
                    "- `exact_layers n`: the first and the last n layers in bf16; bytes of a token in brackets.",
                    "- `recent n`: a query sees the n newest tokens, itself included, as they were (`exact_tokens`).",
                    "- `k_center`: the mean of each head's keys, measured on another text, is taken off.", ""]
        keys = [key.split(" ", 2)[1:] for key in self.results if key.startswith("option ")]
        bits = sorted({fmt for fmt, _ in keys})
        names = list(dict.fromkeys(name for _, name in keys))
        rows = []
        for name in names:
            cells = []
            for fmt in bits:
                text = rise_text(self.results[f"option {fmt} {name}"])
                if name.startswith("exact_layers"):
                    text += f" ({self._exact_bytes(fmt, int(name.split()[1]))})"
                cells.append(text)
            rows.append((name, *cells))
        yield from table(("option", *(f"`{fmt}`" for fmt in bits)), rows)
        yield from ["Most of what the next word depends on is near, so perplexity flatters a recent window. Whether "
                    "far tokens are found is another question: digits of 25 that come back, by depth.", ""]
        rows = [(f"`{fmt}`", "plain", self.results[f"main {fmt}"]["needles"]["right"]) for fmt in ("tq2", "tq3")]
        rows += [(f"`{key.split()[1]}`", key.split(" ", 2)[2], told["right"]) for key, told in self.results.items()
                 if key.startswith("needles ")]
        yield from table(("rows", "option", "digits", *(f"{100 * depth:.0f} %" for depth in DEPTHS)), [
            (fmt, option, f"{sum(right)}/25", *right) for fmt, option, right in sorted(rows)])

    def _exact_bytes(self, fmt, n):
        compressed, layers = self.results[f"bytes {fmt}"] / self.model.n_layers, self.model.n_layers
        return round(compressed * (layers - 2 * n) + self.bf16_bytes / layers * 2 * n)

    def outliers(self):
        sizes = sorted({int(key.split()[1]) for key in self.results if key.startswith("bias ")})
        names = list(dict.fromkeys(key.split(" ", 2)[2] for key in self.results if key.startswith("bias ")))
        yield from ["## Keys with a large constant part", "",
                    f"A constant is added to {OUTLIER_CHANNELS} channels of every head's keys, of the size below times "
                    "the spread of that head's keys, as some model families have it. Softmax does not see it: with "
                    "exact rows nothing changes. K in the format, V exact (part). `k_center` is another text's mean.",
                    ""]
        yield from table(("K", *(f"{size} times" for size in sizes)), [
            (f"`{name}`" if " " not in name else f"`{name.split()[0]}` and `k_center`",
             *(rise_text(self.results[f"bias {size} {name}"]) for size in sizes)) for name in names])
        figure, axes = plt.subplots(figsize=(7, 4))
        for name in names:
            rises = [max(rise(self.results[f"bias {size} {name}"])[0], 0.01) for size in sizes]
            axes.plot(sizes, rises, "o-", label=name)
        axes.set(xscale="log", yscale="log", xlabel="constant part, times the spread", ylabel="rise of perplexity, %",
                 title="Keys with a large constant part")
        axes.legend()
        yield from self.picture("outliers.png", figure)

    def other_formats(self):
        yield from ["## Other formats, and mixtures", "", "Part. Bytes without those of the recent window, whose size "
                    "does not depend on the sequence.", ""]
        rows = []
        for key, told in self.results.items():
            if key.startswith("format "):
                k, v, *options = key.split()[1:]
                rows.append((f"`{k}`", f"`{v}`", " ".join(options), told["bytes"],
                             f"{self.bf16_bytes / told['bytes']:.2f}", rise_text(told)))
        yield from table(("K", "V", "besides", "bytes", "compression", "rise"), rows)

    def trust(self):
        yield from ["## How far a figure can be trusted", "",
                    "The same measurement (part) with the embedding changed by a ten-millionth to a millionth. A "
                    "number that lands in another cell of its codebook moves everything behind it, so few bits are "
                    "chaotic: differences smaller than this spread mean nothing.", ""]
        rows = []
        for fmt in sorted({key.split()[1] for key in self.results if key.startswith("repeat ")}):
            values = [rise(self.results[f"option {fmt} plain"])[0]] + [
                rise(told)[0] for key, told in self.results.items() if key.startswith(f"repeat {fmt} ")]
            rows.append((f"`{fmt}`", ", ".join(f"{value:+.2f} %" for value in values),
                         f"{np.std(values, ddof=1):.2f} %"))
        yield from table(("rows", "rise", "standard deviation"), rows)

    def daemon(self):
        yield from ["## Through the daemon", "",
                    "A tqkvd of this tree: rows appended as float32, query i decoded as one that saw i + 1 tokens; "
                    "then the first tokens once more, one APPEND_DECODE per token and layer. Output: largest relative "
                    "difference of a layer's attention output from the batched pass over the same rows. Bytes: READ "
                    "gives the bytes that libtqkv makes. `window`: `tq5`/`tq3` with `exact_tokens` 64, one by one only, held "
                    "to the same newest rows as bf16. The perplexities differ as those of the section before.", ""]
        yield from table(("rows", "tokens", "one by one", "output", "same bytes", "perplexity", "batched"), [
            (f"`{name}`", told["n"], told["steps"], f"{told['output_error']:.1e}", told["same_bytes"],
             f"{math.exp(told['loss']):.3f}", f"{math.exp(told['batched_loss']):.3f}")
            for name, told in self.results["spot"].items()])

    def answer(self):
        text = self.model.tokenizer.decode(self.results["answer"]["ids"]).decode(errors="replace")
        n_different = len(set(self.results["answer"]["ids"]))
        return ["## The greedy answer", "", f"To \"{QUESTION}\", with exact rows. It has {n_different} different "
                "tokens; where a small model repeats itself, agreement is easy. Agreement over the text is harder.", "",
                "> " + " ".join(text.split()), ""]


def write(out, header, results, gates, model):
    report = Report(out, header, results, gates, model)
    lines = []
    for section in (report.intro, report.main_table, report.needles, report.layer_maps, report.sides, report.options,
                    report.outliers, report.other_formats, report.trust, report.daemon, report.answer):
        lines += section()
    (out / "report.md").write_text("\n".join(lines))
