"""Row operations against a server that plays its part: retries, splitting, positions, pipelines."""

import struct
import threading
import time
import unittest

import numpy as np
import tqkv
from tqkv import Status
from tqkv import _wire as wire

from .common import ONE, QUERY, Errors, FakeServer, opened, script


class Retries(Errors):
    def test_a_busy_server_is_asked_again_after_its_hint(self):
        """BUSY_RETRY of the frame; not before retry_after_ms."""
        times = []

        def busy(peer, request):
            times.append(time.monotonic())
            peer.error(request, 402, retry_after_ms=60, retryable=1)

        def fine(peer, request):
            times.append(time.monotonic())
            peer.rows(request)

        with FakeServer(script(busy, busy, fine)) as server:
            client, session = opened(server)
            self.assertEqual(session.append(1, 0, ONE, ONE), 1)
            client.close()
        self.assertGreaterEqual(times[1] - times[0], 0.06)
        self.assertGreaterEqual(times[2] - times[1], 0.06)

    def test_only_failed_items_are_sent_again(self):
        """And they keep their rows."""
        seen = []

        def note(statuses):
            def step(peer, request):
                at = request.segment(request.op.k_off, 128 * len(request.items), "K")
                seen.append({item.sequence: struct.unpack_from("<f", at, 128 * i)[0]
                             for i, item in enumerate(request.items)})
                peer.rows(request, statuses)
            return step

        with FakeServer(script(note([0, 400, 0, 402]), note([400, 0]), note([0]))) as server:
            client, session = opened(server)
            lengths = session.append_batch({i: (ONE * i, ONE) for i in (1, 2, 3, 4)}, layer=0)
            client.close()
        self.assertEqual(lengths, [1, 1, 1, 1])
        self.assertEqual(seen, [{1: 1, 2: 2, 3: 3, 4: 4}, {2: 2, 4: 4}, {2: 2}])

    def test_retrying_ends_with_the_deadline(self):
        """The last refusal is raised, with all items, in time."""
        def full(peer, request):
            while True:
                peer.rows(request, [0, 400] if len(request.items) == 2 else [400])
                request = peer.request()

        with FakeServer(script(full)) as server:
            client, session = opened(server)
            begun = time.monotonic()
            error = self.assert_raises(Status.POOL_FULL, session.append_batch, {1: (ONE, ONE), 2: (ONE, ONE)}, layer=0,
                                       timeout=1.5)
            self.assertLess(time.monotonic() - begun, 5)
            self.assertTrue(error.retryable)
            self.assertEqual([(r.sequence, r.status_name, r.index) for r in error.item_errors], [(2, "POOL_FULL", 1)])
            self.assertEqual([r.ok for r in error.results], [True, False])
            client.close()

    def test_no_retry_when_it_is_not_wanted(self):
        with FakeServer(script(lambda peer, request: peer.rows(request, [400], retry_after_ms=9))) as server:
            client, session = opened(server, retry=False)
            error = self.assert_raises(Status.POOL_FULL, session.append, 1, 0, ONE, ONE)
            self.assertEqual(error.retry_after_ms, 9)
            client.close()

    def test_a_quota_is_no_matter_of_time(self):
        """QUOTA of OPEN and of an item raises at once; QUOTA of a frame with rows is one of requests in flight."""
        def part(peer):
            peer.hello()
            peer.error(peer.request(), 401, retryable=1, detail=b"2, 4 are used")
            peer.open()
            peer.rows(peer.request(), [401], retry_after_ms=9)
            peer.tell(peer.request(), {})
            peer.error(peer.request(), 401, retryable=1)
            peer.rows(peer.request())

        with FakeServer(part) as server:
            client = tqkv.Client(server.address)
            begun = time.monotonic()
            error = self.assert_raises(Status.QUOTA, client.open, "pool")
            self.assertIn("2, 4 are used", str(error))
            session = client.open("pool")
            error = self.assert_raises(Status.QUOTA, session.append, 1, 0, ONE, ONE)
            self.assertEqual(str(error), "QUOTA: APPEND: sequence 1: quota exceeded, one of the tenant's: "
                             "'tqkvctl tenants' tells which")
            self.assertLess(time.monotonic() - begun, 10)
            self.assertEqual(session.append(1, 0, ONE, ONE), 1)
            client.close()

    def test_pauses_can_be_set(self):
        """No pause at all: three refusals take no time to speak of, although the third pause would be longer."""
        with FakeServer(script(*[lambda peer, request: peer.rows(request, [400])] * 3,
                               lambda peer, request: peer.rows(request))) as server:
            client, session = opened(server, backoff_first=0, backoff_max=0)
            self.assertEqual(session.append(1, 0, ONE, ONE), 1)
            client.close()
            for first, longest in ((-1, 1), (2, 1)):
                with self.assertRaises(ValueError):
                    tqkv.Client(server.address, backoff_first=first, backoff_max=longest)

    def test_open_and_read_are_tried_again_too(self):
        def part(peer):
            peer.hello()
            peer.error(peer.request(), 400, retryable=1)
            peer.open()
            peer.error(peer.request(), 402, retryable=1)
            request = peer.request()
            op = wire.LAYOUTS["read_reply"].pack(**request.op._asdict(), k_off=0, v_off=wire.ABSENT, fingerprint=1)
            peer.reply(request, op, (), bytes(128))

        with FakeServer(part) as server:
            client, session = opened(server)
            k, v = session.read(1, layers=0, n=1, v=False)
            self.assertEqual((k.shape, v), ((1, 2, 16), None))
            client.close()


