"""Scores → Judgement: culprit, exonerated, within the margin, or inconclusive, and how much more it would take.

The rule (docs/statistics.md has its measured error rates):

- culprit: paired cluster-t and exact sign-flip both say that recall is lost at some rung (or pooled over the rungs),
  after Holm over every patch × rung;
- exonerated: at every rung the cluster-t bound and Tango's score bound with n = conversations both exclude a loss of
  the margin, with at least the minimum number of conversations (intersection-union: no correction over rungs);
- within-margin: both; inconclusive: neither, or the campaign's own controls do not allow a verdict.

Controls come first: base against base again must agree, a known-bad build must be caught, a no-op must not be
convicted. Missing replies leave the denominator; where their share differs between builds an exoneration is refused
and a conviction must hold with every missing reply counted in the patch's favour.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from scipy import stats

from longrecall.evals.cells import OUTCOMES, Cells, Ints, make_cells
from longrecall.evals.compare import comparisons, differences, percent, weigh
from longrecall.evals.controls import aa_control, campaign_blocker, negative_control, positive_control
from longrecall.evals.curves import make_curves
from longrecall.evals.family import Family
from longrecall.evals.lengths import length_fits
from longrecall.evals.paired import min_conversations, min_conversations_any_time, tango_z
from longrecall.evals.schema import (
    MISSING,
    ControlResult,
    Judgement,
    Missing,
    Score,
    Verdict,
    VerdictConfig,
    VerdictName,
)
from longrecall.evals.scores_file import ScoresError
from longrecall.evals.secondary import flips, logprob_shifts
from longrecall.evals.sizes import more_conversations_needed
from longrecall.runners.schema import Build

ANALYSIS_VERSION = "4"
"""Changes whenever the same replies could give another verdict. 2: values told person by person are graded by name.
3: a run stopped on its results is exonerated by its e-values alone. 4: a value is told of a person on whichever side
the name stands, and the gold told of somebody else is wrong."""
MAX_MARGIN_SHARE = 0.5
"""The margin may be at most this share of what the positive control lost, and of what the baseline could lose."""


def judge(
    scores: Sequence[Score] | pa.Table,
    builds: Sequence[Build],
    *,
    rungs: Sequence[int],
    planned: int | Mapping[str, int] | None = None,
    config: VerdictConfig | None = None,
    order: Sequence[str] | None = None,
    arm: str | None = None,
    stopped_early: bool = False,
    secondary: bool = True,
) -> Judgement:
    """Judge one run.

    planned: replies planned per build. order: conversation_ids in the order they were asked (the e-values read them
    in that order). arm: the cache arm to judge; None takes the first asked of warm, branched, cold, free, concat.
    stopped_early: the number of conversations was decided by looking at the results, so only the any-time-valid
    e-values may convict or exonerate. secondary: also length fits, log-probability shifts and flips. Raises
    ScoresError when the scores cannot be judged as they stand.
    """
    config = config or VerdictConfig()
    _check(builds, rungs, config)
    cells = make_cells(scores, builds=[b.build_id for b in builds], rungs=rungs, arm=arm, order=order)
    return judge_cells(
        cells,
        builds,
        planned=planned,
        config=config,
        stopped_early=stopped_early,
        secondary=secondary,
    )


def judge_cells(
    cells: Cells,
    builds: Sequence[Build],
    *,
    planned: int | Mapping[str, int] | None = None,
    config: VerdictConfig,
    stopped_early: bool = False,
    secondary: bool = True,
) -> Judgement:
    """`judge` for scores that are already dense arrays."""
    base = next(b.build_id for b in builds if b.role == "base")
    again = next((b.build_id for b in builds if b.role == "aa"), None)
    candidates = [b for b in builds if b.role != "base"]
    parts = [differences(cells, base, b.build_id) for b in candidates]
    family = Family.of(cells, candidates, parts, config, stopped_early)
    compared = [comparisons(part, family.evidence, family.offset(i), family.p_holm[i]) for i, part in enumerate(parts)]
    controls = (
        aa_control(family, compared),
        positive_control(family, compared),
        negative_control(family, compared),
    )
    verdicts = [_verdict(family, i, controls) for i, build in enumerate(candidates) if build.role != "aa"]
    return Judgement(
        analysis_version=ANALYSIS_VERSION,
        config=config,
        curves=make_curves(cells),
        comparisons=tuple(c for group in compared for c in group),
        verdicts=tuple(verdicts),
        controls=controls,
        missing=_count_missing(cells, planned),
        length_fits=length_fits(cells, base) if secondary else (),
        logprob_shifts=logprob_shifts(cells, base) if secondary else (),
        flips=flips(cells, base, again) if secondary else (),
    )


def _check(builds: Sequence[Build], rungs: Sequence[int], config: VerdictConfig) -> None:
    names = [b.build_id for b in builds]
    if len(set(names)) != len(names):
        raise ScoresError(f"two builds share one id: {sorted(n for n in names if names.count(n) > 1)[0]}")
    n_base = sum(b.role == "base" for b in builds)
    if n_base != 1:
        raise ScoresError(
            f"a campaign has exactly one base build; this one has {n_base} of {', '.join(names) or 'none'}"
        )
    if not rungs or len(set(rungs)) != len(rungs):
        raise ScoresError(f"rungs must be distinct and at least one; got {list(rungs)}")
    if not 0 < config.margin < 0.5:
        raise ScoresError(f"margin {config.margin}: a share of recall between 0 and 0.5 is needed, such as 0.10")
    if not 0 < config.alpha < 0.5 or not 0 < config.aa_alpha < 0.5:
        raise ScoresError(f"alpha {config.alpha} and aa_alpha {config.aa_alpha} must lie between 0 and 0.5")


def _verdict(family: Family, i: int, controls: Sequence[ControlResult]) -> Verdict:
    build, part, config = family.builds[i], family.parts[i], family.config
    n_rungs = len(family.cells.rungs)
    rows = np.arange(family.offset(i), family.offset(i) + n_rungs)
    evidence = family.evidence
    convicted = family.convicted(i)
    refusals = _exoneration_refusals(family, i)
    blocker = campaign_blocker(controls)
    bounds = np.minimum(evidence.lower_t[rows], evidence.lower_tango[rows])
    if (evidence.n[rows] < 1).all():
        return _empty_verdict(build.build_id, "no reply of this build can be paired with the baseline's")
    weakest = int(np.nanargmin(np.where(np.isfinite(bounds), bounds, evidence.mean[rows])))
    row = min(convicted, key=lambda r: float(evidence.mean[family.offset(i) + r])) if convicted else weakest
    cell = family.offset(i) + row
    adjusted = family.p_holm[i]
    p_value = float(adjusted[row]) if adjusted is not None and math.isfinite(adjusted[row]) else None
    more: int | None = None
    name: VerdictName
    if blocker is not None:
        name, reason = "inconclusive", blocker
    elif convicted and not refusals:
        name = "within-margin"
        reason = f"{_loss_sentence(family, cell, row, p_value)}; a loss of {100 * config.margin:.0f} points is excluded"
    elif convicted:
        name, reason = "culprit", _loss_sentence(family, cell, row, p_value)
        gate = family.unbalanced[i]
        if gate is not None:
            reason += f"; {gate}, and the loss stands with all of them counted in the patch's favour"
        if part.rungs_without_pairs:
            reason += f"; not asked at {', '.join(map(str, part.rungs_without_pairs))} tokens"
    elif not refusals:
        name = "exonerated"
        p_value = _equivalence_p(family, rows)
        reason = f"a loss of {100 * config.margin:.0f} points is excluded at every rung: "
        if family.stopped_early:
            reason += f"e-value {evidence.peak_equivalent[rows].min():.3g} of the {1 / config.alpha:.0f} needed"
        else:
            reason += (
                f"bounds {percent(evidence.lower_t[rows].min(), '+z.1f')} (cluster-t) "
                f"and {percent(evidence.lower_tango[rows].min(), '+z.1f')} (Tango, n = conversations)"
            )
    else:
        name, reason = "inconclusive", refusals[0]
        if family.unbalanced[i] is None and not part.rungs_without_pairs:
            more = more_conversations_needed(family, i)
            if more is not None and family.stopped_early:
                n = int(evidence.n[rows].min())
                more = max(more, min_conversations_any_time(config.margin, config.alpha) - n)
            if more is not None:
                reason += f"; about {more} more conversations would settle it"
    return Verdict(
        patch=build.build_id,
        verdict=name,
        delta_recall=_number(evidence.mean[cell]),
        ci_low=_number(evidence.ci_low[cell]) if evidence.n[cell] > 1 else None,
        ci_high=_number(evidence.ci_high[cell]) if evidence.n[cell] > 1 else None,
        p_value=p_value,
        rung=family.cells.rungs[row] if row < n_rungs else None,
        n_conversations=int(evidence.n[cell]),
        n_probes=int(part.n_probes[row]),
        more_conversations_needed=more,
        reason=reason,
    )


def _exoneration_refusals(family: Family, i: int) -> list[str]:
    """Every reason not to exonerate, the most basic first; empty when the proof is complete."""
    config, part, evidence = family.config, family.parts[i], family.evidence
    n_rungs = len(family.cells.rungs)
    rows = np.arange(family.offset(i), family.offset(i) + n_rungs)
    reasons: list[str] = []
    if part.rungs_without_pairs:
        absent = ", ".join(map(str, part.rungs_without_pairs))
        reasons.append(
            f"no paired replies at {absent} tokens: {n_rungs - len(part.rungs_without_pairs)} of {n_rungs} rungs known"
        )
    gate = family.unbalanced[i]
    if gate is not None:
        against = weigh([differences(family.cells, part.baseline, part.candidate, impute="against")], config)
        for_ = weigh([differences(family.cells, part.baseline, part.candidate, impute="for")], config)
        worst = int(np.nanargmin(against.mean[:n_rungs])) if np.isfinite(against.mean[:n_rungs]).any() else 0
        reasons.append(
            f"{gate}; with the missing replies counted against and for it the change at {family.rung_name(worst)} "
            f"is {percent(against.mean[worst], '+z.1f')} to {percent(for_.mean[worst], '+z.1f')} points"
        )
    least = min_conversations(config.margin, config.alpha)
    n = evidence.n[rows]
    if (n < least).any() and not part.rungs_without_pairs:
        reasons.append(
            f"{int(n.min())} conversations at {family.cells.rungs[int(n.argmin())]} tokens; no fewer than {least} can "
            f"exclude a loss of {100 * config.margin:.0f} points"
        )
    base = np.array([np.nanmean(r) if np.isfinite(r).any() else np.nan for r in part.base[:n_rungs]])
    poor = np.flatnonzero(base * MAX_MARGIN_SHARE < config.margin - 1e-9)
    if len(poor):
        reasons.append(
            f"the baseline recalls {base[poor[0]]:.2f} at {family.cells.rungs[int(poor[0])]} tokens: too little "
            f"is there to lose for a margin of {config.margin:.2f} to mean anything"
        )
    lost = [
        float(-np.nanmin(family.evidence.mean[family.offset(k) : family.offset(k) + n_rungs]))
        for k, b in enumerate(family.builds)
        if b.role == "positive-control"
        and np.isfinite(family.evidence.mean[family.offset(k) : family.offset(k) + n_rungs]).any()
    ]
    if lost and config.margin > MAX_MARGIN_SHARE * max(lost) + 1e-9:
        reasons.append(
            f"the margin {config.margin:.2f} is more than half of the {max(lost):.2f} that the positive control lost"
        )
    if family.stopped_early:
        weak = np.flatnonzero(~(evidence.peak_equivalent[rows] >= 1 / config.alpha))
        if len(weak):
            worst = int(weak[np.argmin(evidence.peak_equivalent[rows][weak])])
            reasons.append(
                f"e-value {evidence.peak_equivalent[rows][worst]:.2g} at {family.cells.rungs[worst]} tokens; "
                f"{1 / config.alpha:.0f} is needed to exclude the margin in a run that was stopped on its results"
            )
        return reasons  # bounds for a size that was fixed beforehand say nothing here
    bounds = np.fmin(evidence.lower_t[rows], evidence.lower_tango[rows])
    open_rows = np.flatnonzero(~(np.minimum(evidence.lower_t[rows], evidence.lower_tango[rows]) > -config.margin))
    if len(open_rows):
        worst = int(open_rows[np.nanargmin(np.where(np.isfinite(bounds), bounds, -1)[open_rows])])
        low = bounds[worst]
        known = f"may still be as low as {percent(low, '+z.1f')} points" if math.isfinite(low) else "is unknown"
        reasons.append(
            f"the change at {family.cells.rungs[worst]} tokens {known}, beyond the margin of "
            f"{100 * config.margin:.0f}, and no loss is proved"
        )
    return reasons


def _equivalence_p(family: Family, rows: Ints) -> float | None:
    """Intersection-union p-value: the largest over rungs of the weaker of the two bounds' tests, or of 1/E."""
    if family.stopped_early:
        return float(1 / family.evidence.peak_equivalent[rows].min())
    i = int(rows[0]) // (len(family.cells.rungs) + 1)
    part = family.parts[i]
    n_rungs = len(family.cells.rungs)
    x, y = np.nansum(part.lost_share[:n_rungs], axis=1), np.nansum(part.gained_share[:n_rungs], axis=1)
    score = stats.norm.cdf(tango_z(x, y, family.evidence.n[rows].astype(np.float64), family.config.margin))
    return _number(float(np.max(np.maximum(family.evidence.p_equivalent[rows], score))))


