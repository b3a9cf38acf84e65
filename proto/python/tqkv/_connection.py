"""One connection: frames out, frames in, both at the same time. Knows no sessions and no rows.

The socket never blocks. Whoever waits for something turns the crank (turn()): it sends what the peer takes and receives
what is there, so two full buffers cannot stop each other. Requests end in one of three ways: answered, refused, or
lost with the connection.
"""

import errno
import os
import select
import socket
import threading
import time
import weakref

from . import _wire as wire
from .errors import ArgumentError, Status, TqkvError

DEADLINE_US_MAX = 0xFFFFFFFF
_TIMED = (wire.APPEND, wire.DECODE, wire.APPEND_DECODE)
RECV_BYTES = 1 << 18


def now():
    return time.monotonic()


def parse_address(address):
    """(path, None) or (None, (host, port))"""
    kind, _, rest = str(address).partition(":")
    if kind == "unix" and rest:
        return rest, None
    if kind == "tcp":
        host, _, port = rest.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        if host and port.isascii() and port.isdigit() and int(port) < 65536:
            return None, (host, int(port))
    raise ArgumentError(f"address {address!r}: expected unix:/path, tcp:host:port or tcp:[v6 address]:port")


_open = weakref.WeakSet()  # connections of this process


def _disown():
    """In a child of os.fork(): two processes that read from one socket would take each other's replies."""
    for connection in list(_open):
        connection.lose(TqkvError(Status.IO_ERROR, f"the connection to {connection.address} belongs to the process that forked "
                                  "this one, which has to make a Client of its own"))


os.register_at_fork(after_in_child=_disown)


class Request:
    """A frame on its way, then its reply."""

    __slots__ = ("id", "opcode", "session", "op", "n_items", "sequences", "frame", "n_sent", "body_bytes", "deadline",
                 "is_done", "is_forgotten", "reply", "error", "on_done")

    def __init__(self, opcode, session, op, sequences, frame, deadline):
        self.id = 0
        self.opcode, self.session, self.op = opcode, session, op
        self.sequences = sequences  # of its items
        self.n_items = len(sequences)
        self.frame = frame  # header and body, not yet all sent
        self.n_sent = 0
        self.body_bytes = len(frame) - wire.HEADER_BYTES
        self.deadline = deadline
        self.is_done = self.is_forgotten = False
        self.reply = self.error = None
        self.on_done = None

    @property
    def is_sent(self):
        return self.n_sent == wire.HEADER_BYTES + self.body_bytes


