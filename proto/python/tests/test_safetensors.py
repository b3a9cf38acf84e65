"""Files that are right, and files that lie."""

import json
import os
import tempfile
import unittest

import numpy as np

import tqkv
from tqkv import safetensors

from .common import ROOT


class Files(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="tqkv-test.")
        self.path = os.path.join(self.folder.name, "x.safetensors")

    def tearDown(self):
        self.folder.cleanup()

    def write(self, header, data=b"", n=None):
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        with open(self.path, "wb") as file:
            file.write((len(text) if n is None else n).to_bytes(8, "little") + text + data)

    def test_what_is_written_is_read(self):
        """Every type, an empty tensor, a single number, metadata."""
        tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": tqkv.to_bf16(np.ones((2, 2))),
                   "c": np.zeros((0, 4), np.float16), "d": np.array(7, np.int64), "e": np.array([True, False])}
        safetensors.save(self.path, tensors, {"model": "x"})
        got, metadata = safetensors.load(self.path)
        self.assertEqual(metadata, {"model": "x"})
        self.assertEqual(list(got), list(tensors))
        for name, values in tensors.items():
            self.assertEqual((got[name].dtype, got[name].shape), (values.dtype, values.shape))
            self.assertTrue(np.array_equal(got[name], values), name)

    def test_the_committed_capture(self):
        """Its tensors have the shapes that its metadata tells."""
        path = next((ROOT / "tests/golden/captures").glob("*.safetensors"))
        tensors, metadata = safetensors.load(path)
        self.assertTrue(metadata)
        layers = sorted(int(name[2:]) for name in tensors if name.startswith("k."))
        self.assertEqual(len(tensors), 3 * len(layers))
        for layer in layers:
            tokens, heads, dim = tensors[f"k.{layer}"].shape
            self.assertEqual(tensors[f"v.{layer}"].shape, (tokens, heads, dim))
            self.assertEqual(tensors[f"q.{layer}"].shape[::2], (tokens, dim))
            self.assertTrue(np.isfinite(tqkv.from_bf16(tensors[f"k.{layer}"])).all())

    def test_files_that_lie(self):
        """ValueError with the file's name, whatever is wrong; nothing is read outside the file."""
        good = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
        for header, data, n in [
            (b"", b"", 1 << 60), (b"{}", b"", 3), (b"{", b"", None), (b"[]", b"", None), (b"\xff\xfe", b"", None),
            (b"[" * 5000, b"", None), (b'{"a":1,"a":1}', b"", None), ({"a": 5}, b"", None),
            ({"a": {**good, "dtype": "F99"}}, bytes(8), None), ({"a": {**good, "shape": [3]}}, bytes(8), None),
            ({"a": {**good, "shape": [-2]}}, bytes(8), None), ({"a": {**good, "shape": [2.0]}}, bytes(8), None),
            ({"a": {**good, "shape": [1 << 62, 4]}}, bytes(8), None), ({"a": good}, bytes(7), None),
            ({"a": {**good, "data_offsets": [8, 16]}}, bytes(8), None),
            ({"a": {**good, "data_offsets": [-8, 0]}}, bytes(8), None), ({"a": {"dtype": "F32"}}, bytes(8), None),
        ]:
            with self.subTest(header=header):
                self.write(header, data, n)
                with self.assertRaisesRegex(ValueError, "x.safetensors"):
                    safetensors.load(self.path)
        with open(self.path, "wb") as file:
            file.write(b"abc")
        with self.assertRaises(ValueError):
            safetensors.load(self.path)

    def test_the_corpus_of_the_fuzzer(self):
        """Each file is read or refused with ValueError."""
        n_read = n_refused = 0
        for path in (ROOT / "tests/fuzz/corpus/safetensors").iterdir():
            try:
                tensors, _ = safetensors.load(path)
                for array in tensors.values():
                    array.tobytes()
                n_read += 1
            except ValueError:
                n_refused += 1
        self.assertGreater(n_read, 0)
        self.assertGreater(n_refused, 0)

    def test_what_cannot_be_written(self):
        with self.assertRaises(TypeError):
            safetensors.save(self.path, {"a": np.zeros(2, np.complex64)})


if __name__ == "__main__":
    unittest.main()