def _loss_sentence(family: Family, cell: int, row: int, p_value: float | None) -> str:
    p = f"p = {p_value:.2g} after Holm" if p_value is not None else "p unknown"
    return (
        f"recall changes by {percent(family.evidence.mean[cell], '+z.1f')} points at {family.rung_name(row)} "
        f"({p}, {int(family.evidence.n[cell])} conversations)"
    )


def _empty_verdict(patch: str, reason: str) -> Verdict:
    return Verdict(
        patch=patch,
        verdict="inconclusive",
        delta_recall=None,
        ci_low=None,
        ci_high=None,
        p_value=None,
        rung=None,
        n_conversations=0,
        n_probes=0,
        more_conversations_needed=None,
        reason=reason,
    )


def _count_missing(cells: Cells, planned: int | Mapping[str, int] | None) -> tuple[Missing, ...]:
    counts = cells.outcomes.sum(axis=1)
    made = []
    for b, build in enumerate(cells.builds):
        n_asked = int(counts[b].sum())
        n_planned = planned.get(build, n_asked) if isinstance(planned, Mapping) else planned
        made.append(
            Missing(
                build=build,
                n_planned=n_asked if n_planned is None else int(n_planned),
                n_asked=n_asked,
                by_outcome={
                    name: int(counts[b, i]) for i, name in enumerate(OUTCOMES) if name in MISSING and counts[b, i]
                },
            )
        )
    return tuple(made)


def _number(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
