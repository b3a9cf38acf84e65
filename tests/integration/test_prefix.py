"""PUBLISH, MATCH, PIN and eviction: what is shared is what was published, and nothing of anybody else's."""

import struct
import threading
import time
import unittest

import frames
import numpy as np
import tqkv
from daemon import PATIENCE_S, Daemon
from rows_case import EXACT, Rows, attention, distance
from tqkv import Status


class Prefix(Rows):
    def tearDown(self):
        """Published prefixes outlive their sessions: a pool of f32 rows as large as it is makes them go."""
        self.client.close()
        with tqkv.Client(self.daemon.addr, timeout=60) as client:
            end = time.monotonic() + 20
            while time.monotonic() < end:
                with client.open("odd") as session:
                    try:
                        session.append_layers(1, *self.rows(session, 128 * 16, layers=3))
                        break
                    except tqkv.TqkvError as error:
                        self.assertEqual(error.status, Status.POOL_FULL)
        self.client = tqkv.Client(self.daemon.addr, timeout=60)
        super().tearDown()

    def test_a_second_session_sends_only_what_is_new(self):
        """The first one is closed long since; the rows are the same bytes, whatever is appended on top."""
        tokens = list(range(1000, 1100))
        with self.client.open("odd") as session:
            k, v = self.rows(session, 100, layers=3)
            session.append_layers(1, k, v)
            self.assertEqual(session.publish(1, tokens), 96)
            self.assertEqual(session.publish(1, tokens[:50]), 48)
        with self.client.open("odd") as session:
            self.assertEqual(session.match(None, tokens), 96)
            self.assertEqual(session.lengths(), {})
            self.assertEqual(session.match(7, tokens[:99]), 96)
            self.assertEqual(session.match(8, tokens[:40] + [5] * 60), 32)
            self.assertEqual(session.match(9, [5] + tokens[1:]), 0)
            self.assertEqual(session.lengths(), {7: (96,) * 3, 8: (32,) * 3})
            memory = self.control.occupancy()["pools"][0]["memory"]
            self.assertEqual(memory["cached_bytes"], 0)
            more = self.rows(session, 20, layers=3)
            session.append_layers(7, *more)
            session.truncate(8, 20)
            session.append_layers(8, *more)
            for sequence, n in ((7, 96), (8, 20)):
                own = [np.concatenate((part[:, :n], add), axis=1) for part, add in zip((k, v), more)]
                back = session.read(sequence)
                self.assertTrue(np.array_equal(back[0], own[0]) and np.array_equal(back[1], own[1]))
                q = self.query(session)
                self.assertLess(distance(session.decode(sequence, 2, q), attention(q, own[0][2], own[1][2])[0]), EXACT)

    def test_identities(self):
        """FAILURES H3, H4: tenant (TCP is another), adapter, salt and pool are in the key."""
        tokens = list(range(64))
        with self.client.open("odd") as session, self.client.open("tq4") as other_pool, \
                tqkv.Client(self.daemon.tcp) as foreign, foreign.open("odd") as another:
            session.append_layers(1, *self.rows(session, 64, layers=3))
            self.assertEqual(session.publish(1, tokens, adapter="lora", salt="x"), 64)
            self.assertEqual(session.match(None, tokens, adapter="lora", salt="x"), 64)
            for wrong in ({}, {"adapter": "lora"}, {"adapter": "lorax"}, {"salt": "lorax"}, {"salt": "x"},
                          {"adapter": "lor", "salt": "ax"}):
                self.assertEqual(session.match(None, tokens, **wrong), 0)
            self.assertEqual(another.match(None, tokens, adapter="lora", salt="x"), 0)
            self.assertEqual(other_pool.match(None, tokens, adapter="lora", salt="x"), 0)

    def test_time_to_live(self):
        with self.client.open("odd") as session:
            session.append_layers(1, *self.rows(session, 32, layers=3))
            self.assertEqual(session.publish(1, list(range(32)), ttl_ms=60_000), 32)
            self.assertEqual(session.publish(1, [9] * 16, ttl_ms=1), 0)  # its blocks are published already
            session.append_layers(2, *self.rows(session, 32, layers=3))
            self.assertEqual(session.publish(2, [9] * 32, ttl_ms=30), 32)
            end = time.monotonic() + 10
            while session.match(None, [9] * 32) and time.monotonic() < end:
                time.sleep(0.01)
            self.assertEqual(session.match(None, [9] * 32), 0)
            self.assertEqual(session.match(None, list(range(32))), 32)

    def test_operators_see_them_one_by_one(self):
        """Length, blocks, who holds them, time left, tenant, hits; pages in order; taken out, rows that are shared stay."""
        ask = self.daemon.request
        before = len(self.control.prefixes())
        with self.client.open("odd") as session:
            k, v = self.rows(session, 64, layers=3)
            for sequence in (1, 2, 3):
                session.append_layers(sequence, k, v)
            tokens = [list(range(n, n + 64)) for n in (1000, 2000, 3000)]
            session.publish(1, tokens[0], ttl_ms=600_000)
            session.publish(2, tokens[1][:32], adapter="lora", salt="secret")
            session.publish(3, tokens[2][:48])
            session.match(4, tokens[0])
            session.match(None, tokens[0])
            rows = {row["n_tokens"]: row for row in self.control.prefixes()}
            self.assertEqual(len(rows), before + 3)
            longest, short = rows[64], rows[32]
            n_groups = len(self.daemon.get("/v1/pools/odd")["groups"])
            self.assertEqual((longest["pool"], longest["n_hits"], longest["n_holders"], longest["n_blocks"]),
                             ("odd", 2, 2, 4 * n_groups))
            self.assertTrue(500_000 < longest["ttl_left_ms"] <= 600_000)
            self.assertEqual((short["adapter"], short["has_salt"], short["ttl_left_ms"]), ("lora", True, None))
            self.assertNotIn("secret", str(self.daemon.get("/v1/prefixes")))
            self.assertEqual(self.daemon.get(f"/v1/prefixes/{longest['id']}")["n_tokens"], 64)
            for limit in (1, 2, 256):
                self.assertEqual([row["n_tokens"] for row in self.control.prefixes("tokens", limit)][:3], [64, 48, 32])
            self.assertEqual(self.control.prefixes("hits")[0]["id"], longest["id"])
            self.assertEqual(self.daemon.get("/v1/prefixes?tenant=4711")["prefixes"], [])
            self.assertEqual(ask("GET", "/v1/prefixes?sort=queries")[0], 400)
            self.assertIn(longest["id"], self.daemon.ctl("prefixes").stdout)
            # A part of it is a hit, too, and sums of the pool stand below.
            session.match(None, tokens[0][:32])
            row = self.daemon.get(f"/v1/prefixes/{longest['id']}")
            self.assertEqual((row["n_hits"], row["n_whole_hits"]), (3, 2))
            sums = next(pool for pool in self.daemon.get("/v1/prefixes")["pools"] if pool["name"] == "odd")
            rate = 100 * sums["n_hits"] / (sums["n_hits"] + sums["n_misses"])
            self.assertRegex(self.daemon.ctl("prefixes").stdout,
                             rf"(?m)^odd .* {sums['n_hits']} +{sums['n_misses']} +{rate:.1f} % +{sums['n_tokens_matched']} ")

            self.assertEqual(ask("DELETE", f"/v1/prefixes/{longest['id']}")[0], 204)
            self.assertEqual(ask("DELETE", f"/v1/prefixes/{longest['id']}")[0], 404)
            self.assertEqual(ask("GET", f"/v1/prefixes/{longest['id']}")[0], 404)
            self.assertEqual(ask("GET", "/v1/prefixes/7")[0], 400)
            self.assertEqual(session.match(None, tokens[0]), 0)
            self.assertEqual(session.match(None, tokens[2]), 48)
            back = session.read(4)
            self.assertTrue(np.array_equal(back[0], k) and np.array_equal(back[1], v))
            self.assertTrue(self.daemon.get("/v1/audit")["is_clean"])

    def test_pins(self):
        """FAILURES L7: a second UNPIN is BAD_STATE, the counter stays 0, and the audit is clean."""
        def n_pins():
            return [row["n_pins"] for row in self.daemon.get(f"/v1/sessions/{session.handle:016x}")["sequences"]]

        with self.client.open("odd") as session:
            session.append(1, 0, *self.rows(session, 1))
            self.assertEqual(n_pins(), [0])
            session.pin(1)
            self.assertEqual(n_pins(), [1])
            session.unpin(1)
            self.assertEqual(n_pins(), [0])
            for _ in range(3):
                self.raises(Status.BAD_STATE, session.unpin, 1)
                self.assertEqual(n_pins(), [0])
            self.assertTrue(self.daemon.get("/v1/audit")["is_clean"])
            session.pin(1)
            session.pin(1)
            self.assertEqual(n_pins(), [2])
            session.unpin(1)
            session.unpin(1)
            self.raises(Status.NOT_FOUND, session.pin, 2)
            session.pin([1])
            session.free(1)
            session.append(1, 0, *self.rows(session, 1))
            self.raises(Status.BAD_STATE, session.unpin, 1)

    def test_eviction(self):
        """FAILURES P1, L9: idle EVICTABLE sequences give way at once, the oldest first; pinned ones never."""
        with frames.Raw(self.daemon.addr) as raw, self.lone() as client, client.open("small") as session:
            raw.hello()
            own = raw.open(b"small")
            row = np.zeros((16, 1, 16), np.float32).tobytes()
            for sequence in (1, 2, 3):
                frame = frames.rows(frames.APPEND, own, [(sequence, 0, 16, 0, 3)], k=row, v=row)
                self.assertEqual(raw.call(frame).item_statuses(), [0])
            pin = [struct.pack("<Q24x", 2)]
            self.assertEqual(raw.call(frames.frame(50, items=pin, session=own)).item_statuses(), [0])
            # 8 blocks: 3 are taken, 5 are free, 7 are wanted.
            session.append(1, 0, *self.rows(session, 7 * 16))
            tell = raw.call(frames.frame(frames.TELL, struct.pack("<QII", 0, 16, 0), session=own))
            self.assertEqual([struct.unpack_from("<H", item, 24)[0] for item in tell.items], [2, 0, 2])
            q = np.zeros((2, 16), np.float32).tobytes()
            for sequence, status in ((1, Status.EVICTED), (2, 0)):
                frame = frames.rows(frames.DECODE, own, [(sequence, 16, 0, 1, 0)], q=q)
                self.assertEqual(raw.call(frame).item_statuses(), [status])
            error = self.raises(Status.POOL_FULL, session.append, 2, 0, *self.rows(session, 1))
            self.assertGreater(error.results[0].retry_after_ms, 0)
            frame = frames.rows(frames.APPEND, own, [(1, 0, 16, 0, 1)], k=row, v=row)
            session.free(1)
            end = time.monotonic() + 10
            while raw.call(frame).item_statuses() != [0]:  # CREATE makes it a new one
                self.assertLess(time.monotonic(), end)
            self.assertEqual(raw.call(frames.frame(frames.CLOSE, session=own)).status, 0)

    def test_refusals(self):
        with self.client.open("odd") as session:
            session.append_layers(1, *self.rows(session, 20, layers=3))
            self.raises(Status.NOT_FOUND, session.publish, 9, [1])
            error = self.raises(Status.POSITION, session.publish, 1, [1] * 21)
            self.assertEqual(error.expected, 20)
            session.publish(1, [1] * 20)
            self.raises(Status.EXISTS, session.match, 1, [1] * 20)
            with self.assertRaises(ValueError):
                session.publish(1, [])
            with self.assertRaises(ValueError):
                session.publish(1, [1 << 32])


