"""Tenants: quotas that hold under parallel writers, what comes back, policies over HTTP, tqkvctl and reloads."""

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
import unittest

import numpy as np
import tqkv
from daemon import BUILD, PATIENCE_S, Daemon
from tqkv import Status

POOL = "name=p,layers=2,q_heads=2,kv_heads=1,head_dim=32,k=f32,v=f32,block_size=16,blocks=512"
BLOCK_BYTES = 16 * 2 * 2 * 32 * 4
UID = str(os.getuid())
# Of calls that are refused. QUOTA of requests in flight is tried again for so long, any other is told at once.
WAIT_S = 0.5


def rows(n):
    return np.ones((2, n, 1, 32), np.float32)


class Tenants(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.config = os.path.join(self.folder.name, "tqkvd.json")
        self.write([{"tenant": "_default", "sessions": 3}])
        self.daemon = Daemon("--config", self.config, "--pool", POOL, "--host-tier-bytes", "4MiB")
        self.control = tqkv.http.Control(self.daemon.http)

    def tearDown(self):
        audit = self.daemon.get("/v1/audit")
        self.daemon.stop()
        self.folder.cleanup()
        self.assertEqual(audit.get("error"), None, audit)

    def write(self, tenants):
        with open(self.config, "w", encoding="ascii") as file:
            json.dump({"tenants": tenants}, file)

    def refused(self, status, call):
        """The call is refused for that. Its time may end in the middle of its last attempt: then it is made again."""
        end = time.monotonic() + PATIENCE_S
        while True:
            with self.assertRaises(tqkv.TqkvError) as caught:
                call()
            if caught.exception.status != Status.DEADLINE or time.monotonic() > end:
                self.assertEqual(caught.exception.status, status)
                return caught.exception

    def mine(self):
        return self.daemon.get(f"/v1/tenants/{UID}")

    def test_p11_four_writers_and_a_hard_quota(self):
        """P11: never above the quota, even for a moment; who is refused is told QUOTA, and what is freed can be used."""
        quota = 40 * BLOCK_BYTES
        self.control.set_tenant(UID, bytes=quota)
        n_refused, n_taken, stop, above = [0] * 4, [0] * 4, threading.Event(), []

        def write(number):
            with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S, retry=False) as client, client.open("p") as session:
                for sequence in range(1, 41):
                    try:
                        session.append_layers(sequence, rows(32), rows(32))
                        n_taken[number] += 1
                    except tqkv.TqkvError as error:
                        if error.status != Status.QUOTA:
                            raise
                        n_refused[number] += 1
                        break
                barrier.wait(PATIENCE_S)
                barrier.wait(PATIENCE_S)

        def watch():
            while not stop.is_set():
                above.append(self.mine()["used"]["bytes"])

        self.control.set_tenant("_default", sessions=4)
        self.control.set_tenant(UID, bytes=quota, sessions=4)
        barrier = threading.Barrier(5)
        threads = [threading.Thread(target=write, args=(n,)) for n in range(4)] + [threading.Thread(target=watch)]
        for thread in threads:
            thread.start()
        barrier.wait(PATIENCE_S)
        held = self.mine()
        barrier.wait(PATIENCE_S)
        for thread in threads[:4]:
            thread.join(PATIENCE_S)
        stop.set()
        threads[4].join(PATIENCE_S)
        # Whole appends of 2 blocks fill it to the last one, and everybody has met its end.
        self.assertEqual((n_refused, sum(n_taken)), ([1] * 4, 20))
        self.assertLessEqual(max(above), quota)
        self.assertLessEqual(held["used_max"]["bytes"], quota)
        self.assertEqual(held["used"]["bytes"], quota)
        self.assertGreaterEqual(held["n_refused"]["bytes"], 4)
        self.assertEqual(held["used"]["sessions"], 4)
        end = time.monotonic() + PATIENCE_S
        while self.mine()["used"]["bytes"] > 0 and time.monotonic() < end:
            time.sleep(0.01)
        self.assertEqual(self.mine()["used"], {"bytes": 0, "tokens": 0, "sessions": 0, "requests": 0, "tier_bytes": 0})

    def test_metrics(self):
        """A tenant's quotas, use and refusals are in /metrics, with the sum of those that have no series of their own."""
        self.control.set_tenant(UID, sessions=1, weight=7)
        with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S) as client, client.open("p") as session:
            session.append_layers(1, rows(20), rows(20))
            begun = time.monotonic()
            self.refused(Status.QUOTA, lambda: client.open("p"))
            self.assertLess(time.monotonic() - begun, PATIENCE_S / 2, "the refusal waited for the call's deadline")
            now, mine = self.daemon.metrics(), self.mine()
        for quota in ("bytes", "tokens", "sessions", "requests", "tier_bytes"):
            self.assertEqual(now[f'tqkv_tenant_used{{tenant="{UID}",quota="{quota}"}}'], mine["used"][quota])
            self.assertEqual(now[f'tqkv_tenant_used{{tenant="other",quota="{quota}"}}'], 0)
        self.assertEqual(now[f'tqkv_tenant_used{{tenant="{UID}",quota="tokens"}}'], 20)
        self.assertEqual(now[f'tqkv_tenant_quota{{tenant="{UID}",quota="sessions"}}'], 1)
        self.assertEqual(now[f'tqkv_tenant_quota{{tenant="{UID}",quota="bytes"}}'], float("inf"))
        self.assertGreaterEqual(now[f'tqkv_tenant_refused_total{{tenant="{UID}",quota="sessions"}}'], 1)
        self.assertEqual(now[f'tqkv_tenant_weight{{tenant="{UID}"}}'], 7)

    def test_p11_a_failed_append_gives_back(self):
        """A row that is not a number is refused by the backend, after its blocks were charged."""
        self.control.set_tenant(UID, bytes=2 * BLOCK_BYTES, tokens=32)
        bad = rows(32)
        bad[1, 31] = np.nan
        with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S) as client, client.open("p") as session:
            for _ in range(3):
                with self.assertRaises(tqkv.TqkvError) as caught:
                    session.append_layers(1, bad, rows(32))
                self.assertEqual(caught.exception.status, Status.BAD_VALUE)
            session.append_layers(2, rows(32), rows(32))
            self.refused(Status.QUOTA, lambda: session.append_layers(3, rows(1), rows(1), timeout=WAIT_S))
            self.assertEqual(self.mine()["used"], {"bytes": 2 * BLOCK_BYTES, "tokens": 32, "sessions": 1, "requests": 0, "tier_bytes": 0})
            session.truncate(2, 16)
            session.append_layers(3, rows(16), rows(16))

    def test_spilled_rows_are_charged(self):
        """A tenant may fill so much of the tiers and no more; it is told QUOTA, and what comes back is refunded."""
        self.control.set_tenant(UID, tier_bytes="128KiB")
        with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S) as client, client.open("p") as session:
            for sequence in range(1, 4):
                session.append_layers(sequence, rows(32), rows(32))
            session.spill([1, 2])
            self.refused(Status.QUOTA, lambda: session.spill(3, timeout=WAIT_S))
            self.assertEqual(self.mine()["used"]["tier_bytes"], 131072)
            self.assertGreaterEqual(self.mine()["n_refused"]["tier_bytes"], 1)
            now = self.daemon.metrics()
            self.assertEqual(now[f'tqkv_tenant_quota{{tenant="{UID}",quota="tier_bytes"}}'], 131072)
            self.assertGreaterEqual(now["tqkv_spills_rejected_quota_total"], 1)
            session.truncate(1, 0)
            session.spill(3)
            self.assertEqual(self.mine()["used_max"]["tier_bytes"], 131072)

    def test_own_prefixes_make_room_for_the_tenant(self):
        """What a tenant has published and nobody uses goes before the tenant is refused; a pool with room keeps it."""
        self.control.set_tenant(UID, bytes=4 * BLOCK_BYTES)
        with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S) as client, client.open("p") as session:
            session.append_layers(1, rows(48), rows(48))
            self.assertEqual(session.publish(1, list(range(48))), 48)
            session.free([1])
            self.assertEqual(self.mine()["used"]["bytes"], 3 * BLOCK_BYTES)
            session.append_layers(2, rows(64), rows(64))
            self.assertEqual(session.match(None, list(range(48))), 0)

    def test_policies(self):
        """The configuration's at the start; PUT and DELETE until a reload finds another list; "_default" is managed, too."""
        with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S) as client, \
                tqkv.Client(self.daemon.addr, timeout=WAIT_S) as hasty:
            sessions = [client.open("p") for _ in range(3)]
            error = self.refused(Status.QUOTA, lambda: hasty.open("p"))
            self.assertIn("quota of sessions is 3, 3 are used, 1 more wanted", str(error))
            self.assertEqual(self.mine()["policy"], "_default")
            self.assertEqual(self.control.set_tenant(UID, sessions=4, weight=5)["weight"], 5)
            sessions.append(client.open("p"))
            self.control.clear_tenant(UID)
            self.refused(Status.QUOTA, lambda: hasty.open("p"))
            self.control.clear_tenant("_default")
            sessions.append(client.open("p"))
            self.control.set_tenant(UID, sessions=100)
            os.kill(self.daemon.process.pid, signal.SIGHUP)  # the same list: nothing changes
            self.assertEqual(self.daemon.request("POST", "/v1/reload", {})[0], 200)
            end = time.monotonic() + PATIENCE_S
            while self.daemon.log().count("configuration reloaded") < 2:  # the signal's may come later
                self.assertLess(time.monotonic(), end, "the signal reloads nothing")
                time.sleep(0.01)
            self.assertEqual(self.mine()["quotas"]["sessions"], 100)
            self.write([{"tenant": UID, "sessions": 5, "weight": 2}, {"tenant": "8", "bytes": "1GiB"}])
            status, reload = self.daemon.request("POST", "/v1/reload", {})
            self.assertEqual((status, "tenants" in reload["changed"]), (200, True))
            self.assertEqual(self.mine()["quotas"], {"bytes": None, "tokens": None, "sessions": 5, "requests": None,
                                                     "tier_bytes": None})
            self.assertEqual(self.daemon.get("/v1/tenants/8")["quotas"]["bytes"], 1 << 30)
            self.refused(Status.QUOTA, lambda: hasty.open("p"))
            self.write([{"tenant": "8"}, {"tenant": "8"}])
            status, answer = self.daemon.request("POST", "/v1/reload", {})
            self.assertEqual(status, 400)
            self.assertIn("tenants[1]: the same tenant as tenants[0]", answer["detail"])
            self.assertEqual(self.mine()["quotas"]["sessions"], 5)
            for session in sessions:
                session.close()

    def test_requests_in_flight(self):
        self.control.set_tenant(UID, requests=0)
        with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S) as client, client.open("p") as session:
            self.refused(Status.QUOTA, lambda: session.append_layers(1, rows(1), rows(1), timeout=WAIT_S))
            self.control.set_tenant(UID, requests=1)
            session.append_layers(1, rows(1), rows(1))
            for _ in range(3):  # what fails is over, too
                with self.assertRaises(tqkv.TqkvError) as caught:
                    session.append_layers(1, np.full_like(rows(1), np.nan), rows(1))
                self.assertEqual(caught.exception.status, Status.BAD_VALUE)
                session.append_layers(1, rows(1), rows(1))
        used = self.mine()
        self.assertEqual((used["used"]["requests"], used["used_max"]["requests"]), (0, 1))

    def test_a_session_that_is_refused_is_not_charged(self):
        """A reservation that the pool does not have, a pool that is not there, a name that is taken: each is refused
        behind the quota, and the quota's last session can still be opened."""
        self.control.set_tenant(UID, sessions=2, bytes="1GiB")
        with tqkv.Client(self.daemon.addr, timeout=PATIENCE_S) as client, client.open("p", session="taken"):
            for words, status in (({"pool": "p", "reserve_blocks": 513}, Status.LIMIT), ({"pool": "absent"}, Status.NOT_FOUND),
                                  ({"pool": "p", "session": "taken"}, Status.EXISTS)):
                with self.assertRaises(tqkv.TqkvError) as caught:
                    client.open(**words)
                self.assertEqual(caught.exception.status, status)
            self.assertEqual(self.mine()["used"], {"bytes": 0, "tokens": 0, "sessions": 1, "requests": 0, "tier_bytes": 0})
            client.open("p", reserve_blocks=512).close()

    def test_control_program(self):
        def ctl(*words, code=0):
            done = subprocess.run([BUILD / "server/tqkvctl", *words, "--http", self.daemon.http], capture_output=True, text=True,
                                  check=False, timeout=PATIENCE_S)
            self.assertEqual(done.returncode, code, done)
            return done.stdout if code == 0 else done.stderr
        self.assertIn("_default", ctl("tenants"))
        self.assertIn("1.00 GiB", ctl("tenants", "set", "7", "--bytes", "1GiB", "--weight", "3"))
        listed = json.loads(ctl("tenants", "--json"))["tenants"]
        self.assertEqual([(row["tenant"], row["weight"]) for row in listed], [("7", 3), ("_default", 1)])
        self.assertEqual(listed[0]["quotas"]["bytes"], 1 << 30)
        ctl("tenants", "clear", "7")
        self.assertIn("no policy of its own", ctl("tenants", "clear", "7", code=1))
        self.assertIn("is no tenant", ctl("tenants", "set", "a/b", code=2))


if __name__ == "__main__":
    unittest.main()
