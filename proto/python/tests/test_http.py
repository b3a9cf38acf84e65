"""The control API's client against a small HTTP server."""

import http.server
import json
import threading
import unittest

import tqkv
from tqkv import Status
from tqkv.http import Control


class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        n = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(n)
        self.server.seen.append((self.command, self.path, self.headers.get("Content-Type"), body))
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
        self.server.seen, self.server.answers = [], []
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


if __name__ == "__main__":
    unittest.main()