class Flags(Errors):
    def test_flags_of_items_and_of_frames(self):
        """evictable is a bit of every item of an append, the rotated spaces are bits of a frame with queries."""
        seen = []

        def step(peer, request):
            seen.append((request.op.flags, [item.flags for item in request.items]))
            n_q = request.op.n_q_total
            peer.rows(request, out=np.zeros(64 * n_q, np.float32) if n_q else None)

        k = np.ones((2, 1, 2, 16), np.float32)
        rotated = {"q_rotated": True, "out_rotated": True}
        with FakeServer(script(*[step] * 13)) as server:
            client, session = opened(server)
            session.append(1, 0, ONE, ONE, evictable=True)
            session.append_layers(2, k, k, evictable=True)
            session.append_batch({3: (ONE, ONE), 4: (ONE, ONE)}, 0, evictable=True)
            session.append_decode(5, 0, ONE, ONE, QUERY, evictable=True, **rotated)
            session.append_decode_batch({6: (ONE, ONE, QUERY)}, 0, evictable=True, q_rotated=True)
            session.decode(5, 0, QUERY, out_rotated=True)
            session.decode_batch({5: QUERY}, 0, **rotated)
            session.append(1, 0, ONE, ONE)
            with session.pipeline() as p:
                p.append(7, 0, ONE, ONE, evictable=True)
                p.append_layers(8, k, k, evictable=True)
                p.append_batch({9: (ONE, ONE)}, 0, evictable=True)
                p.append_decode(10, 0, ONE, ONE, QUERY, evictable=True, **rotated)
                p.decode(10, 0, QUERY, **rotated)
            client.close()
        self.assertEqual(seen, [(0, [3]), (0, [3]), (0, [3, 3]), (6, [3]), (2, [3]), (4, [0]), (6, [0]), (0, [0]),
                                (0, [3]), (0, [3]), (0, [3]), (6, [3]), (6, [0])])


