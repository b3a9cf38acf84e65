"""What tests of rows share: pools, exact attention, a daemon per class, and that every block comes back."""

import random
import time
import unittest

import numpy as np
import tqkv
from daemon import Daemon

ODD = "name=odd,layers=3,q_heads=6,kv_heads=2,k_head_dim=48,v_head_dim=32,k=f32,v=f32,block_size=16,blocks=128"
SMALL = "name=small,layers=1,q_heads=2,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=8"
TQ4 = "name=tq4,layers=2,q_heads=4,kv_heads=2,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=512"
BF16 = "name=bf16,layers=2,q_heads=8,kv_heads=1,head_dim=64,k=bf16,v=bf16,block_size=32,blocks=64"
WIDE = "name=wide,layers=2,q_heads=8,kv_heads=8,head_dim=128,k=bf16,v=bf16,block_size=64,blocks=64"

# FORMATS 3: what b = 4 loses of a unit vector at d = 128 (a little less at 64), squared.
TQ4_ERROR = 0.009314788
# float64 sums, rounded to float32 once; attention over the rows that are stored.
EXACT = 1e-5


def attention(q, k, v, scale=None):
    """Exact attention: q [q_heads, dim], k and v [tokens, kv_heads, dim]; (out, log-sum-exp)."""
    q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
    group = q.shape[0] // k.shape[1]
    out, lse = np.zeros((q.shape[0], v.shape[2])), np.full(q.shape[0], -np.inf)
    for head in range(q.shape[0] if len(k) else 0):
        logits = k[:, head // group] @ q[head] * (scale or 1 / np.sqrt(q.shape[1]))
        weights = np.exp(logits - logits.max())
        lse[head] = np.log(weights.sum()) + logits.max()
        out[head] = weights @ v[:, head // group] / weights.sum()
    return out, lse


def attention_row(q, k, v, scale=None, *, end=None, window=0, sink_tokens=0, softcap=0, alibi=None, sinks=None):
    """The same with all options: one query row that sees `end` tokens, the newest at end - 1. Plain masks, no ranges."""
    q, k, v = (np.asarray(part, np.float64) for part in (q, k, v))
    end = len(k) if end is None else end
    token = np.arange(len(k))
    is_seen = (token < end) & ((token >= end - window) | (token < sink_tokens) if window else True)
    group = q.shape[0] // k.shape[1]
    out, lse = np.zeros((q.shape[0], v.shape[2])), np.zeros(q.shape[0])
    for head in range(q.shape[0]):
        logits = k[:, head // group] @ q[head] * (scale or 1 / np.sqrt(q.shape[1]))
        logits = softcap * np.tanh(logits / softcap) if softcap else logits
        logits = logits + (0 if alibi is None else alibi[head] * (token - (end - 1.0)))
        logits = np.append(np.where(is_seen, logits, -np.inf), -np.inf if sinks is None else sinks[head])
        if np.isneginf(logits).all():
            lse[head] = -np.inf
            continue
        weights = np.exp(logits - logits.max())
        lse[head] = np.log(weights.sum()) + logits.max()
        out[head] = weights[:-1] @ v[:, head // group] / weights.sum()
    return out, lse


def distance(got, exact):
    """Relative, in length."""
    norm = np.linalg.norm(exact)
    return np.linalg.norm(np.asarray(got, np.float64) - exact) / (norm if norm else 1)


class Rows(unittest.TestCase):
    """A base without tests of its own."""

    @classmethod
    def pools(cls):
        return [ODD, SMALL, TQ4, BF16, WIDE]

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(*(part for pool in cls.pools() for part in ("--pool", pool)))
        cls.control = tqkv.http.Control(cls.daemon.http)
        seed = random.randrange(1 << 32)
        print(f"seed {seed}")
        cls.rng = np.random.default_rng(seed)

    @classmethod
    def tearDownClass(cls):
        code = cls.daemon.stop()
        assert code == 0, (code, cls.daemon.log())

    def setUp(self):
        self.client = tqkv.Client(self.daemon.addr, timeout=60, name="test_rows")

    def tearDown(self):
        self.client.close()
        # Every block is back once the sessions of the test are closed.
        end = time.monotonic() + 20
        while time.monotonic() < end:
            totals = self.control.occupancy()["totals"]
            if totals["blocks"]["free"] == totals["blocks"]["total"]:
                return
            time.sleep(0.02)
        self.fail(self.control.occupancy())

    def rows(self, session, n, scale=1.0, layers=None):
        g = session.geometry
        lead = () if layers is None else (layers,)
        return (self.rng.standard_normal((*lead, n, g.kv_heads, g.k_head_dim), np.float32) * np.float32(scale),
                self.rng.standard_normal((*lead, n, g.kv_heads, g.v_head_dim), np.float32) * np.float32(scale))

    def query(self, session, scale=1.0):
        g = session.geometry
        return self.rng.standard_normal((g.q_heads, g.k_head_dim), np.float32) * np.float32(scale)

    def raises(self, status, call, *args, **kwargs):
        for _ in range(20):
            with self.assertRaises(tqkv.TqkvError) as raised:
                call(*args, **kwargs)
            # A client that tries again may find the end of its time in the middle of its last attempt.
            if "timeout" not in kwargs or raised.exception.status_name != "DEADLINE":
                break
        self.assertEqual(raised.exception.status_name, status.name, raised.exception)
        return raised.exception

    def lone(self):
        """A client that raises refusals at once."""
        client = tqkv.Client(self.daemon.addr, timeout=60, retry=False)
        self.addCleanup(client.close)
        return client
