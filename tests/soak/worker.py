"""One client of the soak: appends, decodes, reads, truncates and frees at random, and checks every answer.

usage: worker.py ADDRESS NUMBER SEED

Every row says whose it is: row(worker, sequence, layer, token) is a number that no other row of the soak begins with,
so rows of another session, sequence, layer or token are noticed at once, whatever happened before.

Standard output is the account that outlives this process, a line each, flushed: "try SEQUENCE LOW HIGH" before a call
that changes a length (afterwards the length is one of the two, or between them where an append is split), "is SEQUENCE
LENGTH" once it was acknowledged, "lost" when the daemon is gone, "ops N" now and then. A wrong answer ends the process
with 1 and a text on standard error.
"""
import random
import sys
import time

import numpy as np
import tqkv

N_LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SEQUENCES, TOKENS_MAX, WORKERS_MAX = 6, 1024, 16
GONE = ("IO_ERROR", "UNAVAILABLE", "STALE_EPOCH", "DEADLINE", "NOT_FOUND", "SESSION_EXPIRED", "STALE_HANDLE", "DRAINING")


def rows(worker, sequence, first, n):
    """[layers, n, kv_heads, dim]: exact in float32, below 2^24."""
    token = np.arange(first, first + n)
    number = ((worker * SEQUENCES + sequence) * N_LAYERS + np.arange(N_LAYERS)[:, None]) * TOKENS_MAX + token
    out = np.repeat(number[:, :, None, None], KV_HEADS, 2) * 4 + np.arange(DIM) % 4
    return np.ascontiguousarray(out, np.float32)


def check(what, got, wanted):
    if got.shape != wanted.shape or not np.array_equal(got, wanted):
        bad = np.argwhere(got != wanted)[:3].tolist() if got.shape == wanted.shape else (got.shape, wanted.shape)
        sys.exit(f"{what}: rows of something else: at {bad}")


def check_all(worker, session, lengths):
    """Every row that the daemon has of this session."""
    for sequence, told in lengths.items():
        n = min(told)
        if n:
            k, v = session.read(sequence, n=n)
            for name, got in (("k", k), ("v", v)):
                check(f"worker {worker} sequence {sequence} {name}", got, rows(worker, sequence - 1, 0, n))


def say(*words):
    print(*words, flush=True)


def step(worker, session, lengths, draw):
    sequence = draw.randint(1, SEQUENCES)
    length, kind = lengths.get(sequence, 0), draw.random()
    if kind < 0.5:
        n = min(draw.choice((1, 1, 2, 7, 16, 40)), TOKENS_MAX - length)
        if n == 0:
            return
        new = rows(worker, sequence - 1, length, n)
        say("try", sequence, length, length + n)
        try:
            session.append_layers(sequence, new, new)
        except tqkv.TqkvError as error:
            if error.status_name != "POOL_FULL" and not any(r.status_name == "POOL_FULL" for r in error.item_errors):
                raise
            return  # nothing was kept, and that is checked like everything else
        lengths[sequence] = length + n
        say("is", sequence, length + n)
    elif length == 0:
        return
    elif kind < 0.75:
        # q = 0: every weight is the same, so the output is the mean of the rows.
        layer, seen = draw.randrange(N_LAYERS), draw.randint(1, length)
        out = session.decode(sequence, layer, np.zeros((Q_HEADS, DIM), np.float32), seen=seen)
        wanted = rows(worker, sequence - 1, 0, seen)[layer].mean(0, dtype=np.float64)
        if not np.allclose(out, np.repeat(wanted, Q_HEADS // KV_HEADS, 0), rtol=1e-6):
            sys.exit(f"worker {worker} sequence {sequence} layer {layer}: a decode over rows of something else")
    elif kind < 0.9:
        first = draw.randrange(length)
        n = draw.randint(1, length - first)
        k, v = session.read(sequence, start=first, n=n)
        check(f"worker {worker} sequence {sequence} k", k, rows(worker, sequence - 1, first, n))
        check(f"worker {worker} sequence {sequence} v", v, rows(worker, sequence - 1, first, n))
    elif kind < 0.97:
        n = draw.randint(0, length)
        say("try", sequence, n, length)
        session.truncate(sequence, n)
        lengths[sequence] = n
        say("is", sequence, n)
    else:
        say("try", sequence, 0, length)
        session.free(sequence)
        lengths.pop(sequence)
        say("is", sequence, 0)


def serve(address, worker, draw, deadline):
    """Until the daemon is gone. A session of this name that is still there is taken over and checked first."""
    with tqkv.Client(address, timeout=20) as client:
        try:
            session = client.attach(f"soak-{worker}")
        except tqkv.TqkvError as error:
            if error.status_name not in ("NOT_FOUND", "SESSION_EXPIRED"):
                raise
            session = client.open("soak", f"soak-{worker}", lease_ms=20000)
            say("new")
        told = session.lengths()
        check_all(worker, session, told)
        lengths = {sequence: min(layers) for sequence, layers in told.items()}
        for sequence, layers in told.items():
            if min(layers) != max(layers):
                sys.exit(f"worker {worker} sequence {sequence}: half an item: {layers}")
        n = 0
        while time.monotonic() < deadline:
            step(worker, session, lengths, draw)
            n += 1
            if n % 50 == 0:
                say("ops", 50)


def main():
    address, worker, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    assert worker < WORKERS_MAX
    draw, deadline = random.Random(seed), time.monotonic() + 3600
    while True:
        try:
            serve(address, worker, draw, deadline)
        except tqkv.TqkvError as error:
            if error.status_name not in GONE and not error.is_local:
                raise
            say("lost")
            time.sleep(0.05)


if __name__ == "__main__":
    main()
