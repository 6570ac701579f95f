"""Choosing a token from logits, its logprob, and where a stop string may begin."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen and when to end."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None


class TokenLogprob(NamedTuple):
    """A token with its natural-log probability (before temperature) and the most probable alternatives."""

    token_id: int
    logprob: float | None
    """None: not computed (the first token of a prompt)."""
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: torch.Tensor, targets: Sequence[int], tops: Sequence[int]) -> list[TokenLogprob]:
    """Log-probabilities of `targets` under the rows of `logits` [n, V], with the tops[i] best of each row."""
    normaliser = torch.logsumexp(logits, dim=-1)
    index = torch.tensor(targets, device=logits.device)
    picked: list[float] = (logits.gather(1, index[:, None]).squeeze(1) - normaliser).tolist()
    most = max(tops, default=0)
    if most:
        values, ids = logits.topk(most, dim=-1)
        best_values: list[list[float]] = (values - normaliser[:, None]).tolist()
        best_ids: list[list[int]] = ids.tolist()
    result = []
    for i, (target, logprob, top) in enumerate(zip(targets, picked, tops, strict=True)):
        best = tuple(zip(best_ids[i][:top], best_values[i][:top], strict=True)) if top else ()
        result.append(TokenLogprob(target, logprob, best))
    return result


def draw(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A sample from one row [V], after temperature, then top-k, then top-p."""
    scaled = logits.float().cpu() / sampling.temperature
    if not sampling.top_k and sampling.top_p >= 1:  # no need to sort
        return int(torch.multinomial(torch.softmax(scaled, dim=-1), 1, generator=generator))
    values, ids = scaled.topk(min(sampling.top_k or len(scaled), len(scaled)))
    probabilities = torch.softmax(values, dim=-1)
    before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(before >= sampling.top_p, 0.0)
    return int(ids[torch.multinomial(probabilities, 1, generator=generator)])


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of `text` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
