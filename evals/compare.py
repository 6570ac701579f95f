"""Two builds, conversation by conversation: the differences behind every comparison, and the comparisons themselves."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longrecall.evals.cells import Cells, Floats, Ints
from longrecall.evals.curves import cluster_means, nanmean
from longrecall.evals.paired import (
    cluster_t,
    log_e_equivalent,
    log_e_loss,
    sign_flip_p,
    tango_lower,
)
from longrecall.evals.schema import Comparison, VerdictConfig


@dataclass(frozen=True, kw_only=True)
class Differences:
    """Candidate - baseline at R rungs and, in row R, pooled over all of them."""

    baseline: str
    candidate: str
    rungs: tuple[int, ...]
    d: Floats
    """[R + 1, U] mean difference of each unit; NaN without a complete pair (pooled: without one at every rung)."""
    base: Floats
    """[R + 1, U] recall of the baseline over the same pairs."""
    lost_share: Floats
    gained_share: Floats
    """[R + 1, U] share of the unit's pairs that were lost or gained."""
    lost: Ints
    gained: Ints
    n_probes: Ints
    n_missing: Ints
    """[R + 1] counts of pairs; `n_missing` were asked of both and are missing on at least one."""
    missing_share: Floats
    """[R + 1, 2] share of missing replies (baseline, candidate) among pairs asked of both."""
    rungs_without_pairs: tuple[int, ...]


def percent(share: float, form: str = "z.0f") -> str:
    """A share in percent, or a difference in points (form "+z.1f"), with the sign − and never "−0"."""
    return f"{100 * share:{form}}".replace("-", "−")


def differences(cells: Cells, baseline: str, candidate: str, *, impute: str | None = None) -> Differences:
    """Differences over pairs that both builds answered.

    impute: "for" counts replies missing on one side in the candidate's favour (its own as right, the baseline's as
    wrong), "against" the other way round; None leaves such pairs out.
    """
    base, cand = cells.build(baseline), cells.build(candidate)
    both = (cells.asked[base] > 0) & (cells.asked[cand] > 0)  # [R, C, P]
    y_base, y_cand = cells.recall[base].copy(), cells.recall[cand].copy()
    lost_base, lost_cand = both & ~np.isfinite(y_base), both & ~np.isfinite(y_cand)
    any_missing = both & ((cells.missing[base] > 0) | (cells.missing[cand] > 0))
    if impute is not None:
        favour = 1.0 if impute == "for" else 0.0
        y_cand[lost_cand], y_base[lost_base] = favour, 1.0 - favour
    pair = both & np.isfinite(y_base) & np.isfinite(y_cand)
    d = np.where(pair, y_cand - y_base, np.nan)
    rows_d = cluster_means(nanmean(d), cells)
    rows_base = cluster_means(nanmean(np.where(pair, y_base, np.nan)), cells)
    rows_lost = cluster_means(nanmean(np.where(pair, np.maximum(-d, 0), np.nan)), cells)
    rows_gained = cluster_means(nanmean(np.where(pair, np.maximum(d, 0), np.nan)), cells)
    per_rung = pair.sum(axis=(1, 2))
    missing_base = np.where(both, cells.missing[base], 0).sum(axis=(1, 2))
    missing_cand = np.where(both, cells.missing[cand], 0).sum(axis=(1, 2))
    asked_base = np.where(both, cells.asked[base], 0).sum(axis=(1, 2))
    asked_cand = np.where(both, cells.asked[cand], 0).sum(axis=(1, 2))
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.stack(
            [
                _with_total(missing_base) / np.maximum(_with_total(asked_base), 1),
                _with_total(missing_cand) / np.maximum(_with_total(asked_cand), 1),
            ],
            axis=1,
        )

    def pooled(rows: Floats) -> Floats:
        return np.concatenate([rows, rows.mean(axis=0, keepdims=True)]) if len(rows) else rows

    return Differences(
        baseline=baseline,
        candidate=candidate,
        rungs=cells.rungs,
        d=pooled(rows_d),
        base=pooled(rows_base),
        lost_share=pooled(rows_lost),
        gained_share=pooled(rows_gained),
        lost=_with_total((d < 0).sum(axis=(1, 2))),
        gained=_with_total((d > 0).sum(axis=(1, 2))),
        n_probes=_with_total(per_rung),
        n_missing=_with_total(any_missing.sum(axis=(1, 2))),
        missing_share=share,
        rungs_without_pairs=tuple(rung for rung, n in zip(cells.rungs, per_rung, strict=True) if n == 0),
    )