class Splitting(Errors):
    def collect(self, limits, call, n_steps):
        """Runs a call against a server that answers rightly; every request."""
        seen = []

        def step(peer, request):
            seen.append(request)
            n_q = request.op.n_q_total
            out = np.full(64 * n_q, len(seen), np.float32) if n_q else None
            peer.rows(request, out=out)

        with FakeServer(script(*[step] * n_steps, **limits)) as server:
            client, session = opened(server)
            result = call(session)
            client.close()
        self.assertEqual(len(seen), n_steps)
        for request in seen:
            self.assertLessEqual(request.header.body_bytes, limits["frame_bytes_max"])
            self.assertLessEqual(len(request.items), limits.get("items_max", 256))
        return seen, result

    def rows_of(self, requests, side):
        """{(layer, sequence): rows in the order in which they came}"""
        rows = {}
        for request in requests:
            op, n = request.op, request.op.n_tokens_total
            data = request.segment(getattr(op, f"{side}_off"), op.n_layers * n * 128, side)
            array = np.frombuffer(data, "<f4").reshape(op.n_layers, n, 2, 16)
            at = 0
            for item in request.items:
                for i in range(op.n_layers):
                    known = rows.setdefault((op.layer_first + i, item.sequence), [])
                    self.assertEqual(item.position, sum(len(part) for part in known))
                    self.assertEqual(item.flags, 1 if item.position == 0 and op.layer_first == 0 else 0)
                    known.append(array[i, at:at + item.n_tokens])
                at += item.n_tokens
        return {key: np.concatenate(parts) for key, parts in rows.items()}

    def test_by_position_and_sequence(self):
        """Every row arrives once, in its place, and no frame is too large."""
        rng = np.random.default_rng(5)
        k = {1: rng.random((300, 2, 16), np.float32), 2: rng.random((1, 2, 16), np.float32),
             3: rng.random((200, 2, 16), np.float32)}
        v = {sequence: -rows for sequence, rows in k.items()}
        seen, lengths = self.collect({"frame_bytes_max": 65536}, lambda session: session.append_batch(
            [(sequence, k[sequence], v[sequence]) for sequence in (1, 2, 3)], layer=0), 2)
        self.assertEqual(lengths, [300, 1, 200])
        for side, rows in (("k", k), ("v", v)):
            got = self.rows_of(seen, side)
            for sequence in rows:
                self.assertTrue(np.array_equal(got[0, sequence], rows[sequence]), (side, sequence))

    def test_by_number_of_items(self):
        seen, _ = self.collect({"frame_bytes_max": 65536, "items_max": 3}, lambda session: session.append_batch(
            {i: (ONE * i, ONE) for i in range(1, 9)}, layer=0), 3)
        self.assertEqual([len(request.items) for request in seen], [3, 3, 2])
        got = self.rows_of(seen, "k")
        self.assertEqual({key[1]: rows[0, 0, 0] for key, rows in got.items()}, {i: i for i in range(1, 9)})

    def test_all_layers_stay_together_while_they_fit(self):
        """append_layers: [layers, tokens, heads, dim], cut by position."""
        k = np.random.default_rng(6).random((2, 300, 2, 16), np.float32)
        seen, length = self.collect({"frame_bytes_max": 65536}, lambda session: session.append_layers(1, k, k), 3)
        self.assertEqual(length, 300)
        got = self.rows_of(seen, "v")
        self.assertTrue(np.array_equal(got[0, 1], k[0]) and np.array_equal(got[1, 1], k[1]))

    def test_layers_are_parted_when_one_token_of_all_is_too_much(self):
        """One frame per layer then."""
        k = np.random.default_rng(7).random((2, 3, 2, 16), np.float32)
        seen, length = self.collect({"frame_bytes_max": 4096 + 128}, lambda session: session.append_layers(
            1, np.concatenate([k] * 3, axis=1), np.concatenate([k] * 3, axis=1)), 2)
        self.assertEqual(length, 9)
        seen, _ = self.collect({"frame_bytes_max": 4096}, lambda session: session.append(
            1, 0, np.zeros((15, 2, 16), np.float32), np.zeros((15, 2, 16), np.float32)), 1)
        self.assertEqual(seen[0].header.body_bytes, 128 + 15 * 256)

    def test_an_append_decode_that_is_too_large_appends_first(self):
        """All but the last token with APPEND, the rest with the query; every query is answered once."""
        k = np.random.default_rng(8).random((300, 2, 16), np.float32)
        seen, out = self.collect({"frame_bytes_max": 65536}, lambda session: session.append_decode(
            1, 0, k, k, QUERY), 2)
        self.assertEqual([(request.header.opcode, request.items[0].q_len) for request in seen],
                         [(wire.APPEND, 0), (wire.APPEND_DECODE, 1)])
        self.assertEqual(out.tolist(), [[2.0] * 16] * 4)
        self.assertTrue(np.array_equal(self.rows_of(seen, "k")[0, 1], k))

    def test_decodes_are_parted_by_request_and_by_reply(self):
        """Outputs come back in the order of the items; here the replies are larger than the requests."""
        seen, out = self.collect({"frame_bytes_max": 4096}, lambda session: session.decode_batch(
            {i: QUERY.astype(np.float16) for i in range(1, 31)}, 0), 3)
        self.assertEqual([len(request.items) for request in seen], [14, 14, 2])
        firsts = [row[0, 0] for row in out]
        self.assertEqual(firsts, [float(i + 1) for i, request in enumerate(seen) for _ in request.items])

    def test_a_retry_goes_on_behind_the_stored_pieces(self):
        """Of an item in three pieces the second is refused once: what is stored is not sent again."""
        seen = []

        def step(peer, request):
            item = request.items[0]
            seen.append((item.position, item.n_tokens, item.flags))
            is_refused = len(seen) in (2, 3)
            peer.rows(request, [(400 if len(seen) == 2 else 308) if is_refused else 0])

        k = np.zeros((600, 2, 16), np.float32)
        with FakeServer(script(*[step] * 5, frame_bytes_max=65536)) as server:
            client, session = opened(server)
            self.assertEqual(session.append(1, 0, k, k), 600)
            client.close()
        n = seen[0][1]
        self.assertEqual(seen, [(0, n, 1), (n, n, 0), (2 * n, 600 - 2 * n, 0), (n, n, 0), (2 * n, 600 - 2 * n, 0)])

    def test_a_piece_that_is_refused_stops_the_rest_of_its_item(self):
        """The error tells how many tokens are stored; the other item is unharmed."""
        def step(peer, request):
            peer.rows(request, [400 if item.sequence == 1 and item.position >= 200 else 0 for item in request.items])

        k = np.zeros((500, 2, 16), np.float32)
        with FakeServer(script(*[step] * 4, frame_bytes_max=65536)) as server:
            client, session = opened(server, retry=False)
            error = self.assert_raises(Status.POOL_FULL, session.append_batch, [(1, k, k), (2, k[:50], k[:50])], 0)
            stored = {result.sequence: (result.status_name, result.n_tokens) for result in error.results}
            self.assertEqual(stored[2], ("OK", 50))
            self.assertEqual(stored[1][0], "POOL_FULL")
            self.assertTrue(200 < stored[1][1] < 300)
            client.close()


