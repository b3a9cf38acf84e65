"""Rows in and attention out, through the Python client and a real daemon, against numpy in float64."""

import unittest

import numpy as np
import tqkv
from rows_case import EXACT, TQ4_ERROR, Rows, attention, distance
from tqkv import Status


class Attention(Rows):
    def test_f32_is_exact(self):
        """K and V of different dims, three query heads per KV head, every layer its own rows; f32, f16 and bf16 in."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 100, layers=3)
            self.assertEqual(session.append_layers(1, k[:, :60], v[:, :60]), 60)
            for layer in range(3):
                self.assertEqual(session.append(1, layer, k[layer, 60:], v[layer, 60:]), 100)
            for layer in range(3):
                q = self.query(session)
                exact, exact_lse = attention(q, k[layer], v[layer])
                out, lse = session.decode(1, layer, q, lse=True)
                self.assertLess(distance(out, exact), EXACT)
                self.assertLess(np.abs(lse - exact_lse).max(), 1e-5)
                self.assertLess(distance(session.decode(1, layer, q.astype(np.float16)),
                                         attention(q.astype(np.float16), k[layer], v[layer])[0]), EXACT)
                self.assertLess(distance(session.decode(1, layer, q, seen=33),
                                         attention(q, k[layer, :33], v[layer, :33])[0]), EXACT)
                self.assertLess(distance(session.decode(1, layer, q, scale=0.5),
                                         attention(q, k[layer], v[layer], 0.5)[0]), EXACT)
                half = session.decode(1, layer, q, dtype="f16")
                self.assertEqual(half.dtype, np.float16)
                self.assertLess(distance(half, exact), 1e-3)
                self.assertLess(distance(tqkv.from_bf16(session.decode(1, layer, q, dtype="bf16")), exact), 4e-3)
            k16, v16 = tqkv.to_bf16(k[0]), v[0].astype(np.float16)
            session.append(2, 0, k16, v16)
            q = self.query(session)
            self.assertLess(distance(session.decode(2, 0, q), attention(q, tqkv.from_bf16(k16), v16)[0]), EXACT)

    def test_bf16_pool_with_one_kv_head(self):
        """GQA 8:1. Rows are what bf16 makes of them; attention over those is exact."""
        with self.client.open("bf16") as session:
            k, v = self.rows(session, 70)
            session.append(1, 0, k, v)
            q = self.query(session)
            stored = [tqkv.from_bf16(tqkv.to_bf16(part)) for part in (k, v)]
            self.assertLess(distance(session.decode(1, 0, q), attention(q, *stored)[0]), EXACT)
            for got, kept in zip(session.read(1, 0), stored):
                self.assertTrue(np.array_equal(got, kept))

    def test_tq4_is_within_its_error(self):
        """Rows lose what the format says, outputs the root of twice that; attention over stored rows is exact."""
        with self.client.open("tq4") as session:
            k, v = self.rows(session, 400)
            session.append(1, 0, k, v)
            stored_k, stored_v = session.read(1, 0)
            for got, sent in ((stored_k, k), (stored_v, v)):
                lost = ((got - sent) ** 2).sum(axis=-1) / (sent ** 2).sum(axis=-1)
                self.assertLess(lost.mean(), 1.1 * TQ4_ERROR)
                self.assertGreater(lost.mean(), 0.5 * TQ4_ERROR)  # it is not the rows as they were sent
            errors, controls = [], []
            for _ in range(20):
                q = self.query(session)
                exact = attention(q, k, v)[0]
                out = session.decode(1, 0, q)
                self.assertLess(distance(out, attention(q, stored_k, stored_v)[0]), EXACT)
                errors.append(distance(out, exact))
                controls.append(distance(attention(q, 0 * k, v)[0], exact))
            # Logits have a standard deviation of 1, so K's error counts as much as V's. Factor 1.5: few outputs.
            self.assertLess(np.mean(errors), 1.5 * np.sqrt(2 * TQ4_ERROR))
            self.assertGreater(np.mean(controls), 3 * np.mean(errors))

    def test_ragged_batches(self):
        """FAILURES K3: lengths 0, 1 and around a block: no token gives zeros and -inf, neighbours are as if alone."""
        lengths = [0, 1, 15, 16, 17, 0, 33]
        for pool in ("odd", "tq4", "bf16"):
            with self.subTest(pool), self.client.open(pool) as session:
                sent = {}
                for sequence, n in enumerate(lengths, 1):
                    k, v = self.rows(session, max(n, 1))
                    session.append(sequence, 1, k, v)
                    if n == 0:
                        session.truncate(sequence, 0)
                    sent[sequence] = session.read(sequence, 1, n=n)
                queries = {sequence: self.query(session) for sequence in sent}
                out, lse = session.decode_batch(queries, 1, lse=True)
                with self.client.pipeline(session) as p:
                    at_once = p.decode_batch(queries, 1, lse=True)
                piped, _ = at_once.result()
                self.assertTrue(np.array_equal(piped, out))
                for i, (sequence, q) in enumerate(queries.items()):
                    exact, exact_lse = attention(q, *sent[sequence])
                    if lengths[i] == 0:
                        self.assertTrue((out[i] == 0).all() and (lse[i] == -np.inf).all(), (pool, sequence))
                        self.assertFalse(np.signbit(out[i]).any())
                    else:
                        self.assertLess(distance(out[i], exact), EXACT, (pool, sequence))
                        self.assertLess(np.abs(lse[i] - exact_lse).max(), 1e-4)
                    alone = session.decode(sequence, 1, q)
                    self.assertTrue(np.array_equal(alone, out[i]), (pool, sequence))
                self.assertTrue((session.decode(7, 1, queries[7], seen=0) == 0).all())

    def test_scaled_rows_zero_rows_outliers(self):
        """FAILURES K5: any magnitude keeps its relative error; a zero row decodes to at most 1e-12."""
        for pool, bound in (("odd", 1e-6), ("bf16", 2 ** -8), ("tq4", np.sqrt(2.4 * TQ4_ERROR))):
            with self.subTest(pool), self.client.open(pool) as session:
                for sequence, scale in enumerate((1e-6, 1.0, 50.0, 6e4), 1):
                    k, v = self.rows(session, 40, scale)
                    k[5], v[7] = 0, 0
                    k[9, :, 3] *= 1000
                    session.append(sequence, 0, k, v)
                    stored_k, stored_v = session.read(sequence, 0)
                    self.assertLess(distance(stored_k, k), bound, scale)
                    self.assertLess(distance(stored_v, v), bound, scale)
                    self.assertLessEqual(np.abs(stored_k[5]).max(), 1e-12)
                    self.assertLessEqual(np.abs(stored_v[7]).max(), 1e-12)
                    q = self.query(session, 1 / scale)
                    out = session.decode(sequence, 0, q)
                    self.assertTrue(np.isfinite(out).all())
                    self.assertLess(distance(out, attention(q, stored_k, stored_v)[0]), 1e-4, scale)

    def test_a_row_that_is_not_finite(self):
        """FAILURES K5: BAD_VALUE with layer and row; that item leaves no trace, the others are stored."""
        for bad in (np.nan, np.inf, -np.inf):
            with self.client.open("tq4") as session:
                batch = {i: self.rows(session, 20, layers=2) for i in (1, 2, 3)}
                session.append_batch(batch)
                more = {i: self.rows(session, 20, layers=2) for i in (1, 2, 3)}
                more[2][1][1, 13, 1, 40] = bad
                error = self.raises(Status.BAD_VALUE, session.append_batch, more)
                self.assertEqual([(r.sequence, r.layer, r.row) for r in error.item_errors], [(2, 1, 13)])
                self.assertEqual(session.lengths(), {1: (40, 40), 2: (20, 20), 3: (40, 40)})
                q = self.query(session)
                for i in (1, 2, 3):
                    self.assertLess(distance(session.decode(i, 0, q), attention(q, *session.read(i, 0))[0]), EXACT)
                # And on it goes from where it was.
                more[2][1][1, 13, 1, 40] = 0
                self.assertEqual(session.append_layers(2, *more[2]), 40)

    def test_a_new_sequence_that_is_refused_can_be_made_again(self):
        """BAD_VALUE in the first rows of a sequence."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 5)
            k[3, 0, 0] = np.nan
            error = self.raises(Status.BAD_VALUE, session.append, 1, 2, k, v)
            self.assertEqual((error.item_errors[0].layer, error.item_errors[0].row), (2, 3))
            k[3, 0, 0] = 1
            self.assertEqual(session.append(1, 2, k, v, create=True), 5)

    def test_append_decode_sees_its_own_token(self):
        """Token by token, many sequences per frame."""
        with self.client.open("odd") as session:
            rows = {i: self.rows(session, 40) for i in (1, 2, 3)}
            session.append_batch({i: (k[:30], v[:30]) for i, (k, v) in rows.items()}, 0)
            for t in range(30, 40):
                q = {i: self.query(session) for i in rows}
                out, lse = session.append_decode_batch({i: (k[t], v[t], q[i]) for i, (k, v) in rows.items()}, 0,
                                                       lse=True)
                for at, (i, (k, v)) in enumerate(rows.items()):
                    exact, exact_lse = attention(q[i], k[:t + 1], v[:t + 1])
                    self.assertLess(distance(out[at], exact), EXACT)
                    self.assertLess(np.abs(lse[at] - exact_lse).max(), 1e-5)
            out = session.append_decode(9, 0, *self.rows(session, 1), self.query(session))
            self.assertTrue(np.allclose(out, np.repeat(session.read(9, 0)[1][0], 3, axis=0), atol=1e-6))


