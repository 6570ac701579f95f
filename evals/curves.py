"""Recall of each build at each rung, with an interval that knows that probes of one conversation move together."""

import numpy as np
from scipy import stats

from longrecall.evals.cells import OUTCOMES, Cells, Floats
from longrecall.evals.schema import MISSING, CurvePoint


def conversation_means(cells: Cells, build: int) -> Floats:
    """[R, U] recall of each independent unit (conversation, or cluster of conversations); NaN where nothing counts."""
    return cluster_means(nanmean(cells.recall[build]), cells)


def nanmean(values: Floats) -> Floats:
    """Mean over the last axis of the finite entries; NaN, without a warning, where there are none."""
    seen = np.isfinite(values)
    n = seen.sum(axis=-1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(n > 0, np.where(seen, values, 0.0).sum(axis=-1) / n, np.nan))


def cluster_means(by_conversation: Floats, cells: Cells) -> Floats:
    """[..., C] → [..., U]: each cluster counts once, as the mean of its conversations."""
    if cells.n_clusters == len(cells.conversations):
        out = np.full_like(by_conversation, np.nan)
        out[..., cells.cluster] = by_conversation
        return out
    shape = (*by_conversation.shape[:-1], cells.n_clusters)
    total, count = np.zeros(shape), np.zeros(shape)
    seen = np.isfinite(by_conversation)
    for c, u in enumerate(cells.cluster):
        total[..., u] += np.where(seen[..., c], by_conversation[..., c], 0.0)
        count[..., u] += seen[..., c]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.where(count > 0, total / count, np.nan))


def clustered_interval(unit_means: Floats, n_probes: int, *, level: float = 0.95) -> tuple[float, float] | None:
    """Wilson interval at the effective sample size that the spread of the units implies, with t for z.

    Without spread between units (all right, all wrong, one unit) nothing is known about clustering and n is taken to
    be the number of units. None without data.
    """
    values = unit_means[np.isfinite(unit_means)]
    n_units = len(values)
    if not n_units or not n_probes:
        return None
    p = float(values.mean())
    variance = float(values.var(ddof=1)) / n_units if n_units > 1 else 0.0
    n = p * (1 - p) / variance if variance > 0 and 0 < p < 1 else float(n_units)
    n = min(n, float(n_probes))
    z = float(stats.t.ppf((1 + level) / 2, max(n_units - 1, 1)))
    centre, half = (
        (p + z * z / (2 * n)) / (1 + z * z / n),
        z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + (z / n / 2) ** 2),
    )
    return max(0.0, float(centre - half)), min(1.0, float(centre + half))


def make_curves(cells: Cells) -> tuple[CurvePoint, ...]:
    """One point per build and rung; a cell without scored replies has recall None, never 0."""
    points = []
    scored = [i for i, name in enumerate(OUTCOMES) if name not in MISSING]
    for b, build in enumerate(cells.builds):
        means = conversation_means(cells, b)
        for r, rung in enumerate(cells.rungs):
            counts = cells.outcomes[b, r]
            n_probes = int(counts[scored].sum())
            interval = clustered_interval(means[r], n_probes)
            values = means[r][np.isfinite(means[r])]
            points.append(
                CurvePoint(
                    build=build,
                    rung=rung,
                    recall=float(values.mean()) if len(values) else None,
                    ci_low=interval[0] if interval else None,
                    ci_high=interval[1] if interval else None,
                    n_conversations=len(values),
                    n_probes=n_probes,
                    outcomes={name: int(counts[i]) for i, name in enumerate(OUTCOMES) if counts[i]},
                )
            )
    return tuple(points)
