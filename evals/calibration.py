"""The error rates of the verdicts, measured on simulated replays whose truth is known (simulate.py).

Each table holds the product's own rule beside tests that are not used, and the bar the product's rule must keep. The
tests that are not used are there to be seen failing: a per-probe McNemar test where whole conversations move together,
a percentile bootstrap everywhere, and every bound that takes "nothing went wrong in a few conversations" for proof.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from longrecall.evals.attribute import family_probabilities, fit_causes, next_arm, observe
from longrecall.evals.causes import CAUSES, FEATURES, LEVELS, Cause
from longrecall.evals.cells import Floats
from longrecall.evals.paired import (
    cluster_t,
    log_e_equivalent,
    log_e_loss,
    min_conversations,
    sign_flip_p,
    tango_lower,
)
from longrecall.evals.schema import Observation, VerdictConfig
from longrecall.evals.simulate import NOISY, QUIET, SHOCK, Bools, Engine, Loss, cells_of, draw_builds
from longrecall.evals.verdict import judge_cells
from longrecall.runners.schema import Build

ALPHA = 0.05
CHUNK = 500
"""Simulated campaigns held in memory at once."""


@dataclass(frozen=True, kw_only=True)
class CalibrationRow:
    """One measured rate (or median) with its exact binomial interval, and what it was held against."""

    table: str
    setting: str
    rule: str
    value: float
    low: float | None
    high: float | None
    n: int
    bar: str | None
    verdict: Literal["within the bar", "above the bar", "not used: fails here", "not used"] | None


def _rate(
    table: str, setting: str, rule: str, hits: Sequence[bool] | Bools, *, bar: float | None, ours: bool
) -> CalibrationRow:
    n, k = len(hits), int(np.sum(hits))
    interval = stats.binomtest(k, n).proportion_ci(0.95)
    verdict: Literal["within the bar", "above the bar", "not used: fails here", "not used"] | None = None
    if bar is not None:
        beyond = interval.low > bar
        if ours:
            verdict = "above the bar" if beyond else "within the bar"
        else:
            verdict = "not used: fails here" if beyond else "not used"
    return CalibrationRow(
        table=table,
        setting=setting,
        rule=rule,
        value=k / n,
        low=float(interval.low),
        high=float(interval.high),
        n=n,
        bar=f"≤ {bar:g}" if bar is not None else None,
        verdict=verdict,
    )


def _draw(
    seed: int,
    reps: int,
    *,
    conversations: int,
    probes: int,
    base: float,
    patched: float,
    icc: float,
    engine: Engine,
    loss: Loss = "uniform",
) -> Floats:
    """Differences patched - base [reps, C, m]."""
    made = []
    for start in range(0, reps, CHUNK):
        y = draw_builds(
            np.random.default_rng((seed, start)),
            reps=min(CHUNK, reps - start),
            conversations=conversations,
            probes=probes,
            base_recall=base,
            recalls=[base, patched],
            icc=icc,
            engine=engine,
            loss=loss,
        )
        made.append(y[:, 1].astype(np.float64) - y[:, 0])
    return np.concatenate(made)


def _bootstrap_means(d: Floats, seed: int, draws: int = 400) -> Floats:
    """[reps, draws] means of resampled conversations (the same resamples for every campaign)."""
    n = d.shape[1]
    weights = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=draws) / n
    return np.asarray(d @ weights.T)


def mcnemar_mid_p_loss(lost: Floats, gained: Floats) -> Floats:
    """One-sided mid-p of McNemar's test per probe: P(X > lost) + P(X = lost)/2, X ~ Bin(lost + gained, 1/2)."""
    n = lost + gained
    return np.asarray(stats.binom.sf(lost, n, 0.5) + 0.5 * stats.binom.pmf(lost, n, 0.5))


