#!/usr/bin/env python3
"""Attention over rows of your own, in ten lines: the snippet of the README.

    build/server/tqkvd --listen unix:/tmp/tqkvd.sock --memory 1GiB \
        --pool name=demo,layers=1,q_heads=4,kv_heads=2,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=1024
    PYTHONPATH=proto/python proto/python/examples/ten_lines.py [ADDRESS]    # or TQKV_ADDR
"""
import os
import sys

import numpy as np
import tqkv

k = np.random.randn(100, 2, 64).astype(np.float32)             # [tokens, kv_heads, head_dim], after RoPE
v = np.random.randn(100, 2, 64).astype(np.float32)
q = np.random.randn(4, 64).astype(np.float32)                  # [q_heads, head_dim]
address = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("TQKV_ADDR", "unix:/tmp/tqkvd.sock")
with tqkv.Client(address) as client, client.open("demo") as session:
    session.append(1, layer=0, k=k, v=v)                       # sequence 1 is created
    out = session.decode(1, layer=0, q=q)                      # [q_heads, head_dim]
    print(out.shape, session.lengths())
