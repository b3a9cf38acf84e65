"""FAILURES M2: a running daemon tells what it lost, and whose it was."""

import signal
import threading
import time
import unittest

import numpy as np

import tqkv
from daemon import PATIENCE_S, Daemon

POOL = "name=demo,layers=1,q_heads=2,kv_heads=1,head_dim=32,k=tq4,v=tq4,block_size=16,blocks=20000"


def rows(n_tokens):
    return np.ones((n_tokens, 1, 32), np.float32)


class Load(threading.Thread):
    """Appends and frees all the time."""

    def __init__(self, addr):
        super().__init__(daemon=True)
        self.addr, self.is_over, self.n_rounds = addr, threading.Event(), 0

    def run(self):
        with tqkv.Client(self.addr) as client, client.open("demo") as session:
            while not self.is_over.is_set():
                session.append(1, layer=0, k=rows(200), v=rows(200))
                session.decode(1, layer=0, q=np.ones((2, 32), np.float32))
                session.free(1)
                self.n_rounds += 1


class Audit(unittest.TestCase):
    def test_a_lost_block_is_told_with_its_session(self):
        """Under load: clean before, then one block is forgotten, and both /v1/audit and the metric name its session."""
        with Daemon("--pool", POOL, "--audit-interval-ms", "50", program="tests/tqkvd_leaky") as daemon:
            loads = [Load(daemon.addr) for _ in range(2)]
            for load in loads:
                load.start()
            with tqkv.Client(daemon.addr) as client, client.open("demo") as session:
                session.append(7, layer=0, k=rows(400), v=rows(400))
                while min(load.n_rounds for load in loads) < 3:
                    time.sleep(0.01)
                for _ in range(5):
                    found = daemon.get("/v1/audit")
                    self.assertTrue(found["is_clean"], found)
                    self.assertGreaterEqual(found["n_blocks"], 20000)
                self.assertEqual(daemon.metrics()['tqkv_audit_difference{pool="",session=""}'], 0)
                for load in loads:
                    load.is_over.set()
                    load.join(PATIENCE_S)
                daemon.process.send_signal(signal.SIGUSR2)
                daemon._wait_for("(armed)")
                name = f"{session.handle:016x}"
                session.free(7)
            # Its session is closed meanwhile, and others work again.
            loads = [Load(daemon.addr) for _ in range(2)]
            for load in loads:
                load.start()
            while min(load.n_rounds for load in loads) < 3:
                time.sleep(0.01)
            found = daemon.get("/v1/audit")
            self.assertFalse(found["is_clean"], found)
            self.assertEqual((found["session"], found["pool"]), (name, "demo"))
            self.assertIn(name, found["difference"])
            end = time.monotonic() + PATIENCE_S
            series = f'tqkv_audit_difference{{pool="demo",session="{name}"}}'
            while daemon.metrics().get(series) != 1:  # the daemon's own audits find it, too
                self.assertLess(time.monotonic(), end)
            self.assertGreaterEqual(daemon.metrics()["tqkv_audits_failed_total"], 1)
            self.assertIn(f"last taken by session {name}", daemon.log())
            for load in loads:
                load.is_over.set()
                load.join(PATIENCE_S)

    def test_sums_of_a_large_session_are_said_to_be_left_out(self):
        """A session of more sequences than one step adds up is counted as such, and so is its pool; later it is not."""
        with Daemon("--pool", POOL) as daemon, tqkv.Client(daemon.addr) as client, client.open("demo") as session:
            def unsummed():
                found = daemon.get("/v1/audit")
                self.assertTrue(found["is_clean"], found)
                return found["n_sessions"], found["n_sessions_unsummed"], found["n_pools_unsummed"]

            for first in range(1, 4201, 200):
                session.append_batch({i: (rows(1), rows(1)) for i in range(first, first + 200)}, layer=0)
            self.assertEqual(unsummed(), (1, 1, 1))
            for first in range(1, 4201, 200):
                session.free(list(range(first, first + 200)))
            session.append(1, layer=0, k=rows(1), v=rows(1))
            self.assertEqual(unsummed()[:2], (1, 0))

    def test_audits_by_themselves(self):
        """Without being asked a daemon audits every audit_interval_ms, finds nothing, and serves on."""
        with Daemon("--pool", POOL, "--audit-interval-ms", "20") as daemon:
            load = Load(daemon.addr)
            load.start()
            end = time.monotonic() + PATIENCE_S
            while daemon.metrics()["tqkv_audits_total"] < 20:
                self.assertLess(time.monotonic(), end)
                time.sleep(0.02)
            load.is_over.set()
            load.join(PATIENCE_S)
            self.assertGreater(load.n_rounds, 0)
            self.assertEqual(daemon.metrics()["tqkv_audits_failed_total"], 0)


if __name__ == "__main__":
    unittest.main()