class Positions(Errors):
    def flags_of(self, request):
        return [(item.sequence, item.position, item.flags) for item in request.items]

    def test_create_and_positions_are_kept(self):
        """The first append of a sequence creates it; each layer has its own length."""
        seen = []

        def step(peer, request):
            seen.append(self.flags_of(request)[0])
            peer.rows(request)

        with FakeServer(script(*[step] * 6)) as server:
            client, session = opened(server)
            two = np.ones((2, 2, 16), np.float16)
            session.append(7, 0, two, two)
            session.append(7, 1, ONE, ONE)
            session.append(7, 1, ONE[0], ONE[0])
            session.append_layers(7, np.ones((2, 1, 2, 16)), np.ones((2, 1, 2, 16)))
            with self.assertRaisesRegex(ValueError, "k has shape"):
                session.append(7, 0, np.ones((1, 3, 16)), ONE)
            session.append(8, 0, ONE, ONE, position=4)
            session.append(9, 0, ONE, ONE, create=False)
            client.close()
        self.assertEqual(seen, [(7, 0, 1), (7, 0, 0), (7, 1, 0), (7, 2, 0), (8, 4, 0), (9, 0, 0)])

    def test_lengths_are_asked_for_after_a_failure(self):
        """The next append goes where the server says the sequence ends."""
        seen = []

        def append(statuses=None):
            def step(peer, request):
                seen.append(self.flags_of(request)[0])
                peer.rows(request, statuses)
            return step

        def tell(rows):
            return lambda peer, request: peer.tell(request, rows)

        with FakeServer(script(append(), append([308]), tell({1: (9, 9)}), append(), append([107]), tell({2: (1, 1)}),
                               append())) as server:
            client, session = opened(server)
            session.append(1, 0, ONE, ONE)
            self.assert_raises(Status.POSITION, session.append, 1, 0, ONE, ONE)
            self.assertEqual(session.append(1, 0, ONE, ONE), 10)
            self.assert_raises(Status.BAD_VALUE, session.append, 1, 0, ONE, ONE)
            session.append(1, 0, ONE, ONE)  # gone, says TELL: made anew
            client.close()
        self.assertEqual(seen, [(1, 0, 1), (1, 1, 0), (1, 9, 0), (1, 10, 0), (1, 0, 1)])

    def test_truncate_and_free_move_the_end(self):
        seen = []

        def step(peer, request):
            seen.append((request.header.opcode, *self.flags_of(request)[0]))
            peer.rows(request)

        with FakeServer(script(*[step] * 5)) as server:
            client, session = opened(server)
            k = np.ones((5, 2, 16), np.float32)
            session.append(1, 0, k, k)
            session.truncate(1, 3)
            session.append(1, 0, ONE, ONE)
            session.free(1)
            session.append(1, 0, ONE, ONE)
            client.close()
        self.assertEqual(seen, [(32, 1, 0, 1), (36, 1, 3, 0), (32, 1, 3, 0), (37, 1, 0, 0), (32, 1, 0, 1)])

    def test_arguments_are_refused_before_anything_is_sent(self):
        """Each with a readable text that has what was expected and what came."""
        with FakeServer(script()) as server:
            client, session = opened(server)
            wrong = [
                (ValueError, r"k has shape \(1, 3, 16\), expected \(tokens, 2, 16\).*2 kv_heads",
                 lambda: session.append(1, 0, np.ones((1, 3, 16)), ONE)),
                (ValueError, "v has shape", lambda: session.append(1, 0, ONE, np.ones((1, 2, 8)))),
                (ValueError, "k has 1 tokens, v has 2", lambda: session.append(1, 0, ONE, np.ones((2, 2, 16)))),
                (ValueError, "no tokens", lambda: session.append(1, 0, ONE[:0], ONE[:0])),
                (TypeError, "k has dtype int", lambda: session.append(1, 0, ONE.astype(int), ONE)),
                (ValueError, "layer is 2", lambda: session.append(1, 2, ONE, ONE)),
                (TypeError, "layer is 'a'", lambda: session.append(1, "a", ONE, ONE)),
                (ValueError, "sequence is 0", lambda: session.append(0, 0, ONE, ONE)),
                (TypeError, "sequence is 1.5", lambda: session.append(1.5, 0, ONE, ONE)),
                (ValueError, "q has shape", lambda: session.decode(1, 0, ONE)),
                (ValueError, "2 queries, the server takes 1", lambda: session.decode(1, 0, np.ones((2, 4, 16)))),
                (ValueError, "dtype 'f8'", lambda: session.decode(1, 0, QUERY, dtype="f8")),
                (ValueError, "scale", lambda: session.decode(1, 0, QUERY, scale=-1)),
                (ValueError, "scale is 1e.300", lambda: session.decode(1, 0, QUERY, scale=1e300)),
                (ValueError, "timeout is nan", lambda: session.decode(1, 0, QUERY, timeout=float("nan"))),
                (TypeError, "timeout is 'x'", lambda: session.decode(1, 0, QUERY, timeout="x")),
                (ValueError, "session's name .*surrogates", lambda: client.open("demo", "\ud800")),
                (ValueError, "reply_bytes is -1", lambda: client.echo(b"", -1)),
                (ValueError, "twice", lambda: session.append_batch([(1, ONE, ONE), (1, ONE, ONE)], 0)),
                (ValueError, "has 2 parts", lambda: session.append_batch([(1, ONE)], 0)),
                (ValueError, "position 0, not 3", lambda: session.append(1, 0, ONE, ONE, position=3, create=True)),
                (ValueError, "layers 1 to 2", lambda: session.read(1, layers=range(1, 3), n=1)),
                (ValueError, "neither", lambda: session.read(1, n=1, k=False, v=False)),
                (ValueError, "k has shape", lambda: session.append_layers(1, np.ones((3, 1, 2, 16)), ONE)),
                (TypeError, "truncate", lambda: session.truncate([1, 2])),
            ]
            for kind, text, call in wrong:
                with self.subTest(text), self.assertRaisesRegex(kind, text) as raised:
                    call()
                self.assertEqual(raised.exception.status, Status.BAD_ARG)
                self.assertTrue(raised.exception.is_local)
            client.close()

    def test_dtypes_that_differ_become_float32(self):
        """Of one side of one call; each side has its own."""
        seen = []

        def step(peer, request):
            seen.append((request.op.k_dtype, request.op.v_dtype))
            at = request.segment(request.op.k_off, 256 if request.op.k_dtype == 1 else 128, "K")
            seen.append(np.frombuffer(at, "<f4").tolist() if request.op.k_dtype == 1 else None)
            peer.rows(request)

        with FakeServer(script(step)) as server:
            client, session = opened(server)
            session.append_batch([(1, ONE.astype(np.float16) * 3, ONE.astype(np.float16)),
                                  (2, tqkv.to_bf16(ONE * 5), ONE.astype(np.float16))], 0)
            client.close()
        self.assertEqual(seen, [(1, 2), [3.0] * 32 + [5.0] * 32])


