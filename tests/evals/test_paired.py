"""Every hand-written statistic against brute force or a second implementation."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import optimize, stats

from longrecall.evals.paired import (
    FRACTIONS_EQUIVALENT,
    LAMBDAS_LOSS,
    cluster_t,
    holm,
    log_e_equivalent,
    log_e_loss,
    min_conversations,
    sign_flip_p,
    tango_lower,
    tango_z,
)

eighths = st.integers(-8, 8).map(lambda i: i / 8)
differences = hnp.arrays(np.float64, st.integers(2, 12), elements=eighths)


@given(differences)
def test_cluster_t_equals_scipy_ttest(d):
    got = cluster_t(d[None], margin=0.1, alpha=0.05)
    if np.ptp(d) == 0:
        assert got.stderr[0] == 0
        return
    loss = stats.ttest_1samp(d, 0, alternative="less")
    equivalent = stats.ttest_1samp(d, -0.1, alternative="greater")
    interval = stats.ttest_1samp(d, 0).confidence_interval(0.95)
    lower = stats.ttest_1samp(d, 0, alternative="greater").confidence_interval(0.95).low
    assert got.p_loss[0] == pytest.approx(loss.pvalue, abs=1e-12)
    assert got.p_equivalent[0] == pytest.approx(equivalent.pvalue, abs=1e-12)
    assert got.p_two_sided[0] == pytest.approx(stats.ttest_1samp(d, 0).pvalue, abs=1e-12)
    assert (got.ci_low[0], got.ci_high[0]) == pytest.approx((interval.low, interval.high))
    assert got.lower[0] == pytest.approx(lower)


def test_cluster_t_leaves_unknown_conversations_out_and_reports_too_few_as_unknown():
    d = np.array([[0.0, -0.5, np.nan, -0.25], [np.nan] * 4, [0.5, np.nan, np.nan, np.nan]])
    got = cluster_t(d, margin=0.1, alpha=0.05)
    assert list(got.n) == [3, 0, 1]
    assert got.mean[0] == pytest.approx(-0.25)
    assert np.isnan(got.mean[1]) and got.mean[2] == 0.5
    assert np.isnan(got.p_loss[1:]).all() and np.isnan(got.lower[1:]).all()


@given(hnp.arrays(np.float64, st.integers(1, 9), elements=eighths))
def test_sign_flip_equals_enumeration_of_all_patterns(d):
    patterns = np.array(list(itertools.product([-1, 1], repeat=len(d))))
    brute = float((patterns @ np.abs(d) <= d.sum() + 1e-9).mean())
    assert sign_flip_p(d) == pytest.approx(brute, abs=1e-12)


def test_sign_flip_equals_scipy_permutation_test():
    d = np.random.default_rng(3).integers(-4, 3, 11) / 8
    reference = stats.permutation_test(
        (d,), np.mean, permutation_type="samples", alternative="less", n_resamples=np.inf, vectorized=False
    )
    assert sign_flip_p(d) == pytest.approx(reference.pvalue, abs=1e-9)


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(5, 8)), min_size=1, max_size=8))
def test_sign_flip_is_exact_with_unequal_numbers_of_probes(pairs):
    d = np.array([a / b for a, b in pairs])
    patterns = np.array(list(itertools.product([-1, 1], repeat=len(d))))
    assert sign_flip_p(d) == pytest.approx(float((patterns @ np.abs(d) <= d.sum() + 1e-9).mean()), abs=1e-12)


def test_sign_flip_draws_when_the_differences_share_no_denominator():
    d = np.random.default_rng(0).normal(-0.1, 0.3, 12)
    patterns = np.array(list(itertools.product([-1, 1], repeat=12)))
    exact = float((patterns @ np.abs(d) <= d.sum()).mean())
    assert sign_flip_p(d) == pytest.approx(exact, abs=0.01)
    assert sign_flip_p(d) == sign_flip_p(d)  # seeded


def test_sign_flip_of_no_difference_is_no_evidence():
    assert sign_flip_p(np.zeros(40)) == 1.0
    assert math.isnan(sign_flip_p(np.array([np.nan])))


def _tango_numeric(lost, gained, n, loss):
    """The same statistic with the constrained maximum-likelihood estimate found numerically."""

    def negative_log_likelihood(q):
        p = q + loss
        rest = 1 - 2 * q - loss
        return -(
            (lost * math.log(p) if lost else 0)
            + (gained * math.log(q) if gained else 0)
            + ((n - lost - gained) * math.log(rest) if n > lost + gained else 0)
        )

    low, high = max(0.0, -loss) + 1e-13, (1 - loss) / 2 - 1e-13
    found = optimize.minimize_scalar(
        negative_log_likelihood, bounds=(low, high), method="bounded", options={"xatol": 1e-13}
    )
    q = found.x
    return (lost - gained - n * loss) / math.sqrt(n * (2 * q + loss * (1 - loss)))


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 40), st.floats(0.01, 0.6))
def test_tango_statistic_equals_numeric_constrained_likelihood(lost, gained, rest, loss):
    n = lost + gained + rest
    closed = float(tango_z(np.array([float(lost)]), np.array([float(gained)]), np.array([float(n)]), loss)[0])
    assert closed == pytest.approx(_tango_numeric(lost, gained, n, loss), abs=2e-4)


@given(st.integers(0, 20), st.integers(0, 20), st.integers(1, 60))
def test_tango_bound_is_where_the_statistic_meets_its_quantile(lost, gained, rest):
    n = np.array([float(lost + gained + rest)])
    x, y = np.array([float(lost)]), np.array([float(gained)])
    bound = tango_lower(x, y, n, alpha=0.05)
    assert -1 <= bound[0] <= (gained - lost) / n[0] + 1e-9
    assert float(tango_z(x, y, n, -bound)[0]) == pytest.approx(-stats.norm.ppf(0.95), abs=1e-6)


@pytest.mark.parametrize(("p_lost", "p_gained"), [(0.1, 0.0), (0.15, 0.05), (0.2, 0.1), (0.3, 0.3)])
def test_tango_bound_errs_about_as_often_as_it_says_by_full_enumeration(p_lost, p_gained):
    n = 40
    lost, gained = np.array([(x, y) for x in range(n + 1) for y in range(n + 1 - x)], dtype=float).T
    chance = stats.multinomial.pmf(
        np.stack([lost, gained, n - lost - gained], 1), n, [p_lost, p_gained, 1 - p_lost - p_gained]
    )
    too_high = tango_lower(lost, gained, np.full(len(lost), float(n)), alpha=0.05) > p_gained - p_lost
    assert 0.01 < chance[too_high].sum() < 0.065


@pytest.mark.parametrize(("margin", "least"), [(0.10, 25), (0.05, 52)])
def test_minimum_conversations_is_the_first_spotless_record_that_excludes_the_margin(margin, least):
    assert min_conversations(margin, 0.05) == least
    zero = np.zeros(1)
    assert tango_lower(zero, zero, np.array([float(least)]), alpha=0.05)[0] > -margin
    assert tango_lower(zero, zero, np.array([least - 1.0]), alpha=0.05)[0] <= -margin


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_equals_its_step_down_definition(values):
    p = np.array(values)
    adjusted = holm(p)
    for alpha in (0.01, 0.05, 0.2):
        rejected = set()
        for rank, i in enumerate(np.argsort(p, kind="stable")):
            if p[i] * (len(p) - rank) > alpha:
                break
            rejected.add(int(i))
        assert rejected == set(np.flatnonzero(adjusted <= alpha).tolist())


def test_holm_does_not_count_cells_that_were_not_tested():
    assert holm(np.array([0.02, np.nan, 0.04])).tolist()[0] == pytest.approx(0.04)
    assert np.isnan(holm(np.array([np.nan]))).all()


@given(hnp.arrays(np.float64, (2, 6), elements=eighths))
def test_e_processes_equal_their_products(d):
    loss, equivalent = np.exp(log_e_loss(d)), np.exp(log_e_equivalent(d, margin=0.1))
    lambdas = FRACTIONS_EQUIVALENT / 0.9
    for row in range(2):
        for t in range(6):
            seen = d[row, : t + 1]
            by_loss = [np.prod(np.exp(-lam * seen) / np.cosh(lam * seen)) for lam in LAMBDAS_LOSS]
            by_bet = [np.prod(1 + lam * (seen + 0.1)) for lam in lambdas]
            assert loss[row, t] == pytest.approx(np.mean(by_loss), rel=1e-9)
            assert equivalent[row, t] == pytest.approx(np.mean(by_bet), rel=1e-9)


@given(st.lists(eighths, min_size=1, max_size=8))
def test_loss_e_value_has_mean_one_over_all_sign_patterns(values):
    d = np.array(values)
    patterns = np.array(list(itertools.product([-1.0, 1.0], repeat=len(d)))) * d
    assert np.exp(log_e_loss(patterns)[:, -1]).mean() == pytest.approx(1.0, rel=1e-9)


@settings(max_examples=30)
@given(st.integers(1, 8), st.floats(0.05, 0.3))
def test_equivalence_e_value_has_mean_at_most_one_at_the_margin(n, margin):
    # the hardest distribution: all or nothing with mean -margin
    patterns = np.array(list(itertools.product([0.0, -1.0], repeat=n)))
    weights = np.prod(np.where(patterns < 0, margin, 1 - margin), axis=1)
    values = np.exp(log_e_equivalent(patterns, margin=margin)[:, -1])
    assert float((weights * values).sum()) == pytest.approx(1.0, rel=1e-9)
    assert (values > 0).all()


def test_unknown_conversations_leave_e_values_unchanged():
    d = np.array([[-0.5, np.nan, -0.25]])
    loss, equivalent = log_e_loss(d), log_e_equivalent(d, margin=0.1)
    assert loss[0, 0] == pytest.approx(loss[0, 1])
    assert equivalent[0, 0] == pytest.approx(equivalent[0, 1])
