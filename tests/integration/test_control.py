"""The control API of a real daemon: what every route tells, that the sums hold, and what it refuses."""

import collections
import http.client
import json
import os
import pathlib
import re
import shutil
import signal
import struct
import subprocess
import tempfile
import time
import unittest

import frames
import tqkv
from daemon import BUILD, DEMO, EXACT, PATIENCE_S, ROOT, Daemon

ROW = struct.pack("<64f", *[0.5 * i - 16 for i in range(64)])  # exact: 2 kv heads of 32
BLOCK_STATES = ("free", "reserved", "owned", "shared", "pinned", "draining", "exact")
ROW_PARTS = ("payload_bytes", "norms_bytes", "scales_bytes", "zeros_bytes", "exact_bytes")
EXTRA = {"name": "extra", "layers": 1, "q_heads": 2, "kv_heads": 1, "head_dim": 16, "k": "bf16", "v": "f32",
         "block_size": 16, "blocks": 8}
# What an operator must never find in an answer.
SECRET = "c0ffee-not-for-anybody"


def append(raw, session, sequence, position, n_tokens=1, request_id=7, row=ROW):
    return raw.call(frames.rows(frames.APPEND, session, [(sequence, position, n_tokens, 0, int(position == 0))],
                                n_layers=2, k=row * 2 * n_tokens, v=row * 2 * n_tokens, request_id=request_id))


class Case(unittest.TestCase):
    options = ()

    @classmethod
    def setUpClass(cls):
        env = dict(os.environ, TQKV_TEST_SECRET=SECRET, AWS_SECRET_ACCESS_KEY=SECRET, HTTP_PROXY="", http_proxy="")
        cls.daemon = Daemon("--backend", "cpu", "--pool", DEMO, "--pool", EXACT, *cls.options, env=env)

    @classmethod
    def tearDownClass(cls):
        code = cls.daemon.stop()
        shutil.rmtree(cls.daemon.folder, ignore_errors=True)
        assert code == 0, code

    def raw(self, addr=None):
        raw = frames.Raw(addr or self.daemon.addr)
        self.addCleanup(raw.close)
        raw.hello()
        return raw

    def get(self, path):
        return self.daemon.get(path)

    def pages(self, path, member, limit):
        """All rows of a list, and how many of them each page had."""
        rows, sizes, cursor = [], [], None
        while True:
            page = self.get(f"{path}?limit={limit}" + (f"&cursor={cursor}" if cursor else ""))
            rows += page[member]
            sizes.append(len(page[member]))
            cursor = page["cursor_next"]
            if cursor is None:
                return rows, sizes
            self.assertIsInstance(cursor, str)

    def problem(self, status, code, method, path, body=None, headers=None):
        """The request is refused with RFC 9457 JSON of this code; returns its detail."""
        got, answer = self.daemon.request(method, path, body, headers)
        self.assertEqual(got, status, answer)
        self.assertEqual(sorted(answer), ["code", "detail", "status", "title", "type"])
        self.assertEqual((answer["status"], answer["code"], answer["type"]), (status, code, "about:blank"))
        self.assertTrue(answer["detail"])
        return answer["detail"]