class Watermarks(unittest.TestCase):
    """Above the high mark a daemon makes room by itself, until the low one."""

    POOL = "name=p,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=40"
    ROW = np.ones((16, 1, 16), np.float32).tobytes()
    TOKENS = list(range(8 * 16))

    def append(self, raw, session, sequence, flags):
        frame = frames.rows(frames.APPEND, session, [(sequence, 0, 16, 0, flags)], k=self.ROW, v=self.ROW)
        self.assertEqual(raw.call(frame).item_statuses(), [0])

    def blocks(self, daemon):
        return daemon.get("/v1/occupancy")["pools"][0]["blocks"]

    def wait_for_free(self, daemon, n_free):
        end = time.monotonic() + PATIENCE_S
        while self.blocks(daemon)["free"] != n_free:
            self.assertLess(time.monotonic(), end, self.blocks(daemon))
            time.sleep(0.01)

    def fill(self, daemon, client, raw):
        """32 of 40 blocks: 8 of an idle prefix, one of a sequence that stays, 23 of evictable ones, the first pinned."""
        with client.open("p") as session:
            session.append(1, 0, *(np.ones((128, 1, 16), np.float32),) * 2)
            self.assertEqual(session.publish(1, self.TOKENS), 128)
        own = raw.open(b"p")
        self.append(raw, own, 100, 1)
        for sequence in range(1, 24):
            self.append(raw, own, sequence, 3)
            if sequence == 1:
                pin = [struct.pack("<Q24x", 1)]
                self.assertEqual(raw.call(frames.frame(50, items=pin, session=own)).item_statuses(), [0])
        self.wait_for_free(daemon, 8)
        return own

    def states(self, raw, session):
        """0 resident, 2 evicted, by sequence."""
        tell = raw.call(frames.frame(frames.TELL, struct.pack("<QII", 0, 64, 0), session=session))
        return {struct.unpack_from("<Q", item)[0]: struct.unpack_from("<H", item, 24)[0] for item in tell.items}

    def test_room_is_made_ahead_of_need(self):
        """At the mark nothing goes; one block above it the idle prefix goes, then the sequences that rested longest."""
        with Daemon("--pool", self.POOL, "--evict-high-percent", "80", "--evict-low-percent", "50") as daemon, \
                tqkv.Client(daemon.addr, timeout=60) as client, frames.Raw(daemon.addr) as raw:
            raw.hello()
            own = self.fill(daemon, client, raw)
            self.assertEqual(set(self.states(raw, own).values()), {0})
            self.append(raw, own, 24, 3)
            self.wait_for_free(daemon, 20)
            gone = {2, 3, 4, 5, 6}  # with 8 of the prefix 13 of 33 blocks: 20 are half of the pool
            self.assertEqual(self.states(raw, own), {s: 2 if s in gone else 0 for s in (*range(1, 25), 100)})
            with client.open("p") as session:
                self.assertEqual(session.match(None, self.TOKENS), 0)
            q = np.ones((1, 16), np.float32).tobytes()
            for sequence, status in ((6, Status.EVICTED), (7, 0), (1, 0), (100, 0)):
                frame = frames.rows(frames.DECODE, own, [(sequence, 16, 0, 1, 0)], q=q)
                self.assertEqual(raw.call(frame).item_statuses(), [status])
            self.append(raw, own, 25, 3)  # between the marks nothing goes
            self.wait_for_free(daemon, 19)
            self.assertTrue(daemon.get("/v1/audit")["is_clean"])
            self.assertEqual(self.blocks(daemon)["free"], 19)

    def test_python_appends_evictable_sequences(self):
        """Each kind of append marks its sequence; when blocks are short those go, whatever is pinned or unmarked stays."""
        k = np.ones((16, 1, 16), np.float32)
        with Daemon("--pool", self.POOL) as daemon, tqkv.Client(daemon.addr, timeout=60) as client, \
                client.open("p") as session:
            session.append(1, 0, k, k, evictable=True)
            session.append_layers(2, k[None], k[None], evictable=True)
            session.append_batch({3: (k, k), 4: (k, k)}, 0, evictable=True)
            session.append(5, 0, k, k)
            session.pin(4)
            self.assertEqual([told.is_evictable for told in session.tell()], [True] * 4 + [False])
            session.append(6, 0, *(np.ones((37 * 16, 1, 16), np.float32),) * 2)  # 35 of 40 blocks are free
            states = [told.state for told in session.tell()]
            self.assertEqual((states.count("evicted"), states[3:]), (2, ["resident"] * 3))
            with self.assertRaisesRegex(tqkv.TqkvError, "EVICTED: DECODE: sequence 1: the sequence was evicted"):
                session.decode(1, 0, np.ones((1, 16), np.float32))

    def test_without_marks_nothing_goes_before_it_is_needed(self):
        with Daemon("--pool", self.POOL) as daemon, tqkv.Client(daemon.addr, timeout=60) as client, \
                frames.Raw(daemon.addr) as raw:
            raw.hello()
            own = self.fill(daemon, client, raw)
            for sequence in range(24, 32):
                self.append(raw, own, sequence, 3)
            self.wait_for_free(daemon, 0)
            self.assertEqual(set(self.states(raw, own).values()), {0})
            with client.open("p") as session:
                self.assertEqual(session.match(None, self.TOKENS), 128)
            self.append(raw, own, 32, 3)
            self.assertEqual(self.blocks(daemon)["free"], 0)
            self.assertEqual(set(self.states(raw, own).values()), {0})  # the prefix went first


