"""What the engine asks of a model: packed prefill, batched decode, and per-sequence caches that fork.

`ReferenceModel` is one implementation; the engine's tests use a tiny transformer that is another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

Logits = Literal["none", "last", "all"]


class SequenceCache(Protocol):
    """Keys and values of one sequence, extended in place."""

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        ...

    def fork(self, length: int) -> "SequenceCache":
        """A cache of its own over the first `length` tokens; this one may go on growing."""
        ...


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one sequence, to be appended to its cache."""

    tokens: Sequence[int]
    cache: SequenceCache
    logits: Logits


class Model(Protocol):
    """A causal language model. One thread calls it."""

    capture_indexer_topk: bool
    """Ask for `last_indexer_topk` after each call."""
    last_indexer_topk: torch.Tensor | None
    """[tokens of the last call in packed order, n_indexer_layers, index_topk] int32, -1 = none."""

    def new_cache(self) -> SequenceCache: ...

    def prefill(self, chunks: list[Chunk]) -> list[torch.Tensor]:
        """Appends each chunk to its cache; fp32 logits [n, V] per chunk with n = 0, 1 or len(tokens)."""
        ...

    def decode(self, tokens: list[int], caches: list[SequenceCache]) -> torch.Tensor:
        """Appends one token to each cache; fp32 logits [B, V]."""
        ...
