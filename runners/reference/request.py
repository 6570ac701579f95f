"""A request of the engine: what is asked, what has come of it, and how it can fail."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from longrecall.runners.reference.sampling import Sampling, TokenLogprob

FinishReason = Literal["stop", "length", "abort"]


class QueueFullError(RuntimeError):
    """The server holds as many requests as it may; try again later."""


class EngineStoppedError(RuntimeError):
    """The engine is not running."""


class Progress(NamedTuple):
    """What a step added to one request."""

    text: str
    tokens: tuple[TokenLogprob, ...]
    finished: bool
    error: Exception | None = None


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence to prefill and continue; the engine fills in the results."""

    token_ids: list[int]
    sampling: Sampling
    top_logprobs: int | None = None
    """Alternatives per generated token; None: no logprobs."""
    prompt_logprob_start: int | None = None
    """First prompt token whose forced logprob is wanted; None: none."""
    cache_salt: str = ""
    return_indexer_topk: bool = False
    sink: Callable[[Progress], None]
    """Called in the engine's thread after each step of this request; must not block."""
    stream: bool = True
    """False: the sink is called once, at the end, with an empty Progress."""

    cancelled: bool = False
    """Set it from any thread; the engine drops the request at its next step."""

    output_ids: list[int] = field(default_factory=list)
    output_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of prompt tokens from `prompt_logprob_start` on."""
    text: str = ""
    finish_reason: FinishReason | None = None
    matched_stop: str | int | None = None
    cached_tokens: int = 0
    indexer_topk: npt.NDArray[np.int32] | None = None
    """[tokens computed, n_indexer_layers, index_topk]."""
    received_s: float = field(default_factory=time.perf_counter)
    first_token_s: float | None = None
    finished_s: float | None = None
