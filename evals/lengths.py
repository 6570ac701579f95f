"""Recall against length: how long a context may grow before recall is lost, and by how many octaves two builds differ.

  R(L) = (1 - lapse) / (1 + exp((log2 L - μ) / s))

2^μ is L50, where recall has fallen to half of its plateau 1 - lapse; L at a threshold is where R crosses it. Weak
priors keep the fit finite on a handful of rungs: log s ~ N(log 0.7, 1), logit lapse ~ N(logit 0.03, 1.5), and μ is
held within a few octaves of the grid. The isotonic twin (pool adjacent violators, straight lines between rungs in
log2 L) assumes only that recall does not rise with length. Intervals resample conversations; two builds share the
resamples, so that their difference is paired. For display and trend: verdicts do not rest on these.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import optimize

from longrecall.evals.cells import Cells, Floats
from longrecall.evals.curves import conversation_means
from longrecall.evals.schema import Beyond, LengthFit

PRIOR_LOG_S = (math.log(0.7), 1.0)
PRIOR_LAPSE = (math.log(0.03 / 0.97), 1.5)
MIN_CONVERSATIONS = 8
RELATIVE_THRESHOLD = 0.856
"""Share of the baseline's recall at its shortest rung: RULER's bar (Llama2-7B at 4K), made relative."""


class Parameters(NamedTuple):
    """[N] each."""

    mu: Floats
    log_s: Floats
    lapse_logit: Floats


def fit_logistic(
    x: Floats, recall: Floats, weight: Floats, *, start: Parameters | None = None, iterations: int = 60
) -> Parameters:
    """Maximum a posteriori fits of N curves at once by damped Fisher scoring.

    x [R] log2 lengths; recall [N, R] shares; weight [N, R] numbers of replies behind them (0: no data). start: one
    fit to begin all of them at, as for resamples of its data; None begins at two places and keeps the better end.
    """
    centre, reach = float(x.mean()), float(np.ptp(x)) / 2 + 2.0
    prior_mean = np.array([centre + reach / 2, PRIOR_LOG_S[0], PRIOR_LAPSE[0]])
    prior_precision = np.array([1 / reach**2, 1 / PRIOR_LOG_S[1] ** 2, 1 / PRIOR_LAPSE[1] ** 2])
    y = np.where(weight > 0, recall, 0.5)

    def objective(t: Floats) -> Floats:
        p, _ = _curve(x, t)
        loglik = (weight * (y * np.log(p) + (1 - y) * np.log1p(-p))).sum(axis=1)
        return np.asarray(loglik - 0.5 * (prior_precision * (t - prior_mean) ** 2).sum(axis=1))

    best: Floats | None = None
    best_value = np.full(len(recall), -np.inf)
    # two places: a plateau can look like a slope
    begin = [np.array([v[0] for v in start])] if start else [prior_mean, np.array([centre, 0.0, 0.0])]
    for place in begin:
        theta = np.tile(place, (len(recall), 1))
        value = objective(theta)
        damping = np.full(len(recall), 1e-2)
        for _ in range(iterations):
            p, jacobian = _curve(x, theta)
            v = weight / (p * (1 - p))
            score = np.einsum("nr,nrk->nk", v * (y - p), jacobian) - prior_precision * (theta - prior_mean)
            fisher = np.einsum("nr,nrk,nrl->nkl", v, jacobian, jacobian) + np.diag(prior_precision)
            scale = damping[:, None, None] * np.einsum("nkk->nk", fisher)[:, :, None] * np.eye(3)
            step = np.linalg.solve(fisher + scale, score[..., None])[..., 0]
            trial = theta + np.clip(step, -2, 2)
            trial_value = objective(trial)
            better = trial_value >= value
            theta = np.where(better[:, None], trial, theta)
            settled = (np.abs(trial_value - value) < 1e-6) | (damping > 1e6)
            value = np.where(better, trial_value, value)
            damping = np.clip(np.where(better, damping / 5, damping * 10), 1e-9, 1e9)
            if settled.all():
                break
        if best is None:
            best, best_value = theta, value
        else:
            best = np.where((value > best_value)[:, None], theta, best)
            best_value = np.maximum(value, best_value)
    assert best is not None
    return Parameters(mu=best[:, 0], log_s=best[:, 1], lapse_logit=best[:, 2])


def _curve(x: Floats, theta: Floats) -> tuple[Floats, Floats]:
    """R [N, R] and its derivatives by (μ, log s, logit lapse) [N, R, 3]."""
    mu, s = theta[:, :1], np.exp(np.clip(theta[:, 1:2], -4, 4))
    plateau = 1 / (1 + np.exp(np.clip(theta[:, 2:3], -30, 30)))
    z = np.clip((x - mu) / s, -40, 40)
    falling = 1 / (1 + np.exp(z))
    slope = falling * (1 - falling)
    p = np.clip(plateau * falling, 1e-6, 1 - 1e-6)
    jacobian = np.stack([plateau * slope / s, plateau * slope * z, -plateau * (1 - plateau) * falling], axis=-1)
    return p, jacobian


def crossing(fit: Parameters, recall: float) -> Floats:
    """[N] log2 length at which each curve falls to `recall`; -∞ where it never reaches it."""
    plateau = 1 / (1 + np.exp(fit.lapse_logit))
    with np.errstate(divide="ignore", invalid="ignore"):
        at = fit.mu + np.exp(fit.log_s) * np.log(plateau / recall - 1)
    return np.where(plateau > recall, at, -np.inf)


def isotonic_crossing(x: Floats, recall: Floats, weight: Floats, threshold: float) -> float:
    """log2 length at which the non-increasing step fit falls below `threshold`; ±∞ when it does so off the grid."""
    known = weight > 0
    if not known.any():
        return math.nan
    x, fitted = x[known], optimize.isotonic_regression(recall[known], weights=weight[known], increasing=False).x
    if fitted[0] < threshold:
        return -math.inf
    below = np.flatnonzero(fitted < threshold)
    if not len(below):
        return math.inf
    j = int(below[0])
    share = (fitted[j - 1] - threshold) / (fitted[j - 1] - fitted[j])
    return float(x[j - 1] + share * (x[j] - x[j - 1]))


@dataclass(frozen=True, kw_only=True)
class _Resampled:
    """log2 lengths of one build: the estimate, then one per resample (the isotonic twin: the estimate alone)."""

    l50: Floats
    threshold: Floats
    isotonic: float


def length_fits(
    cells: Cells, baseline: str, *, threshold: float | None = None, n_resamples: int = 300, seed: int = 0
) -> tuple[LengthFit, ...]:
    """L50 and L at `threshold` of every build with conversation-bootstrap intervals, and octaves against the baseline.

    threshold: recall; None takes RELATIVE_THRESHOLD of the baseline's recall at its shortest rung. Empty with fewer
    than 2 rungs or 8 conversations, where no curve is worth drawing.
    """
    if len(cells.rungs) < 2 or cells.n_clusters < MIN_CONVERSATIONS:
        return ()
    x = np.log2(np.array(cells.rungs, dtype=np.float64))
    ascending = np.argsort(x)
    x = x[ascending]
    rng = np.random.default_rng(seed)
    draws = rng.multinomial(cells.n_clusters, np.full(cells.n_clusters, 1 / cells.n_clusters), size=n_resamples)
    counts = np.concatenate([np.ones((1, cells.n_clusters)), draws]).astype(np.float64)
    means = {b: conversation_means(cells, i)[ascending] for i, b in enumerate(cells.builds)}
    if threshold is None:
        shortest = means[baseline][0]
        if not np.isfinite(shortest).any():
            return ()
        threshold = RELATIVE_THRESHOLD * float(np.nanmean(shortest))
    if not 0 < threshold < 1:
        return ()
    resampled = {}
    for i, build in enumerate(cells.builds):
        probes = (cells.asked[i] - cells.missing[i])[ascending].sum(axis=(1, 2))
        if (probes > 0).sum() >= 2:
            resampled[build] = _resample(x, means[build], probes.astype(np.float64), counts, threshold)
    return tuple(
        _length_fit(build, cells, fit, resampled.get(baseline) if build != baseline else None, x, threshold)
        for build, fit in resampled.items()
    )


def _resample(x: Floats, means: Floats, probes: Floats, counts: Floats, threshold: float) -> _Resampled:
    seen = np.isfinite(means)  # [R, U]
    n = counts @ seen.T.astype(np.float64)  # [N, R]
    with np.errstate(invalid="ignore", divide="ignore"):
        recall = np.where(n > 0, counts @ np.where(seen, means, 0.0).T / n, 0.5)
        weight = np.where(n > 0, n * (probes / np.maximum(seen.sum(axis=1), 1)), 0.0)
    estimate = fit_logistic(x, recall[:1], weight[:1])
    fit = Parameters(
        *(
            np.concatenate([one, rest])
            for one, rest in zip(
                estimate, fit_logistic(x, recall[1:], weight[1:], start=estimate, iterations=20), strict=True
            )
        )
    )
    isotonic = isotonic_crossing(x, recall[0], weight[0], threshold)
    return _Resampled(l50=fit.mu, threshold=crossing(fit, threshold), isotonic=isotonic)


def _interval(values: Floats) -> tuple[float, float]:
    finite = values[~np.isnan(values)]
    low, high = np.percentile(np.clip(finite, -1e9, 1e9), [2.5, 97.5])
    return float(low), float(high)


def _length_fit(
    build: str, cells: Cells, fit: _Resampled, base: _Resampled | None, x: Floats, threshold: float
) -> LengthFit:
    low, high = float(x[0]), float(x[-1])

    def tokens(log2_length: float) -> float | None:
        return 2.0**log2_length if low <= log2_length <= high else None

    def beyond(log2_length: float) -> Beyond | None:
        return "longer" if log2_length > high else "shorter" if log2_length < low else None

    l50_low, l50_high = _interval(fit.l50[1:])
    at_low, at_high = _interval(fit.threshold[1:])

    def told(estimate: float, at_least: float, at_most: float) -> tuple[float | None, Beyond | None]:
        unknown = at_least < low and at_most > high  # a flat curve: these rungs do not say where it falls
        return (None, None) if unknown else (tokens(estimate), beyond(estimate))

    l50_tokens, l50_beyond = told(float(fit.l50[0]), l50_low, l50_high)
    threshold_tokens, threshold_beyond = told(float(fit.threshold[0]), at_low, at_high)
    octaves = octaves_low = octaves_high = None
    if base is not None:
        # a difference is known only where both curves bend inside the grid, or nearly so
        difference = np.clip(fit.l50, low - 1, high + 1) - np.clip(base.l50, low - 1, high + 1)
        octaves, (octaves_low, octaves_high) = float(difference[0]), _interval(difference[1:])
        if beyond(float(base.l50[0])) == beyond(float(fit.l50[0])) == "longer":
            octaves = octaves_low = octaves_high = None
    isotonic = fit.isotonic
    return LengthFit(
        build=build,
        n_conversations=cells.n_clusters,
        l50_tokens=l50_tokens,
        l50_ci_low=tokens(l50_low),
        l50_ci_high=tokens(l50_high),
        l50_beyond=l50_beyond,
        threshold=threshold,
        threshold_tokens=threshold_tokens,
        threshold_ci_low=tokens(at_low),
        threshold_ci_high=tokens(at_high),
        threshold_beyond=threshold_beyond,
        isotonic_tokens=tokens(isotonic) if math.isfinite(isotonic) else None,
        octaves=octaves,
        octaves_ci_low=octaves_low,
        octaves_ci_high=octaves_high,
    )
