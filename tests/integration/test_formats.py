"""Pools of every row format through a real daemon: stored bytes, decodes, packed rows from outside, refusals."""

import json
import shutil
import struct
import sys
import unittest

import frames
import numpy as np
import tqkv
from daemon import ROOT, Daemon
from rows_case import EXACT, Rows, attention, distance
from tqkv import Status

sys.path.insert(0, str(ROOT / "tests/golden"))
import reference  # noqa: E402  (an encoder written from FORMATS.md, in numpy)

FORMATS = ["f32", "f16", "bf16", "fp8", *(f"tq{b}" for b in range(1, 9)), *(f"tqp{b}" for b in range(2, 6)),
           "v2", "v3", "v4", "v8", "turboquant25", "turboquant35"]
# V of a layer has another format than K, so that each is tried as both and no two layers have rows of one size.
V_FORMATS = FORMATS[7:] + FORMATS[:7]
DIMS = (64, 80, 128)
PACKED = 16
Q_ROTATED, OUT_ROTATED, LSE = 2, 4, 1
BASE = {"q_heads": 4, "kv_heads": 2, "block_size": 16, "blocks": 64}


def encoder(name, d):
    """Of the reference, with the defaults of a pool."""
    dense = {"f32": reference.Dense32, "f16": reference.Half, "bf16": reference.Bfloat16, "fp8": reference.Fp8}
    if name in dense:
        return dense[name](d)
    if name in reference.Recipe.parts:
        return reference.Recipe(d, name)
    family = reference.Tqp if name.startswith("tqp") else reference.Tq if name.startswith("tq") else reference.Vn
    return family(d, int(name[-1]))


def basis_of(name, d, seed, high):
    """What rows are multiplied with, from FORMATS alone; y = B x."""
    if name in reference.Recipe.parts:
        recipe, basis = reference.Recipe(d, name, high), np.zeros((d, d))
        for first, group, channels in ((0, recipe.high, recipe.high_list), (len(high), recipe.low, recipe.low_list)):
            rows = [group.rotation.backward(unit) for unit in np.eye(len(channels), dtype=np.float32)]
            basis[first:first + len(channels), channels] = rows
        return basis
    return reference.matrix_of("rht", d, seed) if name.startswith("tq") else np.eye(d)


class Pool:
    """A session of raw frames on a pool: what the client package has no call for."""

    def __init__(self, daemon, name, info):
        self.raw = frames.Raw(daemon.addr)
        self.raw.hello()
        self.session = self.raw.open(name.encode())
        self.fingerprint, self.n_layers = info.fingerprint, info.json["layers"]

    def append(self, items, k, v, layer_first=0, n_layers=1, fingerprint=None, k_dtype=PACKED, v_dtype=PACKED,
               create=True):
        """items: (sequence, position, n_tokens). The reply."""
        v_off = frames.round_up(len(k))
        op = struct.pack("<IIIIBBBBIQQQfIQ", layer_first, n_layers, sum(item[2] for item in items), 0, k_dtype,
                         v_dtype, 0, 0, 0, 0, v_off, frames.ABSENT, 0.0, 0,
                         self.fingerprint if fingerprint is None else fingerprint)
        packed = [struct.pack("<QIIIHHQ", sequence, position, n, 0, int(create), 0, 0)
                  for sequence, position, n in items]
        return self.raw.call(frames.frame(frames.APPEND, op, packed, k + b"\0" * (v_off - len(k)) + v,
                                          session=self.session))

    def decode(self, sequence, layer, q, flags=0):
        return self.raw.call(frames.rows(frames.DECODE, self.session, [(sequence, 0xFFFFFFFF, 0, 1, 0)],
                                         layer_first=layer, q=q.astype("<f4").tobytes(), flags=flags))

    def holds(self, sequence, n, k, v):
        """Are the packed rows of n tokens on all layers these bytes?"""
        op = struct.pack("<QIIIIBBHI", sequence, 0, self.n_layers, 0, n, PACKED, PACKED, 0, 0)
        reply = self.raw.call(frames.frame(frames.READ, op, session=self.session))
        assert reply.status == 0, (reply.status, reply.detail())
        k_off, v_off = struct.unpack_from("<QQ", reply.op, 32)
        return reply.payload[k_off:k_off + len(k)] == k and reply.payload[v_off:] == v and \
            v_off == frames.round_up(len(k))

    def info_rows(self, index, what, layer, row_first=0):
        op = struct.pack("<HHIII", 0, what, index, layer, row_first)
        return self.raw.call(frames.frame(frames.POOL_INFO, op))

    def close(self):
        reply = self.raw.call(frames.frame(frames.CLOSE, session=self.session))
        assert reply.status == 0, reply.status
        self.raw.close()


