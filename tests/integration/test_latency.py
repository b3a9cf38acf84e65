"""What others feel while much is given back at once, and whether a miss tells that it was nearly a hit."""

import bisect
import random
import select
import struct
import subprocess
import sys
import threading
import time
import unittest

import frames
from daemon import IS_SANITIZED, Daemon

N_CLIENTS, N_QUIET = 8, 250
F16 = 2
# One layer of small rows, so that many blocks are little memory.
POOL = "name=p,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=fp8,v=fp8,block_size=16,blocks={}"
TOKEN = struct.pack("<16e", *[0.25] * 16)
# What is given back is bounded per turn, so an append waits for a turn or two of it: a few times its own length. A daemon
# that took everything in one turn would keep it waiting for tens of milliseconds, a hundred times as long as usual. In
# between is what a busy machine adds to the worst of some hundred samples: a time slice or two.
RATIO_MAX = 30
TRIES = 3
WATCHER = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=30)
while True:
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    rows = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    print(time.monotonic(), *[rows[name] for name in sys.argv[2:]], flush=True)
    time.sleep(0.002)
"""


class Watcher:
    """Another process that asks for metrics all the time: [(when, values...)]."""

    def __init__(self, daemon, *names):
        self.seen = []
        self.process = subprocess.Popen([sys.executable, "-c", WATCHER, daemon.http, *names], stdout=subprocess.PIPE, text=True)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self):
        for line in self.process.stdout:
            self.seen.append(tuple(float(word) for word in line.split()))

    def __enter__(self):
        while not self.seen:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.thread.join()
        self.process.stdout.close()


class Appenders:
    """Clients that append a token each, all at once, again and again."""

    def __init__(self, test, daemon):
        self.test, self.position, self.samples = test, 0, []
        self.clients = [frames.Raw(daemon.addr) for _ in range(N_CLIENTS)]
        for client in self.clients:
            test.addCleanup(client.close)
            client.hello()
        self.sessions = [client.open(b"p", lease_ms=600_000) for client in self.clients]
        self.ready = []
        self.prepare(2 * N_QUIET)

    def prepare(self, n_rounds):
        for _ in range(n_rounds):
            position = self.position + len(self.ready)
            self.ready.append([frames.rows(frames.APPEND, session, [(1, position, 1, 0, int(position == 0))], k=TOKEN, v=TOKEN,
                                           dtype=F16) for session in self.sessions])

    def round(self):
        if not self.ready:
            self.prepare(1)
        begun = []
        for client, data in zip(self.clients, self.ready.pop(0)):
            begun.append(time.monotonic())
            client.send(data)
        for client, start in zip(self.clients, begun):
            head = client.receive(64)
            body = client.receive(struct.unpack_from("<Q", head, 32)[0])
            self.samples.append((start, time.monotonic()))
            self.test.assertEqual((struct.unpack_from("<I", head, 12)[0], frames.Reply(head, body).item_statuses()), (0, [0]))
        self.position += 1

    def quiet(self):
        for _ in range(N_QUIET):
            self.round()
        return sorted(end - start for start, end in self.samples)

    def during(self, begin, end):
        return sorted(stop - start for start, stop in self.samples if stop >= begin and start <= end)

    def close(self):
        for client in self.clients:
            client.close()


def p99(times):
    return times[len(times) * 99 // 100]


def pipelined(test, raw, messages):
    """Sends them some at a time; every one must succeed. Returns the replies."""
    replies = []
    for i in range(0, len(messages), 50):
        raw.send(b"".join(messages[i:i + 50]))
        replies += [raw.reply() for _ in messages[i:i + 50]]
    for reply in replies:
        test.assertEqual((reply.status, [status for status in reply.item_statuses() if status]), (0, []))
    return replies


@unittest.skipIf(IS_SANITIZED, "the time of a sanitized build says nothing")
class GivingBack(unittest.TestCase):
    def compare(self, what, measure):
        for attempt in range(TRIES):
            quiet, busy, seconds = measure()
            ratio = p99(busy) / p99(quiet)
            print(f"{what} in {seconds * 1e3:.0f} ms: p99 of {len(busy)} appends {p99(busy) * 1e6:.0f} us, otherwise "
                  f"{p99(quiet) * 1e6:.0f} us: {ratio:.1f} times; p50 {busy[len(busy) // 2] * 1e6:.0f} us, otherwise "
                  f"{quiet[len(quiet) // 2] * 1e6:.0f} us")
            if ratio <= RATIO_MAX:
                return
        self.fail(f"{ratio:.1f} times")

    def reap(self):
        n, lease_s = 10_000, 4
        with Daemon("--backend", "cpu", "--pool", POOL.format(n + 20_000), "--sessions-max", n + 100, "--sequences-max",
                    n + 100) as daemon, frames.Raw(daemon.addr) as many:
            many.hello()
            appenders = Appenders(self, daemon)
            opened = frames.open_session(b"p", lease_ms=lease_s * 1000)
            for _ in range(n // 500):
                sessions = [struct.unpack_from("<Q", reply.op)[0] for reply in pipelined(self, many, [opened] * 500)]
                pipelined(self, many, [frames.rows(frames.APPEND, session, [(1, 0, 1, 0, 1)], k=TOKEN, v=TOKEN, dtype=F16)
                                       for session in sessions])
                self.assertEqual(many.call(frames.frame(frames.PING)).status, 0)  # of all its sessions
            with Watcher(daemon, "tqkv_sessions") as watcher:
                self.assertEqual(many.call(frames.frame(frames.PING)).status, 0)
                quiet = appenders.quiet()
                self.assertEqual(watcher.seen[-1][1], n + N_CLIENTS)
                many.socket.close()
                time.sleep(lease_s - 0.3)
                appenders.prepare(N_QUIET)
                while watcher.seen[-1][1] > N_CLIENTS:
                    appenders.round()
                begin = max(when for when, n_left in watcher.seen if n_left == n + N_CLIENTS)
                end = min(when for when, n_left in watcher.seen if n_left == N_CLIENTS)
            appenders.close()
            return quiet, appenders.during(begin, end), end - begin

    def test_reaping_sessions(self):
        """FAILURES L14: 10^4 sessions whose leases end together, while 8 clients append. The p99 ratio is printed."""
        self.compare("10^4 sessions reaped", self.reap)

    def evict(self):
        n_sequences, n_tokens = 25, 64_000
        n_blocks = n_sequences * n_tokens // 16
        with Daemon("--backend", "cpu", "--pool", POOL.format(n_blocks + 1000), "--alloc-timeout-ms", "60000") as daemon, \
                frames.Raw(daemon.addr) as idle, frames.Raw(daemon.addr) as wants:
            idle.hello()
            wants.hello()
            appenders = Appenders(self, daemon)
            session, part = idle.open(b"p", lease_ms=600_000), 16_000
            for sequence in range(1, n_sequences + 1):
                for at in range(0, n_tokens, part):
                    rows = frames.rows(frames.APPEND, session, [(sequence, at, part, 0, 2 | int(at == 0))], k=TOKEN * part,
                                       v=TOKEN * part, dtype=F16)
                    self.assertEqual(idle.call(rows).item_statuses(), [0])
            quiet = appenders.quiet()
            begin = time.monotonic()
            wants.send(frames.open_session(b"p", reserve_blocks=n_blocks))
            while True:
                appenders.round()
                if select.select([wants.socket], [], [], 0)[0]:
                    break
            end = time.monotonic()
            self.assertEqual(wants.reply().status, 0)
            tell = idle.call(frames.frame(frames.TELL, struct.pack("<QII", 0, 64, 0), session=session))
            self.assertEqual([struct.unpack_from("<H", item, 24)[0] for item in tell.items], [2] * n_sequences)
            appenders.close()
            return quiet, appenders.during(begin, end), end - begin

    def test_evicting_blocks(self):
        """FAILURES P6: 10^5 blocks of idle sequences go for one reservation, while 8 clients append. The p99 ratio is printed."""
        self.compare("10^5 blocks evicted", self.evict)


def chance_above(some, others):
    """The chance that one of `some` is above one of `others`: 0.5 where they are of one distribution."""
    others = sorted(others)
    below = sum(bisect.bisect_left(others, value) + bisect.bisect_right(others, value) for value in some)
    return below / (2 * len(some) * len(others))


@unittest.skipIf(IS_SANITIZED, "the time of a sanitized build says nothing")
class Misses(unittest.TestCase):
    """
    FAILURES H3: what another tenant published or opened is a miss like any other, in its answer and in its time. The kinds
    come in turn, so whatever else the machine does falls upon all of them alike, and ranks are compared, so a few slow ones
    say nothing. With 3000 of each the chance of one being above another strays from 0.5 by 0.0075; the bound is far
    above that, and below the 0.7 to 0.9 of a hit.
    """

    N, STRAYS_MAX = 3000, 0.05

    def times(self, raw, kinds):
        """kinds: [(frames, status)]. The first rounds warm up."""
        times, order = [[] for _ in kinds], list(range(len(kinds)))
        for n in range(self.N + 50):
            random.shuffle(order)  # what came before it must say nothing either
            for k in order:
                some, status = kinds[k]
                data = random.choice(some)
                begun = time.perf_counter()
                raw.send(data)
                reply = raw.receive(64)
                reply += raw.receive(struct.unpack_from("<Q", reply, 32)[0])
                elapsed = time.perf_counter() - begun
                self.assertEqual(struct.unpack_from("<I", reply, 12)[0], status)
                if n >= 50:
                    times[k].append(elapsed)
        return times

    def compare(self, what, raw, kinds, control=None):
        for _ in range(TRIES):
            foreign, absent, *rest = self.times(raw, kinds + ([control] if control else []))
            chance = chance_above(foreign, absent)
            middle = [sorted(times)[self.N // 2] * 1e6 for times in (foreign, absent)]
            print(f"{what}: p50 {middle[0]:.1f} us for what another tenant has, {middle[1]:.1f} us for what nobody has; "
                  f"chance that one is above the other {chance:.3f}")
            if control:
                hit = chance_above(rest[0], absent)
                print(f"{what}: chance that a hit is above a miss {hit:.3f}")
            if abs(chance - 0.5) <= self.STRAYS_MAX and (not control or hit - 0.5 > self.STRAYS_MAX):
                return
        self.fail("the time of an answer tells what another tenant has")

    def test_misses_take_the_same_time(self):
        # Many of each, because where a single one falls in a table of hashes is a matter of luck, and of nobody's having it.
        n_tokens, n_lists = 1024, 48
        foreign, absent, own = ([struct.pack(f"<{n_tokens}I", *range(first, first + n_tokens))
                                 for first in range(start, start + 1000 * n_lists, 1000)]
                                for start in (0, 1_000_000, 2_000_000))

        def prefix(opcode, session, sequence, ids):
            # No adapter, no salt, no end of its life; MATCH only tells the length.
            op = struct.pack("<QIHHIIQ", sequence, n_tokens, 0, 0, int(opcode != frames.PUBLISH), 0, 0)
            return frames.frame(opcode, op, payload=ids, session=session)

        def attach(name):
            op = struct.pack("<HHHHIIIIQ32x", 0, len(name), 0, 0, 0, 0, 0, 0, 0)
            return frames.frame(frames.ATTACH, op, payload=name)

        with Daemon("--backend", "cpu", "--pool", POOL.format(8000)) as daemon, frames.Raw(daemon.addr) as owner, \
                frames.Raw(daemon.tcp) as stranger:
            owner.hello()
            stranger.hello()
            sessions = []
            # The stranger has published under the same adapter and salt, so its lookups begin as the owner's do.
            for raw, lists in ((owner, foreign), (stranger, own)):
                sessions.append(raw.open(b"p", name=b"a-name"))
                for sequence, ids in enumerate(lists, 1):
                    rows = frames.rows(frames.APPEND, sessions[-1], [(sequence, 0, n_tokens, 0, 1)], k=TOKEN * n_tokens,
                                       v=TOKEN * n_tokens, dtype=F16)
                    self.assertEqual(raw.call(rows).item_statuses(), [0])
                    self.assertEqual(raw.call(prefix(frames.PUBLISH, sessions[-1], sequence, ids)).status, 0)
            for i in range(n_lists):
                owner.open(b"p", name=b"owned-%02d" % i)
            asked = [[prefix(frames.MATCH, sessions[1], 0, ids) for ids in lists] for lists in (foreign, absent, own)]
            self.compare("MATCH", stranger, [(asked[0], 300), (asked[1], 300)], (asked[2], 0))
            names = [[attach(name % i) for i in range(n_lists)] for name in (b"owned-%02d", b"nobod-%02d")]
            self.compare("ATTACH", stranger, [(names[0], 300), (names[1], 300)])


if __name__ == "__main__":
    unittest.main()
