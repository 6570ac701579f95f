"""Change points of a series, by the method of Apache Otava (Hunter), for pages that must work offline.

Split: in windows that overlap by half, E-divisive (Matteson & James, arXiv 1306.4933) proposes where the distribution
changes most, and a t-test keeps the proposal at ten times the final level. Merge: the weakest points go until every
one is significant and large enough (Fleming et al., 10.1145/3578244.3583719). The energy statistic of X (n values) and
Y (m values) is

    Q = 2/(n+m) Σ|x-y| - 2m/((n+m)(n-1)) Σ|x-x'| - 2n/((n+m)(m-1)) Σ|y-y'|

Why it is here and not a dependency: apache-otava pins numpy and pulls in clients of BigQuery, Postgres and Slack. The
trend command also exports CSV and configuration for the original and reads its answer (results/otava.py). Three things
differ on purpose: variances have n - 1 below them (Otava 0.8.0 feeds the population ones to the t-test, which makes
short segments look too sure); after a point goes, both its neighbours are tested anew (Otava: the two after it); and
a magnitude is a difference in the series' own unit, not a ratio. With Otava's t-test the two agree on 22 of the
24 series in tests/results/otava_answers.json, and on all 24 once its merge tests both neighbours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, lgamma, log, log1p, sqrt
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change between `index` - 1 and `index`, with the segments on its two sides."""

    index: int
    mean_before: float
    mean_after: float
    p_value: float
    n_before: int
    n_after: int

    @property
    def magnitude(self) -> float:
        return abs(self.mean_after - self.mean_before)


def t_test(left: Floats, right: Floats) -> float:
    """Two-sided p-value of Student's t-test with pooled variance; 0 when both sides are constant and differ."""
    n, m = len(left), len(right)
    if n + m <= 2:
        return 1.0
    mean_left, mean_right = float(left.sum()) / n, float(right.sum()) / m
    left, right = left - mean_left, right - mean_right
    difference = mean_left - mean_right
    pooled = float(left @ left + right @ right) / (n + m - 2)
    # rounding of equal values is not a spread: 1e-12 is far below one reply in a million
    if pooled <= 1e-24:
        return 0.0 if abs(difference) > 1e-12 else 1.0
    return student_tails(difference / sqrt(pooled * (1 / n + 1 / m)), n + m - 2)


def student_tails(t: float, freedom: int) -> float:
    """P(|T| > |t|) of Student's distribution: the regularised incomplete beta function I_x(freedom/2, 1/2).

    By its continued fraction (Lentz), as in Numerical Recipes 6.4; importing scipy.special for it takes a tenth of the
    time of a trend over 10,000 runs.
    """
    x = freedom / (freedom + t * t)
    a, b = freedom / 2, 0.5
    if x >= 1:
        return 1.0
    if x <= 0:
        return 0.0
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log1p(-x))
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, 1 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    total = d
    for m in range(1, 1000):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / (1 + step * d)
            c = 1 + step / c
            total *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return total


def _prefix_sums(window: Floats) -> Floats:
    """[L] → 2-D prefix sums [L + 1, L + 1] of |x_i - x_j|, from which any block sum is four reads."""
    distances = np.abs(window[:, None] - window[None, :])
    sums = np.zeros((len(window) + 1, len(window) + 1))
    np.cumsum(np.cumsum(distances, axis=0), axis=1, out=sums[1:, 1:])
    return sums


class _Weights(NamedTuple):
    """What the three sums of Q are multiplied by, [τ, κ] for a stretch of one length; -inf where κ <= τ."""

    cross: Floats
    left: Floats
    right: Floats
    outside: Floats


@cache
def _weights(length: int) -> _Weights:
    n = np.arange(1, length)[:, None].astype(np.float64)
    m = np.arange(2, length + 1)[None, :] - n
    inside = m > 0
    m = np.where(inside, m, 1.0)
    return _Weights(
        cross=2 / (n + m),
        left=2 * m / ((n + m) * np.maximum(n - 1, 1)),
        right=2 * n / ((n + m) * np.maximum(m - 1, 1)),
        outside=np.where(inside, 0.0, -np.inf),
    )


def _best(sums: Floats, start: int, stop: int) -> tuple[float, int]:
    """The largest Q over splits τ and ends κ inside [start, stop), with its τ."""
    w = _weights(stop - start)
    diagonal = sums.diagonal()
    at_tau = diagonal[start + 1 : stop, None]
    to_tau = sums[start, start + 1 : stop, None]
    to_end = sums[start + 1 : stop, start + 2 : stop + 1]
    cross = to_end - sums[start, start + 2 : stop + 1] - at_tau + to_tau
    left = (at_tau - 2 * to_tau + sums[start, start]) / 2
    right = (diagonal[start + 2 : stop + 1] - 2 * to_end + at_tau) / 2
    q = w.cross * cross - w.left * left - w.right * right + w.outside
    at = int(q.argmax())
    return float(q.flat[at]), start + 1 + at // q.shape[1]


def _split_window(window: Floats, max_pvalue: float) -> list[int]:
    sums = _prefix_sums(window)
    found: list[int] = []
    while True:
        edges = [0, *found, len(window)]
        pieces = [(a, b) for a, b in pairwise(edges) if b - a > 1]
        if not pieces:
            return found
        _, at, a, b = max((*_best(sums, a, b), a, b) for a, b in pieces)
        if not t_test(window[a:at], window[at:b]) <= max_pvalue:
            return found
        found = sorted([*found, at])


def _candidates(values: Floats, window_len: int, max_pvalue: float) -> list[int]:
    found: set[int] = set()
    start, step = 0, max(1, window_len // 2)
    while start < len(values) - 1:
        new = [start + i for i in _split_window(values[start : start + window_len], max_pvalue)]
        found.update(new)
        start = max(new[-1] if new else 0, start + step)
    return sorted(found)


def _changes(series: Floats, indices: Sequence[int]) -> list[Change]:
    edges = [0, *indices, len(series)]
    made = []
    for before, at, after in zip(edges, edges[1:], edges[2:], strict=False):
        left, right = series[before:at], series[at:after]
        made.append(
            Change(
                index=at,
                mean_before=float(left.sum()) / len(left),
                mean_after=float(right.sum()) / len(right),
                p_value=t_test(left, right),
                n_before=len(left),
                n_after=len(right),
            )
        )
    return made


def change_points(
    series: Sequence[float | None], *, window_len: int = 50, max_pvalue: float = 0.001, min_magnitude: float = 0.0
) -> list[Change]:
    """Changes of a series, oldest first; indices are those of `series`.

    A missing value takes no part. A change whose `n_after` is 1 rests on one measurement.
    """
    places = [i for i, value in enumerate(series) if value is not None and np.isfinite(value)]
    values = np.array([series[i] for i in places], dtype=np.float64)
    first_pass = min(max_pvalue * 10, 0.5)
    kept = _candidates(values, window_len, first_pass)
    while kept:
        changes = _changes(values, kept)
        weakest = max(range(len(changes)), key=lambda i: changes[i].p_value)
        if changes[weakest].p_value < max_pvalue:
            weakest = min(range(len(changes)), key=lambda i: changes[i].magnitude)
            if changes[weakest].magnitude > min_magnitude:
                break
        del kept[weakest]
    found = _changes(values, kept) if kept else []
    return [
        Change(
            index=places[c.index],
            mean_before=c.mean_before,
            mean_after=c.mean_after,
            p_value=c.p_value,
            n_before=c.n_before,
            n_after=c.n_after,
        )
        for c in found
    ]