class FormatRows(Rows):
    """A base without tests: a daemon for each, whose pools are made through the control API."""

    @classmethod
    def setUpClass(cls):
        cls.rng = np.random.default_rng(0x70715)

    @classmethod
    def tearDownClass(cls):
        pass

    def setUp(self):
        self.daemon = Daemon("--memory", "64MiB")
        self.control = tqkv.http.Control(self.daemon.http)
        super().setUp()

    def tearDown(self):
        try:
            super().tearDown()
        finally:
            code = self.daemon.stop()
        assert code == 0, (code, self.daemon.log())
        shutil.rmtree(self.daemon.folder)

    def make(self, name="p", **members):
        return self.control.request("POST", "/v1/pools", {"name": name, **BASE, **members})

    def raw(self, name="p"):
        return Pool(self.daemon, name, self.client.pool_info(name))

    def config_error(self, **members):
        """What a pool is refused for."""
        status, answer = self.daemon.request("POST", "/v1/pools", {"name": "p", **BASE, **members})
        self.assertEqual((status, answer["code"]), (400, "BAD_CONFIG"), answer)
        return answer["detail"]


def flat(layers):
    """Bytes of rows of all layers, one after the other."""
    return b"".join(np.ascontiguousarray(rows).tobytes() for rows in layers)


