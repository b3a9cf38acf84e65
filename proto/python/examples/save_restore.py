#!/usr/bin/env python3
"""Saves a prompt's cache to a file and restores it into a second session: offload means restore.

Needs a running daemon with an HTTP port; makes a pool of its own and deletes it at the end.

    PYTHONPATH=proto/python proto/python/examples/save_restore.py --addr unix:/tmp/tqkvd.sock --http 127.0.0.1:7871

Rows are read as they are stored and appended as they are: the file has the bytes of the pool, and the second session
answers bit for bit as the first one did. The pool's description is kept beside them; a pool of any other is refused,
and the member that differs is named. examples/chat.py keeps whole conversations so.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import numpy as np  # noqa: E402
import tqkv  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]


def load_capture(path):
    """(layers, k, v, q) with rows as [layers, tokens, heads, head_dim]."""
    tensors, _ = tqkv.safetensors.load(path)
    layers = sorted(int(name[2:]) for name in tensors if name.startswith("k."))
    if not layers:
        raise SystemExit(f"{path}: no tensors k.{{layer}}, v.{{layer}}, q.{{layer}}")
    return (layers, *(np.stack([tensors[f"{side}.{layer}"] for layer in layers]) for side in "kvq"))


def f32(rows):
    return tqkv.from_bf16(rows) if rows.dtype == np.uint16 else rows.astype(np.float32)


def attention(q, k, v):
    """Exact, in float64: q [q_heads, dim], k and v [tokens, kv_heads, dim]."""
    group = q.shape[0] // k.shape[1]
    out = np.zeros((q.shape[0], v.shape[2]))
    for head in range(q.shape[0]):
        logits = k[:, head // group].astype(np.float64) @ q[head].astype(np.float64) / np.sqrt(q.shape[1])
        weights = np.exp(logits - logits.max())
        out[head] = weights @ v[:, head // group].astype(np.float64) / weights.sum()
    return out


def save(session, sequence, path, description):
    packed = session.read(sequence, dtype="packed")
    tensors = {f"{side}.{layer}": rows for side, layers in zip("kv", packed) for layer, rows in enumerate(layers)}
    tqkv.safetensors.save(path, tensors, {"pool": json.dumps(description)})
    return packed


def restore(client, pool, sequence, path):
    """(a new session, the sequence's length in it)"""
    tensors, metadata = tqkv.safetensors.load(path)
    session = client.open(pool, expected_json=metadata["pool"])
    k, v = ([tensors[f"{side}.{layer}"] for layer in range(session.geometry.n_layers)] for side in "kv")
    return session, session.append_layers(sequence, k, v, packed=True)


def decode_all(session, sequence, queries):
    return [session.decode(sequence, layer, q) for layer, q in enumerate(queries)]


def main():
    parser = argparse.ArgumentParser(description="Save a prompt's cache and restore it into a second session.")
    parser.add_argument("--addr", default=os.environ.get("TQKV_ADDR", "unix:/run/tqkv/tqkvd.sock"))
    parser.add_argument("--http", default=os.environ.get("TQKV_HTTP", "127.0.0.1:7871"))
    parser.add_argument("--capture", default=next((ROOT / "tests/golden/captures").glob("*.safetensors"), None))
    parser.add_argument("--format", default="tq4", help="of K and V: tq4, bf16, f32, .. (default tq4)")
    parser.add_argument("--file", help="where to keep the cache (default: a file that is removed)")
    args = parser.parse_args()
    layers, k, v, q = load_capture(args.capture)
    n_layers, n_tokens, kv_heads, head_dim = k.shape
    control = tqkv.http.Control(args.http)
    pool = f"save-restore-{os.getpid()}"
    control.create_pool(name=pool, layers=n_layers, q_heads=q.shape[2], kv_heads=kv_heads, head_dim=head_dim,
                        k=args.format, v=args.format, block_size=16, blocks=n_tokens // 16 + 1)
    try:
        with tempfile.TemporaryDirectory() as folder:
            return run(args, pool, args.file or os.path.join(folder, "cache.safetensors"), layers, k, v, q[:, -1])
    finally:
        control.delete_pool(pool)


def run(args, pool, path, layers, k, v, queries):
    queries = [f32(q) for q in queries]
    with tqkv.Client(args.addr) as client, client.open(pool) as session:
        session.append_layers(1, k, v)
        before = decode_all(session, 1, queries)
        packed = save(session, 1, path, client.pool_info(pool).json)
    print(f"saved {k.shape[1]} tokens on {k.shape[0]} layers: {sum(part.nbytes for part in packed)} bytes in the pool, "
          f"{os.path.getsize(path)} bytes in the file; the session is closed")
    with tqkv.Client(args.addr) as client:
        session, n_tokens = restore(client, pool, 1, path)
        print(f"restored {n_tokens} tokens into a second session")
        after, again = decode_all(session, 1, queries), session.read(1, dtype="packed")
        session.close()
    print("layer   error of the output   after from before")
    for layer, q, first, second in zip(range(len(layers)), queries, before, after):
        exact = attention(q, f32(k[layer]), f32(v[layer]))
        print(f"{layers[layer]:5}   {np.linalg.norm(first - exact) / np.linalg.norm(exact):19.5f}   "
              f"{np.abs(second - first).max():17.1e}")
    is_same = all(np.array_equal(first, second) for first, second in zip([*packed, *before], [*again, *after]))
    print("every row and every output is the same to the bit" if is_same else "the restored session is another one")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
