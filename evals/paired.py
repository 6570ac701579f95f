"""Paired statistics with the conversation as unit: cluster-t, sign-flip, Tango's score bound, Holm, e-processes.

Input is D [N, C]: for N cells (patch × rung) the mean over a conversation's probes of candidate - baseline, NaN where
a conversation has no complete pair. Method and simulated error rates: docs/statistics.md.

  cluster-t    mean / (sd / √C), C-1 degrees of freedom (CR1)
  sign-flip    exact: the distribution of Σ ±|D_c| is a convolution when the D_c are multiples of 1/L
  Tango 1998   score test of p_gain - p_loss = -Δ, at n = C conversations; its inversion is the bound
  e_loss       mean_λ Π exp(-λD_c)/cosh(λD_c): any-time valid when D_c is symmetric under "no effect"
  e_equivalent mean_λ Π (1 + λ(D_c + Δ)): any-time valid when E[D_c] ≤ -Δ, for any distribution on [-1, 1]
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LAMBDAS_LOSS = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
FRACTIONS_EQUIVALENT = np.array([0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95])
"""λ of the betting process as a share of its largest admissible value 1 / (1 - Δ)."""
MAX_EXACT_WIDTH = 200_000
"""Largest support of the sign-flip sum that is convolved exactly; above it 20,000 seeded flips are drawn."""


class ClusterT(NamedTuple):
    """One row per cell; NaN where C is too small."""

    n: Ints
    mean: Floats
    stderr: Floats
    p_loss: Floats
    p_equivalent: Floats
    lower: Floats
    ci_low: Floats
    ci_high: Floats
    p_two_sided: Floats


def cluster_t(d: Floats, *, margin: float, alpha: float) -> ClusterT:
    """One-sided loss test, non-inferiority test at -margin and intervals, all from sd(D)/√C and t with C-1.

    With no spread at all the statistic is ±∞ (p 0 or 1): such cells are decided by the sign-flip test and by Tango.
    """
    seen = np.isfinite(d)
    n = seen.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(n > 0, np.where(seen, d, 0.0).sum(axis=1) / np.maximum(n, 1), np.nan)
        spread = np.where(seen, d - mean[:, None], 0.0)
        sd = np.sqrt((spread**2).sum(axis=1) / np.maximum(n - 1, 1))
        sd = np.where(sd < 1e-12, 0.0, sd)  # rounding of equal values is not spread
        stderr = np.where(n > 1, sd / np.sqrt(np.maximum(n, 1)), np.nan)
        df = np.maximum(n - 1, 1)
        p_loss = _t_cdf(mean, stderr, df)
        p_equivalent = _t_cdf(-(mean + margin), stderr, df)
        one, two = stats.t.ppf(1 - alpha, df), stats.t.ppf(1 - alpha / 2, df)
        p_two = np.minimum(1.0, 2 * np.minimum(p_loss, _t_cdf(-mean, stderr, df)))
    return ClusterT(
        n=n.astype(np.int64),
        mean=mean,
        stderr=stderr,
        p_loss=p_loss,
        p_equivalent=p_equivalent,
        lower=mean - one * stderr,
        ci_low=mean - two * stderr,
        ci_high=mean + two * stderr,
        p_two_sided=p_two,
    )


def _t_cdf(mean: Floats, stderr: Floats, df: Floats | Ints) -> Floats:
    """P(T ≤ mean/stderr); a mean of exactly 0 without spread is no evidence (1)."""
    statistic = np.where(stderr > 0, mean / np.where(stderr > 0, stderr, 1.0), np.where(mean < 0, -np.inf, np.inf))
    p = stats.t.cdf(statistic, df)
    return np.asarray(np.where(np.isnan(stderr), np.nan, p), dtype=np.float64)


def sign_flip_p(d: Floats, *, n_draws: int = 20_000, seed: int = 0) -> float:
    """P(Σ ±|D_c| ≤ Σ D_c) over all 2^C sign patterns: exact when the D_c share a small denominator, else drawn."""
    values = d[np.isfinite(d)]
    if not len(values):
        return math.nan
    values = values[values != 0]
    if not len(values):
        return 1.0
    scaled = _integers(values)
    if scaled is not None:
        divisor = int(np.gcd.reduce(np.abs(scaled)))
        scaled = scaled // divisor
        total = int(np.abs(scaled).sum())
        if total <= MAX_EXACT_WIDTH:
            # S = Σ s|a|; (S + total)/2 = Σ of the |a| with sign + : a subset sum
            target = (int(scaled.sum()) + total) // 2
            mass = np.zeros(total + 1)
            mass[0], reach = 1.0, 0
            for a in np.sort(np.abs(scaled)):
                step = int(a)
                head = mass[: reach + 1] * 0.5
                mass[: reach + 1] = head
                mass[step : reach + step + 1] += head
                reach += step
            return float(min(1.0, mass[: target + 1].sum()))
    flips = np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=(n_draws, len(values)))
    hits = int((flips @ np.abs(values) <= values.sum() + 1e-12).sum())
    return (hits + 1) / (n_draws + 1)


def _integers(values: Floats, largest: int = 5040) -> npt.NDArray[np.int64] | None:
    """The values times their common denominator, or None when there is none up to `largest`."""
    denominator = 1
    for value in np.unique(np.abs(values)):
        scaled = float(value) * denominator
        if abs(scaled - round(scaled)) < 1e-7:
            continue
        for factor in range(2, largest // denominator + 1):
            if abs(scaled * factor - round(scaled * factor)) < 1e-7:
                denominator *= factor
                break
        else:
            return None
    return np.rint(values * denominator).astype(np.int64)


def tango_z(lost: Floats, gained: Floats, n: Floats, loss: Floats | float) -> Floats:
    """Tango's score statistic of H0: p_lost - p_gained = loss; below -z_{1-α}: the loss is smaller than `loss`.

    lost, gained: discordant pairs of each kind, on the scale of n (fractions are fine).
    """
    a = 2.0 * n
    b = -lost - gained + (2.0 * n - lost + gained) * loss
    c = -gained * loss * (1.0 - loss)
    with np.errstate(invalid="ignore", divide="ignore"):
        q = (np.sqrt(np.maximum(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
        variance = n * (2 * q + loss * (1 - loss))
        return np.asarray((lost - gained - n * loss) / np.sqrt(np.maximum(variance, 1e-300)), dtype=np.float64)


def tango_lower(lost: Floats, gained: Floats, n: Floats, *, alpha: float) -> Floats:
    """One-sided 1-α lower bound of the change in recall (gained - lost)/n, by inverting `tango_z`; NaN where n = 0."""
    z = stats.norm.ppf(1 - alpha)
    low = np.maximum((lost - gained) / np.maximum(n, 1), -1 + 1e-9)  # at the estimate the statistic is 0
    high = np.full_like(low, 1.0 - 1e-12)
    for _ in range(60):
        middle = (low + high) / 2
        inside = tango_z(lost, gained, np.maximum(n, 1e-9), middle) > -z
        low, high = np.where(inside, middle, low), np.where(inside, high, middle)
    return np.where(n > 0, -high, np.nan)


def min_conversations(margin: float, alpha: float) -> int:
    """Fewest conversations with which a spotless record (no discordant pair) proves a loss below `margin`."""
    return math.floor(stats.norm.ppf(1 - alpha) ** 2 * (1 - margin) / margin) + 1


def min_conversations_any_time(margin: float, alpha: float) -> int:
    """Fewest conversations with which a spotless record brings the e-value against a loss of the margin to 1/alpha."""
    growth = 1 + FRACTIONS_EQUIVALENT / (1 - margin) * margin
    n = 1
    while float((growth**n).mean()) < 1 / alpha:
        n += 1
    return n


def holm(p: Floats) -> Floats:
    """Holm's step-down adjusted p-values; NaN (not tested) stays NaN and does not count."""
    adjusted = np.full(p.shape, np.nan)
    tested = np.flatnonzero(np.isfinite(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    running = 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, float(p[index]) * (len(order) - rank)))
        adjusted[index] = running
    return adjusted


def _log_mean_exp(log_terms: Floats) -> Floats:
    """log of the mean over the last axis."""
    top = log_terms.max(axis=-1, keepdims=True)
    return np.asarray(top[..., 0] + np.log(np.exp(log_terms - top).mean(axis=-1)), dtype=np.float64)


def log_e_loss(d: Floats) -> Floats:
    """[N, C] log e-value against "no loss" after each conversation in arrival order; NaN changes nothing."""
    x = np.where(np.isfinite(d), d, 0.0)[..., None] * LAMBDAS_LOSS
    magnitude = np.abs(x)
    log_cosh = magnitude + np.log1p(np.exp(-2 * magnitude)) - math.log(2)
    return _log_mean_exp(np.cumsum(-x - log_cosh, axis=1))


def log_e_equivalent(d: Floats, *, margin: float) -> Floats:
    """[N, C] log e-value against "loses at least the margin" after each conversation."""
    lambdas = FRACTIONS_EQUIVALENT / (1 - margin)
    terms = np.log1p(lambdas * (np.where(np.isfinite(d), d, 0.0)[..., None] + margin))
    return _log_mean_exp(np.cumsum(np.where(np.isfinite(d)[..., None], terms, 0.0), axis=1))