def type1_table(reps: int, seed: int) -> list[CalibrationRow]:
    """False convictions without any true loss: base recall .85 (statistics table 2a), one-sided .05."""
    settings = [
        ("probe noise", QUIET, 0.3, 12, 8),
        ("probe noise", QUIET, 0.3, 20, 10),
        ("probe noise", QUIET, 0.3, 80, 5),
        ("conversation noise", SHOCK, 0.1, 20, 10),
        ("conversation noise", SHOCK, 0.3, 12, 8),
        ("conversation noise", SHOCK, 0.3, 20, 10),
        ("conversation noise", SHOCK, 0.3, 40, 10),
        ("conversation noise", SHOCK, 0.5, 20, 10),
    ]
    rows = []
    for name, engine, icc, n, m in settings:
        setting = f"{name}, ICC {icc}, {n} × {m}"
        y = _draw(seed, reps, conversations=n, probes=m, base=0.85, patched=0.85, icc=icc, engine=engine)
        d = y.mean(axis=2)
        p_t = cluster_t(d, margin=0.1, alpha=ALPHA).p_loss
        p_flip = np.array([sign_flip_p(row) for row in d])
        lost, gained = (y < 0).sum(axis=(1, 2)).astype(float), (y > 0).sum(axis=(1, 2)).astype(float)
        boot = np.quantile(_bootstrap_means(d, seed), 1 - ALPHA, axis=1) < 0
        for rule, hits, ours in (
            ("conviction: cluster-t and sign-flip", np.maximum(p_t, p_flip) <= ALPHA, True),
            ("cluster-t alone", p_t <= ALPHA, False),
            ("percentile bootstrap", boot, False),
            ("McNemar per probe, mid-p", mcnemar_mid_p_loss(lost, gained) <= ALPHA, False),
        ):
            rows.append(_rate("type1", setting, rule, hits, bar=ALPHA, ours=ours))
    return rows


def exonerate_table(reps: int, seed: int) -> list[CalibrationRow]:
    """False exonerations with the true loss exactly at the margin: base .95, 10 probes (statistics table 2d)."""
    rows = []
    for margin, n in ((0.05, 20), (0.05, 60), (0.10, 12), (0.10, 40)):
        for kind in ("catastrophe", "shock"):
            setting = f"loss = margin {margin}, {n} × 10, {kind}"
            y = _draw(
                seed,
                reps,
                conversations=n,
                probes=10,
                base=0.95,
                patched=0.95 - margin,
                icc=0.3,
                engine=SHOCK if kind == "shock" else QUIET,
                loss="catastrophe" if kind == "catastrophe" else "uniform",
            )
            for rule, (hits, ours) in _exonerations(y, margin, seed).items():
                rows.append(_rate("exonerate", setting, rule, hits, bar=ALPHA, ours=ours))
    for margin, n, engine in ((0.10, 40, QUIET), (0.05, 80, QUIET), (0.10, 54, SHOCK), (0.10, 44, NOISY)):
        y = _draw(seed + 1, reps, conversations=n, probes=10, base=0.95, patched=0.95, icc=0.3, engine=engine)
        hits, _ = _exonerations(y, margin, seed)["exoneration: cluster-t and Tango with n = C"]
        setting = f"no loss, margin {margin}, {n} × 10, {engine.name}"
        rows.append(_rate("exonerate", setting, "power of the exoneration", hits, bar=None, ours=True))
    return rows


def _exonerations(y: Floats, margin: float, seed: int) -> dict[str, tuple[Bools, bool]]:
    """Which campaigns each rule exonerates."""
    d, n = y.mean(axis=2), y.shape[1]
    reps, pairs = len(y), float(y.shape[1] * y.shape[2])
    lost, gained = (y < 0).sum(axis=(1, 2)).astype(float), (y > 0).sum(axis=(1, 2)).astype(float)
    t = cluster_t(d, margin=margin, alpha=ALPHA)
    scale = n / pairs
    tango_c = tango_lower(lost * scale, gained * scale, np.full(reps, float(n)), alpha=ALPHA)
    tango_probe = tango_lower(lost, gained, np.full(reps, pairs), alpha=ALPHA)
    mean = (gained - lost) / pairs
    wald = mean - stats.norm.ppf(1 - ALPHA) * np.sqrt(np.maximum((gained + lost) / pairs - mean**2, 0) / pairs)
    boot = np.quantile(_bootstrap_means(d, seed), ALPHA, axis=1)
    bet = log_e_equivalent(d, margin=margin).max(axis=1) >= math.log(1 / ALPHA)
    enough = n >= min_conversations(margin, ALPHA)
    return {
        "exoneration: cluster-t and Tango with n = C": ((t.lower > -margin) & (tango_c > -margin) & enough, True),
        "betting e-process, looked at after every conversation": (bet, True),
        "cluster-t alone": (t.lower > -margin, False),
        "percentile bootstrap": (boot > -margin, False),
        "Tango per probe (McNemar's score form)": (tango_probe > -margin, False),
        "Wald per probe": (wald > -margin, False),
    }