class Reading(Rows):
    def test_packed_rows_and_decoded_rows(self):
        """Packed rows have the format's size, f32 pools give back the bytes that were sent, ranges agree with all."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 50, layers=3)
            session.append_layers(1, k, v)
            packed_k, packed_v = session.read(1, dtype="packed")
            self.assertEqual((packed_k.shape, packed_v.shape), ((3, 50, 2, 192), (3, 50, 2, 128)))
            self.assertEqual(packed_k.tobytes(), k.tobytes())
            self.assertEqual(packed_v.tobytes(), v.tobytes())
            for got, sent in zip(session.read(1, range(1, 3), 7, 20), (k, v)):
                self.assertTrue(np.array_equal(got, sent[1:3, 7:27]))
            got, none = session.read(1, 2, 49, v=False, dtype="bf16")
            self.assertIsNone(none)
            self.assertTrue(np.array_equal(got, tqkv.to_bf16(k[2, 49:])))
            self.raises(Status.POSITION, session.read, 1, 0, 40, 11)
            self.raises(Status.NOT_FOUND, session.read, 2, 0, 0, 1)
            self.raises(Status.NOT_FOUND, session.read, 2)
            self.assertEqual(session.read(1, 0, 50)[0].shape, (0, 2, 48))

    def test_tq4_rows_say_what_is_decoded(self):
        """[32 bytes of indices][norm]: the norm is the row's length, and decoding again gives the decoded rows."""
        with self.client.open("tq4") as session:
            k, v = self.rows(session, 30)
            session.append(1, 1, k, v)
            packed, _ = session.read(1, 1, dtype="packed")
            self.assertEqual(packed.shape, (30, 2, 36))
            norms = packed[..., 32:].copy().view("<f4")[..., 0]
            self.assertLess(np.abs(norms / np.linalg.norm(k.astype(np.float64), axis=-1) - 1).max(), 1e-6)
            rotation = self.client.rotation_matrix("tq4", 1)
            self.assertTrue(np.array_equal(self.client.rotation_matrix("tq4", 1, "v"), rotation))
            self.assertIsNone(self.client.rotation_matrix("odd"))
            self.assertLess(np.abs(rotation @ rotation.T - np.eye(64)).max(), 1e-6)
            decoded, _ = session.read(1, 1)
            indices = np.stack([packed[..., :32] & 15, packed[..., :32] >> 4], axis=-1).reshape(30, 2, 64)
            levels = decoded @ rotation.T / norms[..., None]
            centroids = [levels[indices == i].mean() for i in range(16)]
            self.assertTrue((np.diff(centroids) > 0).all())
            self.assertLess(max(np.ptp(levels[indices == i]) for i in range(16)), 1e-5)

    def test_more_than_a_frame_both_ways(self):
        """3 MB of rows are split on the way in and on the way out, and come back unchanged."""
        with self.client.open("wide") as session:
            k, v = (tqkv.to_bf16(part) for part in self.rows(session, 400, layers=2))
            self.assertGreater(k.nbytes + v.nbytes, 3 << 20)
            self.assertEqual(session.append_layers(1, k, v), 400)
            for got, sent in zip(session.read(1, dtype="bf16"), (k, v)):
                self.assertTrue(np.array_equal(got, sent))
            for got, sent in zip(session.read(1, dtype="packed"), (k, v)):
                self.assertEqual(got.tobytes(), sent.tobytes())
            q = self.query(session)
            self.assertLess(distance(session.decode(1, 1, q), attention(
                q, tqkv.from_bf16(k[1]), tqkv.from_bf16(v[1]))[0]), EXACT)
            # Other sequences in the same call, with other lengths.
            batch = {i: (k[:, :n], v[:, :n]) for i, n in ((2, 300), (3, 1), (4, 250))}
            self.assertEqual(session.append_batch(batch), [300, 1, 250])
            for i, (sent, _) in batch.items():
                self.assertTrue(np.array_equal(session.read(i, dtype="bf16", v=False)[0], sent))


