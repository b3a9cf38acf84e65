"""Packed rows through the Python package: append(.., packed=True) stores what the daemon would have stored."""

import json
import pathlib
import tempfile
import unittest

import numpy as np
import tqkv
from daemon import Daemon
from tqkv import Status

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAYERS, KV_HEADS, Q_HEADS, TOKENS = 3, 2, 4, 37
GEOMETRY = {"layers": LAYERS, "q_heads": Q_HEADS, "kv_heads": KV_HEADS, "block_size": 16, "blocks": 64}
CENTER = np.random.default_rng(8).standard_normal((LAYERS, KV_HEADS, 64), np.float32).tolist()
MATRIX = tqkv.codec.rotation("qr", 32, 5).matrix.tolist()
POOLS = {
    "tq4": {"head_dim": 64, "k": "tq4", "v": "tq4"},
    "qr": {"k_head_dim": 80, "v_head_dim": 96, "k": "tqp3", "v": "tq2", "norm_correction": True, "per_layer": True},
    "mixed": {"head_dim": 64, "k": ["bf16", "tq3", "tq8"], "v": ["v4", "fp8", "f16"], "group": 20},
    "recipe": {"head_dim": 128, "k": "turboquant25", "v": "turboquant25"},
    "center": {"head_dim": 64, "k": "tq4", "v": "v4", "k_center": CENTER},
    "given": {"head_dim": 32, "k": ["f16", "tq4", "tq4"], "v": "tqp3", "rotation": "file", "rotation_matrix": MATRIX},
}


