"""Attention over parts of one context, put together."""

import numpy as np

from . import dtypes
from .errors import ArgumentError


def _stack(what, parts):
    parts = [np.asarray(part, np.float64) for part in parts]
    if len({part.shape for part in parts}) > 1:
        raise ArgumentError(f"{what} of the parts have shapes {', '.join(str(part.shape) for part in parts)}: expected one "
                            "array for each part, all of the same shape")
    return np.stack(parts)


def merge(outs, lses):
    """Outputs and log-sum-exps of the same queries over parts of a context to those over the whole: (out, lse).

    outs: an array [..., v_head_dim] for each part, lses: [...] for each part, as decode(.., lse=True) gives them. What
    comes back is float32. A part that saw no token counts for nothing. At most one part may have been asked with
    sinks. With alibi, slope * (distance between the ends of the two parts) has to be taken off the lse of an earlier
    part before: each part counted from its own end.
    """
    if not len(outs) or len(outs) != len(lses):
        raise ArgumentError(f"{len(outs)} outputs and {len(lses)} log-sum-exps, expected as many, and at least one")
    outs = _stack("outputs", [dtypes.to_f32(*dtypes.as_rows("out", out)) for out in outs])
    lses = _stack("log-sum-exps", lses)
    if outs.shape[:-1] != lses.shape:
        raise ArgumentError(f"outputs have shape {outs.shape[1:]}, log-sum-exps {lses.shape[1:]}: expected the same "
                            "but for the last axis")
    if np.isnan(lses).any() or np.isposinf(lses).any():
        raise ArgumentError("a log-sum-exp is NaN or infinite")
    top = lses.max(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        weights = np.where(np.isneginf(lses), 0, np.exp(lses - top))
        total = weights.sum(axis=0)
        shares = np.where(total > 0, weights / total, 0)
        lse = top + np.log(total)
    out = np.where(shares[..., None] > 0, outs, 0)  # what counts for nothing may be anything
    return (shares[..., None] * out).sum(axis=0).astype(np.float32), lse.astype(np.float32)
