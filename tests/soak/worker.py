"""One client of the soak: appends, decodes, reads, forks, truncates and frees at random, and checks every answer.

usage: worker.py ADDRESS NUMBER SEED    (standard input: what is known of its session, as JSON)

Every row says whose it is. A token that is written gets a number that this worker never used before, also not before it was
killed or its sequence truncated, and each row holds, channel by channel, the worker, that number, position, layer, head,
whether it is a key or a value, and a mixture of all of them. So rows of another session, sequence, token, layer or head, of
what was at the same place before, and of a daemon that is gone are noticed at once.

Standard output is the account that outlives this process, a line each, flushed, before a call that changes a length:

    try SEQUENCE LOW HIGH NUMBER      appends tokens LOW to HIGH, numbered from NUMBER on; the length is LOW or HIGH then
    cut SEQUENCE LOW HIGH             from HIGH to LOW tokens
    fork SEQUENCE PARENT LENGTH       a new sequence of the parent's first tokens, or none

and "is SEQUENCE LENGTH" once it was acknowledged. "new": the session is a new one. "lost WHEN": the daemon is gone; the last
call that succeeded began then. "ops N" now and then. A wrong answer ends the process with 1 and a text on standard error.
"""
import json
import random
import sys
import time

import numpy as np
import tqkv

N_LAYERS, Q_HEADS, KV_HEADS, DIM = 2, 4, 2, 16
SEQUENCES, TOKENS_MAX, WORKERS_MAX = 6, 1024, 16
# What a lost connection says. A call that hangs until its time is over has not noticed anything.
GONE = ("IO_ERROR", "UNAVAILABLE")