class Packed(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        config = pathlib.Path(cls.folder.name) / "tqkvd.json"
        book = json.loads((ROOT / "codebooks/codebook_d64_b4.json").read_text())
        book["centroids"] = [1.25 * value for value in book["centroids"]]
        book["boundaries"][1:-1] = [1.25 * value for value in book["boundaries"][1:-1]]
        own_book = pathlib.Path(cls.folder.name) / "codebook.json"
        own_book.write_text(json.dumps(book))
        own = {"name": "own", **GEOMETRY, "head_dim": 64, "k": "tq4", "v": "v4", "codebook_files": [str(own_book)]}
        config.write_text(json.dumps({
            "pools": [own] + [{"name": name, **GEOMETRY, **pool} for name, pool in POOLS.items()]}))
        cls.daemon = Daemon("--config", str(config))

    @classmethod
    def tearDownClass(cls):
        code = cls.daemon.stop()
        cls.folder.cleanup()
        assert code == 0, (code, cls.daemon.log())

    def setUp(self):
        self.client = tqkv.Client(self.daemon.addr, timeout=60)
        self.addCleanup(self.client.close)

    def rows(self, session, tokens=TOKENS, seed=17):
        rng, g = np.random.default_rng(seed), session.geometry
        return tuple(rng.standard_normal((LAYERS, tokens, KV_HEADS, dim), np.float32)
                     for dim in (g.k_head_dim, g.v_head_dim))

    def assert_same(self, got, expected):
        for sides in zip(got, expected):
            for layers in zip(*sides):
                self.assertEqual(layers[0].tobytes(), layers[1].tobytes())

    def assert_raises(self, status, call, *args, **kwargs):
        with self.assertRaises(tqkv.TqkvError) as raised:
            call(*args, **kwargs)
        self.assertEqual(raised.exception.status_name, status.name, raised.exception)
        return raised.exception

    def test_packed_here_or_there_makes_the_same_bytes_and_decodes(self):
        """Plain rows, rows that are packed here, and those bytes once more: READ and decode see no difference."""
        for name in POOLS:
            with self.subTest(pool=name), self.client.open(name) as session:
                k, v = self.rows(session)
                self.assertEqual(session.append_layers(1, k, v), TOKENS)
                self.assertEqual(session.append_layers(2, k, v, packed=True), TOKENS)
                stored = session.read(1, dtype="packed")
                self.assertEqual(session.append_layers(3, *stored, packed=True), TOKENS)
                for layer in range(LAYERS):
                    session.append(4, layer, k[layer], v[layer], packed=True)
                session.append_batch({5: (k, v), 6: tuple(stored)}, packed=True)
                with session.pipeline() as pipeline:
                    for layer in range(LAYERS):
                        q = np.zeros((Q_HEADS, session.geometry.k_head_dim), np.float32)
                        session.append_decode(7, layer, k[layer], v[layer], q, packed=True)
                        session.append_decode_batch({8: (stored[0][layer], stored[1][layer], q)}, layer, packed=True)
                        pipeline.append_decode(9, layer, k[layer], v[layer], q, packed=True)
                q = np.random.default_rng(3).standard_normal((Q_HEADS, session.geometry.k_head_dim), np.float32)
                outs = [session.decode(1, layer, q).tobytes() for layer in range(LAYERS)]
                for sequence in range(2, 10):
                    self.assert_same(session.read(sequence, dtype="packed"), stored)
                    self.assertEqual([session.decode(sequence, layer, q).tobytes() for layer in range(LAYERS)], outs)

    def test_an_attached_session_finds_its_pool(self):
        """It knows no pool's name: the fingerprint tells which."""
        for name in ("center", "given"):
            self.client.open(name, f"named.{name}")
            with tqkv.Client(self.daemon.addr, timeout=60) as other, other.attach(f"named.{name}") as session:
                k, v = self.rows(session, 5)
                session.append_layers(1, k, v)
                session.append_layers(2, k, v, packed=True)
                self.assert_same(session.read(2, dtype="packed"), session.read(1, dtype="packed"))

    def test_packed_rows_of_a_pipeline_and_over_many_frames(self):
        """Layers with rows of different sizes are cut between tokens like all others."""
        with self.client.open("mixed") as session:
            k, v = self.rows(session, 300)
            session.append_layers(1, k, v)
            frame_bytes_max, self.client._connection.frame_bytes_max = self.client._connection.frame_bytes_max, 8192
            with session.pipeline() as pipeline:
                pipeline.append_layers(2, k[:, :200], v[:, :200], packed=True)
                length = pipeline.append_layers(2, k[:, 200:], v[:, 200:], packed=True)
            self.client._connection.frame_bytes_max = frame_bytes_max
            self.assertEqual(length.result(), 300)
            self.assert_same(session.read(2, dtype="packed"), session.read(1, dtype="packed"))

    def test_rows_for_another_pool_are_refused(self):
        """By their size where it differs, and by the fingerprint; nothing is stored and the connection stays."""
        with self.client.open("tq4") as session, self.client.open("mixed") as other:
            k, v = self.rows(session, 4)
            session.append_layers(1, k, v, packed=True)
            packed_k, packed_v = session.read(1, dtype="packed")
            self.assertRaises(tqkv.ArgumentError, session.append, 2, 0, packed_k[0][..., :-1], packed_v[0], packed=True)
            session.codec = None
            session._row_bytes.clear()
            self.assertRaises(tqkv.ArgumentError, session.append, 2, 0, packed_k[0][..., :-1], packed_v[0], packed=True)
            session.fingerprint ^= 1
            self.assert_raises(Status.FORMAT_MISMATCH, session.append, 2, 0, packed_k[0], packed_v[0], packed=True)
            session.fingerprint ^= 1
            self.assertEqual(session.append(2, 0, packed_k[0], packed_v[0], packed=True), 4)
            self.assertEqual(other.lengths(), {})

    def test_a_codebook_of_the_pools_own_is_noticed(self):
        """Its rows would look right and decode wrongly, so none is packed here; plain rows are as good as ever."""
        with self.client.open("own") as session:
            k, v = self.rows(session, 4)
            error = self.assert_raises(Status.UNSUPPORTED, session.append_layers, 1, k, v, packed=True)
            self.assertIn("k_codebook is not that of the pool", str(error))
            session.append_layers(1, k, v)
            self.assertEqual(session.lengths(), {1: (4,) * LAYERS})

    def test_rows_that_cannot_be_stored(self):
        """A NaN is found here; a field that is out of range in packed rows by the daemon, with its place."""
        with self.client.open("tq4") as session:
            k, v = self.rows(session, 4)
            bad = k.copy()
            bad[1, 2, 1, 7] = np.nan
            error = self.assert_raises(Status.BAD_VALUE, session.append_layers, 1, bad, v, packed=True)
            self.assertIn("k of layer 1, token 2", str(error))
            self.assertEqual(session.lengths(), {})
            session.append_layers(1, k, v, packed=True)
            packed_k, packed_v = session.read(1, dtype="packed")
            packed_k[1, 3, 1, 35] |= 0x80  # a negative norm
            error = self.assert_raises(Status.BAD_VALUE, session.append_layers, 2, packed_k, packed_v, packed=True)
            self.assertEqual((error.item_errors[0].layer, error.item_errors[0].row), (1, 3))
            self.assertEqual(session.lengths().get(2, (0, 0, 0)), (0, 0, 0))

    def test_an_expected_pool(self):
        """open() names the member that differs from the expected JSON."""
        expected = self.client.pool_info("qr").json
        self.client.open("qr", expected_json=expected).close()
        self.client.open("qr", expected_json=json.dumps(expected)).close()
        error = self.assert_raises(Status.FORMAT_MISMATCH, self.client.open, "qr", expected_json={
            **expected, "k_rotation": {**expected["k_rotation"], "seed": 43}})
        self.assertIn("k_rotation.seed: expected 43, got 42", str(error))
        error = self.assert_raises(Status.FORMAT_MISMATCH, self.client.open, "tq4", expected_json=expected)
        self.assertIn("pool 'tq4' is not the expected one: ", str(error))


if __name__ == "__main__":
    unittest.main()
