"""Synthetic indexer inputs: Gaussian keys, a needle of chosen strength for each query, outlier channels on request.

Gaussian keys and head weights of random sign are pessimistic (no key is easier to find than another); they make
formats comparable, not models predictable. Captured activations (`capture.py`) are the other source.
"""

import torch
from torch import Tensor

from longrecall.kernels.indexer.emulate import Activations
from longrecall.kernels.indexer.presets import Preset
from longrecall.kernels.indexer.reference import indexer_logits_ref


def _needle_keys(q: Tensor, weights: Tensor, noise: Tensor, target: Tensor) -> Tensor:
    """Keys noise + a * direction of each query, with a found so that the score is the target. q [T, H, D]."""
    direction = (weights.clamp(min=0).unsqueeze(2) * q).sum(1)
    direction = direction / direction.norm(dim=1, keepdim=True) * q.shape[2] ** 0.5
    low, high = torch.zeros(q.shape[0], 1), torch.full((q.shape[0], 1), 64.0)
    for _ in range(40):
        middle = (low + high) / 2
        score = indexer_logits_ref(q, (noise + middle * direction).unsqueeze(1), weights)
        low, high = torch.where(score < target, middle, low), torch.where(score < target, high, middle)
    return noise + high * direction


def synthetic(
    preset: Preset,
    tokens: int,
    *,
    generator: torch.Generator,
    queries: int = 8,
    needle_sigma: float | None = 4.0,
    needle_keys: int = 2,
    outlier_channels: int = 0,
    outlier_gain: float = 20.0,
    crowding: float = 0.0,
) -> Activations:
    """Activations of the last token of `queries` contexts of `tokens` tokens over shared keys.

    needle_sigma: score of each needle key, in standard deviations of the background's scores above their mean (it
    leaves the top-k near the length where k / candidates of the background reach it); None plants nothing.
    outlier_channels: channels whose values are outlier_gain times as large in keys and as small in queries, as trained
    models have: scores are unchanged in full precision, and an unrotated block scale drowns the other channels.
    crowding: a component shared by queries and keys adds this many standard deviations to every dot product, and the
    weights are positive: scores then differ little relative to their size, which crowds the bins of a coarse top-k.
    """
    keys_count = preset.candidates(tokens)
    heads, dim = preset.heads, preset.head_dim
    q = torch.randn(queries, heads, dim, generator=generator)
    keys = torch.randn(keys_count, dim, generator=generator)
    foreign = torch.randn(keys_count, dim, generator=generator)
    # Real scales differ from key to key; without this a wrong scale would be nearly right.
    foreign *= torch.exp(0.5 * torch.randn(keys_count, 1, generator=generator))
    weights = torch.randn(queries, heads, generator=generator) * preset.weight_scale
    if crowding:
        shared = torch.randn(dim, generator=generator)
        shared *= (crowding * dim**0.5) ** 0.5 / shared.norm()
        # the keys' own part along it would differ from key to key for all heads at once: no crowd
        keys -= (keys @ shared).unsqueeze(1) * shared / shared.square().sum()
        q, keys, weights = q + shared, keys + shared, weights.abs()
    needles = None
    if needle_sigma is not None:
        sample = indexer_logits_ref(q, keys[: min(keys_count, 8192)], weights)
        target = sample.mean(1, keepdim=True) + needle_sigma * sample.std(1, keepdim=True)
        where = torch.randperm(keys_count, generator=generator)[: queries * needle_keys].view(queries, needle_keys)
        for n in range(needle_keys):
            noise = 0.5 * torch.randn(queries, dim, generator=generator)
            keys[where[:, n]] = _needle_keys(q, weights, noise, target)
        needles = where.to(torch.int32)
    if outlier_channels:
        channels = torch.randperm(dim, generator=generator)[:outlier_channels]
        keys[:, channels] *= outlier_gain
        foreign[:, channels] *= outlier_gain
        q[:, :, channels] /= outlier_gain
    positions = torch.full((queries,), tokens - 1)
    return Activations(
        preset=preset, q=q, keys=keys, weights=weights, positions=positions, needles=needles, foreign_keys=foreign
    )