class Connection:
    def __init__(self, address, *, body_crc=False, timings=False):
        self.address = address
        self._path, self._host = parse_address(address)
        self._flags = (wire.BODY_CRC if body_crc else 0) | (wire.TIMINGS if timings else 0)
        self.frame_bytes_max = 64 << 10  # until HELLO tells
        self.inflight_bytes_max = 1 << 62
        self.inflight_requests_max = 1
        self.items_max = 1
        self.is_draining = False
        self.failure = None  # why the connection is gone
        self._socket = None
        self._last_id = 0
        self._requests, self._queue, self._in_flight_bytes = {}, [], 0
        # Nobody waits for it: it finds out that two threads are in here, which would mix their frames.
        self._inside = threading.RLock()

    # ---- making and losing it ----

    def connect(self, deadline):
        """Connects; HELLO is the caller's."""
        self._last_id = 0
        self._requests = {}  # by id: not answered yet
        self._queue = []  # of them, not wholly sent
        self._in_flight_bytes = 0
        self._header = bytearray(wire.HEADER_BYTES)
        self._body = None
        self._n_got = 0
        self.failure = None
        self.is_draining = False
        last = None
        for family, target in self._targets():
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                self._connect_one(sock, target, deadline)
            except (OSError, TqkvError) as error:
                sock.close()
                last = error
                if isinstance(error, TqkvError):
                    break
                continue
            self._socket = sock
            self._poll = select.poll()
            _open.add(self)
            return
        error = last if isinstance(last, TqkvError) else TqkvError(
            Status.IO_ERROR, f"cannot connect to {self.address}: {last.strerror or last if last else 'no address'}")
        self.failure = error
        raise error

    def _targets(self):
        if self._path is not None:
            return [(socket.AF_UNIX, self._path)]
        host, port = self._host
        try:
            # A name is resolved by libc, which keeps its own time.
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            self.failure = TqkvError(Status.IO_ERROR, f"cannot resolve {host!r}: {error.strerror or error}")
            raise self.failure from error
        return [(family, target) for family, _, _, _, target in found]

    def _connect_one(self, sock, target, deadline):
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            code = sock.connect_ex(target)
            if code not in (errno.EAGAIN, errno.EINTR):
                break
            # A Unix socket whose backlog is full says EAGAIN and is not connecting.
            if now() >= deadline:
                raise self._too_late("connecting")
            time.sleep(0.005)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(sock, select.POLLOUT)
            if not poll.poll(_poll_ms(deadline)):
                raise self._too_late("connecting")
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _too_late(self, what):
        return TqkvError(Status.DEADLINE, f"{self.address}: the deadline passed while {what}")

    @property
    def is_connected(self):
        return self._socket is not None

    def fileno(self):
        return self._socket.fileno() if self._socket else -1

    def lose(self, error):
        """Closes the socket. Requests that are not answered end with the error."""
        if self._socket is None:
            return
        self._socket.close()
        self._socket = None
        self.failure = error
        requests, self._requests = list(self._requests.values()), {}
        self._queue.clear()
        self._in_flight_bytes = 0
        for request in requests:
            request.frame = None
            self._end(request, error=error.copy(outcome_unknown=request.is_sent))

    def check(self):
        if self._socket is None:
            raise (self.failure or TqkvError(Status.IO_ERROR, "not connected")).copy(outcome_unknown=False)

    def _enter(self):
        if not self._inside.acquire(blocking=False):
            raise TqkvError(Status.BAD_STATE, "another thread is in a call of this client: a client belongs to one thread at "
                            "a time; make one for each")

    # ---- requests ----

    def new_frame(self, op_bytes, n_items, payload_bytes):
        """A zeroed buffer for header and body."""
        body_bytes = wire.body_size(op_bytes, n_items, payload_bytes)
        if body_bytes > self.frame_bytes_max:
            raise ArgumentError(f"a frame's body of {body_bytes} bytes is above the server's frame_bytes_max "
                                f"{self.frame_bytes_max}")
        return bytearray(wire.HEADER_BYTES + body_bytes)

    def submit(self, opcode, frame, *, session=0, op_bytes=0, sequences=(), op=None, deadline, tell_deadline=True,
               on_done=None):
        """Sends a frame whose body is filled in, as soon as the server's limits allow it."""
        request = Request(opcode, session, op, sequences, frame, deadline)
        self._enter()
        try:
            return self._submit(request, op_bytes, tell_deadline, on_done)
        finally:
            self._inside.release()

    def _submit(self, request, op_bytes, tell_deadline, on_done):
        opcode, frame, session, deadline = request.opcode, request.frame, request.session, request.deadline
        self._await_room(request)
        self._last_id += 1
        request.id = self._last_id
        request.on_done = on_done
        flags = self._flags if opcode in _TIMED else self._flags & wire.BODY_CRC
        crc = wire.crc32c(memoryview(frame)[wire.HEADER_BYTES:]) if flags & wire.BODY_CRC else 0
        left_us = int((deadline - now()) * 1e6)
        frame[:wire.HEADER_BYTES] = wire.pack_header(
            opcode, flags=flags, request_id=request.id, session=session, body_bytes=request.body_bytes,
            op_bytes=op_bytes, n_items=request.n_items, body_crc=crc,
            # A deadline that the field cannot hold is only kept here.
            deadline_us=max(left_us, 1) if tell_deadline and left_us <= DEADLINE_US_MAX else 0)
        self._requests[request.id] = request
        self._in_flight_bytes += request.body_bytes
        self._queue.append(request)
        self._send()
        return request

    def _await_room(self, request):
        """The server stops reading beyond its limits. One request is always allowed."""
        while True:
            self.check()
            n = len(self._requests)
            if n == 0 or (n < self.inflight_requests_max and
                          self._in_flight_bytes + request.body_bytes <= self.inflight_bytes_max):
                return
            if not self.turn(request.deadline):
                raise TqkvError(Status.DEADLINE, f"no room among the requests in flight: {n} were not answered in time")

    def wait(self, request, deadline):
        """The reply as a Frame; raises what the request ended with."""
        while not request.is_done:
            if not self.turn(deadline) and not request.is_done:
                raise self._expire(request)
        if request.error is not None:
            raise request.error
        return request.reply

    def _expire(self, request):
        """Nobody waits for it any more. A frame that was not begun is not sent at all."""
        was_begun = request.n_sent > 0  # then the rest of it will still be sent
        self.forget(request)
        return TqkvError(Status.DEADLINE, f"no reply to {wire.opcode_name(request.opcode)} in time"
                         if was_begun else f"{wire.opcode_name(request.opcode)} could not be sent in time",
                         outcome_unknown=was_begun)

    def forget(self, request):
        request.is_forgotten = True
        if not request.is_done and request.n_sent == 0 and request in self._queue:
            self._queue.remove(request)
            self._release(request)

    def _release(self, request):
        if self._requests.pop(request.id, None) is not None:
            self._in_flight_bytes -= request.body_bytes

    def _end(self, request, reply=None, error=None):
        request.is_done = True
        request.reply, request.error = reply, error
        if request.on_done is not None and not request.is_forgotten:
            request.on_done(request)

    # ---- the crank ----

    def turn(self, deadline):
        """Sends and receives once, waiting for the socket. False: the deadline passed and nothing happened.

        A deadline that has passed still takes what is there already."""
        self.check()
        self._enter()
        try:
            return self._turn(deadline)
        finally:
            self._inside.release()

    def _turn(self, deadline):
        self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._queue else 0))
        events = self._poll.poll(_poll_ms(deadline))
        if not events:
            return now() < deadline
        if events[0][1] & select.POLLOUT:
            self._send()
        if self._socket is not None and events[0][1] & ~select.POLLOUT:
            self._receive()
        return True

    def drain(self):
        """Takes what is there without waiting."""
        while self._socket is not None and self.turn(0):
            pass

    def sleep(self, until):
        """Waits without leaving replies unread."""
        while self._socket is not None and now() < until:
            self.turn(until)

    def _send(self):
        while self._queue:
            request = self._queue[0]
            try:
                # A broken pipe is an error here, no signal.
                request.n_sent += self._socket.send(memoryview(request.frame)[request.n_sent:], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                # Whatever the peer said before it closed is worth more than "broken pipe".
                self._receive_last(error)
                return
            if request.is_sent:
                self._queue.pop(0)
                request.frame = None

    def _receive_last(self, cause):
        try:
            while self._socket is not None and self._receive():
                pass
        finally:
            self.lose(TqkvError(Status.IO_ERROR, f"connection to {self.address} lost: {cause.strerror or cause}"))

    def _receive(self):
        """Takes up to RECV_BYTES. False: nothing was there, or the connection is gone."""
        n_taken = 0
        while self._socket is not None and n_taken < RECV_BYTES:
            into = self._header if self._body is None else self._body
            try:
                n = self._socket.recv_into(memoryview(into)[self._n_got:])
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.lose(TqkvError(Status.IO_ERROR, f"connection to {self.address} lost: {error.strerror or error}"))
                break
            if n == 0:
                inside = " inside a frame" if self._n_got or self._body is not None else ""
                self.lose(TqkvError(Status.IO_ERROR, f"{self.address} closed the connection"
                                    f"{' (it was draining)' if self.is_draining else ''}{inside}"))
                break
            n_taken += n
            self._n_got += n
            if self._n_got == len(into):
                try:
                    self._complete()
                except wire.BadFrame as error:
                    self.lose(TqkvError(error.status, f"{self.address} sent no valid frame: {error}",
                                        scope="connection"))
        return n_taken > 0

    def _complete(self):
        """A header or a body is there."""
        self._n_got = 0
        if self._body is None:
            header = wire.unpack_header(self._header, self.frame_bytes_max)
            if not header.flags & wire.RESPONSE:
                raise wire.BadFrame(Status.BAD_FRAME, "a request came from the server")
            self._reply_header = header
            self._body = bytearray(header.body_bytes)
            if header.body_bytes:
                return
        header, body = self._reply_header, self._body
        self._body = None
        if header.flags & wire.BODY_CRC and wire.crc32c(body) != header.body_crc:
            raise wire.BadFrame(Status.BAD_CRC, "the checksum of a body does not match")
        self._take(wire.Frame(header, body))

    def _take(self, frame):
        header = frame.header
        if header.opcode == wire.GOAWAY and header.request_id == 0:
            self.is_draining = True
            return
        request = self._requests.get(header.request_id)
        if request is None:
            if header.request_id == 0 and header.status >= Status.BAD_MAGIC:
                # Told about a frame whose header the server could not read, or HELLO of another version.
                self._fatal(frame)
                return
            raise wire.BadFrame(Status.BAD_FRAME, f"a reply to request {header.request_id}, which is not open")
        if header.opcode != request.opcode:
            raise wire.BadFrame(Status.BAD_FRAME, f"a reply to {wire.opcode_name(request.opcode)} has "
                                f"{wire.opcode_name(header.opcode)}")
        # A refusal may come while the payload is still being sent: the server reads the rest and throws it away.
        if request.n_sent < wire.HEADER_BYTES:
            raise wire.BadFrame(Status.BAD_FRAME, "a reply to a request that was not sent yet")
        if 0 < header.status < Status.BAD_MAGIC:
            raise wire.BadFrame(Status.BAD_FRAME, f"status {header.status}")
        if header.status == Status.OK and request.session and header.session != request.session:
            raise wire.BadFrame(Status.BAD_FRAME, f"a reply of session {header.session:#x}, expected "
                                f"{request.session:#x}")
        self._release(request)
        if header.status == Status.OK or header.opcode == wire.HELLO:
            self._end(request, reply=frame)
            return
        error = wire.error_of(frame)
        self._end(request, error=error)
        if error.scope in ("connection", "daemon"):
            self.lose(error)

    def _fatal(self, frame):
        if frame.header.opcode == wire.HELLO:
            self.lose(TqkvError(frame.header.status, f"this package speaks version {wire.VERSION} of the protocol, "
                                f"the server {frame.op.proto_min} to {frame.op.proto_max}", is_local=False))
        else:
            self.lose(wire.error_of(frame))


def _poll_ms(deadline):
    """Rounded up, so that a poll does not end before the deadline; bounded, because the argument is an int."""
    left = deadline - now()
    return 0 if left <= 0 else min(int(left * 1000) + 1, 1 << 30)