class Shapes(Case):
    MEMORY = {"n_tokens", "dense_equivalent_bytes", "stored_bytes", "compression", "tables_bytes", *ROW_PARTS}
    POOL_MEMORY = MEMORY | {"reserved_bytes", "codebooks_bytes", "rotation_bytes", "workspace_bytes", "shared_bytes", "cached_bytes",
                            "free_bytes"}

    def setUp(self):
        raw = self.raw()
        self.session = raw.open(b"exact", name=b"told", reserve_blocks=3, lease_ms=60000)
        self.assertEqual(append(raw, self.session, 5, 0, 20).item_statuses(), [0])
        self.assertEqual(append(raw, self.session, 6, 0, 1).item_statuses(), [0])
        self.id = f"{self.session:016x}"
        self.addCleanup(lambda: raw.call(frames.frame(frames.CLOSE, session=self.session)))

    def test_info(self):
        info = self.get("/v1/info")
        self.assertEqual(info["backend"], "cpu")
        self.assertIn(info["io"], ("io_uring", "epoll"))
        self.assertEqual(info["pid"], self.daemon.process.pid)
        self.assertEqual(info["listeners"], [self.daemon.addr, self.daemon.tcp])
        self.assertRegex(info["boot_id"], "^[0-9a-f]{16}$")
        self.assertEqual(info["frame_bytes_max"], 1 << 20)
        for member in ("version", "commit", "backend_reason", "io_reason", "device", "instruction_set"):
            self.assertTrue(info[member], member)
        with frames.Raw(self.daemon.addr) as raw:
            self.assertEqual(f"{struct.unpack_from('<Q', raw.hello().op, 8)[0]:016x}", info["boot_id"])

    def test_pools(self):
        pools = {pool["name"]: pool for pool in self.get("/v1/pools")["pools"]}
        self.assertEqual(sorted(pools), ["demo", "exact"])
        exact = pools["exact"]
        self.assertEqual((exact["layers"], exact["q_heads"], exact["kv_heads"], exact["k_head_dim"], exact["k"]),
                         (2, 4, 2, 32, "f32"))
        self.assertEqual(exact["groups"], [{"n_blocks": 64, "block_bytes": 2 * 2 * 2 * 32 * 4 * 16}])
        self.assertEqual((exact["n_sessions"], exact["n_sequences"]), (1, 2))
        self.assertRegex(exact["fingerprint"], "^[0-9a-f]{16}$")
        self.assertNotEqual(exact["fingerprint"], pools["demo"]["fingerprint"])

    def test_sessions(self):
        rows, _ = self.pages("/v1/sessions", "sessions", 64)
        row = next(row for row in rows if row["id"] == self.id)
        self.assertEqual((row["name"], row["pool"], row["n_sequences"], row["n_outstanding"]), ("told", "exact", 2, 0))
        self.assertEqual((row["n_rows_in"], row["n_rows_out"], row["n_queries"]), (42, 0, 0))
        self.assertEqual(row["tenant"], str(os.getuid()))
        self.assertEqual(row["lease_ms"], 60000)
        self.assertTrue(0 < row["lease_left_ms"] <= 60000)
        self.assertEqual(set(row["memory"]), self.MEMORY | {"reserved_bytes"})
        self.assertIn(row["connection"], [c["id"] for c in self.get("/v1/connections")["connections"]])

    def test_one_session(self):
        answer = self.get(f"/v1/sessions/{self.id}")
        self.assertEqual([(s["id"], s["length_min"], s["length_max"], s["n_blocks"]) for s in answer["sequences"]],
                         [("5", 20, 20, 2), ("6", 1, 1, 1)])
        for sequence in answer["sequences"]:
            self.assertEqual(set(sequence["memory"]), self.MEMORY)
        self.assertEqual(answer["session"]["id"], self.id)
        self.assertIsNone(answer["cursor_next"])
        self.problem(400, "BAD_ARG", "GET", "/v1/sessions/1")
        self.problem(410, "STALE_EPOCH", "GET", f"/v1/sessions/{self.session ^ 1 << 16:016x}")
        self.problem(404, "STALE_HANDLE", "GET", f"/v1/sessions/{self.session ^ 1 << 32:016x}")

    def test_connections(self):
        with frames.Raw(self.daemon.tcp) as raw:
            raw.call(frames.hello(name=b"worker \xc3\xa4"))
            rows = self.get("/v1/connections")["connections"]
            tcp = [row for row in rows if row["transport"] == "tcp"]
            self.assertEqual([(row["client_name"], row["uid"], row["n_frames_in"]) for row in tcp],
                             [("worker ä", None, 1)])
            mine = [row for row in rows if row["n_sessions"] == 1]
            self.assertEqual([(row["transport"], row["uid"], row["state"]) for row in mine],
                             [("unix", os.getuid(), "header")])
            self.assertGreater(mine[0]["bytes_in"], 20 * 2 * 2 * len(ROW))

    def test_occupancy(self):
        answer = self.get("/v1/occupancy")
        self.assertEqual([pool["name"] for pool in answer["pools"]], ["demo", "exact"])
        for pool in answer["pools"]:
            self.assertEqual(set(pool["blocks"]), {"total", "used_max", "published", "idle", *BLOCK_STATES})
            self.assertEqual(set(pool["memory"]), self.POOL_MEMORY)
        exact = answer["pools"][1]
        self.assertEqual((exact["blocks"]["owned"], exact["blocks"]["reserved"]), (3, 0))
        self.assertEqual(exact["memory"]["n_tokens"], 21)
        self.assertEqual(exact["memory"]["stored_bytes"], 21 * 2 * 2 * len(ROW))
        self.assertEqual(exact["memory"]["compression"], 0.5)
        self.assertEqual(answer["totals"]["n_pools"], 2)
        arena = answer["arena"]
        self.assertEqual(arena["total_bytes"], 256 << 20)
        self.assertEqual(arena["used_bytes"] + arena["free_bytes"], arena["total_bytes"])
        self.assertGreaterEqual(arena["used_bytes"], sum(pool["arena_bytes"] for pool in answer["pools"]))

    def test_health(self):
        status, live = self.daemon.request("GET", "/livez")
        self.assertEqual((status, live["status"]), (200, "alive"))
        self.assertLess(live["turn_age_ms"], 5000)
        self.assertEqual(self.daemon.request("GET", "/readyz"), (200, {"status": "ready", "is_deep": False}))
        self.assertEqual(self.daemon.request("GET", "/readyz?deep=1"), (200, {"status": "ready", "is_deep": True}))
        self.assertIn("deep", self.problem(400, "BAD_ARG", "GET", "/readyz?deep=2"))

    def test_config_holds_what_was_given(self):
        config = self.get("/v1/config")
        self.assertEqual([pool["name"] for pool in config["pools"]], ["demo", "exact"])
        self.assertIn(self.daemon.addr, config["listen"])
        self.assertEqual(config["memory"], "256MiB")