class Limits(Rows):
    def test_len_limit(self):
        """FAILURES L18: the length stays, and decoding at it stays right."""
        with self.client.open("odd", tokens_max=20) as session:
            self.assertEqual(session.tokens_max, 20)
            k, v = self.rows(session, 16)
            session.append(1, 0, k, v)
            error = self.raises(Status.LEN_LIMIT, session.append, 1, 0, *self.rows(session, 5))
            self.assertEqual(error.item_errors[0].length, 16)
            self.assertEqual(session.lengths(), {1: (16, 0, 0)})
            q = self.query(session)
            self.assertLess(distance(session.decode(1, 0, q), attention(q, k, v)[0]), EXACT)
            self.assertEqual(session.append(1, 0, *self.rows(session, 4)), 20)

    def test_a_full_pool_stores_what_fits(self):
        """FAILURES P5: 5 of 8 items are stored, 3 are POOL_FULL with a hint; after a CLOSE those 3 succeed."""
        client = self.lone()
        other = client.open("small", reserve_blocks=3)
        with client.open("small") as session:
            batch = {i: self.rows(session, 1) for i in range(1, 9)}
            error = self.raises(Status.POOL_FULL, session.append_batch, batch, 0)
            self.assertEqual([r.status_name for r in error.results], ["OK"] * 5 + ["POOL_FULL"] * 3)
            self.assertTrue(error.retryable and all(r.retry_after_ms > 0 for r in error.item_errors))
            self.assertEqual(session.lengths(), {i: (1,) for i in range(1, 6)})
            self.assertEqual(self.control.occupancy()["pools"][1]["blocks"]["free"], 0)
            other.close()
            again = {r.sequence: batch[r.sequence] for r in error.item_errors}
            self.assertEqual(session.append_batch(again, 0), [1, 1, 1])
            self.assertEqual(set(session.lengths()), set(batch))

    def test_retrying_waits_for_blocks(self):
        """The same with a client that tries again: it returns when another connection frees its blocks."""
        holder, session = self.lone().open("small"), self.client.open("small")
        holder.append(1, 0, *self.rows(holder, 7 * 16))
        with self.client.pipeline(session) as p:
            future = p.append(1, 0, *self.rows(session, 16))
            self.assertEqual(future.result(), 16)
        self.raises(Status.POOL_FULL, session.append, 1, 0, *self.rows(session, 1), timeout=0.3)
        holder.truncate(1, 16)
        self.assertEqual(session.append(1, 0, *self.rows(session, 1)), 17)
        holder.close()
        session.close()

    def test_reservations_are_all_or_nothing(self):
        """Above the pool is LIMIT, above what is free POOL_FULL; reserved blocks serve their session."""
        client = self.lone()
        self.raises(Status.LIMIT, client.open, "small", reserve_blocks=9)
        with client.open("small", reserve_blocks=6) as first:
            self.raises(Status.POOL_FULL, client.open, "small", reserve_blocks=3)
            with client.open("small") as second:
                second.append(1, 0, *self.rows(second, 32))
                self.raises(Status.POOL_FULL, second.append, 1, 0, *self.rows(second, 1))
                self.assertEqual(first.append(1, 0, *self.rows(first, 96)), 96)