class Waiting(unittest.TestCase):
    """OPEN with a reservation waits for blocks; everything else is answered at once."""

    def test_reservations(self):
        """FAILURES P2, L19: of 8 clients that want 60 % of the pool one has it at a time, and more than all is final."""
        pool = "name=p,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=10"
        with Daemon("--pool", pool, "--alloc-timeout-ms", "20000", "--evict-high-percent", "90",
                    "--evict-low-percent", "50") as daemon:
            clients = [tqkv.Client(daemon.addr, timeout=60, retry=False) for _ in range(8)]
            failures, holders, most = [], [], []

            def work(client):
                try:
                    with client.open("p", reserve_blocks=6):
                        holders.append(client)
                        most.append(len(holders))
                        time.sleep(0.01)
                        holders.remove(client)
                except tqkv.TqkvError as error:
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(client,)) for client in clients]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual((failures, max(most)), ([], 1))
            start = time.monotonic()
            with self.assertRaises(tqkv.TqkvError) as raised:
                clients[0].open("p", reserve_blocks=11)
            self.assertEqual(raised.exception.status, Status.LIMIT)
            with clients[0].open("p", reserve_blocks=6), clients[1].open("p") as session:
                with self.assertRaises(tqkv.TqkvError) as raised:
                    session.append(1, 0, *(np.zeros((16 * 5, 1, 16), np.float32),) * 2)
                self.assertEqual(raised.exception.status, Status.POOL_FULL)
            self.assertLess(time.monotonic() - start, 15)
            for client in clients:
                client.close()

    def test_the_wait_ends(self):
        """FAILURES L19: after alloc_timeout_ms, with POOL_FULL."""
        pool = "name=p,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=10"
        with Daemon("--pool", pool, "--alloc-timeout-ms", "50") as daemon, \
                tqkv.Client(daemon.addr, timeout=60, retry=False) as client, client.open("p", reserve_blocks=6):
            start = time.monotonic()
            with self.assertRaises(tqkv.TqkvError) as raised, \
                    tqkv.Client(daemon.addr, timeout=60, retry=False) as other:
                other.open("p", reserve_blocks=6)
            self.assertEqual(raised.exception.status, Status.POOL_FULL)
            self.assertGreaterEqual(time.monotonic() - start, 0.05)

    def test_what_is_refused_leaves_no_trace(self):
        """PROTOCOL rule 2: a sequence whose first append is refused was never created."""
        pool = "name=p,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=10"
        with Daemon("--pool", pool) as daemon, tqkv.Client(daemon.addr, timeout=60, retry=False) as client, \
                client.open("p") as session:
            bad = np.full((1, 1, 16), np.nan, np.float32)
            with self.assertRaises(tqkv.TqkvError) as raised:
                session.append(1, 0, bad, bad)
            self.assertEqual(raised.exception.status, Status.BAD_VALUE)
            self.assertEqual(session.lengths(), {})
            with self.assertRaises(tqkv.TqkvError) as raised:
                session.truncate(1, 0)
            self.assertEqual(raised.exception.status, Status.NOT_FOUND)
            self.assertEqual(session.append(1, 0, *(np.zeros((3, 1, 16), np.float32),) * 2), 3)


if __name__ == "__main__":
    unittest.main()