class Sums(Case):
    def check_blocks(self, blocks):
        self.assertEqual(sum(blocks[state] for state in BLOCK_STATES), blocks["total"])
        self.assertLessEqual(blocks["total"] - blocks["free"] - blocks["reserved"], blocks["used_max"])

    def check_occupancy(self, answer):
        for pool in answer["pools"]:
            memory = pool["memory"]
            total = sum(group["blocks"]["total"] * group["block_bytes"] for group in pool["groups"])
            for group in pool["groups"]:
                self.check_blocks(group["blocks"])
            self.check_blocks(pool["blocks"])
            self.assertEqual(sum(memory[part] for part in ROW_PARTS), memory["stored_bytes"])
            self.assertEqual(memory["stored_bytes"] + memory["cached_bytes"] + memory["workspace_bytes"] +
                             memory["reserved_bytes"] + memory["free_bytes"], total + memory["shared_bytes"])
            self.assertLessEqual(total, pool["arena_bytes"])
        totals = answer["totals"]
        for kind in ("blocks", "memory"):
            for member in totals[kind]:
                if member not in ("compression",):
                    self.assertEqual(totals[kind][member], sum(pool[kind][member] for pool in answer["pools"]), member)
        self.assertEqual(totals["n_sequences"], sum(pool["n_sequences"] for pool in answer["pools"]))

    def check_metrics(self, rows):
        blocks, memory = {}, {}
        for name, value in rows.items():
            match = re.match(r'tqkv_(blocks|pool_memory_bytes)\{device="cpu",pool="(\w+)",(?:group="\d+",)?'
                             r'(?:state|kind)="(\w+)"\}', name)
            if match:
                kind, pool, label = match.groups()
                (blocks if kind == "blocks" else memory).setdefault(pool, {})[label] = value
        self.assertEqual(sorted(blocks), ["demo", "exact"])
        for pool, states in blocks.items():
            self.assertEqual(sorted(states), sorted(set(BLOCK_STATES) - {"exact"}))
            self.assertEqual(sum(states.values()), 64)
            stored = rows[f'tqkv_pool_stored_bytes{{device="cpu",pool="{pool}"}}']
            self.assertEqual(sum(memory[pool][part.removesuffix("_bytes")] for part in ROW_PARTS), stored)

    def test_sums_hold_at_every_scrape(self):
        """While sessions open, grow, shrink and go: a scrape is one moment, and its parts add up."""
        raw = self.raw()
        for i in range(40):
            session = raw.open(b"exact" if i % 3 else b"demo", name=b"sum-%d" % i, reserve_blocks=i % 5)
            if i % 3:
                append(raw, session, 1, 0, 1 + i)
                append(raw, session, 2, 0, 17)
                raw.send(frames.rows(frames.APPEND, session, [(1, 1 + i, 16, 0, 0)], n_layers=2, k=ROW * 32,
                                     v=ROW * 32, request_id=8))
            self.check_occupancy(self.get("/v1/occupancy"))
            if i % 3:
                self.assertEqual(raw.reply().item_statuses(), [0])
                item = struct.pack("<QIIIHHQ", 1, 5, 0, 0, 0, 0, 0)
                self.assertEqual(raw.call(frames.frame(frames.TRUNCATE, items=[item], session=session)).status, 0)
            self.check_metrics(self.daemon.metrics())
            if i % 2:
                self.assertEqual(raw.call(frames.frame(frames.CLOSE, session=session)).status, 0)
        self.check_sessions()

    def check_sessions(self):
        """Sequences add up to their session, sessions to their pool."""
        sums = {}
        rows, _ = self.pages("/v1/sessions", "sessions", 7)
        for row in rows:
            sequences, _ = self.pages(f"/v1/sessions/{row['id']}", "sequences", 1)
            self.assertEqual(len(sequences), row["n_sequences"])
            for member in ("stored_bytes", "n_tokens", "dense_equivalent_bytes", *ROW_PARTS):
                self.assertEqual(sum(s["memory"][member] for s in sequences), row["memory"][member], member)
                key = (row["pool"], member)
                sums[key] = sums.get(key, 0) + row["memory"][member]
        self.assertGreater(len(rows), 15)
        for pool in self.get("/v1/occupancy")["pools"]:
            for member in ("stored_bytes", "n_tokens", *ROW_PARTS):
                self.assertEqual(sums.get((pool["name"], member), 0), pool["memory"][member], member)

    def rejected(self):
        """By reason."""
        return collections.Counter({name.split('"')[1]: int(value) for name, value in self.daemon.metrics().items()
                                    if name.startswith("tqkv_rejected_total{")})

    def test_rejected_counts_refused_items_and_refused_frames(self):
        """FAILURES P10: by reason, each once, whatever the operation; those that a full daemon gives as well."""
        raw = self.raw()
        session = raw.open(b"exact", tokens_max=40)
        nan = struct.pack("<64f", *[float("nan")] * 64)
        before, refused = self.rejected(), collections.Counter()

        def call(data):
            reply = raw.call(data)
            for status in reply.item_statuses() if reply.items else [reply.status]:
                if status != 0:
                    refused[tqkv.Status(status).name] += 1
            return reply

        self.assertEqual(append(raw, session, 1, 0, 20).item_statuses(), [0])
        items = [(1, 20, 1, 0, 0), (2, 0, 1, 0, 1), (3, 4, 1, 0, 0), (4, 0, 41, 0, 1)]
        reply = call(frames.rows(frames.APPEND, session, items, n_layers=2, k=ROW * 88, v=ROW * 88))
        self.assertEqual(reply.item_statuses(), [0, 0, 300, 309])
        reply = call(frames.rows(frames.APPEND, session, [(1, 5, 1, 0, 0)], n_layers=2, k=ROW * 2, v=ROW * 2))
        self.assertEqual(reply.item_statuses(), [308])
        reply = call(frames.rows(frames.APPEND, session, [(1, 21, 1, 0, 0)], n_layers=2, k=ROW + nan, v=ROW * 2))
        self.assertEqual(reply.item_statuses(), [107])
        read = struct.pack("<QIIIIBBHI", 1, 0, 2, 10, 30, frames.F32, 0, 0, 0)
        self.assertEqual(call(frames.frame(frames.READ, read, session=session)).status, 308)
        read = struct.pack("<QIIIIBBHI", 9, 0, 2, 0, 1, frames.F32, 0, 0, 0)
        self.assertEqual(call(frames.frame(frames.READ, read, session=session)).status, 300)
        item = struct.pack("<QIIIHHQ", 77, 0, 0, 0, 0, 0, 0)
        self.assertEqual(call(frames.frame(frames.FREE, items=[item], session=session)).item_statuses(), [300])
        self.assertEqual(call(frames.frame(77, session=session)).status, 105)
        self.assertEqual(call(frames.frame(frames.TELL, b"\0" * 16, session=session ^ 1 << 40)).status, 301)
        self.assertEqual(call(frames.open_session(b"nowhere")).status, 300)
        keeper = struct.unpack_from("<Q", call(frames.open_session(b"exact", reserve_blocks=60)).op)[0]
        self.assertEqual(call(frames.open_session(b"exact", reserve_blocks=60)).status, 400)
        self.assertEqual(call(frames.open_session(b"exact", reserve_blocks=65)).status, 403)
        greedy = raw.open(b"exact")
        items = [(1, 0, 200, 0, 1), (2, 0, 1, 0, 1), (3, 0, 200, 0, 1)]
        reply = call(frames.rows(frames.APPEND, greedy, items, n_layers=2, k=ROW * 802, v=ROW * 802))
        self.assertEqual(reply.item_statuses(), [400, 0, 400])
        self.assertEqual(self.daemon.request("PUT", f"/v1/tenants/{os.getuid()}", {"tokens": 1})[0], 200)
        reply = call(frames.rows(frames.APPEND, greedy, [(2, 1, 1, 0, 0)], n_layers=2, k=ROW * 2, v=ROW * 2))
        self.assertEqual(reply.item_statuses(), [401])
        self.assertEqual(self.daemon.request("DELETE", f"/v1/tenants/{os.getuid()}")[0], 204)
        self.assertEqual(call(frames.frame(frames.CLOSE, session=keeper)).status, 0)
        self.assertEqual(refused, {"POSITION": 2, "NOT_FOUND": 4, "LEN_LIMIT": 1, "BAD_VALUE": 1, "UNSUPPORTED": 1,
                                   "STALE_HANDLE": 1, "POOL_FULL": 3, "LIMIT": 1, "QUOTA": 1})
        self.assertEqual(self.rejected() - before, refused)


