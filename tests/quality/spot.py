"""The same forward pass with its K and V in a daemon: what the batched passes stand for."""

import numpy as np
import tqkv
from daemon import Daemon

from model import Past, attention
from settings import PRESETS, format_of

# One attention output, float32 here against float64 there.
BOUND = 1e-4


class Rows:
    """Attention through a session: rows are appended, and query i is decoded as one that saw i + 1 tokens."""

    def __init__(self, session, setting):
        self.session, self.setting, self.error, self.is_same = session, setting, 0.0, True
        self.past, self.exact = Past(session.geometry.n_layers), Past(session.geometry.n_layers)

    def _packed(self, layer, side, rows):
        return self.setting.format(layer, side).pack(rows)

    def _through(self, layer, k, v):
        return [self.setting.rows(layer, side, rows).transpose(1, 0, 2) for side, rows in zip("kv", (k, v))]

    def _compare(self, there, here):
        self.error = max(self.error, float(np.linalg.norm(there - here) / np.linalg.norm(here)))
        return there

    def attend(self, layer, q, k, v):
        here = attention(q, *self._through(layer, k, v))
        with self.session.pipeline() as pipeline:
            pipeline.append(1, layer, k, v)
            futures = [pipeline.decode(1, layer, q[i], seen=i + 1) for i in range(len(q))]
            there = np.stack([future.result() for future in futures])
        for stored, rows, side in zip(self.session.read(1, layer, dtype="packed"), (k, v), "kv"):
            self.is_same = self.is_same and np.array_equal(stored, self._packed(layer, side, rows))
        return self._compare(there, here)

    def step(self, layer, q, k, v):
        """One token, as a frontend sends it."""
        seen = self.past.extend(layer, *self._through(layer, k, v))
        exact = self.exact.extend(layer, *(rows.transpose(1, 0, 2) for rows in (k, v)))
        recent = min(self.setting.recent, exact[0].shape[1])
        if recent:
            bf16 = format_of("bf16", self.setting.head_dim)
            seen = [np.concatenate((far[:, :-recent], bf16.through(near[:, -recent:])), axis=1)
                    for far, near in zip(seen, exact)]
        return self._compare(self.session.append_decode(2, layer, k[0], v[0], q[0])[None], attention(q, *seen))

    def read_back(self):
        """The bytes of what was sent one by one."""
        for layer, rows in enumerate(self.exact.rows):
            for stored, side, sent in zip(self.session.read(2, layer, dtype="packed"), "kv", rows):
                packed = self._packed(layer, side, sent.transpose(1, 0, 2))
                self.is_same = self.is_same and np.array_equal(stored, packed)


def spot_check(model, ids, n_tokens, n_steps, settings):
    """{name: figures} of the settings {name: (pool members, setting)}."""
    told = {}
    with Daemon() as daemon:
        control, geometry = tqkv.http.Control(daemon.http), {
            "q_heads": model.q_heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim, "block_size": 16}
        with tqkv.Client(daemon.addr, timeout=120) as client:
            for name, formats in PRESETS.items():
                control.create_pool(name=f"preset-{name}", layers=1, blocks=1, preset=name, **geometry)
                pool = client.pool_info(f"preset-{name}").json
                if (pool["k"], pool["v"]) != formats:
                    raise RuntimeError(f"preset {name} is {pool['k']} and {pool['v']}, expected {formats}")
            for name, (members, setting) in settings.items():
                blocks = (n_tokens + n_steps) // 16 + 2
                control.create_pool(name=name, layers=model.n_layers, blocks=blocks, **geometry, **members)
                with client.open(name) as session:
                    check = _check_window if setting.recent else _check
                    told[name] = check(model, ids, n_tokens, n_steps, session, setting)
                control.delete_pool(name)
    return told


def _check(model, ids, n_tokens, n_steps, session, setting):
    rows = Rows(session, setting)
    x = model.hidden(ids[:n_tokens], setting, attend=rows.attend)
    loss = float(model.predictions(x, ids[:n_tokens])[0].mean())
    batched = float(model.measure(ids[:n_tokens], setting)[0].mean())
    for token in ids[:n_steps]:
        model.hidden([token], setting, rows.past, attend=rows.step)
    rows.read_back()
    return {"n": n_tokens, "steps": n_steps, "loss": loss, "batched_loss": batched, "output_error": rows.error,
            "same_bytes": rows.is_same}


def _check_window(model, ids, _, n_steps, session, setting):
    """One by one only, and longer than the window: a decode of fewer tokens than are stored has another one."""
    n = n_steps + setting.recent
    rows, outs = Rows(session, setting), []
    for token in ids[:n]:
        outs.append(model.hidden([token], setting, rows.past, attend=rows.step))
    rows.read_back()
    loss = float(model.predictions(np.concatenate(outs), ids[:n])[0].mean())
    return {"n": n, "steps": n, "loss": loss, "batched_loss": float(model.measure(ids[:n], setting)[0].mean()),
            "output_error": rows.error, "same_bytes": rows.is_same}