class EveryFormat(FormatRows):
    def test_stored_bytes_are_those_of_the_reference(self):
        """Rows that are appended as numbers are stored as the independent encoder says, on every layer, K and V."""
        for d in DIMS:
            name = f"p{d}"
            self.make(name, layers=len(FORMATS), head_dim=d, k=FORMATS, v=V_FORMATS)
            with self.client.open(name) as session, self.subTest(d=d):
                k, v = self.rows(session, 4, layers=len(FORMATS))
                session.append_layers(1, k, v)
                stored = session.read(1, dtype="packed")
                decoded = session.read(1)
                for rows, packed, numbers, names in zip((k, v), stored, decoded, (FORMATS, V_FORMATS)):
                    for layer, format_name in enumerate(names):
                        made = encoder(format_name, d)
                        for token in range(4):
                            for head in range(2):
                                wanted = made.encode(rows[layer, token, head])
                                self.assertEqual(packed[layer][token, head].tobytes(), wanted, (format_name, layer))
                                error = numbers[layer][token, head] - made.decode(wanted)
                                self.assertLess(np.abs(error).max(), 1e-5, format_name)

    def test_decodes_and_packed_rows(self):
        """A decode is attention over the rows that READ gives, and rows that come back packed decode to the same bits."""
        n = 37
        for d in DIMS:
            name = f"p{d}"
            self.make(name, layers=len(FORMATS), head_dim=d, k=FORMATS, v=V_FORMATS)
            with self.client.open(name) as session, self.subTest(d=d):
                k, v = self.rows(session, n, layers=len(FORMATS))
                session.append_layers(1, k, v)
                packed_k, packed_v = session.read(1, dtype="packed")
                pool = self.raw(name)
                # Two sequences in one frame of all layers, and one in a frame that begins in the middle.
                whole_k = [np.concatenate([rows, rows[:9]]) for rows in packed_k]
                whole_v = [np.concatenate([rows, rows[:9]]) for rows in packed_v]
                reply = pool.append([(1, 0, n), (2, 0, 9)], flat(whole_k), flat(whole_v), 0, len(FORMATS))
                self.assertEqual((reply.status, reply.item_statuses()), (0, [0, 0]), reply.detail())
                for first, end in ((0, 5), (5, len(FORMATS))):
                    reply = pool.append([(3, 0, 7)], flat(rows[:7] for rows in packed_k[first:end]),
                                        flat(rows[:7] for rows in packed_v[first:end]), first, end - first,
                                        create=first == 0)
                    self.assertEqual((reply.status, reply.item_statuses()), (0, [0]), reply.detail())
                for sequence, length in ((1, n), (2, 9), (3, 7)):
                    self.assertTrue(pool.holds(sequence, length, flat(rows[:length] for rows in packed_k),
                                               flat(rows[:length] for rows in packed_v)))
                for layer in range(len(FORMATS)):
                    q = self.query(session)
                    out, lse = session.decode(1, layer, q, lse=True)
                    exact, exact_lse = attention(q, *session.read(1, layer))
                    self.assertLess(distance(out, exact), EXACT, FORMATS[layer])
                    self.assertLess(np.abs(lse - exact_lse).max(), EXACT * 10)
                    reply = pool.decode(1, layer, q)
                    self.assertEqual(reply.payload[:out.nbytes], out.tobytes(), FORMATS[layer])
                pool.close()

    def test_packed_beside_numbers(self):
        """K packed and V as f32 in one frame, and the other way round."""
        self.make(layers=2, head_dim=64, k=["tq3", "tq8"], v=["v4", "f32"])
        with self.client.open("p") as session:
            k, v = self.rows(session, 20, layers=2)
            session.append_layers(1, k, v)
            packed_k, packed_v = session.read(1, dtype="packed")
            pool = self.raw()
            wanted = flat(packed_k), flat(packed_v)
            self.assertEqual(pool.append([(1, 0, 20)], wanted[0], v.tobytes(), 0, 2, v_dtype=1).item_statuses(), [0])
            self.assertEqual(pool.append([(2, 0, 20)], k.tobytes(), wanted[1], 0, 2, k_dtype=1).item_statuses(), [0])
            self.assertTrue(pool.holds(1, 20, *wanted))
            self.assertTrue(pool.holds(2, 20, *wanted))
            pool.close()

    def test_presets_and_the_report(self):
        """Presets are formats of layers with exact ones at both ends; the report counts what they take."""
        row_bytes = {"k8v4": (68, 40), "4bit": (36, 40), "k3v4": (28, 40), "3bit": (28, 32), "2bit": (20, 24),
                     "k3v2": (28, 24)}
        for preset, sizes in row_bytes.items():
            made = self.make(preset, layers=4, head_dim=64, preset=preset, exact_layers=1)
            self.assertEqual((made["k"], made["v"]), ("mixed", "mixed"))
            described = self.client.pool_info(preset).json
            self.assertEqual((described["k"][0], described["v"][3]), ("bf16", "bf16"))
            with self.client.open(preset) as session:
                k, v = self.rows(session, 20, layers=4)
                session.append_layers(1, k, v)
                memory = self.control.request("GET", "/v1/occupancy")["pools"][-1]["memory"]
                stored = sum(memory[f"{part}_bytes"] for part in ("payload", "norms", "scales", "zeros", "exact"))
                self.assertEqual(stored, 20 * 2 * 2 * (sum(sizes) + 2 * 128), preset)
                self.assertEqual(memory["exact_bytes"], 20 * 2 * 2 * 2 * 128)
                self.assertEqual(memory["dense_equivalent_bytes"], 20 * 2 * 4 * 2 * 128)