class Metrics(Case):
    def test_metrics_are_prometheus_text(self):
        raw = self.raw()
        session = raw.open(b"exact")
        append(raw, session, 1, 0, 3)
        text = self.get("/metrics")
        self.assertTrue(text.endswith("\n"))
        families, family, seen = {}, None, set()
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split()[2]
                self.assertNotIn(family, families, "samples of a family stand together")
                families[family] = None
            elif line.startswith("# TYPE "):
                _, _, name, kind = line.split()
                self.assertEqual(name, family)
                families[family] = kind
                self.assertIn(kind, ("counter", "gauge", "histogram"))
            else:
                match = re.fullmatch(r'(tqkv_[a-z0-9_]+)(\{([a-z_]+="([^"\\\n]|\\.)*",?)+\})? (\S+)', line)
                self.assertTrue(match, line)
                self.assertNotIn(line.rsplit(" ", 1)[0], seen)
                seen.add(line.rsplit(" ", 1)[0])
                float(match.group(5))
                base = match.group(1)
                if families[family] == "histogram":
                    base = re.sub("_(bucket|sum|count)$", "", base)
                self.assertEqual(base, family)
                self.assertEqual(families[family] == "counter", base.endswith("_total"))
        self.check_histograms(families)

    def check_histograms(self, families):
        rows = self.daemon.metrics()
        for family in (name for name, kind in families.items() if kind == "histogram"):
            buckets = [(float(re.search('le="(.*)"', name).group(1)), value) for name, value in rows.items()
                       if name.startswith(family + "_bucket")]
            self.assertEqual(buckets, sorted(buckets))
            self.assertEqual([value for _, value in buckets], sorted(value for _, value in buckets))
            self.assertEqual(buckets[-1], (float("inf"), rows[family + "_count"]))
        self.assertGreater(rows["tqkv_request_seconds_count"], 0)

    def test_counters_count(self):
        before = self.daemon.metrics()
        raw = self.raw()
        session = raw.open(b"exact")
        append(raw, session, 1, 0, 3)
        q = struct.pack("<128f", *[0.1] * 128)
        raw.call(frames.rows(frames.DECODE, session, [(1, 3, 0, 1, 0)], q=q))
        after = self.daemon.metrics()
        for name, n in (("connections_accepted", 1), ("frames_in", 4), ("frames_out", 4), ("rows_in", 6),
                        ("queries", 1),
                        ("items_ok", 2), ("batches", 2), ("sessions_opened", 1)):
            self.assertEqual(after[f"tqkv_{name}_total"] - before[f"tqkv_{name}_total"], n, name)
        # Two requests in two batches: each waited, was copied in and out, and computed. OPEN and HELLO make no batch.
        for name, n in (("queue", 2), ("copy_in", 2), ("kernel", 2), ("copy_out", 2), ("request", 2)):
            grown = {part: after[f"tqkv_{name}_seconds_{part}"] - before[f"tqkv_{name}_seconds_{part}"] for part in ("count", "sum")}
            self.assertEqual(grown["count"], n, name)
            self.assertTrue(0 <= grown["sum"] < PATIENCE_S, (name, grown))
        self.assertGreater(after["tqkv_request_seconds_sum"], before["tqkv_request_seconds_sum"])
        self.assertEqual(after["tqkv_ready"], 1)
        self.assertEqual(after["tqkv_resident_bytes"] > 1 << 20, True)


