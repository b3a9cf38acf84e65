"""Packed rows and expected pools against a server that plays its part."""

import json
import unittest

import numpy as np
import tqkv
from tqkv import Status
from tqkv import _wire as wire
from tqkv._xxh3 import xxh3_128
from tqkv.codec import Codebook, PoolCodec, RowCodec

from .common import Errors, FakeServer, open_reply, opened, script

FINGERPRINT = 99  # of the fake's sessions
PACKED = 16
POOL = {"block_size": 16, "group": 16, "k": ["v4", "f16"], "k_head_dim": 16, "kv_heads": 2, "layers": 2, "q_heads": 4,
        "scale": "3e800000", "v": "fp8", "v_head_dim": 16}


def told(pool=POOL, fingerprint=FINGERPRINT, rows=None):
    """A step that answers POOL_INFO with a pool's JSON, or with float32 rows."""
    def step(peer, request):
        assert request.header.opcode == wire.POOL_INFO, request.header
        data = json.dumps(pool).encode() if rows is None else np.asarray(rows, "<f4").tobytes()
        op = wire.LAYOUTS["pool_info_reply"].pack(fingerprint=fingerprint, json_bytes=len(data), n_pools=1)
        peer.reply(request, op, (), data)
    return step


def numbers(layers=2, tokens=3, dim=16):
    rng = np.random.default_rng(layers * 100 + tokens)
    return rng.standard_normal((layers, tokens, 2, dim), np.float32), rng.standard_normal((layers, tokens, 2, dim),
                                                                                          np.float32)


