"""CRC-32C. Headers (60 bytes) go through one table; long bodies are summed by numpy in a tree.

The tree uses that a checksum without its first and last inversion is linear: that of two halves is the left
one's, moved over as many zero bytes as the right half has, xor the right one's.
"""

import numpy as np

POLYNOMIAL = 0x82F63B78
TREE_BYTES_MIN = 1024  # below, the plain loop is faster

_TABLE = []
for _value in range(256):
    for _ in range(8):
        _value = _value >> 1 ^ (POLYNOMIAL if _value & 1 else 0)
    _TABLE.append(_value)
_MASK = 0xFFFFFFFF


def _zero_byte(crc):
    return crc >> 8 ^ _TABLE[crc & 0xFF]


def _bytes_of(images):
    """What a linear map does to each byte of a word, [4, 256], from what it does to each of its 32 bits."""
    tables = np.zeros((4, 256), np.uint32)
    for bit, image in enumerate(images):
        tables[bit // 8, np.arange(256) >> bit % 8 & 1 == 1] ^= np.uint32(image)
    return tables


def _apply(tables, words):
    result = tables[0][words & 0xFF]
    for i in (1, 2, 3):
        result ^= tables[i][words >> np.uint32(8 * i) & np.uint32(0xFF)]
    return result


_moves = []  # _moves[k]: over 4 << k zero bytes


def _move(k):
    while len(_moves) <= k:
        images = [1 << bit for bit in range(32)]
        if not _moves:
            for _ in range(4):
                images = [_zero_byte(image) for image in images]
        else:
            twice = np.array(images, np.uint32)
            for _ in range(2):
                twice = _apply(_moves[-1], twice)
            images = [int(image) for image in twice]
        _moves.append(_bytes_of(images))
    return _moves[k]


def _tree(data):
    """Zeros in front do not change a checksum that starts with 0, so any length can be filled up."""
    words = np.zeros((len(data) + 3) // 4, "<u4")
    view = words.view(np.uint8)
    first = len(view) - len(data)
    view[first:] = np.frombuffer(data, np.uint8)
    view[first:first + 4] ^= 0xFF  # the start value, put into the data
    sums = _apply(_move(0), words.astype(np.uint32))
    k = 0
    while len(sums) > 1:
        if len(sums) % 2:
            sums = np.concatenate([np.zeros(1, np.uint32), sums])
        sums = _apply(_move(k), sums[0::2]) ^ sums[1::2]
        k += 1
    return int(sums[0]) ^ _MASK


def crc32c(data):
    if len(data) >= TREE_BYTES_MIN:
        return _tree(data)
    crc, table = _MASK, _TABLE
    for byte in bytes(data):
        crc = crc >> 8 ^ table[(crc ^ byte) & 0xFF]
    return crc ^ _MASK