class Pipelines(Errors):
    def test_full_buffers_in_both_directions(self):
        """A server that does not read on before its reply is read: sending alone would wait for ever."""
        n = 60

        def part(peer):
            peer.hello(inflight_requests_max=1000)
            peer.open()
            for _ in range(n):
                request = peer.request()
                peer.rows(request, out=np.zeros(64, np.float32), flags=1)
                peer.send(wire.pack_header(wire.GOAWAY, flags=1, status=404) * 2000)  # 128 KB that must be taken

        with FakeServer(part, buffer_bytes=4096) as server:
            client, session = opened(server, timeout=20)
            k = np.zeros((1000, 2, 16), np.float32)
            with session.pipeline() as p:
                futures = [p.append_decode(1, 0, k, k, QUERY) for _ in range(n)]
            self.assertEqual([future.result().shape for future in futures], [(4, 16)] * n)
            client.close()

    def test_replies_in_any_order(self):
        """Each finds its request."""
        def part(peer):
            peer.hello()
            peer.open()
            requests = [peer.request() for _ in range(5)]
            for i in (3, 0, 4, 2, 1):
                peer.rows(requests[i], out=np.full(64, i, np.float32))

        with FakeServer(part) as server:
            client, session = opened(server)
            with client.pipeline() as p:
                futures = [p.decode(1, 0, QUERY) for _ in range(5)]
                self.assertEqual([future.result()[0, 0] for future in futures], [0, 1, 2, 3, 4])
            client.close()

    def test_limits_in_flight_are_kept(self):
        """Never more requests or bytes than HELLO allows, however many are sent."""
        for n_max, bytes_max, expected in ((4, 2000, 4), (64, 1000, 2), (64, 100, 1)):
            with self.subTest(n_max=n_max, bytes_max=bytes_max):
                self.check_limits(n_max, bytes_max, expected)

    def check_limits(self, n_max, bytes_max, expected):
        most = [0]

        def part(peer):
            peer.hello(inflight_requests_max=n_max, inflight_bytes_max=bytes_max)
            peer.open()
            waiting = []
            peer.socket.settimeout(0.05)
            n_answered = 0
            while n_answered < 12:
                try:
                    request = peer.request()
                    waiting.append(request)
                    most[0] = max(most[0], len(waiting))
                except (TimeoutError, OSError):
                    n_answered += len(waiting)
                    for request in waiting:
                        peer.rows(request)
                    waiting.clear()

        with FakeServer(part) as server:
            client, session = opened(server)
            with session.pipeline() as p:
                for i in range(12):
                    p.append(1, 0, ONE, ONE)
            client.close()
        self.assertEqual(most[0], expected)

    def test_a_refused_append_fails_what_was_built_on_it(self):
        """Nothing is repeated; leaving the block raises the first error; the next append asks for the length."""
        seen = []

        def append(status):
            def step(peer, request):
                seen.append(request.items[0].position)
                peer.rows(request, [status])
            return step

        with FakeServer(script(append(0), append(400), append(308),
                               lambda peer, request: peer.tell(request, {1: (1, 1)}), append(0))) as server:
            client, session = opened(server)
            with self.assertRaises(tqkv.TqkvError) as raised:
                with session.pipeline() as p:
                    futures = [p.append(1, 0, ONE, ONE) for _ in range(3)]
            self.assertEqual(raised.exception.status, Status.POOL_FULL)
            self.assertEqual([future.exception() and future.exception().status_name for future in futures],
                             [None, "POOL_FULL", "POSITION"])
            self.assertEqual(session.append(1, 0, ONE, ONE), 2)
            client.close()
        self.assertEqual(seen, [0, 1, 2, 1])

    def test_a_refusal_is_noticed_before_its_result_is_fetched(self):
        """The next append of the pipeline goes where the sequence ends, not where it would have ended."""
        seen = []

        def append(status):
            def step(peer, request):
                seen.append((request.items[0].position, request.items[0].flags))
                peer.rows(request, [status])
            return step

        with FakeServer(script(append(0), append(107), lambda peer, request: peer.tell(request, {1: (1, 0)}),
                               append(0))) as server:
            client, session = opened(server)
            p = session.pipeline()
            p.append(1, 0, ONE, ONE).result()
            refused = p.append(1, 0, ONE, ONE)
            while not refused.done():
                time.sleep(0.01)
            self.assertEqual(p.append(1, 0, ONE, ONE).result(), 2)
            self.assertEqual(refused.exception().status, Status.BAD_VALUE)
            client.close()
        self.assertEqual(seen, [(0, 1), (1, 0), (1, 0)])

    def test_leaving_by_an_exception_waits_for_nothing(self):
        """The caller's error comes out; a refusal that arrives later is still noticed."""
        go = threading.Event()

        def refuse(peer, request):
            go.wait(10)
            peer.rows(request, [107])

        with FakeServer(script(refuse, lambda peer, request: peer.reply(
                request, wire.LAYOUTS["ping_reply"].pack(proto=1, proto_min=1, proto_max=1, n_pools=1, boot_id=11)),
                lambda peer, request: peer.tell(request, {}), lambda peer, request: peer.rows(request))) as server:
            client, session = opened(server)
            with self.assertRaises(ZeroDivisionError):
                with session.pipeline() as p:
                    p.append(1, 0, ONE, ONE)
                    raise ZeroDivisionError
            go.set()
            client.ping()
            self.assertEqual(session.append(1, 0, ONE, ONE), 1)
            client.close()

    def test_fetched_errors_are_not_raised_again(self):
        with FakeServer(script(lambda peer, request: peer.error(request, 500))) as server:
            client, session = opened(server)
            with session.pipeline() as p:
                future = p.decode(1, 0, QUERY)
                self.assertEqual(future.exception().status, Status.INTERNAL)
                self.assertTrue(future.done())
            client.close()

    def test_cancel(self):
        """The outcome is told, and the request still gets its own reply."""
        def part(peer):
            peer.hello()
            peer.open()
            request = peer.request()
            cancel = peer.request()
            self.assertEqual((cancel.header.opcode, cancel.op.request_id), (wire.CANCEL, request.header.request_id))
            peer.error(request, 503)
            peer.reply(cancel, wire.LAYOUTS["cancel_reply"].pack(outcome=0))

        with FakeServer(part) as server:
            client, session = opened(server)
            with session.pipeline() as p:
                future = p.decode(1, 0, QUERY)
                self.assertEqual(future.cancel(), "dropped")
                self.assertEqual(future.exception().status, Status.CANCELLED)
                self.assertEqual(future.cancel(), "unknown")
            client.close()

    def test_a_lost_connection_ends_every_future(self):
        def part(peer):
            peer.hello()
            peer.open()
            peer.rows(peer.request())
            peer.request()

        with FakeServer(part) as server:
            client, session = opened(server)
            p = session.pipeline()
            futures = [p.append(1, 0, ONE, ONE) for _ in range(2)]
            self.assertEqual(futures[0].result(), 1)
            error = futures[1].exception()
            self.assertEqual((error.status, error.outcome_unknown), (Status.IO_ERROR, True))
            client.close()

    def test_which_session(self):
        """A client's pipeline takes the only session; with two it wants to be told."""
        def part(peer):
            peer.hello()
            peer.open()
            peer.open(handle=0x20002)
            self.assertEqual(peer.request().header.session, 0x20002)

        with FakeServer(part) as server:
            client, session = opened(server)
            other = client.open("p")
            p = client.pipeline()
            with self.assertRaisesRegex(ValueError, "2 sessions"):
                p.decode(1, 0, QUERY)
            p.decode(1, 0, QUERY, session=other)
            client.close()


if __name__ == "__main__":
    unittest.main()
