"""Row operations that are sent without waiting for each other."""

from . import _read
from . import _wire as wire
from ._arguments import POSITION_MAX, entries_of, outputs_of, rotated_flags, sequence_id, whole
from ._connection import now
from ._rows import Item
from .errors import ArgumentError, Status, TqkvError

CANCEL_OUTCOMES = ("dropped", "too late", "unknown")


class Future:
    """The outcome of a pipelined operation, which may be several frames."""

    def __init__(self, pipeline, requests, collect):
        self._pipeline = pipeline
        self._requests = requests
        self._collect = collect  # called once, when all are answered: the result, or raises
        self._outcome = None  # (result, error)
        self.was_fetched = False

    def done(self):
        """Whether the answer is there. Takes what has come, without waiting."""
        if self._outcome is None:
            self._pipeline._connection.drain()
        return self._outcome is not None or all(request.is_done for request in self._requests)

    def _await(self, timeout):
        if self._outcome is not None:
            return
        connection = self._pipeline._connection
        deadline = None if timeout is None else now() + timeout
        for request in self._requests:
            while not request.is_done:
                until = request.deadline if deadline is None else deadline
                if not connection.turn(until) and not request.is_done:
                    if deadline is not None and now() < request.deadline:
                        raise TqkvError(Status.DEADLINE, "no answer yet; result() may be called again")
                    request.error = connection._expire(request)
                    request.is_done = True
                    if request.on_done:
                        request.on_done(request)
        try:
            self._outcome = self._collect(self._requests), None
        except TqkvError as error:
            self._outcome = None, error

    def result(self, timeout=None):
        """Waits, and returns what the blocking call would return, or raises what it would raise.

        timeout: None waits for the operation's own deadline, and then its outcome is DEADLINE."""
        self._await(timeout)
        self.was_fetched = True
        result, error = self._outcome
        if error is not None:
            raise error
        return result

    def exception(self, timeout=None):
        """Waits; the error, or None."""
        self._await(timeout)
        self.was_fetched = True
        return self._outcome[1]

    def cancel(self, timeout=None):
        """Asks the server to drop what has not begun: "dropped", "too late", or "unknown" when it was answered already.

        A dropped operation still has an outcome: result() raises CANCELLED. Of several frames the worst is told."""
        client = self._pipeline._client
        worst = "unknown" if not self._requests else "dropped"
        for request in self._requests:
            outcome = "unknown"
            if not request.is_done:
                op = wire.LAYOUTS["cancel_req"].pack(request_id=request.id)
                told = client._call(wire.CANCEL, op, deadline=client._deadline(timeout)).op.outcome
                outcome = CANCEL_OUTCOMES[min(told, 2)]
            worst = max(worst, outcome, key=CANCEL_OUTCOMES.index)
        return worst