class Packed(Errors):
    def append(self, call, *before, n_frames=1, **limits):
        """Requests of the frames that `call` sends, after the steps that answer what comes before them."""
        seen = []

        def step(peer, request):
            self.assertEqual(request.header.opcode, wire.APPEND)
            seen.append(request)
            peer.rows(request)

        with FakeServer(script(*before, *[step] * n_frames, **limits)) as server:
            client, session = opened(server)
            call(session)
            client.close()
        self.assertEqual(len(seen), n_frames)
        return seen

    def test_rows_are_encoded_and_go_with_the_fingerprint(self):
        """K then V, layer after layer, each in its own format; the codec is asked for once."""
        k, v = numbers()
        codec = PoolCodec(POOL)

        def call(session):
            self.assertEqual(session.append_layers(1, k, v, packed=True), 3)
            self.assertEqual(session.append(1, 1, k[1], v[1].astype(np.float16), packed=True), 6)
            self.assertEqual(session.append(2, 0, k[0], v[0]), 3)

        first, second, plain = self.append(call, told(), n_frames=3)
        self.assertEqual((first.op.k_dtype, first.op.v_dtype, first.op.fingerprint), (PACKED, PACKED, FINGERPRINT))
        expected_k = codec.encode(0, "k", k[0]).tobytes() + codec.encode(1, "k", k[1]).tobytes()
        expected_v = codec.encode(0, "v", v[0]).tobytes() + codec.encode(1, "v", v[1]).tobytes()
        self.assertEqual(first.segment(first.op.k_off, len(expected_k), "K"), expected_k)
        self.assertEqual(first.segment(first.op.v_off, len(expected_v), "V"), expected_v)
        self.assertEqual(second.op.fingerprint, FINGERPRINT)
        expected_v = RowCodec("fp8", 16).encode(v[1].astype(np.float16).astype(np.float32)).tobytes()
        self.assertEqual(second.segment(second.op.v_off, len(expected_v), "V"), expected_v)
        self.assertEqual((plain.op.k_dtype, plain.op.fingerprint), (1, 0))

    def test_rows_that_are_packed_already_are_sent_as_they_are(self):
        """Alone, as a list over layers of different sizes, and as an array with an axis for the layers."""
        k, v = numbers()
        codec = PoolCodec(POOL)
        packed_k = [codec.encode(layer, "k", k[layer]) for layer in range(2)]
        packed_v = np.stack([codec.encode(layer, "v", v[layer]) for layer in range(2)])

        def call(session):
            session.codec = codec
            session.append_layers(1, packed_k, packed_v, packed=True)
            session.append(1, 0, packed_k[0][0], packed_v[0][0], packed=True)  # one token without its axis
            session.append_batch([(2, packed_k, packed_v), (3, k[:, :1], v[:, :1])], packed=True)

        whole, one, batch = self.append(call, n_frames=3)
        expected = packed_k[0].tobytes() + packed_k[1].tobytes()
        self.assertEqual(whole.segment(whole.op.k_off, len(expected), "K"), expected)
        self.assertEqual(whole.segment(whole.op.v_off, packed_v.nbytes, "V"), packed_v.tobytes())
        self.assertEqual(one.segment(one.op.k_off, packed_k[0][0].nbytes, "K"), packed_k[0][0].tobytes())
        self.assertEqual((one.items[0].position, one.items[0].n_tokens), (3, 1))
        expected = b"".join(rows.tobytes() + rows[:1].tobytes() for rows in packed_k)
        self.assertEqual(batch.segment(batch.op.k_off, len(expected), "K"), expected)

    def split(self, n_tokens, frame_bytes_max, n_frames):
        k, v = numbers(2, n_tokens)
        codec = PoolCodec(POOL)

        def call(session):
            session.codec = codec
            session.append_layers(1, k, v, packed=True)

        got = {(side, layer): b"" for side in "kv" for layer in range(2)}
        for request in self.append(call, n_frames=n_frames, frame_bytes_max=frame_bytes_max):
            self.assertLessEqual(request.header.body_bytes, frame_bytes_max)
            self.assertEqual(request.op.fingerprint, FINGERPRINT)
            for side in "kv":
                sizes = {layer: 2 * codec.codec(layer, side).row_bytes * request.op.n_tokens_total
                         for layer in range(request.op.layer_first, request.op.layer_first + request.op.n_layers)}
                data = request.segment(getattr(request.op, f"{side}_off"), sum(sizes.values()), side)
                for layer, n_bytes in sizes.items():
                    got[side, layer], data = got[side, layer] + bytes(data[:n_bytes]), data[n_bytes:]
        for layer in range(2):
            self.assertEqual(got["k", layer], codec.encode(layer, "k", k[layer]).tobytes())
            self.assertEqual(got["v", layer], codec.encode(layer, "v", v[layer]).tobytes())

    def test_packed_rows_are_cut_between_tokens(self):
        """Layers with rows of different sizes, over several frames."""
        self.split(40, 4096, 2)  # 168 bytes a token, 23 of them in a frame
        self.split(90, 4096, 4)

    def test_a_bad_row_is_told_and_nothing_is_sent(self):
        k, v = numbers()
        k[1, 2, 1, 3] = np.inf

        def call(session):
            error = self.assert_raises(Status.BAD_VALUE, session.append_layers, 1, k, v, packed=True)
            self.assertIn("sequence 1: k of layer 1, token 2", str(error))
            self.assertTrue(error.is_local)

        self.append(call, told(), n_frames=0)

    def test_packed_rows_of_a_wrong_size_are_not_sent(self):
        """The size is known from the pool; the message has what was expected."""
        k, v = numbers()
        codec = PoolCodec(POOL)
        k0, v0 = codec.encode(0, "k", k[0]), codec.encode(0, "v", v[0])

        def call(session):
            for got, text in ((k0[..., :-1], f"expected (tokens, 2, {k0.shape[2]}) of uint8"), (k0[:, :1], "(3, 1, "),
                              (k0[:2], "k has 2 tokens, v has 3"), (k0[:0], "k has 0 tokens")):
                with self.assertRaises(tqkv.ArgumentError) as raised:
                    session.append(1, 0, got, v0, packed=True)
                self.assertIn(text, str(raised.exception))
            self.assertRaises(tqkv.ArgumentError, session.append_layers, 1, [k0], [v0, v0], packed=True)
            self.assertRaises(tqkv.ArgumentError, session.append_layers, 1, [k0] * 3, [v0] * 3, packed=True)
            self.assertRaises(tqkv.ArgumentTypeError, session.append, 1, 0, k0, v0)  # not said to be packed

        self.append(call, told(), n_frames=0)

    def test_the_codec_is_of_the_session_s_pool(self):
        """A pool of that name with another fingerprint was made anew: its codec would pack wrongly."""
        def call(session):
            self.assert_raises(Status.FORMAT_MISMATCH, session.append_layers, 1, *numbers(), packed=True)

        self.append(call, told(fingerprint=7), n_frames=0)

    def test_what_the_json_has_by_its_hash_is_fetched(self):
        """Matrices of rotated layers, and K centres of all; a layer without the matrix is an error."""
        matrix = np.eye(16, dtype=np.float32)[::-1]
        center = np.arange(64, dtype=np.float32).reshape(2, 2, 16)
        turn = {"kind": "file", "per_layer": False, "seed": 42, "matrix": xxh3_128(matrix.tobytes())}
        pool = {**POOL, "k": ["f16", "tq4"], "v": "v4", "k_rotation": turn, "k_center": xxh3_128(center.tobytes()),
                "k_codebook": xxh3_128(Codebook(16, 4).centroids.tobytes())}
        asked = []

        def note(step):
            def noting(peer, request):
                asked.append((request.op.what, request.op.layer, request.op.row_first))
                step(peer, request)
            return noting

        steps = [told(pool), told(rows=center[0]), told(rows=center[1]), told(rows=matrix[:10]), told(rows=matrix[10:])]
        with FakeServer(script(*map(note, steps))) as server:
            client, _ = opened(server)
            codec = client.pool_codec("p")
            client.close()
        self.assertEqual(asked, [(0, 0, 0), (2, 0, 0), (2, 1, 0), (1, 1, 0), (1, 1, 10)])
        k, _ = numbers()
        expected = RowCodec("tq4", 16, rotation=matrix).encode(k[1] - center[1])
        self.assertEqual(codec.encode(1, "k", k[1]).tobytes(), expected.tobytes())
        with FakeServer(script(told(pool), lambda peer, request: peer.error(request, 200))) as server:
            client, _ = opened(server)
            with self.assertRaises(tqkv.TqkvError) as raised:
                client.pool_codec("p")
            self.assertEqual(raised.exception.status, 200)
            client.close()

    def test_a_pool_that_this_package_does_not_know(self):
        def call(session):
            error = self.assert_raises(Status.UNSUPPORTED, session.append_layers, 1, *numbers(), packed=True)
            self.assertIn("'novel'", str(error))

        self.append(call, told({**POOL, "novel": 1}), n_frames=0)


