"""Requests that are nearly right: whatever the bytes, no 5xx, no change, and the daemon serves on."""

import json
import os
import random
import re
import socket
import struct
import unittest

import frames
from daemon import EXACT, PATIENCE_S, Daemon

PLAN = {"pool": {"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "k": "tq4", "v": "tq4"}, "context_tokens": 10}
# Bodies that are refused: mutation does not mend them by chance.
BODIES = [b'{"layers": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 64, "k": "tq4", "blocks": 4}', b'{"level": "loudest"}', b"{}",
          b'{"name": 7, "session": []}', json.dumps(PLAN).encode(), b'[{"name": null}]', b'{"context_tokens": 1e400}']
GETS = ["/v1/info", "/v1/pools", "/v1/pools/exact", "/v1/occupancy", "/v1/sessions?limit=5&cursor=0", "/v1/sessions?sort=tokens",
        "/v1/sessions/00ab000000000001", "/v1/sessions/00ab000000000001/sequences/5?group=1", "/v1/connections?limit=2",
        "/v1/config", "/v1/log-level", "/readyz?deep=0", "/livez", "/metrics", "/v1/openapi.json", "/v1/sessions?tenant=tcp",
        "/v1/prefixes?sort=hits&limit=3", "/v1/tenants/_default", "/v1/tenants?limit=1", "/v1/prefixes/0000000100000000",
        "/v1/audit", "/v1/snapshot", "/v1/snapshots", "/", "/dashboard.css", "/dashboard.js"]
# Those that may pass change nothing here: there is no configuration file, and the self-test is right.
POSTS = ["/v1/pools", "/v1/plan", "/v1/restore", "/v1/snapshot", "/v1/reload", "/v1/self-test"]
PUTS = ["/v1/log-level", "/v1/tenants/77"]
DELETES = ["/v1/pools/exact", "/v1/tenants/78", "/v1/prefixes/0000000100000000", "/v1/sessions/00ab000000000001",
           "/v1/snapshots/none"]


class Nearly(unittest.TestCase):
    N = int(os.environ.get("TQKV_HTTP_FUZZ_REQUESTS", "1500"))

    def mutate(self, rng, data):
        data = bytearray(data)
        for _ in range(rng.randrange(4)):
            at = rng.randrange(len(data) + 1)
            what = rng.randrange(4)
            if what == 0:
                data[at:at] = rng.choice([b"%00", b"%", b"..", b"/", b"?", b"&", b"=", b"\xff", b"%zz", b"[", b"{", b'"', b"9" * 30,
                                          b"\\u0000", b"-1", b"1e9", b"null", b"[" * 200, bytes([rng.randrange(1, 256)])])
            elif what == 1 and at < len(data):
                data[at] = rng.randrange(1, 256)
            elif what == 2:
                del data[at:at + rng.randrange(1, 9)]
            else:
                data[at:at] = data[:rng.randrange(20)]
        return bytes(data)

    def request(self, rng):
        method, path = rng.choice([("GET", p) for p in GETS] + [("POST", p) for p in POSTS * 3] + [("PUT", p) for p in PUTS * 3] +
                                  [("DELETE", p) for p in DELETES * 3] + [("PATCH", "/v1/config"), ("OPTIONS", "/v1/pools")])
        target = self.mutate(rng, path.encode()).translate(None, b" \r\n\t\x0b\x0c") or b"/"
        body = self.mutate(rng, rng.choice(BODIES)) if method in ("POST", "PUT") else b""
        kind = b"Content-Type: application/json\r\n" if rng.randrange(20) else b"Content-Type: text/plain\r\n"
        return b"%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%sContent-Length: %d\r\n\r\n%s" % (
            method.encode(), target, kind if body else b"", len(body), body)

    def ask(self, daemon, data):
        host, port = daemon.http.rsplit(":", 1)
        with socket.create_connection((host, int(port)), PATIENCE_S) as one:
            one.sendall(data)
            text = b""
            while part := one.recv(65536):
                text += part
        return text

    def state(self, daemon):
        occupancy = daemon.get("/v1/occupancy")
        sessions = daemon.get("/v1/sessions")["sessions"]
        return (daemon.get("/v1/pools"), [(row["id"], row["n_sequences"]) for row in sessions], daemon.get("/v1/config"),
                daemon.get("/v1/log-level"), occupancy["arena"], occupancy["totals"]["blocks"])

    def test_no_5xx_and_no_change(self):
        seed = int(os.environ.get("TQKV_HTTP_FUZZ_SEED", "0")) or random.randrange(1, 1 << 32)
        print(f"seed {seed}: TQKV_HTTP_FUZZ_SEED={seed} repeats it")
        rng = random.Random(seed)
        with Daemon("--backend", "cpu", "--pool", EXACT) as daemon, frames.Raw(daemon.addr) as raw:
            raw.hello()
            session = raw.open(b"exact", lease_ms=600000)
            row = struct.pack("<64f", *[0.25] * 64)
            raw.call(frames.rows(frames.APPEND, session, [(1, 0, 1, 0, 1)], n_layers=2, k=row * 2, v=row * 2))
            asked = {(method, path.split("?")[0]) for method, paths in (("GET", GETS), ("POST", POSTS), ("PUT", PUTS), ("DELETE", DELETES))
                     for path in paths}
            for path, item in daemon.get("/v1/openapi.json")["paths"].items():
                pattern = re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))
                for method in item:
                    is_asked = any(one == method.upper() and re.fullmatch(pattern, real) for one, real in asked)
                    self.assertTrue(is_asked or path == "/v1/drain", (method, path))  # which is the end
            before = self.state(daemon)
            seen = set()
            for _ in range(self.N):
                data = self.request(rng)
                answer = self.ask(daemon, data)
                self.assertTrue(answer.startswith(b"HTTP/1.1 "), (data, answer[:200]))
                status = int(answer[9:12])
                self.assertLess(status, 500, (data, answer[:400]))
                self.assertNotIn((status, data[:4]), {(201, b"POST"), (202, b"POST"), (204, b"DELE"), (200, b"PUT ")}, data)
                seen.add(status)
            self.assertEqual(self.state(daemon), before)
            self.assertTrue({200, 400, 404} <= seen, seen)
            self.assertTrue(daemon.get("/v1/audit")["is_clean"])


if __name__ == "__main__":
    unittest.main()
