"""Operators that poll beside the data path: 10^4 sessions, /metrics and /v1/sessions a hundred times a second each."""

import os
import signal
import struct
import subprocess
import sys
import time
import unittest

import frames
from daemon import EXACT, IS_SANITIZED, Daemon

N_SESSIONS = 10_000
N_STEPS = 600
N_ROUNDS = 8
RATIO_MAX = 5
POLLS_PER_S = 200
POLLER = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=30)
paths = ["/metrics", "/v1/sessions?limit=256", "/metrics", "/v1/sessions?sort=tokens&limit=256"]
n, due = 0, time.monotonic()
while True:
    connection.request("GET", paths[n % len(paths)])
    reply = connection.getresponse()
    assert reply.status == 200, reply.status
    reply.read()
    n += 1
    print(end=".", flush=True)
    now = time.monotonic()
    due = max(due + 1 / float(sys.argv[2]), now)  # what it missed is not made up for
    if due > now:
        time.sleep(due - now)
"""


def drain(pipe):
    """How many bytes wait in it."""
    try:
        return len(os.read(pipe.fileno(), 65536))
    except BlockingIOError:
        return 0


@unittest.skipIf(IS_SANITIZED, "the time of a sanitized build says nothing")
class Polling(unittest.TestCase):
    def steps(self, raw, session, sequence):
        """Round trips of single appends, in seconds, sorted."""
        row = struct.pack("<64f", *[0.25] * 64)
        times = []
        for position in range(N_STEPS):
            data = frames.rows(frames.APPEND, session, [(sequence, position, 1, 0, int(position == 0))], n_layers=2, k=row * 2,
                               v=row * 2)
            begun = time.perf_counter()
            reply = raw.call(data)
            times.append(time.perf_counter() - begun)
            self.assertEqual(reply.item_statuses(), [0])
        return sorted(times)

    def compare(self, raw, session, poller, sequence):
        """
        The p99 of steps beside the poller, over that of steps without, and polls per second; in turns, so that both meet
        what else runs on this machine.
        """
        quiet, polled, polled_s, n_polls = [], [], 0, 0
        for turn in range(N_ROUNDS):
            poller.send_signal(signal.SIGSTOP)
            quiet += self.steps(raw, session, sequence + 2 * turn)
            drain(poller.stdout)
            poller.send_signal(signal.SIGCONT)
            begun = time.monotonic()
            polled += self.steps(raw, session, sequence + 2 * turn + 1)
            polled_s += time.monotonic() - begun
            n_polls += drain(poller.stdout)
            self.assertIsNone(poller.poll(), "the poller ended")
        quiet, polled = sorted(quiet), sorted(polled)
        p50, p99 = len(quiet) // 2, len(quiet) * 99 // 100
        ratio, rate = polled[p99] / quiet[p99], n_polls / polled_s
        print(f"append p99 {quiet[p99] * 1e6:.0f} us, polled {polled[p99] * 1e6:.0f} us: {ratio:.1f} times; "
              f"p50 {quiet[p50] * 1e6:.0f} us, polled {polled[p50] * 1e6:.0f} us; {rate:.0f} polls a second")
        return ratio, rate

    def test_polling_leaves_the_data_path_alone(self):
        pool = EXACT.replace("blocks=64", "blocks=8192")
        with Daemon("--backend", "cpu", "--pool", pool, "--sessions-max", "12000", "--lease-ms", "600000") as daemon, \
                frames.Raw(daemon.addr) as raw:
            raw.hello()
            session = raw.open(b"exact")
            opened = frames.open_session(b"exact")
            for _ in range(N_SESSIONS // 100):
                raw.send(opened * 100)
                for _ in range(100):
                    self.assertEqual(raw.reply().status, 0)
            self.assertEqual(daemon.metrics()["tqkv_sessions"], N_SESSIONS + 1)
            self.steps(raw, session, 1)  # warm
            poller = subprocess.Popen([sys.executable, "-c", POLLER, daemon.http, str(POLLS_PER_S)], stdout=subprocess.PIPE)
            try:
                poller.stdout.read(1)
                os.set_blocking(poller.stdout.fileno(), False)
                ratio, rate, tries = RATIO_MAX + 1, 0, 0
                # Other programs on this machine are no reason to fail.
                while (ratio > RATIO_MAX or rate < POLLS_PER_S / 2) and tries < 10:
                    ratio, rate = self.compare(raw, session, poller, 10 + 2 * N_ROUNDS * tries)
                    tries += 1
            finally:
                poller.kill()
                poller.communicate()
            self.assertLessEqual(ratio, RATIO_MAX)
            self.assertGreaterEqual(rate, POLLS_PER_S / 2)


if __name__ == "__main__":
    unittest.main()