def power_table(reps: int, seed: int) -> list[CalibrationRow]:
    """Conversations until the running verdict convicts, and false convictions of looking all the time (table 2f)."""
    rows = []
    limit = 120
    bar = math.log(1 / ALPHA)
    for engine in (QUIET, NOISY, SHOCK):
        y = _draw(seed, reps, conversations=limit, probes=10, base=0.95, patched=0.95, icc=0.3, engine=engine)
        d = y.mean(axis=2)
        rows.append(
            _rate(
                "power",
                f"no loss, {engine.name}, up to {limit} × 10",
                "running conviction, looked at after every conversation",
                log_e_loss(d).max(axis=1) >= bar,
                bar=ALPHA,
                ours=True,
            )
        )
        peeked = np.zeros(len(d), dtype=bool)
        for n in range(10, limit + 1, 5):
            peeked |= cluster_t(d[:, :n], margin=0.1, alpha=ALPHA).p_loss <= ALPHA
        rows.append(
            _rate(
                "power",
                f"no loss, {engine.name}, up to {limit} × 10",
                "t-test at every 5th",
                peeked,
                bar=ALPHA,
                ours=False,
            )
        )
        for patched in (0.85, 0.75, 0.50):
            y = _draw(seed, reps, conversations=limit, probes=10, base=0.95, patched=patched, icc=0.3, engine=engine)
            crossed = log_e_loss(y.mean(axis=2)) >= bar
            first = np.where(crossed.any(axis=1), crossed.argmax(axis=1) + 1, limit + 1)
            wanted = 15 if engine is QUIET and patched == 0.85 else None
            median = float(np.median(first))
            rows.append(
                CalibrationRow(
                    table="power",
                    setting=f"loss of {100 * (0.95 - patched):.0f} points, {engine.name}",
                    rule="median conversations until convicted",
                    value=median,
                    low=float(np.quantile(first, 0.1)),
                    high=float(np.quantile(first, 0.9)),
                    n=len(first),
                    bar=f"≤ {wanted}" if wanted else None,
                    verdict=None if wanted is None else "within the bar" if median <= wanted else "above the bar",
                )
            )
    return rows


CAMPAIGN_RUNGS = (4096, 8192, 16384, 32768, 65536)
CAMPAIGN_LOSSES: dict[str, tuple[float, ...]] = {
    "base": (0.0,) * 5,
    "base-again": (0.0,) * 5,
    "known-bad": (0.0, 0.10, 0.30, 0.50, 0.60),
    "noop": (0.0,) * 5,
    "steep": (0.0, 0.04, 0.12, 0.30, 0.45),
    "at the margin": (0.0, 0.0, 0.0, 0.0, 0.10),
    "innocent-1": (0.0,) * 5,
    "innocent-2": (0.0,) * 5,
    "innocent-3": (0.0,) * 5,
    "innocent-4": (0.0,) * 5,
}
CAMPAIGN_ROLES = {"base": "base", "base-again": "aa", "known-bad": "positive-control", "noop": "negative-control"}


CAMPAIGN_SIZES = ((20, QUIET), (40, QUIET), (60, QUIET), (40, SHOCK), (60, SHOCK))


def campaign_table(reps: int, seed: int, sizes: Sequence[tuple[int, Engine]] = CAMPAIGN_SIZES) -> list[CalibrationRow]:
    """Whole campaigns through `judge`: controls, Holm over patches × rungs, every rung to exonerate (table 2e)."""
    rows = []
    names = list(CAMPAIGN_LOSSES)
    builds = [
        Build(build_id=n, patch_ids=(), role=CAMPAIGN_ROLES.get(n, "suspect"))  # type: ignore[arg-type]
        for n in names
    ]
    innocents = [n for n in names if n.startswith("innocent") or n == "noop"]
    for n, engine in sizes:
        setting = f"{n} × 10, {engine.name}"
        found: list[dict[str, str]] = []
        for rep in range(reps):
            right = _campaign_replies(np.random.default_rng((seed, n, rep)), n, engine, names)
            cells = cells_of(right, builds=names, rungs=list(CAMPAIGN_RUNGS))
            judgement = judge_cells(cells, builds, config=VerdictConfig(), secondary=False)
            found.append({v.patch: v.verdict for v in judgement.verdicts})
        measures: list[tuple[str, Callable[[dict[str, str]], bool], float | None]] = [
            ("any innocent convicted", lambda v: any(v[i] == "culprit" for i in innocents), ALPHA),
            ("loss at the margin exonerated", lambda v: v["at the margin"] == "exonerated", ALPHA),
            ("steep loss exonerated", lambda v: v["steep"] == "exonerated", ALPHA),
            ("steep loss convicted", lambda v: v["steep"] == "culprit", None),
            ("loss at the margin convicted", lambda v: v["at the margin"] == "culprit", None),
            ("innocent-1 exonerated", lambda v: v["innocent-1"] == "exonerated", None),
        ]
        for rule, hit, limit in measures:
            rows.append(_rate("campaign", setting, rule, [hit(v) for v in found], bar=limit, ours=True))
    return rows


