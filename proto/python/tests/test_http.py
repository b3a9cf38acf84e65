"""The control API's client against a small HTTP server."""

import http.server
import json
import os
import pathlib
import re
import shutil
import ssl
import subprocess
import tempfile
import threading
import unittest
from unittest import mock

import tqkv
from tqkv import Status
from tqkv.http import Control

from .common import ROOT


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        n = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(n)
        self.server.seen.append((self.command, self.path, self.headers.get("Content-Type"), body))
        self.server.tokens.append(self.headers.get("Authorization"))
        status, kind, data = self.server.answers.pop(0)
        self.send_response(status)
        if kind:
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = answer

    def log_message(self, *_):
        pass


class Calls(unittest.TestCase):
    def setUp(self):
        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.server.seen, self.server.answers, self.server.tokens = [], [], []
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()
        self.control = Control(f"127.0.0.1:{self.server.server_port}", timeout=10)

    def tearDown(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def answer(self, body, status=200, kind="application/json"):
        self.server.answers.append((status, kind, body if isinstance(body, bytes) else json.dumps(body).encode()))

    def test_a_pool_is_made_and_deleted(self):
        """With JSON and its type, and a name that is escaped."""
        self.answer({"name": "demo"}, 201)
        self.answer(b"", 204, None)
        self.assertEqual(self.control.create_pool(name="demo", layers=2), {"name": "demo"})
        self.assertIsNone(self.control.delete_pool("de/mo"))
        self.assertEqual(self.server.seen, [("POST", "/v1/pools", "application/json", b'{"name": "demo", "layers": 2}'),
                                            ("DELETE", "/v1/pools/de%2Fmo", None, b"")])

    def test_lists_are_read_page_by_page(self):
        self.answer({"sessions": [{"id": "1"}], "cursor_next": "7"})
        self.answer({"sessions": [{"id": "2"}], "cursor_next": None})
        self.assertEqual([row["id"] for row in self.control.sessions()], ["1", "2"])
        self.assertEqual([path for _, path, _, _ in self.server.seen],
                         ["/v1/sessions?limit=256", "/v1/sessions?limit=256&cursor=7"])

    def test_problems_become_errors(self):
        """Code and detail arrive; a code that is no status keeps its name."""
        self.answer({"status": 409, "code": "EXISTS", "detail": "pool demo is there"}, 409, "application/problem+json")
        with self.assertRaises(tqkv.TqkvError) as raised:
            self.control.create_pool(name="demo")
        self.assertEqual(raised.exception.status, Status.EXISTS)
        self.assertIn("pool demo is there", str(raised.exception))
        self.answer({"code": "NOT_READY", "detail": "self-test"}, 503, "application/problem+json")
        self.assertFalse(self.control.is_ready())
        self.answer({"code": "BAD_CONFIG", "detail": "block_size is missing"}, 400, "application/problem+json")
        with self.assertRaisesRegex(tqkv.TqkvError, "^BAD_CONFIG: POST /v1/pools: block_size"):
            self.control.create_pool(name="demo")
        self.answer(b"<html>", 502, "text/html")
        with self.assertRaisesRegex(tqkv.TqkvError, "502"):
            self.control.info()
        self.answer(b"{", 200)
        with self.assertRaisesRegex(tqkv.TqkvError, "no JSON"):
            self.control.info()

    def test_nobody_there(self):
        with self.assertRaises(tqkv.TqkvError) as raised:
            Control("127.0.0.1:1", timeout=5).info()
        self.assertEqual(raised.exception.status, Status.IO_ERROR)
        with self.assertRaises(tqkv.TqkvError):
            Control("ftp://h")

    def test_a_token(self):
        """Of the caller, else of the environment; it cannot become two header lines."""
        address = f"127.0.0.1:{self.server.server_port}"
        with mock.patch.dict(os.environ, {"TQKV_TOKEN": "of-the-environment", "TQKV_HTTP": address}):
            for control, wanted in ((Control(address, token="mine"), "Bearer mine"), (Control(address, token=""), None),
                                    (Control(), "Bearer of-the-environment")):
                self.answer({})
                control.info()
                self.assertEqual(self.server.tokens.pop(), wanted)
        with self.assertRaises(ValueError):
            Control(address, token="a\r\nb")

    def test_a_snapshot_is_waited_for(self):
        """Its end is the call's; a failure is an error with the daemon's code; another one in between is told."""
        self.answer({"n_begun": 3, "state": "running"}, 202)
        self.answer({"n_begun": 3, "state": "running", "status": "OK"})
        self.answer({"n_begun": 3, "state": "done", "status": "OK", "n_bytes": 7})
        self.assertEqual(self.control.snapshot("one", "00ab000000000001")["n_bytes"], 7)
        self.assertEqual(json.loads(self.server.seen[0][3]), {"name": "one", "session": "00ab000000000001"})
        self.answer({"n_begun": 4, "state": "running"}, 202)
        self.answer({"n_begun": 4, "state": "done", "status": "CORRUPT", "detail": "block 7"})
        with self.assertRaisesRegex(tqkv.TqkvError, "^CORRUPT: POST /v1/restore: block 7$"):
            self.control.restore("one")
        self.answer({"n_begun": 5, "state": "running"}, 202)
        self.answer({"n_begun": 6, "state": "running"})
        with self.assertRaisesRegex(tqkv.TqkvError, "another one"):
            self.control.snapshot("one")

    def test_https(self):
        """The certificate and its name are verified; each mistake says what to do about it."""
        folder = pathlib.Path(tempfile.mkdtemp(prefix="tqkv-test."))
        self.addCleanup(shutil.rmtree, folder, True)
        for name, subject in (("right", "IP:127.0.0.1"), ("wrong", "DNS:elsewhere.example")):
            subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                            "-days", "2", "-subj", f"/CN={name}", "-addext", f"subjectAltName={subject}", "-keyout",
                            folder / f"{name}.key", "-out", folder / f"{name}.pem"], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "right.pem", folder / "right.key")
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        address = f"https://127.0.0.1:{self.server.server_port}"
        control = Control(address, timeout=10, ca_file=folder / "right.pem", token="t")
        self.answer({"version": "1"})
        self.assertEqual(control.info(), {"version": "1"})
        with self.assertRaisesRegex(tqkv.TqkvError, "certificate is not trusted: .*ca_file="):
            Control(address, timeout=10, ca_file=folder / "wrong.pem").info()
        with self.assertRaisesRegex(tqkv.TqkvError, "certificate is not trusted: .*localhost"):
            Control(address.replace("127.0.0.1", "localhost"), timeout=10, ca_file=folder / "right.pem").info()
        with self.assertRaisesRegex(ValueError, "absent.pem"):
            Control(address, ca_file=folder / "absent.pem")
        with self.assertRaisesRegex(ValueError, "https://"):
            Control("127.0.0.1:1", ca_file=folder / "right.pem")

    def test_plain_http_is_told_from_https(self):
        with self.assertRaisesRegex(tqkv.TqkvError, "has no certificate, and is asked at host:port"):
            Control(f"https://127.0.0.1:{self.server.server_port}", timeout=10).info()