def _with_total(counts: Ints) -> Ints:
    return np.concatenate([counts, counts.sum(keepdims=True)]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Everything the verdict rule reads, [N] over the cells of one or more `Differences` (R + 1 rows each)."""

    n: Ints
    mean: Floats
    stderr: Floats
    p_loss: Floats
    p_flip: Floats
    p_two_sided: Floats
    p_equivalent: Floats
    lower_t: Floats
    lower_tango: Floats
    ci_low: Floats
    ci_high: Floats
    e_loss: Floats
    e_equivalent: Floats
    peak_loss: Floats
    peak_equivalent: Floats
    """e-values, now and at their highest so far (what an any-time decision may use)."""

    @property
    def p_conviction(self) -> Floats:
        """The larger of the two tests' p-values: a conviction needs both."""
        return np.maximum(self.p_loss, self.p_flip)


def weigh(parts: Sequence[Differences], config: VerdictConfig) -> Evidence:
    """All statistics of all cells at once."""
    d = np.concatenate([part.d for part in parts])
    lost = np.concatenate([part.lost_share for part in parts])
    gained = np.concatenate([part.gained_share for part in parts])
    t = cluster_t(d, margin=config.margin, alpha=config.alpha)
    n = t.n.astype(np.float64)
    x, y = np.nansum(lost, axis=1), np.nansum(gained, axis=1)
    tango_low = tango_lower(x, y, n, alpha=config.alpha)
    # without spread the t interval is a point; the score interval still says how little C conversations can show
    flat = t.stderr == 0
    score_low = tango_lower(x, y, n, alpha=config.alpha / 2)
    score_high = -tango_lower(y, x, n, alpha=config.alpha / 2)
    loss, equivalent = log_e_loss(d), log_e_equivalent(d, margin=config.margin)
    return Evidence(
        n=t.n,
        mean=t.mean,
        stderr=t.stderr,
        p_loss=t.p_loss,
        p_flip=np.array([sign_flip_p(row) for row in d]),
        p_two_sided=t.p_two_sided,
        p_equivalent=t.p_equivalent,
        lower_t=t.lower,
        lower_tango=tango_low,
        ci_low=np.where(flat, np.minimum(score_low, t.mean), np.maximum(t.ci_low, -1.0)),
        ci_high=np.where(flat, np.maximum(score_high, t.mean), np.minimum(t.ci_high, 1.0)),
        e_loss=_last(loss),
        e_equivalent=_last(equivalent),
        peak_loss=_peak(loss),
        peak_equivalent=_peak(equivalent),
    )


def _last(log_e: Floats) -> Floats:
    return np.exp(np.minimum(log_e[:, -1], 700.0)) if log_e.shape[1] else np.ones(len(log_e))


def _peak(log_e: Floats) -> Floats:
    return np.exp(np.minimum(np.maximum(log_e.max(axis=1), 0.0), 700.0)) if log_e.shape[1] else np.ones(len(log_e))


def comparisons(part: Differences, evidence: Evidence, offset: int, p_holm: Floats | None) -> list[Comparison]:
    """Records of one pair of builds: one per rung, then the pooled one (when there is more than one rung).

    offset: row of `evidence` where this pair's cells begin. p_holm: adjusted p-values of this pair's rows, if any.
    """
    made = []
    for row in range(len(part.rungs) + (len(part.rungs) > 1)):
        i = offset + row
        pooled = row == len(part.rungs)
        base = part.base[row][np.isfinite(part.base[row])]
        recall = float(base.mean()) if len(base) else None
        delta = _known(evidence.mean[i])
        made.append(
            Comparison(
                baseline=part.baseline,
                candidate=part.candidate,
                rung=None if pooled else part.rungs[row],
                pooled_rungs=part.rungs if pooled else (),
                n_conversations=int(evidence.n[i]),
                n_probes=int(part.n_probes[row]),
                n_missing=int(part.n_missing[row]),
                recall_baseline=recall,
                recall_candidate=recall + delta if recall is not None and delta is not None else None,
                delta_recall=delta,
                stderr=_known(evidence.stderr[i]),
                ci_low=_known(evidence.ci_low[i]) if evidence.n[i] > 1 else None,
                ci_high=_known(evidence.ci_high[i]) if evidence.n[i] > 1 else None,
                p_loss=_known(evidence.p_loss[i]),
                p_loss_signflip=_known(evidence.p_flip[i]),
                p_loss_holm=_known(p_holm[row]) if p_holm is not None else None,
                lower_bound_t=_known(evidence.lower_t[i]),
                lower_bound_tango=_known(evidence.lower_tango[i]),
                lost=int(part.lost[row]),
                gained=int(part.gained[row]),
                e_loss=float(evidence.e_loss[i]) if evidence.n[i] else None,
                e_equivalent=float(evidence.e_equivalent[i]) if evidence.n[i] else None,
            )
        )
    return made


def _known(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
