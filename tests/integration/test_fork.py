"""FORK: children share their parent's blocks until somebody writes, and nobody ever sees another's rows."""

import struct
import unittest

import frames
import numpy as np
import tqkv
from rows_case import EXACT, Rows, attention, distance
from tqkv import Status


class Fork(Rows):
    def check(self, session, sequence, k, v):
        """The sequence has exactly these rows on all layers, READ and DECODE say so."""
        back = session.read(sequence)
        self.assertTrue(np.array_equal(back[0], k))
        self.assertTrue(np.array_equal(back[1], v))
        q = self.query(session)
        for layer in range(len(k)):
            self.assertLess(distance(session.decode(sequence, layer, q), attention(q, k[layer], v[layer])[0]), EXACT)

    def test_family(self):
        """Parent, children and grandchildren go their own ways from a partial block on; all die in any order."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 40, layers=3)
            session.append_layers(1, k, v)
            self.assertEqual(session.fork({2: 1, 3: (1, 37), 4: (1, 0)}), {2: 40, 3: 37, 4: 0})
            self.assertEqual(session.fork(5, 3, 20), 20)
            self.assertEqual(session.lengths(), {n: (length,) * 3 for n, length in
                                                 ((1, 40), (2, 40), (3, 37), (4, 0), (5, 20))})
            own = {1: (k, v), 2: (k, v), 3: (k[:, :37], v[:, :37]), 4: (k[:, :0], v[:, :0]), 5: (k[:, :20], v[:, :20])}
            for sequence in (2, 1, 5, 3, 4):  # each writes into a block that others have
                more = self.rows(session, 13, layers=3)
                session.append_layers(sequence, *more)
                own[sequence] = tuple(np.concatenate(pair, axis=1) for pair in zip(own[sequence], more))
                for other, rows in own.items():
                    if rows[0].shape[1]:
                        self.check(session, other, *rows)
            for sequence in (1, 3, 2, 5, 4):
                session.free(sequence)
                del own[sequence]
                for other, rows in own.items():
                    self.check(session, other, *rows)

    def test_truncate_into_shared_blocks(self):
        """Speculative rollback: a child is cut below what it shares and written again; its parent keeps its rows."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 60, layers=3)
            session.append_layers(1, k, v)
            for child, length in ((2, 33), (3, 32), (4, 1), (5, 0)):
                session.fork(child, 1)
                session.truncate(child, length)
                other = self.rows(session, 50, layers=3)
                session.append_layers(child, *other)
                self.check(session, child, np.concatenate((k[:, :length], other[0]), axis=1),
                           np.concatenate((v[:, :length], other[1]), axis=1))
                self.check(session, 1, k, v)

    def test_layers_of_different_lengths(self):
        """The least length counts; a layer of the parent that is ahead stays ahead and right."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 50, layers=3)
            for layer, n in ((0, 50), (1, 21), (2, 30)):
                session.append(1, layer, k[layer, :n], v[layer, :n])
            self.assertEqual(session.fork(2, 1), 21)
            error = self.raises(Status.POSITION, session.fork, 3, 1, 22)
            self.assertEqual(error.results[0].length, 21)
            session.append(1, 1, k[1, 21:], v[1, 21:])  # into a shared block that has later rows of other layers
            session.append(2, 0, v[0, :9, :, :1] + np.zeros((9, 2, 48), np.float32), v[0, :9])
            q = self.query(session)
            for layer, n in ((0, 50), (1, 50), (2, 30)):
                self.assertLess(distance(session.decode(1, layer, q), attention(q, k[layer, :n], v[layer, :n])[0]), EXACT)
            self.assertLess(distance(session.decode(2, 1, q), attention(q, k[1, :21], v[1, :21])[0]), EXACT)

    def test_memory_is_shared(self):
        """64 children of 4 blocks take no block until they write, then one each; a full pool refuses the copy."""
        with self.client.open("odd", "family") as session:
            rows = self.rows(session, 63, layers=3)
            session.append_layers(1, *rows)
            session.fork({child: 1 for child in range(2, 66)})
            occupancy = self.control.occupancy()["pools"][0]
            self.assertEqual(sum(group["blocks"]["owned"] + group["blocks"]["shared"]
                                 for group in occupancy["groups"]), 4 * len(occupancy["groups"]))
            memory = occupancy["memory"]
            self.assertEqual(memory["shared_bytes"], 64 * 4 * 16 * 3 * 2 * 4 * (48 + 32))
            told = {item.sequence: item for item in session.tell()}
            self.assertEqual({(item.n_blocks, item.n_shared_blocks) for item in told.values()}, {(4, 4)})
            one = self.rows(session, 1)
            session.append_batch({child: one for child in range(2, 66)}, 0)
            told = {item.sequence: item for item in session.tell()}
            self.assertEqual({(told[child].n_blocks, told[child].n_shared_blocks) for child in range(2, 66)}, {(4, 3)})
            self.assertEqual(told[1].n_shared_blocks, 3)
            # Operators see the same, and what lies in blocks beside what sequences see.
            ids = {row["name"]: row["id"] for row in self.control.sessions()}
            page = self.daemon.get(f"/v1/sessions/{ids['family']}?limit=256")["sequences"]
            self.assertEqual([(int(row["id"]), row["n_shared_blocks"]) for row in page], [(n, told[n].n_shared_blocks) for n in told])
            occupancy = self.daemon.get("/v1/occupancy")["pools"][0]
            self.assertLess(occupancy["used_bytes"], occupancy["logical_bytes"])
            words = self.daemon.ctl("occupancy").stdout.splitlines()
            for title, ratio in (("of rows", occupancy["memory"]["compression"]), ("compression", occupancy["effective_compression"])):
                end = words[0].index(title) + len(title)
                self.assertEqual(words[1][:end].split()[-1], f"{ratio:.3f}", title)
            # Of 128 blocks 68 are taken: a large sequence takes the rest, and a child that would copy is refused.
            session.append_layers(70, *self.rows(session, 60 * 16, layers=3))
            session.fork(71, 2)
            with self.lone() as client:
                alone = client.attach("family")
                error = self.raises(Status.POOL_FULL, alone.append, 71, 0, *one)
                self.assertGreater(error.results[0].retry_after_ms, 0)
                self.assertEqual(alone.lengths()[71], (63,) * 3)
                alone.free(70)
                alone.append(71, 0, *one)
                alone.close()

    def test_refusals(self):
        """No parent, a child that exists, a child that is its parent, a session of another's."""
        with self.client.open("odd") as session:
            session.append_layers(1, *self.rows(session, 20, layers=3))
            session.fork(2, 1, 20)
            self.raises(Status.NOT_FOUND, session.fork, 3, 9)
            self.raises(Status.EXISTS, session.fork, 2, 1, 5)
            self.raises(Status.BAD_ARG, session.fork, 3, 3)
            self.assertEqual(session.lengths(), {1: (20,) * 3, 2: (20,) * 3})
            with frames.Raw(self.daemon.addr) as raw:
                raw.hello()
                own = raw.open(b"odd")
                fork = struct.pack("<QI12xQ", 2, 0xFFFFFFFF, 1)
                self.assertEqual(raw.call(frames.frame(frames.FORK, items=[fork], session=session.handle)).status,
                                 Status.NOT_OWNER)
                self.assertEqual(raw.call(frames.frame(frames.FORK, items=[fork], session=own)).item_statuses(),
                                 [Status.NOT_FOUND])
                self.assertEqual(raw.call(frames.frame(frames.FORK, items=[fork, fork], session=own)).status, Status.BAD_ARG)

    def test_pipelined(self):
        """FORK takes effect behind the appends and in front of the decodes of its connection."""
        with self.client.open("odd") as session:
            k, v = self.rows(session, 30, layers=3)
            q = self.query(session)
            with session.pipeline() as p:
                p.append_layers(1, k[:, :18], v[:, :18])
                p.fork(2, 1, 18)
                p.append_layers(1, k[:, 18:], v[:, 18:])
                p.append_layers(2, v[:, :1, :, :1] + np.zeros((3, 1, 2, 48), np.float32), v[:, :1])
                out = p.decode(2, 0, q, 18)
                own = p.decode(1, 0, q)
            self.assertLess(distance(out.result(), attention(q, k[0, :18], v[0, :18])[0]), EXACT)
            self.assertLess(distance(own.result(), attention(q, k[0], v[0])[0]), EXACT)


if __name__ == "__main__":
    unittest.main()