def _campaign_replies(rng: np.random.Generator, n: int, engine: Engine, names: list[str]) -> Bools:
    per_rung = []
    for r in range(len(CAMPAIGN_RUNGS)):
        recalls = [0.95 - CAMPAIGN_LOSSES[name][r] for name in names]
        per_rung.append(
            draw_builds(
                rng, reps=1, conversations=n, probes=10, base_recall=0.95, recalls=recalls, icc=0.3, engine=engine
            )[0]
        )
    return np.stack(per_rung, axis=1)


ATTRIBUTION_RUNGS = (448, 1024, 2048)
ATTRIBUTION_ONSET = 512
ATTRIBUTION_BASE = 0.55


def _draw_truth(rng: np.random.Generator, cause: Cause) -> dict[str, float]:
    """True value of every feature under a cause: a visible loss whose growth agrees with its two sides."""
    while True:
        truth = {}
        for name in FEATURES:
            low, high = LEVELS[cause.signature.get(name, "any")]
            truth[name] = float(rng.uniform(max(low, 0.0), min(high, 1.0)))
        low, high = LEVELS[cause.signature.get("growth", "any")]
        if cause.signature.get("short", "any") == "none":
            truth["short"] = 0.0
        grown = truth["long"] - truth["short"]
        if low - 0.02 <= grown <= high and max(truth["long"], truth["short"]) >= 0.1:
            truth["growth"] = grown
            return truth


def attribution_table(
    reps: int, seed: int, *, conversations: int = 40, arm_error: float = 0.06
) -> list[CalibrationRow]:
    """Faults drawn at random from the causes: is the family named, and after how many further arms?

    The loss is observed on simulated replays; each further arm returns its true value with normal error. The causes'
    own ranges are the prior of the truth, so this measures the engine, not whether the ranges are those of real faults.
    """
    hits: dict[str, list[bool]] = {"from the ladder alone": [], "with the arms it asks for": []}
    ruled_out: list[bool] = []
    arms: list[int] = []
    for rep in range(reps):
        rng = np.random.default_rng((seed, rep))
        cause = CAUSES[int(rng.integers(len(CAUSES)))]
        truth = _draw_truth(rng, cause)
        right = np.stack(
            [
                draw_builds(
                    rng,
                    reps=1,
                    conversations=conversations,
                    probes=8,
                    base_recall=ATTRIBUTION_BASE,
                    recalls=[ATTRIBUTION_BASE, ATTRIBUTION_BASE * (1 - truth[side])],
                    icc=0.2,
                    engine=QUIET,
                )[0]
                for side in ("short", "long", "long")
            ],
            axis=1,
        )
        cells = cells_of(right, builds=["base", "patch"], rungs=list(ATTRIBUTION_RUNGS))
        observed = observe(cells, "base", "patch", onset=ATTRIBUTION_ONSET)
        fits = fit_causes(observed)
        families = family_probabilities(fits)
        hits["from the ladder alone"].append(max(families, key=lambda f: families[f]) == cause.family)
        used = 0
        while (arm := next_arm(fits, [o.feature for o in observed])) is not None:
            estimate = truth[arm.feature] + float(rng.normal(0, arm_error))
            observed.append(
                Observation(
                    patch="patch",
                    feature=arm.feature,
                    estimate=estimate,
                    stderr=arm_error,
                    n=conversations,
                    source="served",
                )
            )
            fits = fit_causes(observed)
            used += 1
        families = family_probabilities(fits)
        hits["with the arms it asks for"].append(max(families, key=lambda f: families[f]) == cause.family)
        ruled_out.append(families[cause.family] < 0.02)
        arms.append(used)
    setting = f"{len(CAUSES)} causes, {conversations} × 8, base recall {ATTRIBUTION_BASE}"
    rows = [
        _rate("attribution", setting, f"right family named {how}", found, bar=None, ours=True)
        for how, found in hits.items()
    ]
    rows.append(_rate("attribution", setting, "right family ruled out", ruled_out, bar=0.05, ours=True))
    rows.append(
        CalibrationRow(
            table="attribution",
            setting=setting,
            rule="median further arms until settled",
            value=float(np.median(arms)),
            low=float(np.quantile(arms, 0.1)),
            high=float(np.quantile(arms, 0.9)),
            n=reps,
            bar=None,
            verdict=None,
        )
    )
    return rows


TABLES: dict[str, Callable[[int, int], list[CalibrationRow]]] = {
    "type1": type1_table,
    "exonerate": exonerate_table,
    "power": power_table,
    "campaign": lambda reps, seed: campaign_table(max(20, reps // 10), seed),
    "attribution": attribution_table,
}
"""Campaigns are judged whole, which costs more: a tenth of the repetitions."""


def run_calibration(*, reps: int, seed: int, only: Sequence[str]) -> list[CalibrationRow]:
    """Rows of the named tables, in order."""
    return [row for name in only for row in TABLES[name](reps, seed)]