class Expected(Errors):
    def test_the_member_that_differs_is_named(self):
        """By its path; a member that one side lacks is named too."""
        turn = {"kind": "qr", "seed": 42}
        pool = {**POOL, "k_rotation": turn, "norm_correction": True}
        cases = (({"k_rotation": {**turn, "seed": 43}}, "k_rotation.seed: expected 43, got 42"),
                 ({"k": ["v4", "bf16"]}, 'k[1]: expected "bf16", got "f16"'),
                 ({"k": "v4"}, 'k: expected "v4", got ["v4", "f16"]'),
                 ({"layers": 4}, "layers: expected 4, got 2"),
                 ({"norm_correction": 1}, "norm_correction: expected 1, got true"),
                 ({"zeta": 5}, "zeta is missing: 5"))
        with FakeServer(script(*[told(pool)] * (len(cases) + 1))) as server:
            client, _ = opened(server)
            for changed, text in cases:
                error = self.assert_raises(Status.FORMAT_MISMATCH, client.open, "demo",
                                           expected_json=json.dumps({**pool, **changed}))
                self.assertIn(f"pool 'demo' is not the expected one: {text}", str(error))
            error = self.assert_raises(Status.FORMAT_MISMATCH, client.open, "demo", expected_json={
                key: pool[key] for key in pool if key != "group"})
            self.assertIn("group is not expected: 16", str(error))
            self.assertRaises(tqkv.ArgumentError, client.open, "demo", expected_json="{")
            client.close()

    def test_the_expected_pool_is_opened_with_its_fingerprint(self):
        """So that it cannot be replaced in between; the order of the members and white space do not matter."""
        seen = []

        def open_step(peer, request):
            seen.append(request.op.fingerprint)
            peer.reply(request, open_reply(0x10002))

        text = json.dumps(dict(reversed(POOL.items())), indent=1)
        with FakeServer(script(told(fingerprint=77), open_step)) as server:
            client, _ = opened(server)
            client.open("demo", expected_json=text)
            client.close()
        self.assertEqual(seen, [77])


if __name__ == "__main__":
    unittest.main()
