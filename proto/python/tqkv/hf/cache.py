"""A Cache of transformers whose rows are sequences of a session."""

import contextlib
import itertools
import weakref

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ..errors import ArgumentError, Status, TqkvError

# Of each session: numbers that no cache of this process has used on it.
_numbers = weakref.WeakKeyDictionary()


def pool_description(config, name, *, blocks=256, block_size=16, preset=None, **members):
    """What tqkv.http.Control.create_pool() takes for the rows of a model: create_pool(**pool_description(..)).

    preset, or k= and v=, and every other member of a pool's JSON (core/pool_spec.h) may be given.
    """
    config = config.get_text_config(decoder=True)
    heads = config.num_attention_heads
    if preset is not None:
        members["preset"] = preset
    return {"name": name, "layers": config.num_hidden_layers, "q_heads": heads,
            "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "block_size": block_size, "blocks": blocks, **members}


class _Layer(CacheLayerMixin):
    """What transformers asks of one layer. The rows are in the daemon."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, cache, index):
        super().__init__()
        self._cache, self._index = weakref.ref(cache), index
        self.is_initialized = True

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *_, **__):
        return self._cache()._take(self._index, key_states, value_states)

    def get_seq_length(self):
        return self._cache()._seen[self._index]

    def get_mask_sizes(self, query_length):
        return self.get_seq_length() + query_length, 0

    def get_max_length(self):
        return -1

    get_max_cache_shape = get_max_length


class TqkvCache(Cache):
    """The K/V cache of one batch: a sequence of the session for each row of the batch.

    session: a tqkv.Session on a pool with the model's geometry (pool_description() makes one). config: the model's, to
    compare with the pool now instead of at the first step.

    Rows are sent as the model computes them, in its own dtype. The attention of a prompt is computed here while its
    rows are on their way; a decode step is one APPEND_DECODE per layer. A prompt after a prompt (a chat's next turn,
    the check of a speculation) attends to the new tokens here and to the stored ones there, and both parts are merged by
    their log-sum-exp. Padding is not stored.

    Beam search forks sequences, and so does copy.deepcopy(cache), for prompts that are used again; speculation
    truncates them. Everything that a cache holds is freed by close() or a
    `with` block; or by the session's end. Errors are tqkv.TqkvError; after one, the cache's rows are not all there:
    reset() it and prefill again.

    Not served: torch.compile, encoder-decoder models, soft caps, attention sinks, and layers that are not attention.
    """

    def __init__(self, session, config=None):
        self.session = session
        n_layers = session.geometry.n_layers
        self._seen = [0] * n_layers  # columns of the batch, padding included
        self._waiting = None  # (layer, number of columns): its rows wait for their query
        self.sequences = []  # of every row of the batch
        self.real = np.zeros((0, 0), bool)  # [rows of the batch, columns]: tokens that are stored
        self.pipeline = session.pipeline()
        if config is not None:
            self._compare(pool_description(config, ""))
        super().__init__(layers=[_Layer(self, index) for index in range(n_layers)])

    def _compare(self, model):
        g = self.session.geometry
        for what, expected, got in (("layers", model["layers"], g.n_layers), ("q_heads", model["q_heads"], g.q_heads),
                                    ("kv_heads", model["kv_heads"], g.kv_heads),
                                    ("head_dim", model["head_dim"], g.k_head_dim)):
            if expected != got:
                raise ArgumentError(f"the model has {what} {expected}: {g}")

    def __repr__(self):
        return f"<TqkvCache of {len(self.sequences)} sequences, {self.get_seq_length()} tokens: {self.session!r}>"

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or self.session._client.is_connected:
            self.close()

    def __deepcopy__(self, memo):
        """A cache of its own with the same tokens: how transformers reuses a prompt. The blocks are shared (FORK)."""
        self._settled()
        copied = memo[id(self)] = TqkvCache(self.session)
        copied._seen, copied.real = list(self._seen), self.real.copy()
        copied.sequences = [self._number() for _ in self.sequences]
        children = {child: parent for child, parent in zip(copied.sequences, self.sequences)
                    if parent in self.session._lengths}
        if children:
            self.session.fork(children)
        return copied

    # ---- a step ----

    def _take(self, layer, key, value):
        """Rows of a layer, on their way to the attention function, which finds the cache by the tensor."""
        if self._waiting is not None:
            raise ArgumentError(f"the attention of layer {self._waiting[0]} did not use the cache: call "
                                "model.set_attn_implementation(\"tqkv\") before generating")
        batch, _, n_tokens, _ = key.shape
        if not self.sequences:
            self._begin(batch)
        if batch != len(self.sequences):
            raise ArgumentError(f"the batch has {batch} rows, the cache {len(self.sequences)}")
        self._waiting = (layer, n_tokens)
        self._seen[layer] += n_tokens
        # A new object, so that nobody else's tensor is marked.
        key = key.view(key.shape)
        key._tqkv = (self, layer)
        return key, value

    def _begin(self, batch):
        self.sequences = [self._number() for _ in range(batch)]
        self.real = np.zeros((batch, 0), bool)

    def _number(self):
        """A sequence that the session does not have."""
        if self.session not in _numbers:
            _numbers[self.session] = itertools.count(max(self.session._lengths, default=0) + 1)
        return next(number for number in _numbers[self.session] if number not in self.session._lengths)

    def step_begins(self, layer, real):
        """The attention of a layer takes its rows. real: [rows of the batch, new columns]. Returns the earlier ones."""
        if self._waiting is None or self._waiting[0] != layer:
            raise ArgumentError(f"the rows of layer {layer} are not the cache's last")
        self._waiting = None
        first = self._seen[layer] - real.shape[1]
        if self.real.shape[1] == first:
            self.real = np.concatenate((self.real, real), axis=1)
        elif self.real.shape[1] != self._seen[layer] or (self.real[:, first:] != real).any():
            raise ArgumentError(f"layer {layer} has other tokens than the layers before it")
        return self.real[:, :first]

    # ---- what transformers calls ----

    def _settled(self):
        """No layer waits, every row is answered for, all layers are as long."""
        if self._waiting is not None or len(set(self._seen)) > 1:
            raise ArgumentError("the cache is in the middle of a step")
        self.pipeline.flush()

    def reset(self):
        """Forgets all tokens."""
        sequences, self.sequences = self.sequences, []
        self._waiting = None
        self._seen = [0] * len(self._seen)
        self.real = np.zeros((0, 0), bool)
        with contextlib.suppress(TqkvError):  # rows that were refused are forgotten with the others
            self.pipeline.flush()
        self._free(sequences)

    close = reset

    def _free(self, sequences):
        stored = [sequence for sequence in sequences if sequence in self.session._lengths]
        try:
            if stored:
                self.session.free(stored)
        except TqkvError as error:
            # Those whose first rows were refused need not be there.
            if not error.item_errors or any(item.status != Status.NOT_FOUND for item in error.item_errors):
                raise

    def crop(self, tokens_to_remove):
        """Removes that many tokens if it is negative, as the library asks; positive: shortens to that length."""
        self._settled()
        length = self.get_seq_length()
        keep = min(tokens_to_remove, length) if tokens_to_remove > 0 else max(length + tokens_to_remove, 0)
        if keep == length:
            return
        self.real = self.real[:, :keep]
        self._seen = [keep] * len(self._seen)
        lengths = {sequence: int(real.sum()) for sequence, real in zip(self.sequences, self.real)
                   if sequence in self.session._lengths}
        if lengths:
            self.session.truncate(lengths)

    def reorder_cache(self, beam_idx):
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        self.batch_select_indices(np.repeat(np.arange(len(self.sequences)), repeats))

    def batch_select_indices(self, indices):
        """Row i of the batch becomes what row indices[i] is. What is used again is forked, all in one frame."""
        if not self.sequences:
            return
        self._settled()
        indices = indices.tolist()
        before, used, after, children = self.sequences, set(), [], {}
        for index in indices:
            after.append(self._number() if index in used else before[index])
            if index in used and before[index] in self.session._lengths:
                children[after[-1]] = before[index]
            used.add(index)
        if children:
            self.session.fork(children)
        self.sequences, self.real = after, self.real[indices]
        self._free([sequence for index, sequence in enumerate(before) if index not in used])
