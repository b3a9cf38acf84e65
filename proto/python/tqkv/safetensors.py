"""A small reader and writer of safetensors files. numpy has no bfloat16: such tensors are uint16 (tqkv.from_bf16)."""

import json
import os

import numpy as np

HEADER_BYTES_MAX = 100 << 20
# bf16 first: a uint16 array is written as BF16, which is what uint16 means in this package.
DTYPES = {"BF16": "<u2", "F32": "<f4", "F16": "<f2", "F64": "<f8", "U16": "<u2", "I16": "<i2", "U8": "u1", "I8": "i1",
          "U32": "<u4", "I32": "<i4", "U64": "<u8", "I64": "<i8", "BOOL": "?"}


def _unique(pairs):
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return members


def _read_header(path):
    """(entries by name, metadata, where the data begins, its bytes)"""
    n_file = os.path.getsize(path)
    with open(path, "rb") as file:
        n = int.from_bytes(file.read(8), "little")
        if n_file < 8 or n > min(HEADER_BYTES_MAX, n_file - 8):
            raise ValueError(f"a header of {n} bytes in a file of {n_file}")
        header = json.loads(file.read(n).decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("the header is no object")
    metadata = header.pop("__metadata__", {})
    return header, metadata, 8 + n, n_file - 8 - n


def _check_entry(name, entry, n_data):
    """(dtype, shape, first byte) of one tensor."""
    try:
        dtype = np.dtype(DTYPES[entry["dtype"]])
        shape = tuple(entry["shape"])
        first, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"tensor {name!r}: {type(error).__name__} {error}") from error
    if any(type(part) is not int or part < 0 for part in (*shape, first, end)):
        raise ValueError(f"tensor {name!r}: shape {shape} or offsets {first}, {end} are no sizes")
    n_bytes = dtype.itemsize
    for part in shape:
        n_bytes *= part
    if end - first != n_bytes or end > n_data:
        raise ValueError(f"tensor {name!r}: shape {shape} of {entry['dtype']} takes {n_bytes} bytes, the offsets "
                         f"{first} to {end} of {n_data} hold {end - first}")
    return dtype, shape, first


def load(path):
    """({name: array}, {metadata}). The arrays are read-only views of the file, read when they are used.

    ValueError says what is wrong with a file, and in which tensor.
    """
    try:
        header, metadata, start, n_data = _read_header(path)
        data = np.memmap(path, np.uint8, "r", start, (n_data,)) if n_data else np.zeros(0, np.uint8)
        tensors = {}
        for name, entry in header.items():
            dtype, shape, first = _check_entry(name, entry, n_data)
            n_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            tensors[name] = data[first:first + n_bytes].view(dtype).reshape(shape)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a safetensors file that can be read: {error}") from error
    return tensors, metadata


def save(path, tensors, metadata=None):
    """Writes {name: array}; uint16 arrays as BF16. metadata: {text: text}."""
    names = {np.dtype(code): name for name, code in reversed(list(DTYPES.items()))}
    header, at, arrays = {}, 0, []
    if metadata:
        header["__metadata__"] = {str(key): str(value) for key, value in metadata.items()}
    for name, values in tensors.items():
        array = np.ascontiguousarray(values)
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if array.dtype not in names:
            raise TypeError(f"tensor {name!r}: {array.dtype} cannot be written")
        header[name] = {"dtype": names[array.dtype], "shape": list(np.shape(values)),
                        "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
        arrays.append(array)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays:
            file.write(array.tobytes())
