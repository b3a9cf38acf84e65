"""What the Python client says to somebody who made a mistake, and what it refuses to answer wrongly."""

import os
import threading
import time
import unittest

import numpy as np
import tqkv
from daemon import Daemon
from rows_case import EXACT, SMALL, distance
from tqkv import Status

POOL = "name=tq4,layers=2,q_heads=4,kv_heads=2,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=32,exact_tokens=48"


class Words(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon("--pool", POOL, "--pool", SMALL)
        cls.daemon.__enter__()
        cls.addClassCleanup(cls.daemon.__exit__, None, None, None)
        cls.rng = np.random.default_rng(11)

    def setUp(self):
        self.client = tqkv.Client(self.daemon.addr)
        self.addCleanup(self.client.close)

    def rows(self, n, heads=2, dim=64):
        return tuple(self.rng.standard_normal((n, heads, dim)).astype(np.float32) for _ in "kv")

    def told(self, status, text, call, *args, **kwargs):
        with self.assertRaises(tqkv.TqkvError) as caught:
            call(*args, **kwargs)
        self.assertEqual(caught.exception.status, status, caught.exception)
        self.assertIn(text, str(caught.exception))

    def test_an_evicted_sequence_is_not_read_as_an_empty_one(self):
        with self.client.open("small") as session:
            for sequence in range(1, 10):
                session.append(sequence, 0, *self.rows(16, 1, 16), evictable=True)
            self.assertEqual(session.tell()[0].state, "evicted")
            self.told(Status.EVICTED, "READ: sequence 1: the sequence was evicted", session.read, 1, 0)
            self.assertEqual(len(session.read(9, 0)[0]), 16)

    def test_the_number_that_cannot_be_stored_is_named(self):
        with self.client.open("tq4") as session:
            k, v = self.rows(5)
            v[3, 1, 7] = np.nan
            self.told(Status.BAD_VALUE, "layer 0, row 3: v of head 1, channel 7 is nan", session.append, 1, 0, k, v)
            session.append(1, 0, k, k)
            q = np.zeros((4, 64), np.float16)
            q[2, 9] = -np.inf
            self.told(Status.BAD_VALUE, ": q of head 2, channel 9 is -inf", session.decode, 1, 0, q)
            pairs = np.stack([k, k]), np.stack([k, v])
            self.told(Status.BAD_VALUE, "layer 1, row 3: v of head 1, channel 7 is nan", session.append_layers, 2, *pairs)
            self.told(Status.BAD_VALUE, "1 of 2 items failed; sequence 4", session.append_batch, {3: (k, k), 4: (k, v)}, 0)

    def test_lengths_are_compared_in_the_words_of_the_call(self):
        with self.client.open("tq4") as session:
            k, v = self.rows(20)
            session.append_layers(1, np.stack([k, k]), np.stack([v, v]))
            self.told(Status.POSITION, "FORK: sequence 2: its length is above that of its parent, which has 20 tokens",
                      session.fork, 2, 1, length=21)
            q = np.zeros((4, 64), np.float32)
            self.told(Status.POSITION, "would see more tokens than there are, the sequence has 20", session.decode, 1, 0, q, seen=21)
            self.told(Status.POSITION, "PUBLISH: sequence 1: 30 token ids are given, it has 20 tokens on all layers",
                      session.publish, 1, range(30))
            self.told(Status.NOT_FOUND, "PUBLISH: sequence 9: ", session.publish, 9, range(30))
            self.assertEqual(session.publish(1, range(20)), 16)
            self.told(Status.EXISTS, "MATCH: sequence 1: already exists", session.match, 1, range(20))

    def test_places_of_client_tables_are_told_with_what_lies_there(self):
        with self.client.open("tq4", reserve_blocks=2, client_tables=True) as session:
            k, v = self.rows(3)
            self.told(Status.SLOT_OUT_OF_RANGE, "at 1: slots[1] is 32, the session has slots 0 to 31", session.update_slots,
                      [0, 32, 1], k, v, layer=0)
            q = np.zeros((2, 4, 64), np.float32)
            self.told(Status.SLOT_OUT_OF_RANGE, "at 3: table[1][1] is 7, the session has blocks 0 to 1", session.decode_table,
                      0, q, [[0, 1], [1, 7]], [20, 20])
            self.told(Status.BAD_ARG, "at 1: seen[1] is 40, expected 1 to 32 with 2 blocks of 16 tokens", session.decode_table,
                      0, q, [[0, 1], [1, 0]], [20, 40])

    def test_a_session_that_is_not_there_is_named(self):
        self.told(Status.NOT_FOUND, 'no session "nobody"', self.client.attach, "nobody")

    def test_a_lease_that_ran_out_says_what_renews_one(self):
        session = self.client.open("tq4", "silent", lease_ms=50)
        time.sleep(0.4)
        for call, args in ((session.read, (1, 0)), (session.append, (1, 0, *self.rows(1))), (self.client.attach, ("silent",))):
            self.told(Status.SESSION_EXPIRED, "the session's lease ran out; any call renews one, ping too; open takes lease_ms", call, *args)

    def test_limits_are_told_with_their_size(self):
        with self.client.open("tq4", tokens_max=10, sequences_max=1) as session:
            self.told(Status.LEN_LIMIT, "sequence 1: sequence would exceed tokens_max (10)", session.append, 1, 0, *self.rows(11))
            session.append(1, 0, *self.rows(10))
            self.told(Status.LIMIT, "limit reached: of sequences (this session may have 1)", session.append, 2, 0, *self.rows(1))
            self.told(Status.LIMIT, "limit reached: of sequences (this session may have 1)", session.fork, 2, 1)
            self.told(Status.BAD_STATE, ": the daemon has no tier", session.spill, 1)

    def test_names_are_names(self):
        for call, args in ((self.client.open, (None,)), (self.client.open, ("tq4", 5)), (self.client.attach, (None,))):
            self.told(Status.BAD_ARG, "expected a name", call, *args)
        self.told(Status.NOT_FOUND, 'no pool "none"', self.client.pool_info, "none")
        self.client.open("tq4", "taken")
        self.told(Status.EXISTS, 'session "taken" is open already; attach() takes it over', self.client.open, "tq4", "taken")

    def test_numbers_of_open_are_named(self):
        self.told(Status.BAD_ARG, "lease_ms is -1, expected 0 to 4294967295", self.client.open, "tq4", lease_ms=-1)
        self.told(Status.BAD_ARG, "reserve_blocks is 1.5, expected a whole number", self.client.open, "tq4", reserve_blocks=1.5)

    def test_parts_of_different_shapes_are_not_merged(self):
        self.told(Status.BAD_ARG, "outputs of the parts have shapes (4, 64), (4,)", tqkv.merge,
                  [np.zeros((4, 64), np.float32), np.zeros(4, np.float32)], [np.zeros(4), np.zeros(4)])

    def test_a_client_says_where_it_is_connected(self):
        self.assertEqual(repr(self.client), f"<tqkv.Client {self.daemon.addr}>")
        self.client.close()
        self.assertEqual(repr(self.client), f"<tqkv.Client {self.daemon.addr}, not connected>")

    def test_packed_rows_of_a_pool_with_an_exact_window(self):
        """Their bytes are those that the daemon makes; they have no exact rows, and go back as they were read."""
        with self.client.open("tq4") as session:
            k, v = self.rows(30)
            session.append(1, 0, k, v)
            session.append(2, 0, k, v, packed=True)
            packed = session.read(1, 0, dtype="packed")
            for one, other in zip(packed, session.read(2, 0, dtype="packed")):
                self.assertEqual(one.tobytes(), other.tobytes())
            session.append(3, 0, *packed, packed=True)
            q = self.rng.standard_normal((4, 64)).astype(np.float32)
            self.assertEqual(session.decode(2, 0, q).tobytes(), session.decode(3, 0, q).tobytes())
            self.assertGreater(distance(session.decode(2, 0, q), session.decode(1, 0, q)), EXACT)

    def test_threads_that_share_a_client_are_told(self):
        """Each call is right or refused, and the connection is whole: frames of two threads do not mix."""
        with self.client.open("tq4") as session:
            session.append(1, 0, *self.rows(20))
            q = self.rng.standard_normal((4, 64)).astype(np.float32)
            right = session.decode(1, 0, q).tobytes()
            told = []

            def ask():
                for _ in range(100):
                    try:
                        told.append("right" if session.decode(1, 0, q).tobytes() == right else "wrong")
                    except tqkv.TqkvError as error:
                        told.append(str(error))

            threads = [threading.Thread(target=ask) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            refused = [text for text in told if text != "right"]
            self.assertEqual(len(told), 400)
            self.assertLess(len(refused), 400)
            for text in refused:
                self.assertRegex(text, "BAD_STATE: DECODE: another thread is in a call of this client")
            self.assertEqual(session.decode(1, 0, q).tobytes(), right)

    def test_a_child_of_fork_does_not_take_its_parents_replies(self):
        with self.client.open("tq4") as session:
            session.append(1, 0, *self.rows(20))
            q = self.rng.standard_normal((4, 64)).astype(np.float32)
            before = session.decode(1, 0, q)
            reader, writer = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    session.decode(1, 0, q)
                    text = "it answered"
                except tqkv.TqkvError as error:
                    text = str(error)
                with tqkv.Client(self.daemon.addr) as own:  # which it may
                    text += f" {own.ping() > 0}"
                os.write(writer, text.encode())
                os._exit(0)
            os.close(writer)
            with open(reader, encoding="utf-8") as pipe:
                text = pipe.read()
            os.waitpid(pid, 0)
            self.assertRegex(text, r"^IO_ERROR: .*belongs to the process that forked this one.* True$")
            self.assertTrue(self.client.is_connected)
            self.assertEqual(session.decode(1, 0, q).tobytes(), before.tobytes())


if __name__ == "__main__":
    unittest.main()
