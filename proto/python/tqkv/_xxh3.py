"""XXH3-128 without a seed, of 4 bytes or more: the hash by which a pool's JSON names matrices and codebooks."""

import struct

import numpy as np

MASK = 2**64 - 1
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e")
P32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
P64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
STRIPE, STRIPES_OF_BLOCK = 64, (len(SECRET) - 64) // 8


def _u64(data, at):
    return int.from_bytes(data[at:at + 8], "little")


def _u32(data, at):
    return int.from_bytes(data[at:at + 4], "little")


def _swap(x, n_bytes):
    return int.from_bytes(x.to_bytes(n_bytes, "little"), "big")


def _avalanche(x):
    x = (x ^ x >> 37) * 0x165667919E3779F9 & MASK
    return x ^ x >> 32


def _fold(a, b):
    product = a * b
    return product & MASK ^ product >> 64


def _of_4_to_8(data):
    n = len(data)
    keyed = (_u32(data, 0) | _u32(data, n - 4) << 32) ^ _u64(SECRET, 16) ^ _u64(SECRET, 24)
    product = keyed * (P64[0] + 4 * n)
    low, high = product & MASK, product >> 64
    high = (high + 2 * low) & MASK
    low ^= high >> 3
    low = (low ^ low >> 35) * 0x9FB21C651E98DF25 & MASK
    return low ^ low >> 28, _avalanche(high)


def _of_9_to_16(data):
    n = len(data)
    first, last = _u64(data, 0), _u64(data, n - 8)
    product = (first ^ last ^ _u64(SECRET, 32) ^ _u64(SECRET, 40)) * P64[0]
    low, high = (product + ((n - 1) << 54)) & MASK, product >> 64
    last ^= _u64(SECRET, 48) ^ _u64(SECRET, 56)
    high = (high + last + (last & 0xFFFFFFFF) * (P32[1] - 1)) & MASK
    low ^= _swap(high, 8)
    product = low * P64[1]
    return _avalanche(product & MASK), _avalanche((product >> 64) + high * P64[1] & MASK)


def _mix(state, data, first, second, key):
    def fold(at, key):
        return _fold(_u64(data, at) ^ _u64(SECRET, key), _u64(data, at + 8) ^ _u64(SECRET, key + 8))

    low, high = state
    low = (low + fold(first, key) & MASK) ^ (_u64(data, second) + _u64(data, second + 8) & MASK)
    high = (high + fold(second, key + 16) & MASK) ^ (_u64(data, first) + _u64(data, first + 8) & MASK)
    return low, high


def _of_17_to_240(data):
    n = len(data)
    state = (n * P64[0] & MASK, 0)
    if n <= 128:
        for i in reversed(range((n - 1) // 32 + 1)):
            state = _mix(state, data, 16 * i, n - 16 * (i + 1), 32 * i)
    else:
        for i in range(n // 32):
            if i == 4:
                state = tuple(_avalanche(half) for half in state)
            state = _mix(state, data, 32 * i, 32 * i + 16, 32 * i if i < 4 else 3 + 32 * (i - 4))
        if n < 160:
            state = tuple(_avalanche(half) for half in state)
        state = _mix(state, data, n - 16, n - 32, 136 - 17 - 16)
    low, high = state
    mixed = (low * P64[0] + high * P64[3] + n * P64[1]) & MASK
    return _avalanche(low + high & MASK), -_avalanche(mixed) & MASK


def _accumulate(lanes, stripes, keys):
    """Adds [stripes, 8] numbers; within a block the order does not matter."""
    keyed = stripes ^ keys
    products = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    swapped = stripes.reshape(-1, 4, 2)[:, :, ::-1].reshape(-1, 8)
    return lanes + products.sum(axis=0, dtype=np.uint64) + swapped.sum(axis=0, dtype=np.uint64)


def _keys(first, n):
    return np.stack([np.frombuffer(SECRET, "<u8", 8, first + 8 * i) for i in range(n)])


def _of_many(data):
    n = len(data)
    lanes = np.array([P32[2], P64[0], P64[1], P64[2], P64[3], P32[1], P64[4], P32[0]], np.uint64)
    block_keys, scramble_key = _keys(0, STRIPES_OF_BLOCK), _keys(len(SECRET) - STRIPE, 1)[0]
    n_blocks = (n - 1) // (STRIPE * STRIPES_OF_BLOCK)
    n_stripes = (n - 1) // STRIPE
    words = np.frombuffer(data, "<u8", n_stripes * 8).astype(np.uint64).reshape(-1, 8)
    for first in range(0, n_blocks * STRIPES_OF_BLOCK, STRIPES_OF_BLOCK):
        lanes = _accumulate(lanes, words[first:first + STRIPES_OF_BLOCK], block_keys)
        lanes = (lanes ^ lanes >> np.uint64(47) ^ scramble_key) * np.uint64(P32[0])
    rest = words[n_blocks * STRIPES_OF_BLOCK:]
    lanes = _accumulate(lanes, rest, block_keys[:len(rest)])
    last = np.frombuffer(data[n - STRIPE:], "<u8").astype(np.uint64).reshape(1, 8)
    lanes = [int(lane) for lane in _accumulate(lanes, last, _keys(len(SECRET) - STRIPE - 7, 1))]

    def merge(key, start):
        return _avalanche((start + sum(_fold(lanes[i] ^ _u64(SECRET, key + 8 * i),
                                             lanes[i + 1] ^ _u64(SECRET, key + 8 * i + 8))
                                       for i in range(0, 8, 2))) & MASK)

    return merge(11, n * P64[0] & MASK), merge(len(SECRET) - 64 - 11, ~(n * P64[1]) & MASK)


def xxh3_128(data):
    """32 hex digits, the high half first."""
    data = bytes(data)
    n = len(data)
    if n < 4:
        raise ValueError(f"{n} bytes: expected 4 or more")
    low, high = (_of_4_to_8 if n <= 8 else _of_9_to_16 if n <= 16 else _of_17_to_240 if n <= 240 else _of_many)(data)
    return struct.pack(">QQ", high, low).hex()
