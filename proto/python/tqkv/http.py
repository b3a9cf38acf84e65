"""The control API of tqkvd, with the standard library only.

    control = tqkv.http.Control("127.0.0.1:7871")
    control.create_pool(name="demo", layers=2, q_heads=4, kv_heads=2, head_dim=64, k="tq4", v="tq4", block_size=16,
                        blocks=64)
    print(control.occupancy()["totals"]["blocks"])
"""

import http.client
import json
import socket
import urllib.parse

from .errors import BY_NUMBER, Status, TqkvError


class Control:
    """address: "host:port" of the daemon's --http, an "http://" in front allowed. Errors are TqkvError."""

    def __init__(self, address="127.0.0.1:7871", timeout=30.0):
        parts = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
        if parts.scheme not in ("", "http") or not parts.hostname:
            raise TqkvError(Status.BAD_ARG, f"address {address!r}: expected host:port")
        self.host, self.port, self.timeout = parts.hostname, parts.port or 7871, timeout

    def request(self, method, path, body=None):
        """The parsed JSON of an answer, its text where it is none, or None where it is empty."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read().decode("utf-8", "replace")
        except socket.timeout as error:
            raise TqkvError(Status.DEADLINE, f"{method} {path}: no answer in {self.timeout} s",
                            outcome_unknown=method != "GET") from error
        except (OSError, http.client.HTTPException) as error:
            raise TqkvError(Status.IO_ERROR, f"{method} {path} at {self.host}:{self.port}: {error}",
                            outcome_unknown=method != "GET") from error
        finally:
            connection.close()
        is_json = "json" in (reply.getheader("Content-Type") or "")
        try:
            answer = json.loads(text) if is_json and text else text or None
        except ValueError as error:
            raise TqkvError(Status.BAD_FRAME, f"{method} {path}: the answer is no JSON: {error}") from error
        if reply.status >= 300:
            raise _problem(method, path, reply.status, answer)
        return answer

    def _pages(self, path, name, sort=None, limit=256):
        """All rows of a list that comes in pages."""
        order = f"&sort={urllib.parse.quote(sort)}" if sort else ""
        rows, cursor = [], ""
        while True:
            page = self.request("GET", f"{path}?limit={limit}{order}{cursor}")
            rows += page[name]
            if page.get("cursor_next") is None:
                return page, rows
            cursor = "&cursor=" + urllib.parse.quote(str(page["cursor_next"]))

    def is_ready(self):
        try:
            self.request("GET", "/readyz")
        except TqkvError as error:
            if error.is_local:
                raise
            return False
        return True

    def info(self):
        return self.request("GET", "/v1/info")

    def config(self):
        return self.request("GET", "/v1/config")

    def pools(self):
        return self.request("GET", "/v1/pools")["pools"]

    def create_pool(self, spec=None, **members):
        """Carves a pool from the daemon's memory: name, layers, q_heads, kv_heads, head_dim (or k_head_dim and
        v_head_dim), k, v, block_size, blocks; optional model, seed, tokens_max, groups, and
        what attention needs: scale, window, sink_tokens, softcap, sinks, alibi."""
        return self.request("POST", "/v1/pools", {**(spec or {}), **members})

    def delete_pool(self, name):
        self.request("DELETE", "/v1/pools/" + urllib.parse.quote(name, safe=""))

    def occupancy(self):
        """Blocks by state and bytes by purpose, per pool and in total."""
        return self.request("GET", "/v1/occupancy")

    def sessions(self):
        return self._pages("/v1/sessions", "sessions")[1]

    def session(self, session_id):
        """{"session": .., "sequences": [..]} of one session; its id is that of sessions()."""
        page, rows = self._pages("/v1/sessions/" + urllib.parse.quote(str(session_id), safe=""), "sequences")
        return {"session": page["session"], "sequences": rows}

    def prefixes(self, sort=None, limit=256):
        """Published prefixes one by one, in the order of `sort` (age, tokens, bytes, hits), by pages of `limit`."""
        return self._pages("/v1/prefixes", "prefixes", sort, limit)[1]

    def delete_prefix(self, prefix_id):
        """Takes out a prefix of prefixes(), with all that go on behind it."""
        self.request("DELETE", "/v1/prefixes/" + urllib.parse.quote(str(prefix_id), safe=""))

    def tenants(self):
        """What each tenant has and may have."""
        return self._pages("/v1/tenants", "tenants")[1]

    def set_tenant(self, tenant, **policy):
        """Quotas bytes, tokens, sessions, requests, tier_bytes (missing or None: no limit) and weight of a tenant: its number,
        "tcp", or "_default" for all that have no policy of their own. What is not given is not limited."""
        return self.request("PUT", "/v1/tenants/" + urllib.parse.quote(str(tenant), safe=""), policy)

    def clear_tenant(self, tenant):
        """The policy of "_default" holds again."""
        self.request("DELETE", "/v1/tenants/" + urllib.parse.quote(str(tenant), safe=""))

    def connections(self):
        return self._pages("/v1/connections", "connections")[1]

    def metrics(self):
        """The Prometheus text."""
        return self.request("GET", "/metrics")


def _problem(method, path, http_status, answer):
    """RFC 9457: the code is the name of a status where one is the cause."""
    problem = answer if isinstance(answer, dict) else {}
    number = next((row.number for row in BY_NUMBER.values() if row.name == problem.get("code")), Status.INTERNAL)
    detail = f"{method} {path}: {problem.get('detail') or answer or 'refused'} (HTTP {http_status})"
    error = TqkvError(number, detail, scope="request", is_local=False)
    if problem.get("code"):
        error.status_name = problem["code"]
    return error
