"""What is done with sequences as a whole: cut, forked, pinned, published, matched, sent away and fetched. Part of Session."""

import numpy as np

from . import _wire as wire
from ._arguments import POSITION_MAX, encoded, sequence_id, sequence_ids, whole
from ._rows import Item
from .errors import ArgumentError, ArgumentTypeError, Status, TqkvError


class SequenceOps:
    def truncate(self, sequence, length=None, timeout=None):
        """Shortens a sequence on every layer to at most this length; or many: truncate({sequence: length})."""
        lengths = sequence if length is None else {sequence: length}
        if not isinstance(lengths, dict):
            raise ArgumentTypeError("truncate() takes a sequence and a length, or {sequence: length}")
        items = [Item(sequence_id(sequence), whole("length", length, 0, POSITION_MAX))
                 for sequence, length in lengths.items()]
        self._run_items(wire.TRUNCATE, items, timeout)

    def free(self, sequences, timeout=None):
        """Forgets one sequence or many and gives their blocks back."""
        self._run_items(wire.FREE, [Item(sequence) for sequence in sequence_ids(sequences)], timeout)

    def fork(self, child, parent=None, length=None, timeout=None):
        """Makes a sequence of the first `length` tokens of another (None: all that every layer has); returns its
        length. Or many: fork({child: parent}), fork({child: (parent, length)}), which returns {child: length}.

        The child shares the parent's memory; whoever writes into a shared block first gets a copy of that block.
        Child ids must be new. Many children of one parent are one frame.
        """
        pairs = child if isinstance(child, dict) else {child: (parent, length)}
        items = []
        for child_id, source in pairs.items():
            parent_id, at = source if isinstance(source, tuple) else (source, None)
            at = wire.PLANNED if at is None else whole("length", at, 0, POSITION_MAX)
            items.append(Item(sequence_id(child_id), at, parent=sequence_id(parent_id)))
        self._run_items(wire.FORK, items, timeout)
        return {item.sequence: item.length for item in items} if isinstance(child, dict) else items[0].length

    def pin(self, sequences, timeout=None):
        """While a sequence is pinned it is not evicted. Pins are counted, and go with the sequence."""
        self._run_items(wire.PIN, [Item(sequence) for sequence in sequence_ids(sequences)], timeout)

    def unpin(self, sequences, timeout=None):
        """Undoes one pin() each; BAD_STATE where there is none."""
        self._run_items(wire.UNPIN, [Item(sequence) for sequence in sequence_ids(sequences)], timeout)

    # ---- published prefixes ----

    def publish(self, sequence, tokens, adapter="", salt="", ttl_ms=0, timeout=None):
        """Offers the whole blocks among the sequence's first len(tokens) tokens to other sequences of this tenant.

        tokens: the ids of all tokens from the first one on. adapter and salt: what else the rows depend on; others
        must give the same. ttl_ms: after so long without use they go (0: when memory is short). Returns how many
        tokens are published now. They outlive the sequence.
        """
        reply = self._prefix(wire.PUBLISH, sequence_id(sequence), tokens, adapter, salt, 0,
                             whole("ttl_ms", ttl_ms, 0, 0xFFFFFFFF), timeout)
        return reply.op.n_tokens

    def match(self, sequence, tokens, adapter="", salt="", evictable=False, timeout=None):
        """Makes a sequence of the longest published prefix of the tokens, without sending its rows; returns its
        length, in whole blocks. 0: there is none, and no sequence was made. sequence None: only tells the length."""
        flags = (wire.PREFIX_EVICTABLE if evictable else 0) | (wire.PREFIX_PROBE if sequence is None else 0)
        number = 0 if sequence is None else sequence_id(sequence)
        try:
            reply = self._prefix(wire.MATCH, number, tokens, adapter, salt, flags, 0, timeout)
        except TqkvError as error:
            if error.status == Status.NOT_FOUND:
                return 0
            raise
        if number:
            self._lengths[number] = [reply.op.n_tokens] * self.geometry.n_layers
        return reply.op.n_tokens

    def _prefix(self, op, sequence, tokens, adapter, salt, flags, ttl_ms, timeout):
        self._check()
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
            raise ArgumentError(f"tokens have shape {ids.shape} and dtype {ids.dtype}, expected a list of whole numbers")
        if ids.min() < 0 or ids.max() > 0xFFFFFFFF:
            raise ArgumentError("a token id leaves 32 bits")
        texts = [encoded("adapter or salt", text) for text in (adapter, salt)]
        if max(map(len, texts)) > wire.PREFIX_TEXT_BYTES_MAX:
            raise ArgumentError(f"adapter and salt have at most {wire.PREFIX_TEXT_BYTES_MAX} bytes")
        packed = wire.LAYOUTS["prefix_req"].pack(
            sequence=sequence, n_tokens=len(ids), adapter_bytes=len(texts[0]), salt_bytes=len(texts[1]), flags=flags,
            ttl_ms=ttl_ms)
        deadline = self._client._deadline(timeout)
        payload = ids.astype("<u4").tobytes() + b"".join(texts)
        if sequence:
            self._settle([sequence], deadline)
            self._unsure.add(sequence)
        try:
            reply = self._client._run([lambda: self._client._submit(op, packed, payload, session=self.handle,
                                                                    deadline=deadline)], deadline)[0]
        except TqkvError as error:
            if error.is_local or not sequence:
                raise
            detail = error.detail
            if error.status == Status.POSITION:
                detail = f"{len(ids)} token ids are given, it has {error.expected} tokens on all layers"
            raise error.copy(detail=f"{wire.opcode_name(op)}: sequence {sequence}: {detail}") from None
        self._unsure.discard(sequence)
        return reply

    def spill(self, sequences, timeout=None):
        """Lets one sequence or many leave the pool for a slower tier of the server, until somebody needs them.

        Returns when they have begun to go; tell() says `spilled` once they are out. Using one meanwhile keeps it."""
        self._run_items(wire.SPILL, [Item(sequence) for sequence in sequence_ids(sequences)], timeout)

    def prefetch(self, sequences, timeout=None):
        """Begins to bring spilled sequences back, so that the next decode does not have to wait for that."""
        self._run_items(wire.PREFETCH, [Item(sequence) for sequence in sequence_ids(sequences)], timeout)

    def _run_items(self, op, items, timeout):
        self._check()
        if not items:
            return
        deadline = self._client._deadline(timeout)
        call = self._call(op, items)
        self._unsure.update(item.sequence for item in items)
        call.run(deadline, self._client._pauses())
        for item in items:
            if item.status == Status.OK:
                was_known = item.sequence in self._lengths
                self._cut(op, item)
                if op in (wire.FREE, wire.FORK) or was_known:
                    self._unsure.discard(item.sequence)
        self._finish(call)

    def _cut(self, op, item):
        if op == wire.FREE:
            self._lengths.pop(item.sequence, None)
        elif op == wire.FORK:
            self._lengths[item.sequence] = [item.length] * self.geometry.n_layers
        elif op == wire.TRUNCATE and item.sequence in self._lengths:
            self._lengths[item.sequence] = [min(length, item.position) for length in self._lengths[item.sequence]]
