"""Early warnings that never convict: the shift of the gold answer's log-probability, and flips of single replies.

The log-probability of the gold answer moves before recall does where recall is near its ceiling, and it has a sign.
Flips show a patch that changes which replies are right without changing how many.
"""

import numpy as np

from longrecall.evals.cells import Cells, Floats
from longrecall.evals.curves import cluster_means, nanmean
from longrecall.evals.paired import cluster_t
from longrecall.evals.schema import Flips, LogprobShift


def logprob_shifts(cells: Cells, baseline: str) -> tuple[LogprobShift, ...]:
    """Candidate - baseline in nats per answer at each rung, over replies for which both gave a log-probability."""
    base = cells.logprob[cells.build(baseline)]
    made = []
    for b, build in enumerate(cells.builds):
        if build == baseline:
            continue
        difference = cells.logprob[b] - base
        t = cluster_t(cluster_means(nanmean(difference), cells), margin=0.0, alpha=0.05)
        for r, rung in enumerate(cells.rungs):
            n_replies = int(np.isfinite(difference[r]).sum())
            if t.n[r] < 2:
                continue
            made.append(
                LogprobShift(
                    baseline=baseline,
                    candidate=build,
                    rung=rung,
                    n_conversations=int(t.n[r]),
                    n_probes=n_replies,
                    shift_nats=float(t.mean[r]),
                    ci_low=float(t.ci_low[r]),
                    ci_high=float(t.ci_high[r]),
                    p_lower=float(t.p_loss[r]),
                )
            )
    return tuple(made)


def flips(cells: Cells, baseline: str, again: str | None) -> tuple[Flips, ...]:
    """Replies that changed from right to wrong or back, against the baseline's own flips when it is run again.

    p_more_flips: one-sided cluster-t of "flips more than the base build against itself", per conversation; None
    without a second run of the base.
    """
    base = cells.recall[cells.build(baseline)]
    noise = _flip_means(cells, base, again) if again is not None else None
    made = []
    for b, build in enumerate(cells.builds):
        if build == baseline:
            continue
        difference = cells.recall[b] - base
        rate = cluster_means(nanmean(np.abs(difference)), cells)
        p = None
        if noise is not None and build != again:
            excess = cluster_t(noise - rate, margin=0.0, alpha=0.05)
            p = excess.p_loss
        for r, rung in enumerate(cells.rungs):
            pairs = int(np.isfinite(difference[r]).sum())
            if not pairs:
                continue
            made.append(
                Flips(
                    baseline=baseline,
                    candidate=build,
                    rung=rung,
                    lost=int((difference[r] < 0).sum()),
                    gained=int((difference[r] > 0).sum()),
                    n_probes=pairs,
                    n_identical=int((difference[r] == 0).sum()),
                    flip_rate=float(np.nanmean(rate[r])),
                    p_more_flips=float(p[r]) if p is not None and np.isfinite(p[r]) else None,
                )
            )
    return tuple(made)


def _flip_means(cells: Cells, base: Floats, again: str) -> Floats:
    return cluster_means(nanmean(np.abs(cells.recall[cells.build(again)] - base)), cells)
