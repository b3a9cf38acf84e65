"""Who has which blocks, in which state: every figure against what the clients did, in JSON, /metrics and tqkvctl."""

import json
import tempfile
import unittest

import numpy as np
import tqkv
from daemon import Daemon

BLOCK, LAYERS, HEADS, DIM = 16, 2, 2, 64
N_BLOCKS, N_RINGS, WINDOW = 64, 8, 32
POOL = (f"name=p,layers={LAYERS},q_heads=4,kv_heads={HEADS},head_dim={DIM},k=tq4,v=fp8,block_size={BLOCK},blocks={N_BLOCKS},"
        f"exact_tokens={WINDOW},exact_blocks={N_RINGS}")
STATES = ("free", "reserved", "owned", "shared", "pinned", "draining", "exact")
TOKENS = "data worker data-token-0123456789 tenant=77\ndata other other-token-0123456789 tenant=78\nadmin ops admin-token-0123456789\n"


def rows(n):
    return np.random.default_rng(n).standard_normal((LAYERS, n, HEADS, DIM)).astype(np.float32)


def need(n):
    return -(-n // BLOCK)


class Occupancy(unittest.TestCase):
    def expect(self, **states):
        """What is in which state; all others are free. In every place that tells it, and the bytes with it."""
        told = {state: states.get(state, 0) for state in STATES}
        told["free"] = N_BLOCKS + N_RINGS - sum(told.values())
        answer = self.daemon.get("/v1/occupancy")
        pool, rows = answer["pools"][0], self.daemon.metrics()
        self.assertEqual({state: pool["blocks"][state] for state in STATES}, told)
        self.assertEqual(pool["blocks"]["total"], N_BLOCKS + N_RINGS)
        self.assertEqual(self.daemon.get("/v1/pools/p")["blocks"], pool["blocks"])
        self.assertEqual(answer["totals"]["blocks"], pool["blocks"])
        page_bytes, ring_bytes = pool["groups"][0]["block_bytes"], pool["exact_window"]["block_bytes"]
        n_ring_free = pool["exact_window"]["blocks"]["free"]
        self.assertEqual(N_RINGS - n_ring_free, told["exact"])
        for state in STATES:
            n_bytes = pool["block_bytes"][state]
            expected = told[state] * (ring_bytes if state == "exact" else page_bytes)
            expected += n_ring_free * (ring_bytes - page_bytes) if state == "free" else 0
            self.assertEqual(n_bytes, expected, state)
            self.assertEqual(rows[f'tqkv_pool_blocks_bytes{{device="cpu",pool="p",state="{state}"}}'], n_bytes)
        self.assertEqual(pool["block_bytes"]["total"], N_BLOCKS * page_bytes + N_RINGS * ring_bytes)
        self.assertEqual(pool["used_bytes"], sum(pool["block_bytes"][state] for state in STATES[2:]))
        self.assertEqual(answer["device"]["used_bytes"], pool["used_bytes"])
        for group, n in (("0", N_BLOCKS), ("exact", N_RINGS)):
            labels = f'device="cpu",pool="p",group="{group}"'
            states = [value for name, value in rows.items() if name.startswith(f"tqkv_blocks{{{labels},state=")]
            self.assertEqual((len(states), sum(states)), (6, n))
            self.assertEqual(rows[f"tqkv_blocks_configured{{{labels}}}"], n)
        self.assertEqual(rows['tqkv_blocks{device="cpu",pool="p",group="0",state="pinned"}'], told["pinned"])
        self.assertTrue(self.daemon.get("/v1/audit")["is_clean"])
        return pool

    def test_states_of_blocks(self):
        """Pins, forks, prefixes, reservations, rings, tiers, snapshots and what goes: each block is in one state at any time."""
        with Daemon("--backend", "cpu", "--pool", POOL, "--host-tier-bytes", "4MiB") as self.daemon, \
                tqkv.Client(self.daemon.addr) as client:
            self.expect()
            session = client.open("p", "one")
            session.append_layers(1, rows(40), rows(40))
            self.expect(owned=3, exact=2)
            session.fork({2: 1})
            self.expect(shared=3, exact=2)
            session.pin(2)
            pool = self.expect(pinned=3, exact=2)
            self.assertGreater(pool["memory"]["shared_bytes"], 0)
            self.assertIn("3 pinned", self.daemon.ctl("top", "--count", "1").stdout)
            session.pin(2)
            session.unpin(2)
            self.expect(pinned=3, exact=2)
            session.append_layers(2, rows(8), rows(8))  # leaves the third block to its parent
            self.expect(owned=1, pinned=3, exact=4)  # and has a ring of its own
            session.append_layers(2, rows(16), rows(16))
            self.expect(owned=1, pinned=4, exact=4)
            session.publish(1, list(range(32)))  # the first two: pinned all the same
            self.expect(owned=1, pinned=4, exact=4)
            session.unpin(2)
            self.expect(owned=3, shared=2, exact=4)
            session.pin(2)
            session.truncate(2, 20)
            pool = self.expect(owned=1, pinned=2, exact=4)
            self.assertEqual((pool["blocks"]["published"], pool["blocks"]["idle"]), (2, 0))
            reserved = client.open("p", "two", reserve_blocks=5)
            self.expect(owned=1, pinned=2, exact=4, reserved=5)
            reserved.append_layers(1, rows(20), rows(20))
            reserved.pin(1)
            self.expect(owned=1, pinned=4, exact=6, reserved=3)
            reserved.close()
            self.settle(owned=1, pinned=2, exact=4)
            session.free(2)
            self.settle(owned=1, shared=2, exact=2)
            session.free(1)
            pool = self.settle(owned=2)
            self.assertEqual(pool["blocks"]["idle"], 2)
            client.open("p", "three").close()
            session.close()

    def settle(self, **states):
        """What is given back is so within turns."""
        told = {state: states.get(state, 0) for state in STATES[1:]}
        for _ in range(200):
            blocks = self.daemon.get("/v1/occupancy")["pools"][0]["blocks"]
            if {state: blocks[state] for state in STATES[1:]} == told:
                break
        return self.expect(**states)

    def test_pins_come_back_from_a_tier_and_a_snapshot(self):
        """What is spilled has no blocks, pinned or not; what comes back is pinned as it was."""
        with tempfile.TemporaryDirectory() as folder:
            options = ("--backend", "cpu", "--pool", POOL, "--host-tier-bytes", "4MiB", "--snapshot-dir", folder)
            with Daemon(*options) as self.daemon, tqkv.Client(self.daemon.addr) as client:
                session = client.open("p", "one", lease_ms=600000)
                session.append_layers(1, rows(40), rows(40))
                session.append_layers(2, rows(24), rows(24))
                session.pin(1)
                self.expect(owned=2, pinned=3, exact=4)
                session.spill(1)
                self.settle(owned=2, exact=2)
                session.prefetch(1)
                self.settle(owned=2, pinned=3, exact=4)
                self.daemon.ctl("snapshot", "kept")
            with Daemon(*options, "--restore", "kept") as self.daemon, tqkv.Client(self.daemon.addr) as client:
                session = client.attach("one")
                self.expect(owned=2, pinned=3, exact=4)
                session.unpin(1)
                self.expect(owned=5, exact=4)

    def test_per_tenant_session_and_format(self):
        """Two tenants, of whom one shares rows: tokens, logical and stored bytes, and high-water marks are what they did."""
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(TOKENS)
            file.flush()
            with Daemon("--backend", "cpu", "--pool", POOL, "--tokens-file", file.name, token="admin-token-0123456789") as self.daemon, \
                    tqkv.Client(self.daemon.tcp, token="data-token-0123456789") as first, \
                    tqkv.Client(self.daemon.tcp, token="other-token-0123456789") as second:
                self.check_tenants(first, second)

    def check_tenants(self, first, second):
        a, b = first.open("p", "a"), second.open("p", "b", reserve_blocks=4)
        a.append_layers(1, rows(40), rows(40))
        a.fork({2: 1, 3: 1})
        b.append_layers(1, rows(20), rows(20))
        pool = self.expect(shared=3, owned=2, reserved=2, exact=4)
        page_bytes, ring_bytes = pool["groups"][0]["block_bytes"], pool["exact_window"]["block_bytes"]
        tenants = {row["tenant"]: row for row in self.daemon.get("/v1/tenants")["tenants"]}
        sessions = {row["name"]: row for row in self.daemon.get("/v1/sessions")["sessions"]}
        self.assertEqual(sorted(tenants), ["77", "78"])
        dense = LAYERS * HEADS * DIM * 2 * 2  # of one token, K and V as bf16
        stored = {row["rows_of"]: row for row in pool["formats"]}
        self.assertEqual({side: row["n_rows"] for side, row in stored.items()}, {side: (3 * 40 + 20) * LAYERS * HEADS for side in "kv"})
        self.assertEqual((stored["k"]["format"], stored["v"]["format"]), ("tq4", "fp8"))
        per_token = sum(row["stored_bytes"] for row in stored.values()) // (3 * 40 + 20)
        self.assertEqual(per_token, LAYERS * HEADS * ((DIM // 2 + 4) + (DIM + 4)))  # tq4: 4 bits and a norm; fp8: a byte and a scale
        self.assertEqual(page_bytes, BLOCK * per_token)
        for name, tenant, n_sequences, n_tokens, n_blocks, n_rings, n_reserved in (
                ("a", "77", 3, 120, 3, 2, 0), ("b", "78", 1, 20, 2, 2, 2)):
            row, session = tenants[tenant], sessions[name]
            ring = min(n_tokens // n_sequences, WINDOW) * dense
            with self.subTest(tenant):
                self.assertEqual((row["n_sessions"], row["n_sequences"], row["n_tokens"]), (1, n_sequences, n_tokens))
                self.assertEqual((session["tenant"], session["n_sequences"], session["memory"]["n_tokens"]),
                                 (tenant, n_sequences, n_tokens))
                self.assertEqual(row["dense_equivalent_bytes"], n_tokens * dense)
                self.assertEqual(row["stored_bytes"] - n_tokens * per_token, ring)
                self.assertEqual(session["memory"]["stored_bytes"], row["stored_bytes"])
                used = (n_blocks + n_reserved) * page_bytes + n_rings * ring_bytes
                self.assertEqual(row["used"], {"bytes": used, "tokens": n_tokens, "sessions": 1, "requests": 0, "tier_bytes": 0})
                self.assertEqual(row["reserved_bytes"], n_reserved * page_bytes)
                self.assertAlmostEqual(row["effective_compression"], n_tokens * dense / used, places=4)
                self.assertEqual(self.daemon.metrics()[f'tqkv_tenant_used{{tenant="{tenant}",quota="bytes"}}'], used)
        self.assertEqual(sum(row["used"]["bytes"] for row in tenants.values()), pool["used_bytes"] + pool["block_bytes"]["reserved"])
        self.assertEqual(sum(row["stored_bytes"] for row in tenants.values()), pool["logical_bytes"])
        self.assertAlmostEqual(pool["effective_compression"], 140 * dense / pool["used_bytes"], places=4)
        before = tenants["77"]["used"]["bytes"]
        a.close()
        pool = self.settle(owned=2, reserved=2, exact=2)
        row = self.daemon.get("/v1/tenants?limit=1")["tenants"][0]
        self.assertEqual((pool["blocks"]["used_max"], row["tenant"]), (9, "78"))
        a = first.open("p", "a")
        row = self.daemon.get("/v1/tenants/77")
        self.assertEqual((row["used"]["bytes"], row["used_max"]["bytes"]), (0, before))
        self.assertIn("77", self.daemon.ctl("--token-file", self.token_file(), "tenants").stdout)

    def token_file(self):
        path = self.daemon.folder / "token"
        path.write_text("admin-token-0123456789\n")
        path.chmod(0o600)
        return path

    def test_top_and_occupancy_have_all_states(self):
        with Daemon("--backend", "cpu", "--pool", POOL) as self.daemon, tqkv.Client(self.daemon.addr) as client:
            session = client.open("p", "one", reserve_blocks=7)
            session.append_layers(1, rows(40), rows(40))
            session.fork({2: 1})
            session.append_layers(3, rows(16), rows(16))
            session.pin(3)
            self.expect(shared=3, pinned=1, reserved=3, exact=3)
            text = self.daemon.ctl("occupancy").stdout
            titles, first = text.splitlines()[0].split(), text.splitlines()[1].split()
            for state, n in (("reserved", 3), ("owned", 0), ("shared", 3), ("pinned", 1), ("draining", 0), ("exact", 3)):
                self.assertEqual(first[titles.index(state)], str(n), text)
            self.assertIn("blocks of p: 3 shared, 1 pinned, 3 exact, 3 reserved, 62 free", self.daemon.ctl("top", "--count", "1").stdout)
            self.assertEqual(json.loads(self.daemon.ctl("occupancy", "--json").stdout)["pools"][0]["blocks"]["pinned"], 1)


if __name__ == "__main__":
    unittest.main()
