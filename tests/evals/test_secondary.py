"""Log-probability shifts warn before recall moves; flips show what a mean hides."""

import numpy as np
import pytest

from longrecall.evals.cells import make_cells
from longrecall.evals.secondary import flips, logprob_shifts
from longrecall.evals.simulate import scores_of

pytestmark = pytest.mark.filterwarnings("error")
BUILDS = ["base", "base-again", "patched"]


def _cells(right, logprob=None):
    table = scores_of(right, builds=BUILDS, rungs=[448, 2048], logprob=logprob)
    return make_cells(table, builds=BUILDS, rungs=[448, 2048])


def test_shift_is_seen_where_recall_does_not_move():
    rng = np.random.default_rng(0)
    right = np.ones((3, 2, 12, 8), dtype=bool)
    logprob = np.repeat(rng.normal(-2, 1, (1, 2, 12, 8)), 3, axis=0) + rng.normal(0, 0.05, (3, 2, 12, 8))
    logprob[2, 1] -= 0.2
    shifts = {(s.candidate, s.rung): s for s in logprob_shifts(_cells(right, logprob), "base")}
    assert shifts["patched", 2048].shift_nats == pytest.approx(-0.2, abs=0.05)
    assert shifts["patched", 2048].p_lower < 1e-6 and shifts["patched", 2048].ci_high < 0
    assert shifts["patched", 448].p_lower > 0.01 and shifts["base-again", 2048].p_lower > 0.01


def test_replies_without_a_log_probability_leave_their_pair_out():
    logprob = np.full((3, 2, 4, 2), -1.0)
    logprob[2, 0, 0] = np.nan
    logprob[2, 1] = np.nan
    shifts = logprob_shifts(_cells(np.ones((3, 2, 4, 2), dtype=bool), logprob), "base")
    assert [(s.candidate, s.rung, s.n_conversations, s.n_probes) for s in shifts] == [
        ("base-again", 448, 4, 8),
        ("base-again", 2048, 4, 8),
        ("patched", 448, 3, 6),
    ]


def test_same_mean_with_more_flips_is_reported_as_such():
    rng = np.random.default_rng(1)
    right = np.repeat(rng.random((1, 2, 30, 8)) < 0.5, 3, axis=0)
    half = rng.random((30, 8)) < 0.3
    right[2, 1] ^= half
    found = {(f.candidate, f.rung): f for f in flips(_cells(right), "base", "base-again")}
    moved = found["patched", 2048]
    assert moved.lost + moved.gained == int(half.sum()) and moved.n_identical == 240 - int(half.sum())
    assert moved.p_more_flips < 1e-6 and moved.flip_rate == pytest.approx(half.mean())
    assert found["patched", 448].p_more_flips == 1.0 and found["patched", 448].n_identical == 240
    assert found["base-again", 448].p_more_flips is None
    assert flips(_cells(right), "base", None)[0].p_more_flips is None
