"""What a format or a fault does to a selection, and what it does to the fact that a query asks for.

Selections are int32 [T, K], -1 padded, compared as sets. Every measure returns one number per query ([T], fp32), so
that a caller can group by layer, head group or rung; NaN never appears, an undefined entry raises.
"""

import math

import torch
from torch import Tensor


class MeasureError(ValueError):
    """Arguments for which the measure is not defined."""


def _membership(selection: Tensor, keys: int) -> Tensor:
    """bool [T, S]."""
    member = torch.zeros(selection.shape[0], keys + 1, dtype=torch.bool, device=selection.device)
    member.scatter_(1, torch.where(selection < 0, keys, selection).long(), True)
    return member[:, :keys]


def set_recall(selection: Tensor, reference: Tensor) -> Tensor:
    """|selection ∩ reference| / |reference|. State the reference: exact, bf16, or the trained format."""
    keys = int(max(selection.max(), reference.max())) + 1
    inside = _membership(selection, keys) & _membership(reference, keys)
    size = (reference >= 0).sum(1)
    if int(size.min()) == 0:
        raise MeasureError("the reference selection of a query is empty")
    return inside.sum(1) / size


def near_tie_misses(selection: Tensor, reference: Tensor, scores: Tensor, tolerance: float) -> Tensor:
    """Differences that are no near-tie: picks of one set alone whose score lies further than `tolerance` (absolute)
    from the k-th score of the reference. 0 for a kernel that only resolves rounding differently. scores [T, S]."""
    keys = scores.shape[1]
    in_selection, in_reference = _membership(selection, keys), _membership(reference, keys)
    kth = scores.masked_fill(~in_reference, torch.inf).amin(1, keepdim=True)
    differs = in_selection != in_reference
    return (differs & ((scores - kth).abs() > tolerance)).sum(1).float()


def needle_hit(selection: Tensor, needles: Tensor) -> Tensor:
    """1 where every key of the planted fact is selected. needles [T, N], -1 padded."""
    keys = int(max(selection.max(), needles.max())) + 1
    wanted = _membership(needles, keys)
    if int(wanted.sum(1).min()) == 0:
        raise MeasureError("a query has no needle")
    return (~(wanted & ~_membership(selection, keys)).any(1)).float()


def needle_rank(scores: Tensor, needles: Tensor, visible: Tensor) -> Tensor:
    """Rank (1 = best) of the fact's worst key among the visible keys."""
    worst = _needle_score(scores, needles)
    seen = torch.arange(scores.shape[1], device=scores.device) < visible.unsqueeze(1)
    return ((scores > worst.unsqueeze(1)) & seen).sum(1).float() + 1


def _needle_score(scores: Tensor, needles: Tensor) -> Tensor:
    values = scores.gather(1, needles.clamp(min=0).long())
    return values.masked_fill(needles < 0, torch.inf).amin(1)


def kth_score(scores: Tensor, k: int, visible: Tensor) -> Tensor:
    """The k-th best visible score; -inf where fewer are visible (nothing can be lost there)."""
    seen = torch.arange(scores.shape[1], device=scores.device) < visible.unsqueeze(1)
    masked = scores.masked_fill(~seen, -torch.inf)
    if masked.shape[1] < k:
        return torch.full_like(masked[:, 0], -torch.inf)
    return masked.topk(k, dim=1).values[:, -1]


def score_noise(scores: Tensor, exact: Tensor, visible: Tensor) -> Tensor:
    """The format's noise: standard deviation of score - exact score over the visible keys, in score units.

    The difference is taken after the best common factor, because a selection cannot see one (fnuz halves all scores).
    """
    seen = (torch.arange(scores.shape[1], device=scores.device) < visible.unsqueeze(1)).to(scores.dtype)
    scores, exact = torch.nan_to_num(scores) * seen, exact * seen
    factor = (scores * exact).sum(1) / exact.square().sum(1).clamp(min=1e-30)
    factor = torch.where(factor > 0, factor, torch.ones_like(factor))
    residue = scores / factor.unsqueeze(1) - exact
    count = seen.sum(1)
    mean = residue.sum(1) / count
    return (((residue - mean.unsqueeze(1)) * seen).square().sum(1) / count).sqrt()


def needle_margin(scores: Tensor, needles: Tensor, k: int, visible: Tensor, noise: Tensor) -> Tensor:
    """(needle score - k-th score) / noise; negative: not selected; inf: at most k keys, or a format without noise."""
    distance = _needle_score(scores, needles) - kth_score(scores, k, visible)
    return torch.where(
        noise > 0, distance / noise.clamp(min=1e-30), torch.copysign(torch.full_like(noise, torch.inf), distance)
    )


def boundary_margin(scores: Tensor, k: int, visible: Tensor) -> Tensor:
    """k-th minus (k+1)-th best score: what rounding must bridge to change the set. inf where k keys or fewer."""
    if scores.shape[1] <= k:
        return torch.full_like(scores[:, 0], torch.inf)
    seen = torch.arange(scores.shape[1], device=scores.device) < visible.unsqueeze(1)
    best = scores.masked_fill(~seen, -torch.inf).topk(k + 1, dim=1).values
    return torch.where(visible > k, best[:, k - 1] - best[:, k], torch.inf)


def mass_recall(selection: Tensor, reference: Tensor, attention: Tensor) -> Tensor:
    """Attention mass of the selection over that of the reference selection; attention [T, S] is the model's own."""
    keys = attention.shape[1]
    got = (attention * _membership(selection, keys)).sum(1)
    base = (attention * _membership(reference, keys)).sum(1)
    if float(base.min()) <= 0:
        raise MeasureError("the reference selection of a query carries no attention mass")
    return got / base


def critical_candidates(
    scores: Tensor, needles: Tensor, k: int, visible: Tensor, noise: Tensor | None = None
) -> Tensor:
    """Predicted number of candidates at which the needle leaves the top-k, were the background to go on as it is.

    With p the chance that a background key scores above the needle, k / p candidates hold k such keys. p is counted
    where the background reaches the needle, else extrapolated by an exponential tail through the top 1 %.
    noise [T]: the format's, added to the background (its scores are noisy where `scores` are exact).
    """
    worst = _needle_score(scores, needles)
    out = torch.empty(scores.shape[0])
    for t in range(scores.shape[0]):
        background = scores[t, : int(visible[t])].clone()
        keep = torch.ones_like(background, dtype=torch.bool)
        keep[needles[t][needles[t] >= 0].long()] = False
        background = background[keep]
        if background.numel() < 100:
            raise MeasureError(f"a tail needs at least 100 background keys, not {background.numel()}")
        if noise is not None:
            step = float(noise[t])
            centre = background.mean()
            spread = background.std()
            # Independent noise widens the background; its mean stays.
            background = centre + (background - centre) * math.sqrt(1 + (step / float(spread)) ** 2)
        above = int((background > worst[t]).sum())
        if above >= 10:
            chance = above / background.numel()
        else:
            tail = background.topk(max(10, background.numel() // 100)).values
            start, mean_excess = tail[-1], (tail[:-1] - tail[-1]).mean().clamp(min=1e-12)
            base = tail.numel() / background.numel()
            chance = base * math.exp(-float((worst[t] - start) / mean_excess)) if worst[t] > start else base
        out[t] = k / chance if chance > 1e-30 else torch.inf
    return out
