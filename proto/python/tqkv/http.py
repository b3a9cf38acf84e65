"""The control API of tqkvd, with the standard library only.

    control = tqkv.http.Control("127.0.0.1:7871")
    control.create_pool(name="demo", layers=2, q_heads=4, kv_heads=2, head_dim=64, k="tq4", v="tq4", block_size=16,
                        blocks=64)
    print(control.occupancy()["totals"]["blocks"])

A daemon with tokens and a certificate:

    control = tqkv.http.Control("https://cache.example:7871", token=token, ca_file="ca.pem")
"""

import http.client
import json
import os
import socket
import ssl
import time
import urllib.parse

from .errors import BY_NUMBER, ArgumentError, Status, TqkvError

LOOK_S = 0.02  # between two looks at a snapshot that is being written


class Control:
    """address: "host:port" of the daemon's --http, or "https://host:port" where it has a certificate; None is what
    TQKV_HTTP of the environment says, else 127.0.0.1:7871. Errors are TqkvError.

    token: of role admin, or read for what only looks; None is what TQKV_TOKEN says. ca_file: certificates (PEM) that the
    daemon's one must come from; None is what TQKV_HTTP_CA_FILE says, else those that the system trusts. The name in the
    certificate must be the address' host. certificate_file, key_file: what this client shows where the daemon has
    http_client_ca_file. timeout: seconds until a request is given up.
    """

    def __init__(self, address=None, timeout=30.0, *, token=None, ca_file=None, certificate_file=None, key_file=None):
        if address is None:
            address = os.environ.get("TQKV_HTTP") or "127.0.0.1:7871"
        try:
            parts = urllib.parse.urlsplit(address if "//" in address else f"//{address}")
            self.host, self.port = parts.hostname, parts.port or 7871
        except ValueError as error:
            raise ArgumentError(f"address {address!r}: {error}") from error
        if parts.scheme not in ("", "http", "https") or not self.host or parts.path not in ("", "/"):
            raise ArgumentError(f"address {address!r}: expected host:port, or https://host:port")
        self.timeout = timeout
        self._token = os.environ.get("TQKV_TOKEN", "") if token is None else token
        if isinstance(self._token, bytes):
            self._token = self._token.decode("latin-1")
        if not all("!" <= c <= "~" for c in self._token):
            raise ArgumentError("the token has a character that no token has")
        self._tls = None
        if parts.scheme == "https":
            self._tls = _trust(ca_file or os.environ.get("TQKV_HTTP_CA_FILE") or None, certificate_file, key_file)
        elif ca_file or certificate_file or key_file:
            raise ArgumentError(f"address {address!r}: certificates are for https://host:port")

    def request(self, method, path, body=None):
        """The parsed JSON of an answer, its text where it is none, or None where it is empty."""
        if self._tls:
            connection = http.client.HTTPSConnection(self.host, self.port, timeout=self.timeout, context=self._tls)
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        where = f"{'https' if self._tls else 'http'}://{self.host}:{self.port}"
        try:
            headers = {"Content-Type": "application/json"} if body is not None else {}
            if self._token:
                headers["Authorization"] = f"Bearer {self._token}"
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            reply = connection.getresponse()
            text = reply.read().decode("utf-8", "replace")
        except socket.timeout as error:
            raise TqkvError(Status.DEADLINE, f"{method} {path}: no answer in {self.timeout} s",
                            outcome_unknown=method != "GET") from error
        except ssl.SSLCertVerificationError as error:
            raise TqkvError(Status.IO_ERROR, f"{method} {path} at {where}: the certificate is not trusted: "
                            f"{error.verify_message}; ca_file= or TQKV_HTTP_CA_FILE names those that are") from error
        except (OSError, http.client.HTTPException) as error:
            hint = ""
            if not self._tls and isinstance(error, (http.client.RemoteDisconnected, ConnectionResetError)):
                hint = "; a daemon with a certificate is asked at https://host:port"
            elif isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
                hint = "; the daemon has no certificate, and is asked at host:port"
            raise TqkvError(Status.IO_ERROR, f"{method} {path} at {where}: {error}{hint}",
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

    def _pages(self, path, name, sort=None, limit=256, group=0):
        """The last page and all rows of a list that comes in pages."""
        order = (f"&sort={urllib.parse.quote(sort)}" if sort else "") + (f"&group={group}" if group else "")
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

    def self_test(self):
        """A decode with a known answer, run now."""
        return self.request("POST", "/v1/self-test")

    def info(self):
        return self.request("GET", "/v1/info")

    def config(self):
        return self.request("GET", "/v1/config")

    def log_level(self):
        return self.request("GET", "/v1/log-level")["level"]

    def set_log_level(self, level):
        """error, warning, info or debug: until the next reload or start."""
        self.request("PUT", "/v1/log-level", {"level": level})

    def pools(self):
        return self.request("GET", "/v1/pools")["pools"]

    def pool(self, name):
        return self.request("GET", "/v1/pools/" + _part(name))

    def create_pool(self, spec=None, **members):
        """Carves a pool from the daemon's memory: name, layers, q_heads, kv_heads, head_dim (or k_head_dim and
        v_head_dim), k, v, block_size, blocks; optional model, seed, tokens_max, groups, and
        what attention needs: scale, window, sink_tokens, softcap, sinks, alibi."""
        return self.request("POST", "/v1/pools", {**(spec or {}), **members})

    def delete_pool(self, name):
        self.request("DELETE", "/v1/pools/" + _part(name))

    def plan(self, **question):
        """What fits, and how fast it can be at best: pool (members of a pool without name and blocks), context_tokens,
        sessions, memory_bytes."""
        return self.request("POST", "/v1/plan", question)

    def occupancy(self):
        """Blocks by state and bytes by purpose, per pool and in total."""
        return self.request("GET", "/v1/occupancy")

    def sessions(self):
        return self._pages("/v1/sessions", "sessions")[1]

    def session(self, session_id):
        """{"session": .., "sequences": [..]} of one session; its id is that of sessions()."""
        page, rows = self._pages("/v1/sessions/" + _part(session_id), "sequences")
        return {"session": page["session"], "sequences": rows}

    def delete_session(self, session_id):
        """Closes a session: its client finds STALE_HANDLE."""
        self.request("DELETE", "/v1/sessions/" + _part(session_id))

    def sequence(self, session_id, sequence, group=0):
        """{"sequence": .., "blocks": [..]}: one sequence and its block table of one group of layers."""
        path = f"/v1/sessions/{_part(session_id)}/sequences/{_part(sequence)}"
        page, rows = self._pages(path, "blocks", group=group)
        return {**page, "blocks": rows}

    def prefixes(self, sort=None, limit=256):
        """Published prefixes one by one, in the order of `sort` (age, tokens, bytes, hits), by pages of `limit`."""
        return self._pages("/v1/prefixes", "prefixes", sort, limit)[1]

    def prefix(self, prefix_id):
        return self.request("GET", "/v1/prefixes/" + _part(prefix_id))

    def delete_prefix(self, prefix_id):
        """Takes out a prefix of prefixes(), with all that go on behind it."""
        self.request("DELETE", "/v1/prefixes/" + _part(prefix_id))

    def tenants(self):
        """What each tenant has and may have."""
        return self._pages("/v1/tenants", "tenants")[1]

    def tenant(self, tenant):
        return self.request("GET", "/v1/tenants/" + _part(tenant))

    def set_tenant(self, tenant, **policy):
        """Quotas bytes, tokens, sessions, requests, tier_bytes (missing or None: no limit) and weight of a tenant: its number,
        "tcp", or "_default" for all that have no policy of their own. What is not given is not limited."""
        return self.request("PUT", "/v1/tenants/" + _part(tenant), policy)

    def clear_tenant(self, tenant):
        """The policy of "_default" holds again."""
        self.request("DELETE", "/v1/tenants/" + _part(tenant))

    def connections(self):
        return self._pages("/v1/connections", "connections")[1]

    def audit(self):
        """Counts owners of blocks and entries of tables again while the daemon serves."""
        return self.request("GET", "/v1/audit")

    def snapshot(self, name, session_id=None):
        """Writes sessions that have a name (or the one with this id) to a file of the daemon's snapshot_dir; returns once
        it is on disk, with what is in it. Clients go on meanwhile."""
        return self._checkpoint("/v1/snapshot", {"name": name, **({} if session_id is None else {"session": session_id})})

    def restore(self, name):
        """Brings the sessions of a snapshot back: all of them, or none. Clients attach to them by name."""
        return self._checkpoint("/v1/restore", {"name": name})

    def snapshot_state(self):
        """How the last snapshot or restore is."""
        return self.request("GET", "/v1/snapshot")

    def snapshots(self):
        """[{"name": .., "n_bytes": .., "modified_unix_s": ..}]: what is in snapshot_dir, newest first."""
        return self.request("GET", "/v1/snapshots")["snapshots"]

    def delete_snapshot(self, name):
        self.request("DELETE", "/v1/snapshots/" + _part(name))

    def _checkpoint(self, path, body):
        begun = self.request("POST", path, body)["n_begun"]
        while True:
            state = self.snapshot_state()
            if state["n_begun"] != begun:
                raise TqkvError(Status.BUSY_RETRY, f"POST {path}: another one was begun before this one was looked at",
                                outcome_unknown=True)
            if state["state"] != "running":
                break
            time.sleep(LOOK_S)
        if state["status"] != "OK":
            raise _problem("POST", path, None, {"code": state["status"], "detail": state.get("detail")})
        return state

    def reload(self):
        """The daemon reads its configuration and tokens again, whole or not at all; what changed, and what needs a
        restart."""
        return self.request("POST", "/v1/reload")

    def drain(self):
        """The daemon takes no new sessions and ends when those that are there have gone, or after drain_timeout_ms."""
        return self.request("POST", "/v1/drain")

    def openapi(self):
        """The document that describes all this."""
        return self.request("GET", "/v1/openapi.json")

    def metrics(self):
        """The Prometheus text."""
        return self.request("GET", "/metrics")


def _part(value):
    """Of a path."""
    return urllib.parse.quote(str(value), safe="")


def _trust(ca_file, certificate_file, key_file):
    """Who is believed, and what is shown."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise ArgumentError(f"ca_file {ca_file!r}: {error.strerror or error}") from error
    if certificate_file or key_file:
        try:
            context.load_cert_chain(certificate_file or key_file, key_file)
        except OSError as error:
            raise ArgumentError(f"certificate_file {certificate_file!r} and key_file {key_file!r}: "
                                f"{error.strerror or error}") from error
    return context


def _problem(method, path, http_status, answer):
    """RFC 9457: the code is the name of a status where one is the cause. http_status None: told by a good answer."""
    problem = answer if isinstance(answer, dict) else {}
    number = next((row.number for row in BY_NUMBER.values() if row.name == problem.get("code")), Status.INTERNAL)
    detail = f"{method} {path}: {problem.get('detail') or answer or 'refused'}"
    detail += f" (HTTP {http_status})" if http_status else ""
    error = TqkvError(number, detail, scope="request", is_local=False)
    if problem.get("code"):
        error.status_name = problem["code"]
        error.args = (f"{error.status_name}: {detail}",)
    return error