def rows(worker, numbers, first):
    """K and V, [layers, n, kv_heads, dim], of tokens with these numbers from position first on: exact in float32."""
    n = len(numbers)
    layer, token, head, kind = np.ogrid[:N_LAYERS, :n, :KV_HEADS, :2]
    number = np.asarray(numbers, np.int64).reshape(1, n, 1, 1)
    parts = [worker + 1, number // 4096, number % 4096, first + token, layer, head, kind]
    mixture = number * 131 + (first + token) * 17 + layer * 7 + head * 3 + kind + worker * 5
    parts += [(mixture * (c + 1)) % 1021 for c in range(DIM - len(parts))]
    out = np.stack(np.broadcast_arrays(*parts), -1).astype(np.float32)
    return np.ascontiguousarray(out[:, :, :, 0]), np.ascontiguousarray(out[:, :, :, 1])


def check(what, got, wanted):
    if got.shape != wanted.shape or not np.array_equal(got, wanted):
        bad = np.argwhere(got != wanted)[:3].tolist() if got.shape == wanted.shape else (got.shape, wanted.shape)
        sys.exit(f"{what}: rows of something else: at {bad}")


def check_read(worker, session, sequence, numbers, first, n):
    wanted = rows(worker, numbers[first:first + n], first)
    for name, got, row in zip("kv", session.read(sequence, start=first, n=n), wanted):
        check(f"worker {worker} sequence {sequence} {name}", got, row)


def check_all(worker, session, lengths, known):
    """Every row that the daemon has of this session; known: the numbers of each sequence's tokens."""
    for sequence, told in lengths.items():
        if min(told) != max(told):
            sys.exit(f"worker {worker} sequence {sequence}: half an item: {told}")
        if min(told) > len(known.get(sequence, ())):
            sys.exit(f"worker {worker} sequence {sequence}: {min(told)} tokens, and nobody wrote so many")
        if min(told):
            check_read(worker, session, sequence, known[sequence], 0, min(told))


def say(*words):
    print(*words, flush=True)


class Worker:
    def __init__(self, number, draw, known):
        self.number, self.draw = number, draw
        self.known = {int(sequence): numbers for sequence, numbers in known["tokens"].items()}
        self.next = known["next"]

    def step(self, session):
        """False: nothing was asked for."""
        draw = self.draw
        sequence = draw.randint(1, SEQUENCES)
        numbers, kind = self.known.get(sequence, []), draw.random()
        length = len(numbers)
        if kind < 0.5:
            return self.append(session, sequence, numbers, min(draw.choice((1, 1, 2, 7, 16, 40)), TOKENS_MAX - length))
        elif length == 0:
            return False
        elif kind < 0.72:
            # q = 0: every weight is the same, so the output is the mean of the rows.
            layer, seen = draw.randrange(N_LAYERS), draw.randint(1, length)
            out = session.decode(sequence, layer, np.zeros((Q_HEADS, DIM), np.float32), seen=seen)
            wanted = rows(self.number, numbers[:seen], 0)[1][layer].mean(0, dtype=np.float64)
            if not np.allclose(out, np.repeat(wanted, Q_HEADS // KV_HEADS, 0), rtol=1e-6):
                sys.exit(f"worker {self.number} sequence {sequence} layer {layer}: a decode over rows of something else")
        elif kind < 0.84:
            first = draw.randrange(length)
            check_read(self.number, session, sequence, numbers, first, draw.randint(1, length - first))
        elif kind < 0.91:
            child = next((child for child in range(1, SEQUENCES + 1) if child not in self.known), None)
            if child is None:
                return False
            say("fork", child, sequence, length)
            session.fork(child, sequence)
            self.acknowledged(child, numbers)
        elif kind < 0.97:
            n = draw.randint(0, length)
            say("cut", sequence, n, length)
            session.truncate(sequence, n)
            self.acknowledged(sequence, numbers[:n])
        else:
            say("cut", sequence, 0, length)
            session.free(sequence)
            self.acknowledged(sequence, [])
            del self.known[sequence]
        return True

    def acknowledged(self, sequence, numbers):
        self.known[sequence] = list(numbers)
        say("is", sequence, len(numbers))

    def append(self, session, sequence, numbers, n):
        if n == 0:
            return False
        new = list(range(self.next, self.next + n))
        say("try", sequence, len(numbers), len(numbers) + n, self.next)
        self.next += n
        try:
            session.append_layers(sequence, *rows(self.number, new, len(numbers)))
        except tqkv.TqkvError as error:
            if error.status_name != "POOL_FULL" and not any(r.status_name == "POOL_FULL" for r in error.item_errors):
                raise
            new = []  # nothing was kept, and that is checked like everything else
        if new or numbers:
            self.acknowledged(sequence, numbers + new)
        else:
            say("is", sequence, 0)
        return True

    def begin(self, client):
        """The session of this name that is still there is taken over and checked first."""
        try:
            session = client.attach(f"soak-{self.number}")
        except tqkv.TqkvError as error:
            if error.status_name != "NOT_FOUND":
                raise
            session = client.open("soak", f"soak-{self.number}", lease_ms=60000)
            self.known = {}
            say("new")
        told = session.lengths()
        check_all(self.number, session, told, self.known)
        self.known = {sequence: self.known[sequence][:layers[0]] for sequence, layers in told.items() if layers[0]}
        for sequence, layers in told.items():
            self.known.setdefault(sequence, [])
        return session

    def serve(self, client):
        """Until the daemon is gone; then until there is another one, which must not be taken for the same."""
        session, n, last = self.begin(client), 0, 0
        try:
            while True:
                begun = time.monotonic()
                if self.step(session):
                    last, n = begun, n + 1
                if n % 20 == 19:
                    say("ops", 20)
                    n += 1
        except tqkv.TqkvError as error:
            if error.status_name not in GONE:
                raise
            say("lost", last)
        self.find_another(client)
        try:
            session.lengths()
        except tqkv.TqkvError:
            return
        sys.exit(f"worker {self.number}: a session of a daemon that was killed still answers")

    def find_another(self, client):
        while True:
            try:
                client.reconnect()
            except tqkv.TqkvError as error:
                if error.status_name == "STALE_EPOCH":
                    return
                if error.status_name not in GONE:
                    raise
                time.sleep(0.02)
            else:
                sys.exit(f"worker {self.number}: another daemon was taken for the one that was killed")


def main():
    address, number, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    assert number < WORKERS_MAX
    worker = Worker(number, random.Random(seed), json.load(sys.stdin))
    # Time enough for a busy machine: nothing here may take so long.
    with tqkv.Client(address, timeout=60, connect_timeout=60) as client:
        while True:
            worker.serve(client)


if __name__ == "__main__":
    main()