class Routes(unittest.TestCase):
    def test_every_route_has_a_method(self):
        """Every path and method of the OpenAPI document but what browsers fetch."""
        document = json.loads((ROOT / "server/openapi.json").read_text())
        wanted = {(method.upper(), path) for path, item in document["paths"].items() for method in item
                  if method in ("get", "post", "put", "delete") and (path.startswith("/v1/") or path == "/metrics")}
        asked = set()

        class Recorder(Control):
            def request(self, method, path, body=None):
                asked.add((method, re.sub(r"\?.*", "", path)))
                return {"cursor_next": None, "level": "info", "n_begun": 1, "state": "done", "status": "OK", "session": {},
                        **{name: [] for name in ("pools", "sessions", "sequences", "blocks", "tenants", "prefixes",
                                                 "connections", "snapshots")}}

        control = Recorder("127.0.0.1:1")
        arguments = {"session": ["{id}"], "delete_session": ["{id}"], "sequence": ["{id}", "{sequence}"],
                     "prefix": ["{id}"], "delete_prefix": ["{id}"], "tenant": ["{tenant}"], "set_tenant": ["{tenant}"],
                     "clear_tenant": ["{tenant}"], "pool": ["{name}"], "delete_pool": ["{name}"],
                     "snapshot": ["{name}"], "restore": ["{name}"], "delete_snapshot": ["{name}"],
                     "set_log_level": ["info"]}
        for name in (name for name in dir(Control) if name[0] != "_" and name != "request"):
            with mock.patch("urllib.parse.quote", lambda text, safe="": text):
                getattr(control, name)(*arguments.get(name, []))
        self.assertEqual(asked - {("GET", "/readyz")}, wanted)


if __name__ == "__main__":
    unittest.main()