class Sequences(Rows):
    def test_tell(self):
        """Every sequence with the length of each layer, over several pages."""
        with self.client.open("tq4") as session:
            k, v = self.rows(session, 1)
            session.append_batch({i: (k, v) for i in range(1, 601) if i % 5}, 0)
            session.append(3, 1, *self.rows(session, 17))
            told = session.tell()
            self.assertEqual([row.sequence for row in told], [i for i in range(1, 601) if i % 5])
            row = told[2]
            self.assertEqual((row.sequence, row.length_min, row.length_max), (3, 1, 17))
            self.assertEqual((row.n_blocks, row.state, row.is_evictable), (2, "resident", False))
            lengths = session.lengths()
            self.assertEqual((len(lengths), lengths[1], lengths[3]), (480, (1, 0), (1, 17)))
            session.free([row.sequence for row in told])
            self.assertEqual(session.lengths(), {})

    def test_truncate_then_append(self):
        """Rewritten tokens are the new ones, before and behind the edge of a block."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 50)
            session.append(1, 0, k, v)
            for length in (48, 33, 32, 31, 5):
                new_k, new_v = self.rows(session, 50 - length)
                k, v = np.concatenate([k[:length], new_k]), np.concatenate([v[:length], new_v])
                session.truncate(1, length)
                self.assertEqual(session.append(1, 0, new_k, new_v), 50)
                q = self.query(session)
                self.assertLess(distance(session.decode(1, 0, q), attention(q, k, v)[0]), EXACT)
            session.truncate({1: 100})  # nothing to do
            self.assertEqual(session.lengths(), {1: (50, 0, 0)})
            self.raises(Status.NOT_FOUND, session.truncate, 2, 1)

    def test_free_and_create_again(self):
        """The number can be used again, and names only the new rows."""
        with self.client.open("odd") as session:
            session.append(1, 0, *self.rows(session, 40))
            self.raises(Status.EXISTS, session.append, 1, 0, *self.rows(session, 1), create=True)
            session.free(1)
            self.raises(Status.NOT_FOUND, session.decode, 1, 0, self.query(session))
            self.raises(Status.NOT_FOUND, session.append, 1, 0, *self.rows(session, 1), create=False)
            self.raises(Status.NOT_FOUND, session.free, 1)
            k, v = self.rows(session, 3)
            self.assertEqual(session.append(1, 0, k, v), 3)
            q = self.query(session)
            self.assertLess(distance(session.decode(1, 0, q), attention(q, k, v)[0]), EXACT)

    def test_positions_are_compared(self):
        """POSITION tells the length; nothing is written; decoding beyond the end too."""
        with self.client.open("odd") as session:
            session.append(1, 0, *self.rows(session, 10))
            for position in (0, 9, 11):
                error = self.raises(Status.POSITION, session.append, 1, 0, *self.rows(session, 2), position=position)
                self.assertEqual(error.item_errors[0].length, 10)
            error = self.raises(Status.POSITION, session.decode, 1, 0, self.query(session), seen=11)
            self.assertEqual(error.item_errors[0].length, 10)
            self.assertEqual(session.lengths(), {1: (10, 0, 0)})
            self.raises(Status.POSITION, session.append_layers, 1, *self.rows(session, 2, layers=3), position=10)
            self.assertEqual(session.append(1, 0, *self.rows(session, 2), position=10), 12)


if __name__ == "__main__":
    unittest.main()