class Pipeline:
    """Sends row operations one after another; each method returns a Future at once.

        with session.pipeline() as p:
            futures = [p.append(1, layer, k[layer], v[layer]) for layer in range(n_layers)]
            out = p.decode(1, 0, q)
        print(out.result())

    Operations of one session take effect in the order in which they are sent. Nothing is repeated: a refused append
    fails with what was built on it (POSITION), and the session asks for the lengths before its next append.

    While the server's limits on requests and bytes in flight are reached, a method sends and receives until there is
    room: full buffers in both directions never stop each other. Otherwise replies are taken only while some method of
    the client runs; whoever computes for long with requests in flight calls done() now and then, because the server
    disconnects peers that do not read.

    Leaving the `with` block waits for everything; if something failed whose result was not fetched, its error is
    raised there. Leaving it by an exception waits for nothing.

    Made by Session.pipeline(), or Client.pipeline(session): without a session it is the client's only one, or
    named in each call with session=. timeout: seconds that each operation has; None is the client's.
    """

    def __init__(self, client, session=None, timeout=None):
        self._client = client
        self._connection = client._connection
        self._session = session
        self._timeout = timeout
        self._futures = []

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.flush()
        # Otherwise what was sent goes on: a refusal is still noticed when it comes.
        self._futures = []

    def flush(self):
        """Waits for everything that was sent. Raises the first error that nobody has fetched."""
        futures, self._futures = self._futures, []
        errors = []
        for future in futures:
            was_fetched = future.was_fetched
            error = future.exception()
            if error is not None and not was_fetched:
                errors.append(error)
        if errors:
            raise errors[0]

    # ---- sending ----

    def _of(self, session):
        session = session or self._session
        if session is None:
            if len(self._client._sessions) != 1:
                raise ArgumentError(f"the client has {len(self._client._sessions)} sessions: say which with session=")
            session = self._client._sessions[0]
        if session._client is not self._client:
            raise ArgumentError("the session belongs to another client")
        session._check()
        return session

    def _deadline(self):
        return self._client._deadline(self._timeout)

    def _add(self, requests, collect):
        # Those that were fetched need no second look when the pipeline ends.
        self._futures = [future for future in self._futures if not future.was_fetched]
        future = Future(self, requests, collect)
        self._futures.append(future)
        return future

    def _send(self, session, call, deadline, result):
        """All frames of a row operation."""
        if call.has_rows and call.layers_fit() < call.n_layers:
            raise ArgumentError("one token of all these layers does not fit into a frame: append fewer layers at once")

        def on_done(request):
            # Known at once, so that the next append of the session does not build on it.
            if request.error is not None or request.reply.op.n_failed:
                session._unsure.update(request.sequences)

        flights = []
        sequences = {item.sequence for item in call.items}
        sent = False
        try:
            while True:
                planned = call.plan()
                if planned is None:
                    break
                flights.append(call.send(*planned, deadline, on_done))
            sent = True
        finally:
            if not sent:
                session._unsure |= sequences
                for flight in flights:
                    self._connection.forget(flight.request)

        def collect(requests):
            for flight in flights:
                call.take(flight, flight.request.reply, flight.request.error)
            for item in call.items:
                if not item.is_over and item.status == Status.OK:
                    item.status = Status.INTERNAL
            failure = call.failure()
            if failure is not None:
                session._unsure |= sequences
                raise failure
            return result(call)

        return self._add([flight.request for flight in flights], collect)

    def _append(self, session, entries, layer_first, n_layers, has_axis, position, create, result, op=wire.APPEND,
                **kwargs):
        deadline = self._deadline()
        call, axes = session._append_call(entries, layer_first, n_layers, has_axis, position, create, deadline, op,
                                          **kwargs)
        future = self._send(session, call, deadline, lambda call: result(call, axes))
        layers = range(layer_first, layer_first + n_layers)
        for item in call.items:
            if item.sequence not in session._unsure:
                session._enter(item, layers, item.position + item.n_tokens)
        return future

    def append(self, sequence, layer, k, v, position=None, create=None, session=None, packed=False, evictable=False):
        """As Session.append()."""
        session = self._of(session)
        return self._append(session, [(sequence, k, v)], session._layer(layer), 1, False, position, create, _one_length,
                            packed=packed, evictable=evictable)

    def append_layers(self, sequence, k, v, layer_first=0, position=None, create=None, session=None, packed=False,
                      evictable=False):
        """As Session.append_layers()."""
        session = self._of(session)
        first, n_layers = session._layers_of(k, layer_first, packed)
        return self._append(session, [(sequence, k, v)], first, n_layers, True, position, create, _one_length,
                            packed=packed, evictable=evictable)

    def append_batch(self, items, layer=None, create=None, session=None, packed=False, evictable=False):
        """As Session.append_batch()."""
        session = self._of(session)
        first, n = (0, session.geometry.n_layers) if layer is None else (session._layer(layer), 1)
        return self._append(session, entries_of(items, 2), first, n, layer is None, None, create, _all_lengths,
                            packed=packed, evictable=evictable)

    def decode(self, sequence, layer, q, seen=None, lse=False, dtype="f32", scale=0.0, session=None,
               window=0, sinks=True, q_rotated=False, out_rotated=False):
        """As Session.decode()."""
        session = self._of(session)
        call, axes = session._decode_call([(sequence, q)], layer, seen, lse, dtype, scale, window, sinks,
                                          rotated_flags(q_rotated, out_rotated))
        return self._send(session, call, self._deadline(), lambda call: _one_output(call, axes))

    def decode_batch(self, items, layer, seen=None, lse=False, dtype="f32", scale=0.0, session=None,
                     window=0, sinks=True, q_rotated=False, out_rotated=False):
        """As Session.decode_batch()."""
        session = self._of(session)
        call, _ = session._decode_call(items, layer, seen, lse, dtype, scale, window, sinks,
                                       rotated_flags(q_rotated, out_rotated))
        return self._send(session, call, self._deadline(), outputs_of)

    def append_decode(self, sequence, layer, k, v, q, position=None, create=None, lse=False, dtype="f32", scale=0.0,
                      session=None, window=0, sinks=True, packed=False, evictable=False, q_rotated=False,
                      out_rotated=False):
        """As Session.append_decode()."""
        session = self._of(session)
        return self._append(session, [(sequence, k, v, q)], session._layer(layer), 1, False, position, create,
                            _one_output, wire.APPEND_DECODE, out_dtype=dtype, lse=lse, scale=scale, window=window,
                            sinks=sinks, packed=packed, evictable=evictable,
                            rotated=rotated_flags(q_rotated, out_rotated))

    def append_decode_batch(self, items, layer, create=None, lse=False, dtype="f32", scale=0.0, session=None,
                            window=0, sinks=True, packed=False, evictable=False, q_rotated=False,
                            out_rotated=False):
        """As Session.append_decode_batch()."""
        session = self._of(session)
        return self._append(session, entries_of(items, 3), session._layer(layer), 1, False, None, create,
                            lambda call, _: outputs_of(call), wire.APPEND_DECODE, out_dtype=dtype, lse=lse, scale=scale,
                            window=window, sinks=sinks, packed=packed, evictable=evictable,
                            rotated=rotated_flags(q_rotated, out_rotated))

    def read(self, sequence, layers=None, start=0, n=None, dtype="f32", k=True, v=True, exact=False, session=None):
        """As Session.read(). With n None, or the first "packed", it asks for sizes and waits for the answer."""
        session = self._of(session)
        job = _read.Job(session, sequence_id(sequence), layers, start, n, dtype, k, v, exact, self._deadline())
        return self._add([submit() for submit in job.submits()], lambda requests: job.result(_replies(requests)))

    def truncate(self, sequence, length, session=None):
        """As Session.truncate() of one sequence."""
        return self._items(self._of(session), wire.TRUNCATE, [Item(
            sequence_id(sequence), whole("length", length, 0, POSITION_MAX))])

    def free(self, sequence, session=None):
        """As Session.free() of one sequence."""
        return self._items(self._of(session), wire.FREE, [Item(sequence_id(sequence))])

    def fork(self, child, parent, length, session=None):
        """As Session.fork() of one child, whose length must be given."""
        item = Item(sequence_id(child), whole("length", length, 0, POSITION_MAX), parent=sequence_id(parent))
        item.length = item.position
        return self._items(self._of(session), wire.FORK, [item])

    def _items(self, session, op, items):
        call = session._call(op, items)
        future = self._send(session, call, self._deadline(), lambda call: None)
        for item in items:
            if item.sequence not in session._unsure:
                session._cut(op, item)
        return future

    def lengths(self, session=None):
        """As Session.lengths(), of the first items_max sequences."""
        session = self._of(session)
        n_max = min(self._client.server.items_max, wire.ITEMS_MAX)
        request = self._client._submit(wire.TELL, session._tell_op(0, n_max), session=session.handle,
                                       deadline=self._deadline())
        return self._add([request], lambda requests: {
            told.sequence: told.lengths for told in session._read_tell(request, *_replies(requests))})


def _replies(requests):
    for request in requests:
        if request.error is not None:
            raise request.error
    return [request.reply for request in requests]


def _one_length(call, _):
    return call.items[0].position + call.items[0].n_tokens


def _all_lengths(call, _):
    return [item.position + item.n_tokens for item in call.items]


def _one_output(call, axes):
    out = outputs_of(call)
    if axes[0]:
        return out
    return (out[0][0], out[1][0]) if call.lse else out[0]

