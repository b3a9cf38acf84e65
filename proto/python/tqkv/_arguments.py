"""What callers give, looked at: numbers, sequences, rows and lists of them."""

import numpy as np

from . import _wire as wire
from . import dtypes
from .errors import ArgumentError, ArgumentTypeError

POSITION_MAX = wire.PLANNED - 1


def whole(what, value, low, high):
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise ArgumentTypeError(f"{what} is {value!r}, expected a whole number")
    if not low <= value <= high:
        raise ArgumentError(f"{what} is {value}, expected {low} to {high}")
    return int(value)


def seconds(what, value):
    """A float; infinite is 30 years."""
    try:
        value = float(value)
    except (TypeError, ValueError):
        raise ArgumentTypeError(f"{what} is {value!r}, expected seconds") from None
    if value != value:
        raise ArgumentError(f"{what} is {value}, expected seconds")
    return max(min(value, 1e9), -1e9)


def encoded(what, text):
    try:
        return text.encode() if isinstance(text, str) else bytes(text)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{what} is {text!r}: {error}") from None


def rotated_flags(q_rotated, out_rotated):
    return (wire.ROWS_Q_ROTATED if q_rotated else 0) | (wire.ROWS_OUT_ROTATED if out_rotated else 0)


def sequence_ids(values):
    values = [values] if isinstance(values, (int, np.integer)) else values
    return [sequence_id(value) for value in values]


def sequence_id(value):
    return whole("sequence", value, 1, (1 << 64) - 1)


def n_tokens_of(sequence, k, v):
    """Of rows with an axis for the layers."""
    n_tokens, n_v = len(k[0]), len(v[0])
    if n_tokens != n_v:
        raise ArgumentError(f"sequence {sequence}: k has {n_tokens} tokens, v has {n_v}")
    if n_tokens == 0:
        raise ArgumentError(f"sequence {sequence}: there are no tokens")
    return n_tokens


def is_packed(values):
    """Whether these are packed rows, or a list of them over layers."""
    if isinstance(values, (list, tuple)) and values:
        values = values[0]
    return getattr(values, "dtype", None) == np.uint8


def entries_of(items, n_values):
    """{sequence: value(s)} or a list of (sequence, value..) or (sequence, (value..)) as a list of flat tuples."""
    pairs = items.items() if isinstance(items, dict) else items
    entries = []
    for entry in pairs:
        entry = tuple(entry)
        if n_values > 1 and len(entry) == 2 and isinstance(entry[1], (tuple, list)):
            entry = (entry[0], *entry[1])
        if len(entry) != n_values + 1:
            raise ArgumentError(f"an item has {len(entry)} parts, expected {n_values + 1}: the sequence and "
                                f"{('q', 'k and v', 'k, v and q')[n_values - 1]}")
        entries.append(entry)
    return entries


def unify(items, side):
    """The dtype of one side of all items; where they differ, everything becomes float32."""
    pairs = [getattr(item, side) for item in items]
    if not pairs or pairs[0] is None:
        return dtypes.NONE
    numbers = {number for _, number in pairs}
    number = numbers.pop() if len(numbers) == 1 else dtypes.F32
    for item, (array, own) in zip(items, pairs):
        setattr(item, side, array if own == number else dtypes.to_f32(array, own))
    return number


def outputs_of(call):
    return (call.out, call.lses) if call.lse else call.out
