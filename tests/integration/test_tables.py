"""Block tables of the client, windows that leave blocks behind, and the exact recent window, end to end."""

import unittest

import numpy as np
from rows_case import EXACT, Rows, attention, attention_row, distance
from tqkv import Status

WINDOWED = ("name=win,layers=2,q_heads=4,kv_heads=2,head_dim=32,k=f32,v=f32,block_size=16,blocks=16,window=64,"
            "sink_tokens=5,tokens_max=100000")
EXACT_POOL = ("name=exact,layers=2,q_heads=4,kv_heads=2,head_dim=64,k=tq3,v=tq3,block_size=16,blocks=64,"
              "exact_tokens=48,exact_blocks=8")


class Tables(Rows):
    def open(self, n_blocks=12, pool="odd"):
        return self.client.open(pool, reserve_blocks=n_blocks, client_tables=True)

    def test_scattered_blocks(self):
        """Two sequences in scattered blocks, written in any order and over two calls, decode to what was written."""
        with self.open() as session:
            self.assertEqual(session.reserved_blocks, 12)
            tables = {0: [7, 2, 11], 1: [0, 5, 3]}
            rows = {s: self.rows(session, 40, layers=3) for s in tables}
            for s, table in tables.items():
                slots = np.array([table[t // 16] * 16 + t % 16 for t in range(40)])
                order = self.rng.permutation(40)
                for part in (order[:25], order[25:]):
                    session.update_slots(slots[part], rows[s][0][:, part], rows[s][1][:, part])
            q = np.stack([self.query(session), self.query(session)])
            for layer in range(3):
                out, lse = session.decode_table(layer, q, [tables[0] + [-1], tables[1] + [99]], [40, 33], lse=True)
                for s, seen in ((0, 40), (1, 33)):
                    exact = attention(q[s], rows[s][0][layer, :seen], rows[s][1][layer, :seen])
                    self.assertLess(distance(out[s], exact[0]), EXACT)
                    self.assertLess(distance(lse[s], exact[1]), EXACT)
            # Length 0 gives zeros and -inf, and leaves the neighbour alone.
            out, lse = session.decode_table(0, q, [tables[0], tables[1]], [0, 40], lse=True)
            self.assertFalse(out[0].any())
            self.assertTrue(np.isneginf(lse[0]).all())
            self.assertLess(distance(out[1], attention(q[1], rows[1][0][0], rows[1][1][0])[0]), EXACT)

    def test_slot_rules(self):
        """A negative slot is skipped, of two equal ones the later row stays, one out of range refuses everything."""
        with self.open(2) as session:
            k, v = self.rows(session, 6)
            session.update_slots(np.arange(6), k, v, layer=1)
            other = self.rows(session, 6)
            session.update_slots([-1, 1, 1, -7, 4, 1], *other, layer=1)
            k[1], v[1], k[4], v[4] = other[0][5], other[1][5], other[0][4], other[1][4]
            q = self.query(session)

            def check():
                out = session.decode_table(1, q[None], [[0]], [6])
                self.assertLess(distance(out[0], attention(q, k, v)[0]), EXACT)

            check()
            for slot in (32, 1 << 40):
                error = self.raises(Status.SLOT_OUT_OF_RANGE, session.update_slots, [0, 1, slot, 3], *self.rows(session, 4),
                                    layer=1)
                self.assertEqual(error.got, 2)
                check()
            for entry in (-1, 2, 1 << 20):
                error = self.raises(Status.SLOT_OUT_OF_RANGE, session.decode_table, 1, np.stack([q, q]), [[0, 1], [0, entry]],
                                    [32, 17])
                self.assertEqual(error.got, 3)
            error = self.raises(Status.BAD_ARG, session.decode_table, 1, np.stack([q, q]), [[0], [1]], [16, 17])
            self.assertEqual(error.got, 1)

    def test_q_len(self):
        """Rows of a query see a token less each; a window narrows them."""
        with self.open() as session:
            k, v = self.rows(session, 50)
            session.update_slots(np.arange(50), k, v, layer=0)
            q = np.stack([self.query(session) for _ in range(3)])
            out = session.decode_table(0, q[None], [[0, 1, 2, 3]], [50], window=7)
            for row in range(3):
                exact = attention_row(q[row], k, v, end=48 + row, window=7)[0]
                self.assertLess(distance(out[0, row], exact), EXACT)

    def test_a_session_has_one_kind(self):
        """Operations of the other kind are BAD_STATE; blocks come back with CLOSE; nobody gets more than there are."""
        with self.open() as session:
            k, v = self.rows(session, 4)
            self.raises(Status.BAD_STATE, session.append, 1, 0, k, v)
            self.raises(Status.BAD_STATE, session.read, 1, n=1)
            self.raises(Status.BAD_STATE, session.truncate, 1, 0)
            self.raises(Status.BAD_STATE, session.fork, 2, 1, 0)
            self.assertEqual(session.lengths(), {})
        with self.client.open("odd") as session:
            self.raises(Status.BAD_STATE, session.update_slots, [0], *self.rows(session, 1), layer=0)
            self.raises(Status.BAD_STATE, session.decode_table, 0, self.query(session)[None], [[0]], [0])
        self.raises(Status.BAD_ARG, self.open, 0)
        self.raises(Status.LIMIT, self.open, 129)
        with self.open(128):
            self.raises(Status.POOL_FULL, self.client.open, "odd", reserve_blocks=1, timeout=0.2)
        with self.open(128):
            pass

    def test_sessions_keep_apart(self):
        """Block 0 of one session is not block 0 of another."""
        with self.open(4) as a, self.open(4) as b:
            rows = {}
            for session in (a, b):
                rows[session] = self.rows(session, 16)
                session.update_slots(np.arange(16), *rows[session], layer=2)
            q = self.query(a)
            for session in (a, b, a):
                out = session.decode_table(2, q[None], [[0]], [16])
                self.assertLess(distance(out[0], attention(q, *rows[session])[0]), EXACT)

    def test_bad_rows(self):
        """Rows that cannot be stored are BAD_VALUE with the row."""
        with self.open(1) as session:
            k, v = self.rows(session, 4)
            k[2, 1, 5] = np.nan
            error = self.raises(Status.BAD_VALUE, session.update_slots, np.arange(4), k, v, layer=0)
            self.assertEqual(error.got, 2)


class Windows(Rows):
    @classmethod
    def pools(cls):
        return [*super().pools(), WINDOWED, EXACT_POOL]

    def test_long_sequence_in_few_blocks(self):
        """3000 tokens in a pool of 256: chunks, steps, decodes of the window and the sinks; gone rows say so."""
        with self.client.open("win") as session:
            k, v = self.rows(session, 0, layers=2)
            for n in [64, 100, 30, 50] * 11 + [77, 1, 2, 16]:
                part = self.rows(session, n, layers=2)
                session.append_layers(7, *part)
                k, v = np.concatenate((k, part[0]), axis=1), np.concatenate((v, part[1]), axis=1)
            length = k.shape[1]
            self.assertGreater(length, 2700)
            q = np.stack([self.query(session) for _ in range(16)])
            for layer in range(2):
                out = session.decode(7, layer, q)
                for row in (0, 7, 15):
                    exact = attention_row(q[row], k[layer], v[layer], end=length - 15 + row, window=64, sink_tokens=5)[0]
                    self.assertLess(distance(out[row], exact), EXACT)
            back = session.read(7, start=length - 64, n=64)
            self.assertTrue(np.array_equal(back[0], k[:, -64:]))
            self.assertTrue(np.array_equal(session.read(7, start=0, n=5)[0], k[:, :5]))
            self.raises(Status.WINDOW_GONE, session.read, 7, start=1000, n=1)
            self.raises(Status.WINDOW_GONE, session.read, 7, start=0, n=17)
            self.raises(Status.WINDOW_GONE, session.decode, 7, 0, q[0], seen=length - 100)
            self.raises(Status.WINDOW_GONE, session.truncate, 7, length - 100)
            self.raises(Status.WINDOW_GONE, session.fork, 8, 7, length - 100)
            told = session.tell()[0]
            self.assertEqual(told.lengths, (length, length))
            self.assertLessEqual(told.n_blocks, 8)
            # A child at the newest length has the same window; the beginning can be taken up again.
            session.fork(8, 7)
            session.truncate(7, 5)
            part = self.rows(session, 40, layers=2)
            session.append_layers(7, *part)
            own = np.concatenate((k[:, :5], part[0]), axis=1), np.concatenate((v[:, :5], part[1]), axis=1)
            self.assertLess(distance(session.decode(7, 1, q[0]), attention(q[0], own[0][1], own[1][1])[0]), EXACT)
            exact = attention_row(q[0], k[1], v[1], end=length, window=64, sink_tokens=5)[0]
            self.assertLess(distance(session.decode(8, 1, q[0]), exact), EXACT)

    def test_exact_window(self):
        """The newest tokens are bf16, the older ones what the pages hold; both can be read."""
        with self.client.open("exact") as session:
            k, v = (np.float32(part) for part in self.rows(session, 100, layers=2))
            session.append_layers(1, k, v)
            told = session.tell()[0]
            self.assertEqual(told.n_exact, 48)
            stored, exact = session.read(1), session.read(1, exact=True)
            for side, rows in ((0, k), (1, v)):
                self.assertTrue(np.array_equal(exact[side][:, :52], stored[side][:, :52]))
                error = np.abs(exact[side][:, 52:] - rows[:, 52:]) / np.maximum(np.abs(rows[:, 52:]), 1e-3)
                self.assertLess(error.max(), 1 / 128)
                self.assertGreater(distance(stored[side][:, 52:], rows[:, 52:]), 0.1)
            q = self.query(session)
            for layer in range(2):
                self.assertLess(distance(session.decode(1, layer, q), attention(q, exact[0][layer], exact[1][layer])[0]), EXACT)
            session.truncate(1, 60)
            self.assertEqual(session.tell()[0].n_exact, 8)
            session.fork(2, 1)
            self.assertEqual([told.n_exact for told in session.tell()], [8, 0])


if __name__ == "__main__":
    unittest.main()
