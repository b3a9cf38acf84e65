"""bf16 and what arrays are taken."""

import random
import sys
import types
import unittest
import unittest.mock

import numpy as np

import tqkv
from tqkv import dtypes


def nearest_even(value):
    """bf16 bits of a finite float32, found by comparing its two neighbours in exact arithmetic."""
    bits = int(np.float32(value).view(np.uint32))
    low, high = bits & 0xFFFF0000, (bits & 0xFFFF0000) + 0x10000
    below, above = bits - low, high - bits
    if below != above:
        return (low if below < above else high) >> 16
    return (low if (low >> 16) % 2 == 0 else high) >> 16


class Bf16(unittest.TestCase):
    def test_every_bf16_value_comes_back(self):
        """All 65536 patterns: numbers bit for bit, NaNs as NaNs of the same sign."""
        patterns = np.arange(65536, dtype=np.uint16)
        values = tqkv.from_bf16(patterns)
        back = tqkv.to_bf16(values)
        is_nan = np.isnan(values)
        self.assertTrue(np.array_equal(back[~is_nan], patterns[~is_nan]))
        self.assertTrue(np.isnan(tqkv.from_bf16(back[is_nan])).all())
        self.assertTrue(np.array_equal(back[is_nan] & 0x8000, patterns[is_nan] & 0x8000))

    def test_rounds_to_nearest_even(self):
        """Ties, the largest number below infinity, and random bits."""
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        bits = np.random.default_rng(seed).integers(0, 1 << 32, 2000, dtype=np.uint32)
        bits[::4] = bits[::4] & 0xFFFF0000 | 0x8000  # ties
        values = bits.view(np.float32)
        values = values[np.isfinite(values)]
        expected = [nearest_even(value) for value in values]
        self.assertEqual(tqkv.to_bf16(values).tolist(), expected)
        self.assertEqual(int(tqkv.to_bf16(np.float32(3.4e38))), 0x7F80)  # rounds up to infinity
        self.assertEqual(int(tqkv.to_bf16(1.0)), 0x3F80)

    def test_a_nan_stays_one(self):
        """Also one whose upper half alone would be an infinity, or whose rounding would overflow."""
        nans = np.array([0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
        self.assertEqual(np.isnan(tqkv.from_bf16(tqkv.to_bf16(nans))).tolist(), [True] * 4)
        self.assertEqual((tqkv.to_bf16(nans) >> 15).tolist(), [0, 1, 0, 1])

    def test_shapes_stay(self):
        self.assertEqual(tqkv.to_bf16(np.zeros((2, 0, 3))).shape, (2, 0, 3))
        self.assertEqual(tqkv.to_bf16(np.zeros((4, 6), np.float32)[:, ::2]).shape, (4, 3))
        with self.assertRaises(TypeError):
            tqkv.from_bf16(np.zeros(3, np.float32))


class Rows(unittest.TestCase):
    def test_types_that_are_taken(self):
        """float64 is rounded, big-endian is turned, the others go as they are."""
        for given, number, dtype in ((np.float32, 1, "<f4"), (np.float16, 2, "<f2"), (np.uint16, 3, "<u2"),
                                     (np.float64, 1, "<f4"), (">f4", 1, "<f4")):
            array, got = dtypes.as_rows("k", np.ones((2, 3), given))
            self.assertEqual((got, array.dtype), (number, np.dtype(dtype)))
            self.assertEqual(array.tolist(), [[1, 1, 1]] * 2)
        self.assertEqual(dtypes.as_rows("q", [[1.5, 2.5]])[1], dtypes.F32)

    def test_tensors(self):
        """bfloat16 of torch goes as it is: numpy() refuses it, and of a tensor with gradients or on a device anything."""
        class Tensor:
            def __init__(self, array, dtype="torch.float32", is_ready=False):
                self.array, self.dtype, self.is_ready = array, dtype, is_ready

            def detach(self):
                return Tensor(self.array, self.dtype)

            def cpu(self):
                return Tensor(self.array, self.dtype, True)

            def contiguous(self):
                return self

            def view(self, dtype):
                return Tensor(self.array.view(dtype), "torch.int16", self.is_ready)

            def numpy(self):
                if not self.is_ready or self.dtype == "torch.bfloat16":
                    raise TypeError(f"Got unsupported ScalarType {self.dtype}")
                return self.array

            def __array__(self, *_, **__):
                return self.numpy()

        torch = types.ModuleType("torch")
        torch.Tensor, torch.bfloat16, torch.int16 = Tensor, "torch.bfloat16", np.int16
        values = np.array([[1.5, -2.25]], np.float32)
        with unittest.mock.patch.dict(sys.modules, torch=torch):
            array, number = dtypes.as_rows("k", Tensor(dtypes.to_bf16(values), "torch.bfloat16"))
            self.assertEqual((number, dtypes.from_bf16(array).tolist()), (dtypes.BF16, values.tolist()))
            array, number = dtypes.as_rows("k", Tensor(values))
            self.assertEqual((number, array.tolist()), (dtypes.F32, values.tolist()))
        with self.assertRaisesRegex(TypeError, "k is a Tensor that is no array of numbers: Got unsupported"):
            dtypes.as_rows("k", Tensor(values))
        with self.assertRaisesRegex(TypeError, "q is a list that is no array of numbers"):
            dtypes.as_rows("q", [[1.0], [2.0, 3.0]])

    def test_types_that_are_not(self):
        """Told by the array's name and type."""
        for given in (np.int64, np.int8, np.complex64, bool, object):
            with self.assertRaisesRegex(TypeError, "k has dtype"):
                dtypes.as_rows("k", np.ones(3, given))


if __name__ == "__main__":
    unittest.main()
