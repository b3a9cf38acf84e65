"""The connection to one daemon: HELLO, pools, sessions, reconnecting."""

import json
import os
from collections import namedtuple

import numpy as np

from . import _wire as wire
from ._arguments import encoded, seconds, whole
from ._connection import Connection, now
from ._rows import WINDOW_FRAMES, Backoff
from .codec import PoolCodec
from .errors import ArgumentError, ArgumentTypeError, Status, TqkvError, ends_by_itself
from .session import Geometry, Session

# What POOL_INFO is asked for.
MATRIX_OF, K_CENTER, BASIS_OF = {"k": 1, "v": 3}, 2, {"k": 4, "v": 5}
PACKED_INPUT = 1 << 2  # a bit of HELLO's features
DEFAULT_ADDRESS = "unix:/run/tqkv/tqkvd.sock"

ServerInfo = namedtuple("ServerInfo", wire.LAYOUTS["hello_reply"].tuple._fields)
ReconnectReport = namedtuple("ReconnectReport", "boot_id_before boot_id n_sessions n_attached n_sequences n_truncated")
ReconnectReport.__doc__ = """What reconnect() did.

n_sessions: of this client; n_attached: of them usable again; n_sequences: of all attached sessions; n_truncated:
sequences that were cut to their shortest layer. boot_id differs from boot_id_before: the daemon was restarted, and
what is attached came from a snapshot; lengths() tells how far it goes.
"""
PoolInfo = namedtuple("PoolInfo", "name fingerprint json n_pools")
PoolInfo.__doc__ = """A pool.

json: what decides its bytes and results, as a dict. fingerprint: a number that stands for it.
"""


def left_of(deadline):
    return max(deadline - now(), 0)


def _told(value):
    text = json.dumps(value)
    return text if len(text) <= 48 else text[:45] + ".."


def _difference(path, expected, got):
    """The first member of a pool's JSON that differs, or None. The JSON is three levels deep."""
    pairs = ()
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in sorted(set(expected) ^ set(got)):
            what, value = ("missing", expected[key]) if key in expected else ("not expected", got[key])
            return f"{path + '.' if path else ''}{key} is {what}: {_told(value)}"
        pairs = [(f"{path + '.' if path else ''}{key}", expected[key], got[key]) for key in sorted(expected)]
    elif isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = [(f"{path}[{i}]", *pair) for i, pair in enumerate(zip(expected, got))]
    elif type(expected) is not type(got) or expected != got:
        return f"{path or 'the pool'}: expected {_told(expected)}, got {_told(got)}"
    return next(filter(None, (_difference(*pair) for pair in pairs)), None)