class Options(FormatRows):
    def test_k_center_changes_no_answer(self):
        """Rows far from 0 are stored better, and outputs, log-sum-exp and rows are those without a centre."""
        center = self.rng.standard_normal((2, 2, 64)) * 4
        exact = self.make("plain", layers=2, head_dim=64, k="f32", v="f32")
        moved = self.make("moved", layers=2, head_dim=64, k="f32", v="f32", k_center=center.tolist())
        self.assertNotEqual(exact["fingerprint"], moved["fingerprint"])
        for name in ("tq4", "tqp4", "v4", "turboquant35"):
            self.make(f"{name}-plain", layers=2, head_dim=64, k=name, v="f32")
            self.make(f"{name}-moved", layers=2, head_dim=64, k=name, v="f32", k_center=center.tolist())
        with self.client.open("plain") as plain:
            k, v = self.rows(plain, 50, layers=2)
            k += center[:, None].astype(np.float32)
            q = self.query(plain, 0.5)
            plain.append_layers(1, k, v)
            wanted = [plain.decode(1, layer, q, lse=True) for layer in range(2)]
        mu = center.astype(np.float32)[:, None]
        with self.client.open("moved") as session:
            session.append_layers(1, k, v)
            for layer in range(2):
                out, lse = session.decode(1, layer, q, lse=True)
                self.assertLess(distance(out, wanted[layer][0]), EXACT)
                self.assertLess(np.abs(lse - wanted[layer][1]).max(), EXACT * 10)
            packed, _ = session.read(1, dtype="packed")
            self.assertEqual(packed.tobytes(), (k - mu).tobytes())
            self.assertTrue(np.array_equal(session.read(1)[0], (k - mu) + mu))
        errors = {}
        for name in ("tq4", "tqp4", "v4", "turboquant35"):
            for kind in ("plain", "moved"):
                with self.client.open(f"{name}-{kind}") as session:
                    session.append_layers(1, k, v)
                    out, lse = session.decode(1, 1, q, lse=True)
                    stored_k, stored_v = session.read(1, 1)
                    exact, exact_lse = attention(q, stored_k, stored_v)
                    self.assertLess(distance(out, exact), EXACT, (name, kind))
                    self.assertLess(np.abs(lse - exact_lse).max(), EXACT * 10, (name, kind))
                    errors[name, kind] = distance(stored_k, k[1])
            if name != "v4":  # groups of channels have their own zero
                self.assertLess(errors[name, "moved"] * 2, errors[name, "plain"], name)

    def test_pool_info_tells_centers_and_matrices_by_layer(self):
        """what 1 to 3 of POOL_INFO honour the layer and the first row; a layer that is not there is BAD_ARG."""
        center = self.rng.standard_normal((3, 2, 48)).astype(np.float32)
        self.make(layers=3, k_head_dim=48, v_head_dim=64, k=["tq4", "f32", "tq4"], v=["turboquant35", "tq2", "tqp3"],
                  per_layer=True, seed=9, rotation="qr", k_center=center.tolist())
        pool = self.raw()
        for layer in range(3):
            for first in (0, 1, 2):
                reply = pool.info_rows(0, 2, layer, first)
                self.assertEqual(reply.status, 0)
                n_bytes = struct.unpack_from("<I", reply.op, 8)[0]
                self.assertEqual(reply.payload[:n_bytes], center[layer, first:].astype("<f4").tobytes())
        for what, dim, layers in ((1, 48, (0, 2)), (3, 64, (1, 2))):
            for layer in range(3):
                reply = pool.info_rows(0, what, layer)
                if layer not in layers:
                    self.assertEqual(reply.status, Status.NOT_FOUND)
                    continue
                got = np.frombuffer(reply.payload, "<f4").reshape(dim, dim)
                wanted = reference.matrix_of("qr", dim, 9 + 1000003 * layer)
                # Another LAPACK may move single entries by the last bit.
                self.assertLess(np.abs(got - wanted).max(), 1e-6)
        for what in (1, 2, 3):
            reply = pool.info_rows(0, what, 3)
            self.assertEqual((reply.status, struct.unpack_from("<I", reply.op, 12)[0]), (Status.BAD_ARG, 64 + 8))
        self.make("plain", layers=1, head_dim=48, k="tq4", v="tq4")
        self.assertEqual(pool.info_rows(1, 2, 0).status, Status.NOT_FOUND)
        self.assertEqual(pool.info_rows(0, 0, 99).status, 0)
        pool.close()

    def test_rotated_queries_and_outputs_of_any_format(self):
        """The basis that POOL_INFO tells is that of FORMATS, of every layer and KV head; with it a client's own product
        gives the plain decode, whatever the format, beside k_center and the exact window too."""
        k_names = ["tq4", "tqp4", "turboquant25", "bf16", "tq2"]
        v_names = ["tq2", "turboquant25", "tqp3", "v4", "f32"]
        lists = [[[*range(layer, 60 + layer, 4), 63], list(range(7, 23))] for layer in range(5)]
        center = self.rng.standard_normal((5, 2, 64)).astype(np.float32)
        self.make(layers=5, head_dim=64, k=k_names, v=v_names, per_layer=True, seed=7, k_center=center.tolist(),
                  exact_tokens=16, exact_blocks=4,
                  recipe={"version": 1, "recipe": "turboquant25", "head_size": 64, "layers": {
                      str(layer): {f"{side}_high_precision_indices": lists[layer] for side in ("key", "value")}
                      for layer in range(5)}})
        with self.client.open("p") as session:
            k, v = self.rows(session, 40, layers=5)
            session.append_layers(1, k, v)
            raw = self.raw()
            numbers = (k.astype("<f4").tobytes(), v.astype("<f4").tobytes())
            self.assertEqual(raw.append([(1, 0, 40)], *numbers, 0, 5, fingerprint=0, k_dtype=1, v_dtype=1).item_statuses(),
                             [0])
            for layer in range(5):
                bases = {}
                for side, name in (("k", k_names[layer]), ("v", v_names[layer])):
                    bases[side] = self.client.row_basis("p", layer, side)
                    for head in range(2):
                        wanted = basis_of(name, 64, 7 + 1000003 * layer, lists[layer][head])
                        self.assertLess(np.abs(bases[side][head] - wanted).max(), 1e-6, (name, layer, head))
                q = self.query(session)
                plain, plain_lse = session.decode(1, layer, q, lse=True)
                turned = np.concatenate([q[:2] @ bases["k"][0].T, q[2:] @ bases["k"][1].T])
                for flags in (Q_ROTATED, OUT_ROTATED, Q_ROTATED | OUT_ROTATED):
                    reply = raw.decode(1, layer, turned if flags & Q_ROTATED else q, flags | LSE)
                    self.assertEqual(reply.status, 0, (layer, flags))
                    out = np.frombuffer(reply.payload, "<f4", 4 * 64).reshape(4, 64)
                    if flags & OUT_ROTATED:
                        out = np.concatenate([out[:2] @ bases["v"][0], out[2:] @ bases["v"][1]])
                    self.assertLess(distance(out, plain), EXACT, (layer, flags))
                    lse = np.frombuffer(reply.payload, "<f4", 4, struct.unpack_from("<Q", reply.op, 24)[0])
                    self.assertLess(np.abs(lse - plain_lse).max(), EXACT * 10, (layer, flags))
            raw.close()

    def test_files_are_the_operators(self):
        """A pool from the network may not name files; the configuration may."""
        for member, value in (("k_center_file", "/etc/passwd"), ("codebook_files", ["/etc/passwd"]),
                              ("rotation_file", "/etc/passwd")):
            more = {"rotation": "file"} if member == "rotation_file" else {}
            text = self.config_error(layers=1, head_dim=64, k="tq4", v="tq4", **{member: value}, **more)
            self.assertIn("daemon's configuration only", text)
        folder = self.daemon.folder
        center = self.rng.standard_normal((1, 2, 64)).astype(np.float32)
        matrix = reference.matrix_of("qr", 64, 5).astype("<f4")
        channels = [list(range(1, 33, 2)), list(range(16))]
        (folder / "center.json").write_text(json.dumps({"version": 1, "k_center": center.tolist()}))
        (folder / "matrix.f32").write_bytes(matrix.tobytes())
        (folder / "recipe.json").write_text(json.dumps({
            "version": 1, "recipe": "turboquant25", "head_size": 64,
            "layers": {"0": {"key_high_precision_indices": channels, "value_high_precision_indices": channels}}}))
        (folder / "pools.json").write_text(json.dumps({"pools": [
            {"name": "center", **BASE, "layers": 1, "head_dim": 64, "k": "tq4", "v": "tq4", "rotation": "file",
             "rotation_file": str(folder / "matrix.f32"), "k_center_file": str(folder / "center.json")},
            {"name": "recipe", **BASE, "layers": 1, "head_dim": 64, "k": "turboquant25", "v": "turboquant25",
             "recipe_file": str(folder / "recipe.json")}]}))
        with Daemon("--config", folder / "pools.json") as daemon, tqkv.Client(daemon.addr, timeout=60) as client:
            self.assertTrue(np.array_equal(client.rotation_matrix("center"), matrix))
            with client.open("center") as session:
                k, v = self.rows(session, 10)
                session.append(1, 0, k, v)
                self.assertLess(distance(session.read(1, 0)[0], k), 0.2)
            with client.open("recipe") as session:
                session.append(1, 0, k, v)
                packed, _ = session.read(1, 0, dtype="packed")
                for head in range(2):
                    made = reference.Recipe(64, "turboquant25", channels[head])
                    for token in range(10):
                        self.assertEqual(packed[token, head].tobytes(), made.encode(k[token, head]))

    def test_pools_that_cannot_be(self):
        """Refused when the pool is made, with the member and the layer."""
        for members, text in (
                ({"layers": 3, "head_dim": 16, "k": ["tq4", "tq4", "v4"], "v": "tq4"},
                 "k[2] \"v4\": row format v4: a group of 32 is larger than head_dim 16"),
                ({"layers": 1, "head_dim": 16, "k": "turboquant25", "v": "tq4"}, "k \"turboquant25\": "),
                ({"layers": 1, "head_dim": 64, "k": "tq9", "v": "tq4"}, "unknown row format \"tq9\""),
                ({"layers": 1, "head_dim": 48, "k": "tq4", "v": "tq4", "rotation": "rht"}, "rotation \"rht\": "),
                ({"layers": 1, "head_dim": 64, "preset": "6bit"}, "unknown preset \"6bit\""),
                ({"layers": 1, "head_dim": 64, "k": "f32", "v": "f32", "group": 16}, "group 16: expected ")):
            self.assertIn(text, self.config_error(**members))


