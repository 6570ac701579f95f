"""How many conversations a conviction or an exoneration takes."""

import math

import numpy as np
from scipy import stats

from longrecall.evals.family import Family
from longrecall.evals.paired import min_conversations, tango_lower
from longrecall.evals.schema import VerdictConfig

PLANNED_POWER = 0.8


def more_conversations_needed(family: Family, i: int) -> int | None:
    """Further conversations after which candidate i is expected to be settled with 80 % power, if what is seen holds.

    The nearer of two ways: a conviction at the rung (or pooled) that needs fewest, an exoneration at the rung that
    needs most. None when nothing is known about the spread (fewer than 2 conversations).
    """
    part, evidence, config = family.parts[i], family.evidence, family.config
    n_rungs = len(family.cells.rungs)
    n_now = int(evidence.n[family.offset(i) : family.offset(i) + n_rungs].max(initial=0))
    if n_now < 2:
        return None
    n_cells = max(1, sum(int(np.isfinite(p).sum()) for p in family.p_holm if p is not None))
    ways: list[int] = []
    to_convict = []
    for row in range(n_rungs + (n_rungs > 1)):
        cell = family.offset(i) + row
        mean, spread = evidence.mean[cell], evidence.stderr[cell] * math.sqrt(max(int(evidence.n[cell]), 1))
        if math.isfinite(spread) and mean < 0:
            to_convict.append(size_for_effect(-mean, spread, config.alpha / n_cells))
    if to_convict:
        ways.append(min(to_convict))
    to_exonerate = []
    for row in range(n_rungs):
        cell = family.offset(i) + row
        n = int(evidence.n[cell])
        if n < 2:
            return None
        spread = float(evidence.stderr[cell]) * math.sqrt(n)
        lost, gained = float(np.nansum(part.lost_share[row])) / n, float(np.nansum(part.gained_share[row])) / n
        to_exonerate.append(size_to_exonerate(float(evidence.mean[cell]), spread, lost, gained, config))
    known = [size for size in to_exonerate if size is not None]
    if len(known) == n_rungs:
        ways.append(max(known))
    return max(1, min(ways) - n_now) if ways else None


def size_for_effect(effect: float, spread: float, alpha: float, power: float = PLANNED_POWER) -> int:
    """Conversations for a one-sided cluster-t test to see `effect`: C ≥ ((t_α + t_β) sd(D_c) / effect)²."""
    size = 5.0
    for _ in range(50):
        df = max(size - 1, 1.0)
        wanted = ((stats.t.ppf(1 - alpha, df) + stats.t.ppf(power, df)) * spread / effect) ** 2
        updated = max(2.0, wanted, math.log2(1 / alpha))  # the sign-flip test needs 2^-C ≤ α
        if abs(updated - size) < 0.5:
            break
        size = (size + updated) / 2 if updated < size else updated
        if size > 1e6:
            return 1_000_000
    return math.ceil(max(size, updated))


def size_to_exonerate(
    delta: float, spread: float, lost: float, gained: float, config: VerdictConfig, power: float = PLANNED_POWER
) -> int | None:
    """Conversations for both bounds to exclude the margin when the true change is `delta`; None when it is beyond it.

    lost, gained: discordant shares per probe, which set Tango's bound at n = C.
    """
    room = delta + config.margin
    if room <= 0:
        return None
    by_t = size_for_effect(room, spread, config.alpha, power) if spread > 0 else 2
    beta = stats.norm.ppf(power)
    low, high = min_conversations(config.margin, config.alpha), 1_000_000
    while low < high:
        middle = (low + high) // 2
        n = np.array([float(middle)])
        drift = beta * spread / math.sqrt(middle)  # an unlucky run at this power
        bound = tango_lower(n * (lost + drift / 2), n * max(gained - drift / 2, 0.0), n, alpha=config.alpha)
        if bound[0] > -config.margin:
            high = middle
        else:
            low = middle + 1
    return max(by_t, low)
