"""Keys, values and index keys of one sequence: `SequenceCache`, cheap to fork at any length.

A sequence is a shared, never rewritten prefix (rows [0, base_length) of somebody's `Block`) and a block of its own
for what came after. Blocks only grow at their end, so a fork and its parent cannot disturb each other, and forks of one
history share its memory: attention reads the prefix once for all of them.
"""

import torch
from torch import Tensor

from longrecall.runners.reference.config import ReferenceConfig

COPY_TAIL_UP_TO = 64
"""A fork inside a short tail copies it; inside a longer one the tail first becomes part of one contiguous block."""


class Block:
    """Rows of keys [L, rows, D], values [L, rows, D] and index keys [layers with an indexer, rows, D_index]."""

    def __init__(self, config: ReferenceConfig, rows: int, *, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.rows = rows
        layers, head_dim = config.num_hidden_layers, config.head_dim
        self.k = torch.empty(layers, rows, head_dim, device=device, dtype=dtype)
        self.v = torch.empty(layers, rows, head_dim, device=device, dtype=dtype)
        self.index_k = torch.empty(
            len(config.full_attention_layers), rows, config.index_head_dim, device=device, dtype=dtype
        )

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.k, self.v, self.index_k))

    def grown(self, rows: int, used: int) -> "Block":
        """A block of at least `rows` rows that begins with this one's first `used`."""
        bigger = Block(self.config, max(rows, 2 * self.rows), device=self.k.device, dtype=self.k.dtype)
        bigger.copy_from(self, 0, used, at=0)
        return bigger

    def copy_from(self, other: "Block", start: int, end: int, *, at: int) -> None:
        size = end - start
        self.k[:, at : at + size] = other.k[:, start:end]
        self.v[:, at : at + size] = other.v[:, start:end]
        self.index_k[:, at : at + size] = other.index_k[:, start:end]


class SequenceCache:
    """What the model remembers of one sequence. The model extends it; the engine forks it."""

    def __init__(self, config: ReferenceConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self.base: Block | None = None
        self.base_length = 0
        self.tail: Block | None = None
        self.tail_length = 0

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.base_length + self.tail_length

    @property
    def nbytes(self) -> int:
        """Bytes reachable from this cache; a shared prefix is counted in full."""
        return sum(block.nbytes for block in (self.base, self.tail) if block is not None)

    def reserve(self, extra: int) -> Block:
        """The own block, with room for `extra` rows after `tail_length`."""
        need = self.tail_length + extra
        if self.tail is None:
            # a branch grows by a question and a few answer tokens, a history by hundreds
            rows = need + 32 if self.base is not None else max(256, need + need // 4)
            self.tail = Block(self._config, rows, device=self._device, dtype=self._dtype)
        elif need > self.tail.rows:
            self.tail = self.tail.grown(need, self.tail_length)
        return self.tail

    def extended(self, tokens: int) -> None:
        """Count `tokens` rows, written into `reserve`'s block, as held."""
        self.tail_length += tokens

    def fork(self, length: int) -> "SequenceCache":
        """A sequence that begins with this one's first `length` tokens; ValueError when it holds fewer."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot fork at {length} tokens: the sequence holds {self.length}")
        new = SequenceCache(self._config, device=self._device, dtype=self._dtype)
        if self.base is not None and length > self.base_length + COPY_TAIL_UP_TO:
            self._make_contiguous()
        if self.base is None:
            new.base, new.base_length = (self.tail, length) if length else (None, 0)
            return new
        new.base, new.base_length = self.base, min(length, self.base_length)
        rest = length - new.base_length
        if rest:
            assert self.tail is not None
            new.reserve(rest).copy_from(self.tail, 0, rest, at=0)
            new.extended(rest)
        return new

    def _make_contiguous(self) -> None:
        """One own block instead of shared prefix and tail."""
        assert self.base is not None and self.tail is not None
        whole = Block(self._config, self.length + self.length // 4, device=self._device, dtype=self._dtype)
        whole.copy_from(self.base, 0, self.base_length, at=0)
        whole.copy_from(self.tail, 0, self.tail_length, at=self.base_length)
        self.tail, self.tail_length = whole, self.length
        self.base, self.base_length = None, 0

    def index_keys(self, layer_slot: int, tokens: int) -> Tensor:
        """Index keys [tokens, D_index] of the first `tokens` rows (rows just written into the tail included)."""
        if self.base is None:
            assert self.tail is not None
            return self.tail.index_k[layer_slot, :tokens]
        shared = self.base.index_k[layer_slot, : self.base_length]
        if tokens == self.base_length or self.tail is None:
            return shared[:tokens]
        return torch.cat((shared, self.tail.index_k[layer_slot, : tokens - self.base_length]))
