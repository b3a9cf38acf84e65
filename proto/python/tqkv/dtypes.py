"""The element types of rows. numpy has no bfloat16: here it is uint16, the upper half of a float32."""

import sys

import numpy as np

from .errors import ArgumentError, ArgumentTypeError

NONE, F32, F16, BF16, PACKED = 0, 1, 2, 3, 16
BY_NAME = {"f32": F32, "f16": F16, "bf16": BF16, "packed": PACKED}
NAMES = {number: name for name, number in BY_NAME.items()}
NUMPY = {F32: np.dtype("<f4"), F16: np.dtype("<f2"), BF16: np.dtype("<u2"), PACKED: np.dtype("u1")}
ELEMENT_BYTES = {NONE: 0, F32: 4, F16: 2, BF16: 2}


def to_bf16(values):
    """float32 (or what converts to it) to bfloat16 as uint16, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
    # Rounding could turn a NaN into an infinity: such a NaN only loses its lower half and is made quiet.
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, bits >> 16 | 0x40, rounded).astype(np.uint16).reshape(np.shape(values))


def from_bf16(values):
    """bfloat16 as uint16 to float32, exactly."""
    values = np.asarray(values)
    if values.dtype != np.uint16:
        raise ArgumentTypeError(f"bf16 values are uint16, not {values.dtype}")
    return (values.astype(np.uint32) << 16).view(np.float32)


def number_of(name, may_be_packed=False):
    """'bf16' to its number on the wire."""
    number = BY_NAME.get(name)
    if number is None or (number == PACKED and not may_be_packed):
        known = [known for known in BY_NAME if known != "packed" or may_be_packed]
        raise ArgumentError(f"dtype {name!r}: expected one of {', '.join(known)}")
    return number


def _array(what, values):
    torch = sys.modules.get("torch")  # who has tensors has imported it
    try:
        if torch is None or not isinstance(values, torch.Tensor):
            return np.asarray(values)
        values = values.detach().cpu()
        if values.dtype == torch.bfloat16:  # which numpy() refuses
            return values.contiguous().view(torch.int16).numpy().view(np.uint16)
        return values.numpy()
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{what} is a {type(values).__name__} that is no array of numbers: {error}") from error


def as_rows(what, values):
    """(array, number): values as an array that can go over the wire as it is.

    float32, float16 and uint16 (bf16) are taken as they are, float64 is rounded to float32, an array of a
    bfloat16 extension type is reinterpreted. Tensors of torch are taken, too, from wherever they are.
    """
    array = _array(what, values)
    if array.dtype.name == "bfloat16" and array.dtype.itemsize == 2:
        array = array.view(np.uint16)
    kind = (array.dtype.kind, array.dtype.itemsize)
    if kind == ("f", 8):
        array, kind = array.astype(np.float32), ("f", 4)
    number = {("f", 4): F32, ("f", 2): F16, ("u", 2): BF16}.get(kind)
    if number is None:
        raise ArgumentTypeError(f"{what} has dtype {array.dtype}: expected float32, float16, float64 or uint16 "
                                f"(bf16; see tqkv.to_bf16)")
    return array.astype(NUMPY[number], copy=False), number


def to_f32(array, number):
    """float32 of an array that as_rows() made."""
    return from_bf16(array.astype(np.uint16, copy=False)) if number == BF16 else array.astype("<f4", copy=False)