class Hostile(FormatRows):
    def test_packed_rows_are_not_trusted(self):
        """FORMATS 4: bits behind the last code, fields that are not finite or negative; the others of the frame stand."""
        self.make(layers=2, k_head_dim=80, v_head_dim=64, k=["v3", "tqp2"], v=["tq4", "turboquant35"])
        nan, minus = struct.pack("<f", np.nan), struct.pack("<f", -1)
        cases = (  # (side, layer, offset in the row, bytes)
            ("k", 0, 35, b"\x80"),                        # v3: 80 channels in groups of 32, 16 codes of padding
            ("k", 0, 36, struct.pack("<e", np.inf)),      # v3: scale
            ("k", 0, 38, struct.pack("<e", -1)),
            ("k", 0, 46, struct.pack("<e", np.nan)),      # v3: zero
            ("k", 1, 20, nan),                            # tqp2: norm
            ("k", 1, 24, minus),                          # tqp2: residual norm
            ("v", 0, 32, struct.pack("<f", np.inf)),      # tq4: norm
            ("v", 0, 32, minus),
            ("v", 1, 16, struct.pack("<e", -2)),          # turboquant35: norm of the high group
            ("v", 1, 34, struct.pack("<e", np.nan)))      # residual norm of the low group
        with self.client.open("p") as session:
            k, v = self.rows(session, 12, layers=2)
            session.append_layers(1, k, v)
            packed_k, packed_v = session.read(1, dtype="packed")
            pool = self.raw()
            for number, (side, layer, offset, data) in enumerate(cases):
                sides = {"k": [np.tile(rows, (3, 1, 1)) for rows in packed_k],
                         "v": [np.tile(rows, (3, 1, 1)) for rows in packed_v]}
                sides[side][layer][12 + 7, 1, offset:offset + len(data)] = np.frombuffer(data, np.uint8)
                first = 10 * number + 1
                reply = pool.append([(first + i, 0, 12) for i in range(3)], flat(sides["k"]), flat(sides["v"]), 0, 2)
                self.assertEqual((reply.status, reply.item_statuses()), (0, [0, Status.BAD_VALUE, 0]), number)
                self.assertEqual(struct.unpack_from("<HI", reply.items[1], 22), (layer, 7), number)
                for i in (0, 2):
                    self.assertTrue(pool.holds(first + i, 12, flat(packed_k), flat(packed_v)))
            pool.close()

    def test_packed_rows_need_the_fingerprint(self):
        """Without it BAD_ARG, with another one FORMAT_MISMATCH; and the bit is told in HELLO."""
        self.make(layers=1, head_dim=64, k="tq4", v="tq4")
        pool = self.raw()
        rows = b"\0" * (2 * 36 * 3)
        for fingerprint, status in ((0, Status.BAD_ARG), (pool.fingerprint ^ 1, Status.FORMAT_MISMATCH)):
            reply = pool.append([(1, 0, 3)], rows, rows, fingerprint=fingerprint)
            self.assertEqual(reply.status, status)
            self.assertEqual(struct.unpack_from("<I", reply.op, 12)[0], 64 + 56)
        self.assertEqual(pool.append([(1, 0, 3)], rows, rows).item_statuses(), [0])
        pool.close()
        with frames.Raw(self.daemon.addr) as raw:
            op = struct.pack("<HHHHQQQ", 1, 1, 0, 0, 0xFFFFFFFFFFFFFFFF, 0, 0)
            reply = raw.call(frames.frame(frames.HELLO, op))
            self.assertTrue(struct.unpack_from("<Q", reply.op, 16)[0] & 4)


if __name__ == "__main__":
    unittest.main()
