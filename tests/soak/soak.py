"""Real processes that are killed: clients and the daemon, at random points under load.

usage: soak.py [SECONDS] [CONNECTS]    (TQKV_BUILD, TQKV_IO and KV_SOURCE_ROOT as for the integration tests)

What must hold, whoever dies: no answer has a row of something else (worker.py), a killed client loses nothing that was
acknowledged and leaves no block behind, a killed daemon is noticed by every client and mixes nothing, and connecting
and going away, over and over, leaves neither descriptors nor memory behind.
"""
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

sys.path[:0] = [str(pathlib.Path(__file__).parent), str(pathlib.Path(__file__).parent.parent / "integration")]

import tqkv

import worker
from daemon import IS_SANITIZED, Daemon

POOL = (f"name=soak,layers={worker.N_LAYERS},q_heads={worker.Q_HEADS},kv_heads={worker.KV_HEADS},"
        f"head_dim={worker.DIM},k=f32,v=f32,block_size=16,blocks=1024")
N_WORKERS = 6
PATIENCE_S = 60


class Worker:
    """A worker process and what is known of its session: per sequence the range in which the length must be, and the numbers
    of the tokens that may be there (worker.py)."""

    def __init__(self, address, number, seed, before=None):
        self.number = number
        self.ranges = before.ranges if before else {}
        self.tokens = before.tokens if before else {}
        self.next = before.next if before else 0
        self.n_ops, self.n_new, self.lost = 0, 0, []
        self.process = subprocess.Popen([sys.executable, worker.__file__, address, str(number), str(seed)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        json.dump({"tokens": self.tokens, "next": self.next}, self.process.stdin)
        self.process.stdin.close()
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            if not line.endswith("\n"):
                break  # killed while it wrote: the call was not made yet, or not yet known to be answered
            kind, *words = line.split()
            if kind == "lost":
                self.lost.append(float(words[0]))
                continue
            self._note(kind, *(int(word) for word in words))

    def _note(self, kind, sequence=0, low=0, high=0, number=0):
        before = self.tokens.get(sequence, [])
        if kind == "try":
            self.ranges[sequence] = (low, high)
            self.tokens[sequence] = before[:low] + list(range(number, number + high - low))
            self.next = number + high - low
        elif kind == "cut":
            self.ranges[sequence] = (low, high)
        elif kind == "fork":
            self.ranges[sequence] = (0, high)
            self.tokens[sequence] = self.tokens[low][:high]
        elif kind == "is":
            self.ranges[sequence] = (low, low)
            self.tokens[sequence] = before[:low]
        elif kind == "ops":
            self.n_ops += sequence
        elif kind == "new":
            self.n_new += 1
            self.ranges.clear()
            self.tokens.clear()

    def end(self):
        """By force, in the middle of whatever it does. Its own complaint, if it had one before."""
        self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        complaint = self.process.stderr.read()
        self.process.stderr.close()
        if complaint:
            raise AssertionError(f"worker {self.number}: {complaint}")


def wait_until(what, is_true):
    end = time.monotonic() + PATIENCE_S
    while not is_true():
        if time.monotonic() > end:
            raise AssertionError(f"not within {PATIENCE_S} s: {what}")
        time.sleep(0.02)


def inspect(daemon, dead):
    """A killed client's session, taken over: nothing acknowledged is lost, nothing is half there, all rows are its own."""
    with tqkv.Client(daemon.addr) as client:
        try:
            session = client.attach(f"soak-{dead.number}")
        except tqkv.TqkvError as error:
            if error.status_name == "NOT_FOUND" and all(low == 0 for low, _ in dead.ranges.values()):
                return  # it was killed before it had one
            raise
        told = session.lengths()
        for sequence, (low, high) in dead.ranges.items():
            layers = told.get(sequence, [0] * worker.N_LAYERS)
            assert min(layers) == max(layers), (dead.number, sequence, layers)
            assert layers[0] in (low, high), f"worker {dead.number} sequence {sequence}: {layers[0]} tokens, not {low} or {high}"
        worker.check_all(dead.number, session, told, dead.tokens)
    audit = daemon.get("/v1/audit")
    assert audit["is_clean"], audit


def blocks_of(daemon):
    return daemon.get("/v1/occupancy")["totals"]["blocks"]


def kill_clients(daemon, draw, seconds):
    workers = [Worker(daemon.addr, n, draw.getrandbits(32)) for n in range(N_WORKERS)]
    end, n_killed = time.monotonic() + seconds, 0
    try:
        wait_until("every worker works", lambda: all(w.n_ops for w in workers))
        while time.monotonic() < end or n_killed < 5:
            time.sleep(draw.uniform(0.05, 0.3))
            n = draw.randrange(N_WORKERS)
            workers[n].end()
            n_killed += 1
            inspect(daemon, workers[n])
            workers[n] = Worker(daemon.addr, n, draw.getrandbits(32), workers[n])
    finally:
        for one in workers:
            one.end()
    for one in workers:
        inspect(daemon, one)
    with tqkv.Client(daemon.addr) as client:
        for one in workers:
            client.attach(f"soak-{one.number}").close()
    wait_until("all blocks are free", lambda: blocks_of(daemon)["free"] == blocks_of(daemon)["total"])
    return n_killed


def kill_daemons(folder, draw, seconds):
    """Returns how often. Every worker must have noticed each time, at the first frame that it sent afterwards, whether the
    next daemon was there by then or not, and works on with a session that is new."""
    daemon = Daemon("--pool", POOL, folder=folder)
    workers = [Worker(daemon.addr, n, draw.getrandbits(32)) for n in range(N_WORKERS)]
    end, n_killed = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < end or n_killed < 4:
            wait_until("every worker works", lambda: all(w.n_new > n_killed and w.n_ops for w in workers))
            time.sleep(draw.uniform(0.05, 0.5))
            daemon.process.kill()
            daemon.process.wait()
            dead = time.monotonic()
            daemon.log_file.close()
            is_slow = n_killed % 2 == 0
            n_killed += 1
            if is_slow:
                wait_until("every worker noticed", lambda: all(len(w.lost) == n_killed for w in workers))
            for one in workers:
                one.n_ops = 0
            daemon = Daemon("--pool", POOL, folder=folder)
            wait_until("every worker noticed", lambda: all(len(w.lost) == n_killed for w in workers))
            for one in workers:
                assert one.lost[-1] <= dead, f"worker {one.number} got an answer {one.lost[-1] - dead} s after the daemon's end"
        wait_until("every worker works again", lambda: all(w.n_new > n_killed and w.n_ops for w in workers))
    finally:
        for one in workers:
            one.end()
        code = daemon.stop()
    assert code == 0, code
    return n_killed


def connect_and_go(daemon, n_connects):
    """In every way of going: at once, in the middle of HELLO, with a reset."""
    path = str(daemon.path)
    host, port = daemon.tcp[len("tcp:"):].rsplit(":", 1)

    def is_empty():
        return daemon.metrics()["tqkv_connections"] == 0

    # A daemon that is slower than this loop has many at a time, and memory for the most that it ever had: 1000 is the
    # most, from the first round on.
    def some(n):
        for i in range(n):
            if i % 1000 == 0:
                wait_until("no connection is left", is_empty)
            is_tcp = i % 8 == 0
            sock = socket.socket(socket.AF_INET if is_tcp else socket.AF_UNIX)
            sock.connect((host, int(port)) if is_tcp else path)
            if i % 3 == 1:
                sock.send(b"TKV1"[: i % 5])
            if is_tcp and i % 16 == 0:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            sock.close()

    held = [socket.socket(socket.AF_UNIX) for _ in range(1000)]
    for sock in held:
        sock.connect(path)
    wait_until("1000 connections are there", lambda: daemon.metrics()["tqkv_connections"] == 1000)
    for sock in held:
        sock.close()
    wait_until("no connection is left", is_empty)
    some(5000)  # pages that the first of them touch are no growth
    wait_until("no connection is left", is_empty)
    n_descriptors, resident_bytes = daemon.n_descriptors(), daemon.resident_bytes()
    some(n_connects)
    wait_until("no connection is left", is_empty)
    grown = daemon.resident_bytes() - resident_bytes
    wait_until("no descriptor is left", lambda: daemon.n_descriptors() <= n_descriptors)
    assert IS_SANITIZED or grown < 1 << 20, f"{grown} bytes more after {n_connects} connections"
    accepted = daemon.metrics()["tqkv_connections_accepted_total"]
    assert accepted >= n_connects, accepted
    return grown


def main():
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 10
    n_connects = int(sys.argv[2]) if len(sys.argv) > 2 else 10000
    seed = int(os.environ.get("TQKV_SEED", random.SystemRandom().getrandbits(32)))
    draw = random.Random(seed)
    print(f"seed {seed}", flush=True)
    with Daemon("--pool", POOL) as daemon:
        print(f"{kill_clients(daemon, draw, seconds / 2)} clients killed: nothing lost, nothing mixed, no block left",
              flush=True)
        grown = connect_and_go(daemon, n_connects)
        print(f"{n_connects} connections came and went: resident memory grew by {grown} bytes", flush=True)
    with tempfile.TemporaryDirectory(prefix="tqkv-soak.") as folder:
        n = kill_daemons(folder, draw, seconds / 2)
        print(f"{n} times the daemon was killed: every client noticed, nothing mixed", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