class Paging(Case):
    options = ("--sessions-max", "1000", "--lease-ms", "600000")
    N = 300

    def test_sessions(self):
        raw = self.raw()
        handles = [raw.open(b"exact", name=b"page-%d" % i) for i in range(self.N)]
        for limit in (256, 100, 7):
            rows, sizes = self.pages("/v1/sessions", "sessions", limit)
            self.assertEqual(sorted(row["id"] for row in rows), sorted(f"{handle:016x}" for handle in handles))
            self.assertEqual(sizes, [limit] * (self.N // limit) + ([self.N % limit] if self.N % limit else []))
        self.assertEqual(len(self.get("/v1/sessions")["sessions"]), 64)
        for handle in handles[::3]:
            raw.call(frames.frame(frames.CLOSE, session=handle))
        rows, _ = self.pages("/v1/sessions", "sessions", 50)
        self.assertEqual(len(rows), self.N - len(handles[::3]))
        for handle in set(handles) - set(handles[::3]):
            raw.call(frames.frame(frames.CLOSE, session=handle))
        self.assertEqual(self.get("/v1/sessions"), {"sessions": [], "cursor_next": None})
        for bad in ("limit=0", "limit=257", "limit=x", "cursor=-1", "limit=1&limit=2", "page=1"):
            self.problem(400, "BAD_ARG", "GET", f"/v1/sessions?{bad}")

    def test_sequences_of_a_session(self):
        raw = self.raw()
        session = raw.open(b"exact", name=b"many")
        ids = [3 + 5 * i for i in range(self.N)]
        for sequence in ids:
            self.assertEqual(append(raw, session, sequence, 0).item_statuses(), [0])
            # Cut to nothing, because there are fewer blocks than sequences.
            item = struct.pack("<QIIIHHQ", sequence, 0, 0, 0, 0, 0, 0)
            reply = raw.call(frames.frame(frames.TRUNCATE, items=[item], session=session))
            self.assertEqual(reply.item_statuses(), [0])
        for limit in (256, 37):
            rows, _ = self.pages(f"/v1/sessions/{session:016x}", "sequences", limit)
            self.assertEqual([row["id"] for row in rows], [str(sequence) for sequence in ids])
        self.assertEqual(raw.call(frames.frame(frames.CLOSE, session=session)).status, 0)

    def test_connections(self):
        raws = [self.raw(self.daemon.tcp if i % 2 else None) for i in range(self.N)]
        for limit in (256, 64):
            rows, sizes = self.pages("/v1/connections", "connections", limit)
            self.assertEqual(len({row["id"] for row in rows}), self.N)
            self.assertEqual(max(sizes), limit)
        for raw in raws:
            raw.close()


class Pools(Case):
    def pool_names(self):
        return [pool["name"] for pool in self.get("/v1/pools")["pools"]]

    def test_a_pool_is_made_used_and_deleted(self):
        free = self.get("/v1/occupancy")["arena"]["free_bytes"]
        status, pool = self.daemon.request("POST", "/v1/pools", EXTRA)
        self.assertEqual(status, 201)
        self.assertEqual((pool["name"], pool["k"], pool["v"]), ("extra", "bf16", "f32"))
        self.assertIn("extra", self.pool_names())
        self.assertEqual(self.get("/v1/occupancy")["arena"]["free_bytes"], free - pool["arena_bytes"])
        self.problem(409, "EXISTS", "POST", "/v1/pools", EXTRA)
        raw = self.raw()
        session = raw.open(b"extra")
        self.assertIn("1 open session", self.problem(409, "BAD_STATE", "DELETE", "/v1/pools/extra"))
        raw.call(frames.frame(frames.CLOSE, session=session))
        end = time.monotonic() + PATIENCE_S
        while self.daemon.request("DELETE", "/v1/pools/extra")[0] != 204:  # until the closed session is taken apart
            self.assertLess(time.monotonic(), end)
        self.assertNotIn("extra", self.pool_names())
        self.assertEqual(self.get("/v1/occupancy")["arena"]["free_bytes"], free)
        self.problem(404, "NOT_FOUND", "DELETE", "/v1/pools/extra")
        self.assertEqual(raw.call(frames.open_session(b"extra")).status, 300)

    def test_location_names_the_new_pool(self):
        connection = http.client.HTTPConnection(self.daemon.http, timeout=PATIENCE_S)
        connection.request("POST", "/v1/pools", json.dumps(EXTRA), {"Content-Type": "application/json; charset=utf-8"})
        reply = connection.getresponse()
        reply.read()
        self.assertEqual((reply.status, reply.headers["Location"]), (201, "/v1/pools/extra"))
        connection.request("DELETE", reply.headers["Location"])
        self.assertEqual(connection.getresponse().status, 204)
        connection.close()

    def test_bad_bodies_are_refused_with_the_place(self):
        before = self.pool_names()
        for body, words in [
            (b"", ["empty"]), (b"{", ["1:"]), (b'{"name": "x",\n"name": "y"}', ["name"]), (b"[]", ["object"]),
            (b"\xff\xfe", []), (dict(EXTRA, head_dim=20), ["head_dim", "20"]), (dict(EXTRA, k="f99"), ["f99"]),
            (dict(EXTRA, name="a b"), ["name"]), (dict(EXTRA, colour=1), ["colour"]),
            (dict(EXTRA, q_heads=3, kv_heads=2), ["q_heads"]),
            (dict(EXTRA, blocks=-1), ["blocks"]), (dict(EXTRA, blocks=1.5), ["blocks"]), ({"name": "x"}, []),
            (dict(EXTRA, name=["x"]), ["name"]),
        ]:
            with self.subTest(body=body):
                detail = self.problem(400, "BAD_CONFIG", "POST", "/v1/pools", body)
                for word in words:
                    self.assertIn(word, detail)
        detail = self.problem(507, "NO_MEMORY", "POST", "/v1/pools",
                              dict(EXTRA, layers=64, kv_heads=2, head_dim=256, blocks=100000))
        self.assertRegex(detail, r"extra.*\d{9}")
        self.assertEqual(self.pool_names(), before)

    def test_large_bodies_are_refused(self):
        self.problem(413, "TOO_LARGE", "POST", "/v1/snapshot", b'{"name": "' + b"x" * 70000 + b'"}')

    def test_a_pool_brings_its_centres_along(self):
        """32 layers, 8 heads and 128 channels are more numbers than 64 KiB hold; the plan takes them as well."""
        pool = {"layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "k": "tq4", "v": "tq4", "block_size": 16,
                "k_center": [[[(i % 97 - 48) / 64 for i in range(128)]] * 8] * 32}
        self.assertGreater(len(json.dumps(pool)), 4 * 65536)
        status, plan = self.daemon.request("POST", "/v1/plan", {"pool": pool, "context_tokens": 4096})
        self.assertEqual(status, 200, plan)
        status, made = self.daemon.request("POST", "/v1/pools", dict(pool, name="centred", blocks=4))
        self.assertEqual(status, 201, made)
        self.assertEqual(self.daemon.request("DELETE", "/v1/pools/centred")[0], 204)

    def test_plan_by_the_name_of_a_model(self):
        """The geometry is the model's; what the pool says itself counts; an unknown name says where the names are."""
        ask = {"model": "llama-3.1-8b", "pool": {"preset": "k8v4"}, "context_tokens": 4096}
        status, plan = self.daemon.request("POST", "/v1/plan", ask)
        self.assertEqual(status, 200, plan)
        told = dict(ask, pool={"layers": 32, "q_heads": 32, "kv_heads": 8, "head_dim": 128, "preset": "k8v4"})
        del told["model"]
        self.assertEqual(self.daemon.request("POST", "/v1/plan", told), (200, plan))
        half = self.daemon.request("POST", "/v1/plan", dict(ask, pool={"preset": "k8v4", "layers": 16}))[1]
        self.assertEqual(2 * half["token_bytes"], plan["token_bytes"])
        for name in ("llama-99", 7):
            self.assertIn("plan --list", self.problem(400, "BAD_CONFIG", "POST", "/v1/plan", dict(ask, model=name)))

    def test_wrong_types_and_methods_are_refused(self):
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            self.problem(415, "UNSUPPORTED_MEDIA_TYPE", "POST", "/v1/pools", EXTRA, {"Content-Type": content_type})
        for method, path in [("PUT", "/v1/pools"), ("POST", "/v1/info"), ("DELETE", "/v1/pools"),
                             ("POST", "/v1/pools/demo"),
                             ("POST", "/livez"), ("PATCH", "/v1/config"), ("PUT", "/v1/sessions/0000000000000001")]:
            self.problem(405, "METHOD_NOT_ALLOWED", method, path, EXTRA if method == "POST" else None)
        for path in ("/v1", "/v1/nothing", "/v1/pools/", "/env", "/debug", "/v1/config/../config", "//livez"):
            self.problem(404, "NOT_FOUND", "GET", path)

    def test_other_peoples_pages_reach_nothing(self):
        """Host against DNS rebinding, Origin against forms and scripts of other sites."""
        for host in ("evil.example", "evil.example:7871", "127.0.0.1.evil.example", "localhost.evil.example", "",
                     "[::2]"):
            for method, path in (("GET", "/v1/info"), ("GET", "/metrics"), ("POST", "/v1/pools"),
                                 ("DELETE", "/v1/pools/demo")):
                self.problem(403, "FORBIDDEN", method, path, EXTRA if method == "POST" else None, {"Host": host})
        for origin in ("http://evil.example", "null", f"http://localhost:1", "file://"):
            headers = {"Origin": origin}
            self.problem(403, "FORBIDDEN", "POST", "/v1/pools", EXTRA, headers)
            self.problem(403, "FORBIDDEN", "DELETE", "/v1/pools/demo", None, headers)
            self.assertEqual(self.daemon.request("GET", "/livez", None, headers)[0], 200)
        self.assertEqual(self.daemon.request("POST", "/v1/pools", EXTRA, {"Origin": f"http://{self.daemon.http}"})[0],
                         201)
        self.assertEqual(self.daemon.request("DELETE", "/v1/pools/extra")[0], 204)
        self.assertEqual(self.pool_names(), ["demo", "exact"])


class Named(Case):
    options = ("--http-name", "tqkvd.example")

    def test_the_name_that_others_use_is_a_host(self):
        """Inside a compose network the daemon is reached by its service's name; that one and no other may stand there."""
        for host in ("tqkvd.example", "TQKVD.example:7871", "localhost:7871"):
            self.assertEqual(self.daemon.request("GET", "/v1/info", None, {"Host": host})[0], 200, host)
        for host in ("example", "x.tqkvd.example", "tqkvd.example.evil"):
            self.problem(403, "FORBIDDEN", "GET", "/v1/info", None, {"Host": host})


class Secrets(Case):
    def test_no_route_tells_the_environment_or_a_file(self):
        """FAILURES W13: neither values nor names of the environment, nor files."""
        raw = self.raw()
        session = raw.open(b"exact", name=b"named")
        append(raw, session, 1, 0, 2)
        (self.daemon.folder / "private.txt").write_text(SECRET)
        described = [path.replace("{id}", f"{session:016x}").replace("{sequence}", "1").replace("{name}", "exact")
                     .replace("{tenant}", "_default") for path in self.get("/v1/openapi.json")["paths"]]
        self.assertGreater(len(described), 25)
        # What ends the session comes last, and the daemon's end not at all.
        described = sorted((path for path in described if path != "/v1/drain"), key=lambda path: path == f"/v1/sessions/{session:016x}")
        paths = [*described, "/readyz?deep=1", "/env", "/v1/env", "/v1/environment",
                 "/proc/self/environ", "/v1/config?file=/proc/self/environ", "/../../../proc/self/environ",
                 "/%2e%2e/%2e%2e/proc/self/environ", f"/v1/pools/{self.daemon.folder}/private.txt", "/debug/pprof/",
                 "/metrics/reset"]
        for path in paths:
            for method in ("GET", "POST", "DELETE", "OPTIONS", "HEAD"):
                with self.subTest(path=path, method=method):
                    _, text = self.daemon.request(method, path, b"{}" if method == "POST" else None, raw=True)
                    self.assertNotIn(SECRET, text)
                    for name in ("TQKV_TEST_SECRET", "AWS_SECRET_ACCESS_KEY", "PATH="):
                        self.assertNotIn(name, text)
        self.assertNotIn(SECRET, self.daemon.log())


class SelfTest(unittest.TestCase):
    def test_a_corrupt_codebook_is_noticed(self):
        """FAILURES K15: one number of the embedded codebook is off; the daemon starts, says so, and is not ready."""
        codebook = json.loads((ROOT / "codebooks/codebook_d64_b4.json").read_text())
        table = struct.pack("<16f", *codebook["centroids"])
        program = (BUILD / "server/tqkvd").read_bytes()
        self.assertEqual(program.count(table), 1, "the codebook is not where this test looks for it")
        at = program.index(table) + 4 * 9
        damaged = program[:at] + struct.pack("<f", codebook["centroids"][9] + 0.05) + program[at + 4:]
        with tempfile.TemporaryDirectory(prefix="tqkv-test.") as folder:
            path = pathlib.Path(folder) / "tqkvd"
            path.write_bytes(damaged)
            path.chmod(0o755)
            command = [path, "--listen", f"unix:{folder}/s", "--http", "127.0.0.1:0", "--memory", "64MiB", "--pool",
                       DEMO,
                       "--backend", "cpu", "--self-test-interval-ms", "200"]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            try:
                self.check_not_ready(process)
            finally:
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=PATIENCE_S)

    def test_a_fault_that_arises_is_noticed_within_one_interval(self):
        """FAILURES M4: wrong answers make it not ready at the next self-test; it is alive all the while, and ready again
        when they are right."""
        centroids = json.loads((ROOT / "codebooks/codebook_d64_b4.json").read_text())["centroids"]
        right = struct.pack("<16f", *centroids)
        wrong = struct.pack("<16f", *[value + 0.05 * (i == 9) for i, value in enumerate(centroids)])
        with Daemon("--backend", "cpu-scalar", "--pool", DEMO, "--self-test-interval-ms", "200") as daemon:
            try:
                places = self.places_of(daemon, right)
                self.poke(daemon, places, right)  # what stands there anyway: may it be written?
            except OSError as error:
                self.skipTest(f"another process's memory may not be written here: {error}")
            self.assertTrue(places, "the codebook is not where this test looks for it")
            before = daemon.metrics()
            self.poke(daemon, places, wrong)
            self.wait_ready_is(daemon, 503)
            after = daemon.metrics()
            status, problem = daemon.request("GET", "/readyz")
            self.assertEqual((status, problem["code"]), (503, "NOT_READY"))
            self.assertIn("self-test failed: known answer", problem["detail"])
            # The one that was under way, and no other, may have passed since.
            ran, failed = (after[f"tqkv_{name}_total"] - before[f"tqkv_{name}_total"]
                           for name in ("self_tests", "self_tests_failed"))
            self.assertGreaterEqual(failed, 1)
            self.assertLessEqual(ran - failed, 1)
            self.assertEqual(daemon.request("GET", "/readyz?deep=1")[0], 503)
            self.assertEqual(daemon.request("GET", "/livez")[0], 200)
            self.poke(daemon, places, right)
            self.wait_ready_is(daemon, 200)

    def places_of(self, daemon, table):
        """Where the process has these bytes, constants too: what is written there is its own from then on."""
        places = []
        with open(f"/proc/{daemon.process.pid}/maps") as maps, open(f"/proc/{daemon.process.pid}/mem", "rb") as memory:
            for line in maps:
                area, rights = line.split()[:2]
                first, last = (int(part, 16) for part in area.split("-"))
                if rights[0] != "r" or rights[3] != "p" or last - first > 64 << 20:
                    continue  # the arena holds rows
                memory.seek(first)
                try:
                    held = memory.read(last - first)
                except OSError:
                    continue
                at = held.find(table)
                while at >= 0:
                    places.append(first + at)
                    at = held.find(table, at + 1)
        return places

    def poke(self, daemon, places, table):
        with open(f"/proc/{daemon.process.pid}/mem", "r+b", buffering=0) as memory:
            for at in places:
                memory.seek(at)
                memory.write(table)

    def wait_ready_is(self, daemon, wanted):
        end = time.monotonic() + PATIENCE_S
        while daemon.request("GET", "/readyz")[0] != wanted:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    def check_not_ready(self, process):
        log = ""
        while "control API on" not in log or "self-test failed" not in log:
            line = process.stderr.readline()
            self.assertTrue(line, f"ended early:\n{log}")
            log += line
        address = re.search(r"http://(\S+)", log).group(1)
        for path in ("/readyz", "/readyz?deep=1"):
            connection = http.client.HTTPConnection(address, timeout=PATIENCE_S)
            connection.request("GET", path)
            reply = connection.getresponse()
            problem = json.loads(reply.read())
            connection.close()
            self.assertEqual((reply.status, problem["code"]), (503, "NOT_READY"))
            self.assertIn("self-test failed: known answer", problem["detail"])
            self.assertRegex(problem["detail"], r"expected -?\d")


if __name__ == "__main__":
    unittest.main()