class Client:
    """A connection to tqkvd at "unix:/path", "tcp:host:port" or "tcp:[v6 address]:port".

    address: None is what TQKV_ADDR of the environment says, else the socket of the installed service. token: what the
    daemon asks for over TCP where it has a file of tokens; None is what TQKV_TOKEN says. timeout: seconds that every call has, with all its repetitions, unless it is given its own. When they pass, the
    call raises TqkvError with status DEADLINE; the connection stays usable and the late reply is thrown away.
    connect_timeout: for connecting and HELLO. name: for the server's log. body_crc: checksums over bodies too
    (those of headers are always there). timings: ask for the server's times (Session.timings). retry: calls that are
    refused for now (POOL_FULL, BUSY_RETRY, too many requests in flight) are tried again until the deadline, first
    after up to backoff_first seconds, then after pauses that grow up to backoff_max; False raises at once. QUOTA of
    anything else is never tried again: it is over when somebody gives something back, which may be the caller.

    Threads: a client, its sessions and its pipelines belong to one thread at a time; nothing here takes a lock.
    Different clients are independent. After os.fork() the child's copies are not connected: it makes its own.

    Sessions live in the daemon as long as their lease is renewed: by any call, or by ping().
    """

    def __init__(self, address=None, timeout=30.0, *, connect_timeout=5.0, name="", token=None, body_crc=False,
                 timings=False, retry=True, backoff_first=0.005, backoff_max=1.0):
        if address is None:
            address = os.environ.get("TQKV_ADDR") or DEFAULT_ADDRESS
        token = os.environ.get("TQKV_TOKEN", "") if token is None else token
        self.timeout, self.connect_timeout = seconds("timeout", timeout), seconds("connect_timeout", connect_timeout)
        self.retry = retry
        self._backoff = seconds("backoff_first", backoff_first), seconds("backoff_max", backoff_max)
        if not 0 <= self._backoff[0] <= self._backoff[1]:
            raise ArgumentError(f"backoff_first {backoff_first} and backoff_max {backoff_max}: expected 0 or more, and "
                                "no more than the second")
        self._name = encoded("name", name)
        self._token = encoded("token", token)
        if len(self._name) > 64 or len(self._token) > 512:
            raise ArgumentError("name has at most 64 bytes, token 512")
        self._sessions = []
        self.server = None  # a ServerInfo: what HELLO told
        self._connection = Connection(address, body_crc=body_crc, timings=timings)
        self._dial(now() + self.connect_timeout, 0)

    def __repr__(self):
        state = "" if self.is_connected else ", not connected"
        return f"<tqkv.Client {self._connection.address}{state}>"

    # ---- connection ----

    def _dial(self, deadline, boot_id_seen):
        """True: the daemon is the one of boot_id_seen, or there was none."""
        connection = self._connection
        connection.frame_bytes_max, connection.items_max = 64 << 10, 1
        connection.inflight_requests_max, connection.inflight_bytes_max = 1, 1 << 62
        connection.connect(deadline)
        op = wire.LAYOUTS["hello_req"].pack(
            proto_min=wire.VERSION, proto_max=wire.VERSION, token_bytes=len(self._token), name_bytes=len(self._name),
            features=PACKED_INPUT, boot_id_seen=boot_id_seen)
        try:
            reply = connection.wait(self._submit(wire.HELLO, op, self._token + self._name, deadline=deadline,
                                                 tell_deadline=False), deadline)
            told = ServerInfo(*reply.op)
            status = reply.header.status
            if status == Status.VERSION_UNSUPPORTED:
                raise TqkvError(status, f"this package speaks version {wire.VERSION} of the protocol, the server "
                                f"{told.proto_min} to {told.proto_max}", is_local=False)
            if status not in (Status.OK, Status.STALE_EPOCH):
                raise TqkvError(status, self._why_refused(status), is_local=False)
            if told.proto != wire.VERSION or told.frame_bytes_max < 4096 or told.items_max < 1:
                raise TqkvError(Status.BAD_FRAME, f"HELLO's reply is out of range: {told}")
        except TqkvError as error:
            connection.lose(error)
            raise
        self.server = told
        connection.frame_bytes_max = told.frame_bytes_max
        connection.inflight_bytes_max = max(told.inflight_bytes_max, 1)
        connection.inflight_requests_max = max(told.inflight_requests_max, 1)
        connection.items_max = told.items_max
        return status == Status.OK

    def _why_refused(self, status):
        """HELLO's reply has no text."""
        if status == Status.UNAUTHENTICATED and not self._token:
            return "HELLO was refused: the daemon wants a token; give it as token=, or in TQKV_TOKEN"
        if status == Status.UNAUTHENTICATED:
            return ("HELLO was refused: the token of token= or TQKV_TOKEN is none of the daemon's, or there were too many "
                    "failed logins within a minute")
        if status == Status.FORBIDDEN and self._token:
            return "HELLO was refused: not allowed; the data port takes tokens of role data or admin, not of role read"
        if status == Status.FORBIDDEN:
            return "HELLO was refused: not allowed; the daemon's unix_uids do not name this user"
        return "HELLO was refused"

    @property
    def is_connected(self):
        """False once the connection is lost. True proves nothing about the network."""
        return self._connection.is_connected

    @property
    def is_draining(self):
        """The server has announced that it is about to stop. Seen while some call waits."""
        return self._connection.is_draining

    def fileno(self):
        """For a caller's poll: readable when a reply may be there. -1 when lost."""
        return self._connection.fileno()

    def close(self):
        """Disconnects. The daemon keeps sessions until their lease runs out; Session.close() ends one at once."""
        self._connection.lose(TqkvError(Status.IO_ERROR, "the client was closed"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- requests ----

    def _pauses(self):
        return self._backoff if self.retry else None

    def _deadline(self, timeout):
        return now() + (self.timeout if timeout is None else seconds("timeout", timeout))

    def _submit(self, opcode, op, payload=b"", *, session=0, deadline, tell_deadline=True, on_done=None):
        """A frame without items."""
        layout = wire.REQUEST_OPS.get(opcode)
        frame = self._connection.new_frame(len(op), 0, len(payload))
        frame[wire.HEADER_BYTES:wire.HEADER_BYTES + len(op)] = op
        if payload:
            frame[wire.HEADER_BYTES + wire.payload_start(len(op), 0):] = payload
        values = wire.LAYOUTS[layout].unpack(op, 0, len(op)) if layout and op else None
        return self._connection.submit(opcode, frame, session=session, op_bytes=len(op), op=values, deadline=deadline,
                                       tell_deadline=tell_deadline, on_done=on_done)

    def _bad_reply(self, request, text):
        """Who sends one nonsense is not believed any further."""
        error = TqkvError(Status.BAD_FRAME, f"the reply to {wire.opcode_name(request.opcode)} is malformed: {text}",
                          scope="connection", outcome_unknown=True)
        self._connection.lose(error)
        raise error

    def _run(self, submits, deadline):
        """Sends any number of requests pipelined; those that are refused for now again. Replies in their order.

        submits: callables that send one request each and return it.
        """
        replies = [None] * len(submits)
        todo, backoff = list(range(len(submits))), Backoff(*self._backoff)
        while True:
            refused, retry_after_ms, failure = [], 0, None
            flights, sent = [], 0
            while flights or (sent < len(todo) and failure is None):
                if sent < len(todo) and len(flights) < WINDOW_FRAMES and failure is None:
                    try:
                        flights.append((todo[sent], submits[todo[sent]]()))
                        sent += 1
                        continue
                    except TqkvError as error:
                        failure = error
                        continue
                index, request = flights.pop(0)
                try:
                    replies[index] = self._connection.wait(request, deadline)
                except TqkvError as error:
                    # QUOTA of a READ is one of requests in flight.
                    may_repeat = error.retryable if request.opcode == wire.READ else ends_by_itself(
                        error.status, error.retryable)
                    if self.retry and may_repeat and not error.is_local:
                        refused.append(index)
                        retry_after_ms = max(retry_after_ms, error.retry_after_ms)
                        last = error
                    elif failure is None:
                        failure = error
            if failure is not None:
                raise failure
            if not refused:
                return replies
            if not backoff.pause(self._connection, retry_after_ms, deadline):
                raise last
            todo = refused

    def _call(self, opcode, op, payload=b"", *, session=0, deadline):
        return self._run([lambda: self._submit(opcode, op, payload, session=session, deadline=deadline)], deadline)[0]

    def ping(self, timeout=None):
        """Renews the leases of all sessions of this connection. Seconds that the answer took."""
        return self._ping(0, timeout)

    def _ping(self, session, timeout):
        begun = now()
        reply = self._call(wire.PING, b"", session=session, deadline=self._deadline(timeout))
        took = now() - begun
        if reply.op.boot_id != self.server.boot_id:
            raise TqkvError(Status.STALE_EPOCH, "the daemon was restarted: all sessions are gone", is_local=False)
        return took

    def echo(self, payload, reply_bytes=None, timeout=None):
        """Sends bytes through the path of a row operation and gets reply_bytes of them back, zeros appended."""
        payload = bytes(payload)
        n = len(payload) if reply_bytes is None else whole("reply_bytes", reply_bytes, 0, (1 << 63) - 1)
        op = wire.LAYOUTS["ping_req"].pack(reply_payload_bytes=n)
        reply = self._call(wire.PING, op, payload, deadline=self._deadline(timeout))
        return bytes(reply.payload[:n])

    # ---- pools ----

    def _pool_info(self, name, index, what, layer, row_first, deadline):
        name = encoded("the pool's name", name)
        op = wire.LAYOUTS["pool_info_req"].pack(pool_name_bytes=len(name), what=what, index=index, layer=layer,
                                                row_first=row_first)
        request = None

        def submit():
            nonlocal request
            request = self._submit(wire.POOL_INFO, op, name, deadline=deadline)
            return request

        reply = self._run([submit], deadline)[0]
        if reply.op.json_bytes > len(reply.payload):
            self._bad_reply(request, f"json_bytes {reply.op.json_bytes} of {len(reply.payload)}")
        return reply.op, bytes(reply.payload[:reply.op.json_bytes])

    def pool_info(self, name, timeout=None):
        """The PoolInfo of one pool."""
        if not name:
            raise ArgumentError("a pool's name is not empty")
        return self._parse_info(name, *self._pool_info(name, 0, 0, 0, 0, self._deadline(timeout)))

    def _parse_info(self, name, told, text):
        try:
            parsed = json.loads(text)
        except ValueError as error:
            raise TqkvError(Status.BAD_FRAME, f"the JSON of pool {name!r} cannot be read: {error}") from error
        return PoolInfo(name, told.fingerprint, parsed, told.n_pools)

    def pools(self, timeout=None):
        """The PoolInfo of every pool, in the daemon's order. Their JSON has no names; see tqkv.http for those."""
        deadline, infos, index = self._deadline(timeout), [], 0
        while True:
            try:
                told, text = self._pool_info("", index, 0, 0, 0, deadline)
            except TqkvError as error:
                if error.status == Status.NOT_FOUND and not error.is_local:
                    return infos
                raise
            info = self._parse_info(None, told, text)
            infos.append(info)
            index += 1
            if index >= info.n_pools:
                return infos

    def _pool_rows(self, name, index, what, layer, n_rows, dim, deadline, may_lack=False):
        """float32 [n_rows, dim] of a layer; with may_lack None where it has none."""
        rows, n_got = [], 0
        while n_got < n_rows:
            try:
                _, data = self._pool_info(name, index, what, layer, n_got, deadline)
            except TqkvError as error:
                if may_lack and error.status == Status.NOT_FOUND and not error.is_local and not n_got:
                    return None
                raise
            part = np.frombuffer(data, "<f4")
            if not len(part) or len(part) % dim:
                raise TqkvError(Status.BAD_FRAME, f"{len(part)} numbers are no rows of {dim}")
            rows.append(part.reshape(-1, dim))
            n_got += len(part) // dim
        return np.concatenate(rows)[:n_rows]

    def rotation_matrix(self, name, layer=0, side="k", timeout=None):
        """What K rows ("k") or V rows ("v") of a layer are multiplied with before they are quantised.

        float32 [dim, dim]; None: they are not."""
        if side not in ("k", "v"):
            raise ArgumentError(f"side is {side!r}, expected 'k' or 'v'")
        deadline = self._deadline(timeout)
        described = self.pool_info(name, left_of(deadline)).json
        dim = described[f"{side}_head_dim"]
        return self._pool_rows(name, 0, MATRIX_OF[side], layer, dim, dim, deadline, may_lack=True)

    def row_basis(self, name, layer=0, side="k", timeout=None):
        """The basis of K rows ("k") or V rows ("v") of a layer, which Q_ROTATED and OUT_ROTATED name.

        float32 [kv_heads, dim, dim]: a query q of the head is sent as basis @ q, an output y is basis.T @ y."""
        if side not in ("k", "v"):
            raise ArgumentError(f"side is {side!r}, expected 'k' or 'v'")
        deadline = self._deadline(timeout)
        described = self.pool_info(name, left_of(deadline)).json
        dim, heads = described[f"{side}_head_dim"], described["kv_heads"]
        return self._pool_rows(name, 0, BASIS_OF[side], layer, heads * dim, dim, deadline).reshape(heads, dim, dim)

    def pool_codec(self, name, high_channels=None, timeout=None):
        """The tqkv.codec.PoolCodec of a pool. Matrices and K centres are fetched where the pool's JSON has only a hash.

        high_channels: as PoolCodec takes them, for a pool whose recipe has a file of its own. A pool with codebook files
        of its own is refused with UNSUPPORTED: the daemon does not tell them.
        """
        deadline = self._deadline(timeout)
        return self._make_codec(name, 0, self.pool_info(name, left_of(deadline)).json, high_channels, deadline)

    def _codec_of(self, session, deadline):
        """Of a session's pool, whose name an attached session does not know."""
        name = session.geometry.pool
        infos = [self.pool_info(name, left_of(deadline))] if name else self.pools(left_of(deadline))
        for index, info in enumerate(infos):
            if info.fingerprint == session.fingerprint:
                return self._make_codec(name or "", index, info.json, None, deadline)
        raise TqkvError(Status.FORMAT_MISMATCH, f"no pool has the session's fingerprint {session.fingerprint:#018x}")

    def _make_codec(self, name, index, pool, high_channels, deadline):
        options = {"high_channels": high_channels}
        n_layers = pool["layers"]
        if "k_center" in pool:
            options["k_center"] = np.stack([
                self._pool_rows(name, index, K_CENTER, layer, pool["kv_heads"], pool["k_head_dim"], deadline)
                for layer in range(n_layers)])
        options["matrices"] = {side: self._matrices(name, index, pool, side, deadline) for side in "kv"}
        try:
            return PoolCodec(pool, **options)
        except (KeyError, TypeError, ValueError) as error:
            raise TqkvError(Status.UNSUPPORTED, f"rows of the pool cannot be packed here: {error}") from error

    def _matrices(self, name, index, pool, side, deadline):
        """Of a rotation that the JSON does not give to the last bit; one for each layer where they differ."""
        turn, dim, formats = pool.get(f"{side}_rotation", {}), pool[f"{side}_head_dim"], pool[side]
        if turn.get("kind") not in ("file", "qr"):
            return None
        layers = [layer for layer in range(pool["layers"])
                  if (formats if isinstance(formats, str) else formats[layer]).startswith("tq")]
        if not layers:
            return None
        if not turn.get("per_layer"):
            return self._pool_rows(name, index, MATRIX_OF[side], layers[0], dim, dim, deadline)
        matrices = np.zeros((pool["layers"], dim, dim), np.float32)
        for layer in layers:
            matrices[layer] = self._pool_rows(name, index, MATRIX_OF[side], layer, dim, dim, deadline)
        return matrices

    # ---- sessions ----

    def open(self, pool, session=None, *, reserve_blocks=0, lease_ms=0, tokens_max=0, sequences_max=0, priority=0,
             fingerprint=0, expected_json=None, client_tables=False, timeout=None):
        """A new Session on a pool. session: a name, by which another connection can attach() it later.

        reserve_blocks: taken at once or refused (POOL_FULL is tried again until the deadline). lease_ms: how long
        the daemon keeps the session without hearing from it. tokens_max (per sequence), sequences_max: 0 is as many as
        the server grants. fingerprint: the pool must be this one. expected_json: the same, by what pool_info().json of
        the expected pool is (a dict, or the text): FORMAT_MISMATCH then names the first member that differs.
        client_tables: the caller manages blocks 0 to reserve_blocks - 1 itself; Session.update_slots() and
        decode_table() are then its only row operations.
        """
        deadline = self._deadline(timeout)
        if expected_json is not None:
            told = self._compare_pool(pool, expected_json, deadline)
            fingerprint = fingerprint or told
        try:
            reply = self._open(wire.OPEN, pool, "" if session is None else session, deadline, priority=priority,
                               lease_ms=lease_ms, reserve_blocks=reserve_blocks, sequences_max=sequences_max,
                               tokens_max=tokens_max, fingerprint=fingerprint,
                               flags=wire.OPEN_CLIENT_TABLES if client_tables else 0)
        except TqkvError as error:
            if error.status != Status.EXISTS:
                raise
            raise error.copy(detail=f"{error.detail}; attach() takes it over") from None
        return self._new_session(pool, session, reply)

    def _compare_pool(self, name, expected, deadline):
        """The pool's fingerprint, if it is the expected one."""
        try:
            expected = json.loads(expected) if isinstance(expected, (str, bytes)) else expected
        except ValueError as error:
            raise ArgumentError(f"expected_json cannot be read: {error}") from error
        info = self.pool_info(name, left_of(deadline))
        difference = _difference("", expected, info.json)
        if difference:
            raise TqkvError(Status.FORMAT_MISMATCH, f"pool {name!r} is not the expected one: {difference}")
        return info.fingerprint

    def attach(self, session, *, fingerprint=0, timeout=None):
        """Takes over a session by its name. The connection that had it gets NOT_OWNER from then on."""
        deadline = self._deadline(timeout)
        attached = self._new_session(None, session, self._open(wire.ATTACH, "", session, deadline,
                                                               fingerprint=fingerprint))
        attached._load_lengths(deadline)
        return attached

    def _open(self, opcode, pool, session, deadline, *, priority=0, lease_ms=0, reserve_blocks=0, sequences_max=0,
              tokens_max=0, fingerprint=0, flags=0):
        for what, name in (("pool", pool), ("session", session)):
            if not isinstance(name, str):
                raise ArgumentTypeError(f"{what} is {name!r}, expected a name")
        pool, session = encoded("the pool's name", pool), encoded("the session's name", session)
        if len(pool) > 64 or (opcode == wire.OPEN and not pool):
            raise ArgumentError(f"the pool's name has {len(pool)} bytes, expected 1 to 64")
        if len(session) > 128 or (opcode == wire.ATTACH and not session):
            raise ArgumentError(f"the session's name has {len(session)} bytes, expected 1 to 128")
        op = wire.LAYOUTS["open_req"].pack(
            pool_name_bytes=len(pool), session_name_bytes=len(session), flags=flags,
            priority=whole("priority", priority, 0, 0xFFFF), lease_ms=whole("lease_ms", lease_ms, 0, 0xFFFFFFFF),
            reserve_blocks=whole("reserve_blocks", reserve_blocks, 0, 0xFFFFFFFF),
            sequences_max=whole("sequences_max", sequences_max, 0, 0xFFFFFFFF),
            tokens_max=whole("tokens_max", tokens_max, 0, 0xFFFFFFFF),
            fingerprint=whole("fingerprint", fingerprint, 0, (1 << 64) - 1))
        return self._call(opcode, op, pool + session, deadline=deadline)

    def _new_session(self, pool, name, reply):
        told = reply.op
        self._check_open(told)
        session = Session(self, name, Geometry.of(told, pool), told)
        self._sessions.append(session)
        return session

    def _check_open(self, told):
        if not (told.session and 0 < told.n_layers <= 65536 and told.q_heads and told.kv_heads and told.k_head_dim
                and told.v_head_dim):
            error = TqkvError(Status.BAD_FRAME, f"a session's geometry is out of range: {told}", scope="connection")
            self._connection.lose(error)
            raise error

    def pipeline(self, session=None, timeout=None):
        """A Pipeline: row operations that are sent without waiting for each other."""
        from .pipeline import Pipeline
        return Pipeline(self, session, timeout)

    # ---- after a lost connection ----

    def reconnect(self, timeout=None, keep_lengths=False):
        """Makes a new connection in place of the old one, lost or not, and returns a ReconnectReport.

        Requests that were not answered end with IO_ERROR. Every session with a name is attached again and asked for its
        lengths; sequences whose layers differ are truncated to the shortest one (not with keep_lengths), so that
        every sequence has one length to go on from. Sessions without a name are lost.

        A daemon that was restarted has the sessions of a snapshot that it restored: those with a name are attached
        there, too. Raises TqkvError with status STALE_EPOCH when at least one did not come back with it. The status of
        an ATTACH: at least that session is lost. Either way the connection and the other sessions are usable:
        Session.lost tells of each. IO_ERROR, DEADLINE: no connection; may be called again.
        """
        deadline = self._deadline(timeout)
        before = self.server.boot_id
        self._connection.lose(TqkvError(Status.IO_ERROR, f"the connection to {self._connection.address} was replaced"))
        is_same = self._dial(min(deadline, now() + self.connect_timeout), before)
        sessions = list(self._sessions)
        counts = {"n_attached": 0, "n_sequences": 0, "n_truncated": 0}
        is_restarted = not is_same or self.server.boot_id != before
        failure = None
        for session in sessions:
            if session._lost:
                continue
            try:
                self._attach_again(session, deadline, keep_lengths, counts, is_restarted)
            except TqkvError as error:
                is_over = not self.is_connected or error.status == Status.DEADLINE
                if is_restarted and error.status in (Status.NOT_FOUND, Status.STALE_HANDLE):
                    error = TqkvError(Status.STALE_EPOCH, f"the daemon at {self._connection.address} was restarted, and "
                                      f"session {session.name or '(no name)'} did not come back with it", is_local=False)
                failure = failure or error
                if is_over:
                    break
                session._lost = error
        if failure:
            raise failure
        return ReconnectReport(before, self.server.boot_id, len(sessions), **counts)

    def _attach_again(self, session, deadline, keep_lengths, counts, is_restarted):
        if not session.name:
            raise TqkvError(Status.STALE_HANDLE, "a session without a name cannot be attached again after a lost "
                            "connection")
        told = self._open(wire.ATTACH, "", session.name, deadline, fingerprint=session.fingerprint).op
        self._check_open(told)
        known = {sequence: list(lengths) for sequence, lengths in session._lengths.items()}
        session._take(told)
        sequences = session._load_lengths(deadline)
        for sequence, lengths in known.items() if is_restarted else ():
            # Going on from fewer tokens than the caller knows of would be a wrong cache without a word.
            if any(now_there < before for now_there, before in zip(session._lengths.get(sequence, [0] * len(lengths)), lengths)):
                raise TqkvError(Status.STALE_EPOCH, f"session {session.name} came back from a snapshot that has fewer tokens "
                                f"of sequence {sequence}; attach({session.name!r}) takes it as it is", is_local=False)
        uneven = {} if keep_lengths else {
            told.sequence: told.length_min for told in sequences if told.length_min != told.length_max}
        if uneven:
            session.truncate(uneven, timeout=left_of(deadline))
        counts["n_attached"] += 1
        counts["n_sequences"] += len(sequences)
        counts["n_truncated"] += len(uneven)
