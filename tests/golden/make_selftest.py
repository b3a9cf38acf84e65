#!/usr/bin/env python3
"""Expected numbers of the daemon's self-test (core/selftest.c), from the independent codec of reference.py.

usage: make_selftest.py            writes core/selftest_golden.h
       make_selftest.py --check    compares with what is there; exit 1 on any difference

One layer, two query heads on one KV head, head_dim 64, tq4, 40 tokens. Rows and queries come from the generator of
make_rows.py (the C side draws the same numbers): K rows with lengths of three sizes, V rows of two, queries long
enough that the softmax favours some tokens and forgets none. Attention in float64 over the decoded rows.
"""
import pathlib
import sys

import numpy as np
from make_rows import Lcg
from reference import Tq

HEAD_DIM = 64
N_TOKENS = 40
Q_HEADS = 2
SEED = 7870
TARGET = pathlib.Path(__file__).resolve().parents[2] / "core" / "selftest_golden.h"


def uniform(lcg, n):
    """Numbers in [-1, 1) that float32 holds exactly."""
    return np.array([lcg.bits24() / 2.0**23 - 1.0 for _ in range(n)])


def inputs():
    lcg = Lcg(SEED)
    k = np.array([uniform(lcg, HEAD_DIM) * 2.0 ** (t % 3 - 1) for t in range(N_TOKENS)])
    v = np.array([uniform(lcg, HEAD_DIM) * 2.0 ** (t % 2) for t in range(N_TOKENS)])
    q = np.array([uniform(lcg, HEAD_DIM) * 8.0 for _ in range(Q_HEADS)])
    return k, v, q


def expected():
    k, v, q = inputs()
    codec = Tq(HEAD_DIM, 4)
    k, v = (
        np.array([codec.decode(codec.encode(row.astype(np.float32))) for row in rows], dtype=np.float64)
        for rows in (k, v)
    )
    logits = q @ k.T / np.sqrt(HEAD_DIM)
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - top)
    total = weights.sum(axis=1, keepdims=True)
    return weights / total @ v, (top + np.log(total))[:, 0]


def header():
    out, lse = expected()
    rms = np.sqrt((out**2).mean())
    lines = [
        "/*",
        " * Made by tests/golden/make_selftest.py, do not edit. Expected output and log-sum-exp of core/selftest.c.",
        " */",
        "#ifndef CORE_SELFTEST_GOLDEN_H",
        "#define CORE_SELFTEST_GOLDEN_H",
        "",
        f"/* Root mean square of the outputs: {rms:.4f} */",
        f"static const float selftest_out[{Q_HEADS}][{HEAD_DIM}] = {{",
    ]
    rows = ["\t{ " + ", ".join(f"{np.float32(x):.8e}f" for x in row) + " }" for row in out]
    lines.append(",\n".join(rows))
    numbers = ", ".join(f"{np.float32(x):.8e}f" for x in lse)
    lines += ["};", f"static const float selftest_lse[{Q_HEADS}] = {{ {numbers} }};", "", "#endif", ""]
    return "\n".join(lines)


def main():
    if sys.argv[1:] == ["--check"]:
        # The file in the tree is laid out by clang-format: white space does not count.
        if not TARGET.exists() or "".join(TARGET.read_text(encoding="ascii").split()) != "".join(header().split()):
            sys.exit(f"{TARGET}: differs from what make_selftest.py computes")
        return
    if sys.argv[1:]:
        sys.exit(__doc__)
    TARGET.write_text(header(), encoding="ascii")


if __name__ == "__main__":
    main()
