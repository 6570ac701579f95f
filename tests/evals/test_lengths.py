"""Length fits find the length that was put in, say "beyond the rungs" instead of a number, and pair two builds."""

import numpy as np
import pytest
from scipy import optimize

from longrecall.evals.cells import make_cells
from longrecall.evals.lengths import PRIOR_LAPSE, PRIOR_LOG_S, crossing, fit_logistic, isotonic_crossing, length_fits
from longrecall.evals.simulate import QUIET, draw_builds, scores_of

pytestmark = pytest.mark.filterwarnings("error")
RUNGS = [2**k * 1024 for k in range(7)]
X = np.log2(np.array(RUNGS, dtype=float))


def _truth(x, mu, s, lapse=0.02):
    return (1 - lapse) / (1 + np.exp((x - mu) / s))


def _cells(mus, *, conversations=40, probes=5, s=0.6, seed=0, rungs=RUNGS):
    x = np.log2(np.array(rungs, dtype=float))
    recalls = np.clip(np.array([_truth(x, mu, s) for mu in mus]), 0.002, 0.998)
    right = np.stack(
        [
            draw_builds(
                np.random.default_rng(seed * 100 + r),
                reps=1,
                conversations=conversations,
                probes=probes,
                base_recall=recalls[0, r],
                recalls=list(recalls[:, r]),
                icc=0.2,
                engine=QUIET,
            )[0]
            for r in range(len(rungs))
        ],
        axis=1,
    )
    names = [f"b{i}" for i in range(len(mus))]
    return make_cells(scores_of(right, builds=names, rungs=list(rungs)), builds=names, rungs=rungs)


@pytest.mark.parametrize(("mu", "s", "lapse"), [(13, 0.5, 0.02), (12, 1.0, 0.4), (15.5, 0.3, 0.1), (20, 0.7, 0.5)])
def test_fisher_scoring_finds_the_maximum_that_lbfgs_finds(mu, s, lapse):
    recall = np.round(_truth(X, mu, s, lapse) * 200) / 200
    weight = np.full(7, 200.0)
    fit = fit_logistic(X, recall[None], weight[None])
    reach = np.ptp(X) / 2 + 2.0

    def objective(t):
        p = np.clip(1 / (1 + np.exp(t[2])) / (1 + np.exp(np.clip((X - t[0]) / np.exp(t[1]), -40, 40))), 1e-6, 1 - 1e-6)
        loglik = (weight * (recall * np.log(p) + (1 - recall) * np.log1p(-p))).sum()
        prior = ((t[0] - X.mean() - reach / 2) / reach) ** 2
        prior += ((t[1] - PRIOR_LOG_S[0]) / PRIOR_LOG_S[1]) ** 2 + ((t[2] - PRIOR_LAPSE[0]) / PRIOR_LAPSE[1]) ** 2
        return prior / 2 - loglik

    best = min(
        (optimize.minimize(objective, [m, 0.0, l], method="L-BFGS-B") for m in (11, 13, 15, 17) for l in (-3, 0)),
        key=lambda r: r.fun,
    )
    got = np.array([fit.mu[0], fit.log_s[0], fit.lapse_logit[0]])
    assert objective(got) <= best.fun + 1e-3


def test_length_is_found_with_small_bias_and_about_95_percent_coverage():
    errors, covered = [], 0
    for seed in range(30):
        fit = length_fits(_cells([13.0], seed=seed), "b0")[0]
        errors.append(np.log2(fit.l50_tokens) - 13.0)
        covered += fit.l50_ci_low <= 2**13.0 <= fit.l50_ci_high
    assert abs(np.mean(errors)) < 0.06 and np.std(errors) < 0.2
    assert covered >= 25


def test_difference_in_octaves_is_paired():
    base, patched, same = length_fits(_cells([14.0, 13.0, 14.0], seed=3), "b0")
    assert base.octaves is None
    assert patched.octaves == pytest.approx(-1.0, abs=0.2)
    assert patched.octaves_ci_low < -1 < patched.octaves_ci_high < -0.5
    assert same.octaves_ci_low <= 0 <= same.octaves_ci_high
    width = np.log2(same.l50_ci_high / same.l50_ci_low)
    assert same.octaves_ci_high - same.octaves_ci_low < width


def test_build_that_never_forgets_is_beyond_the_rungs_not_a_number():
    (fit,) = length_fits(_cells([30.0]), "b0")
    assert fit.l50_tokens is None and fit.l50_beyond == "longer"
    assert fit.threshold_tokens is None and fit.threshold_beyond == "longer"


def test_build_that_always_forgets_is_shorter_than_the_rungs():
    fit = length_fits(_cells([14.0, 7.0]), "b0")[1]
    assert fit.l50_tokens is None and fit.l50_beyond == "shorter"


def test_a_flat_curve_half_way_up_has_no_length_of_its_own():
    [once] = draw_builds(
        np.random.default_rng(0),
        reps=1,
        conversations=24,
        probes=8,
        base_recall=0.5,
        recalls=[0.5],
        icc=0.2,
        engine=QUIET,
    )
    both = scores_of(np.stack([once, once], axis=1), builds=["b0"], rungs=[448, 1536])
    (fit,) = length_fits(make_cells(both, builds=["b0"], rungs=[448, 1536]), "b0")
    assert fit.l50_tokens is None and fit.l50_beyond is None and fit.l50_ci_low is None and fit.l50_ci_high is None


def test_too_few_rungs_or_conversations_give_no_fit():
    assert length_fits(_cells([13.0], rungs=[2048]), "b0") == ()
    assert length_fits(_cells([13.0], conversations=5), "b0") == ()


def test_isotonic_crossing_interpolates_and_knows_the_ends():
    x, w = np.array([10.0, 11.0, 12.0]), np.ones(3)
    assert isotonic_crossing(x, np.array([0.9, 0.7, 0.3]), w, 0.5) == pytest.approx(11.5)
    assert isotonic_crossing(x, np.array([0.9, 0.4, 0.6]), w, 0.7) == pytest.approx(10.5)  # violators pooled at .5
    assert isotonic_crossing(x, np.array([0.9, 0.8, 0.7]), w, 0.5) == np.inf
    assert isotonic_crossing(x, np.array([0.4, 0.3, 0.2]), w, 0.5) == -np.inf
    assert isotonic_crossing(x, np.array([0.9, 0.7, 0.3]), np.array([1.0, 0, 1]), 0.6) == pytest.approx(11.0)


def test_threshold_crossing_inverts_the_curve():
    fit = fit_logistic(X, _truth(X, 13.0, 0.5)[None], np.full((1, 7), 1e6))
    at = crossing(fit, 0.8)[0]
    assert _truth(at, 13.0, 0.5) == pytest.approx(0.8, abs=0.01)
    assert crossing(fit, 0.999)[0] == -np.inf
