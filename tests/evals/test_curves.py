"""Recall with an interval that respects the conversation."""

import numpy as np
import pytest

from longrecall.evals.cells import make_cells
from longrecall.evals.curves import clustered_interval, conversation_means, make_curves
from longrecall.evals.simulate import QUIET, draw_builds, scores_of

pytestmark = pytest.mark.filterwarnings("error")


def test_curve_point_counts_outcomes_and_leaves_missing_ones_out():
    right = np.ones((1, 1, 4, 2), dtype=bool)
    right[0, 0, 0] = False
    table = scores_of(right, builds=["base"], rungs=[448])
    outcomes = table["outcome"].to_pylist()
    outcomes[0], outcomes[2] = "error", "stale"
    table = table.set_column(table.column_names.index("outcome"), "outcome", [outcomes])
    (point,) = make_curves(make_cells(table, builds=["base"], rungs=[448]))
    assert point.outcomes == {"ok": 5, "stale": 1, "other": 1, "error": 1}
    assert point.n_probes == 7 and point.n_conversations == 4
    assert point.recall == pytest.approx((0 + 0.5 + 1 + 1) / 4)
    assert point.ci_low < point.recall < point.ci_high


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_spotless_cell_has_an_interval_that_counts_conversations_not_probes(value):
    low, high = clustered_interval(np.full(20, value), 200)
    assert high - low > 0.1 and 0 <= low <= value <= high <= 1


def test_interval_of_one_or_no_conversation():
    low, high = clustered_interval(np.array([1.0]), 10)
    assert low < 0.1 and high == 1.0
    assert clustered_interval(np.array([np.nan]), 0) is None


@pytest.mark.parametrize(("recall", "icc"), [(0.5, 0.3), (0.9, 0.3), (0.98, 0.5)])
def test_interval_covers_the_truth_about_95_times_in_100(recall, icc):
    right = draw_builds(
        np.random.default_rng(5),
        reps=600,
        conversations=30,
        probes=8,
        base_recall=recall,
        recalls=[recall],
        icc=icc,
        engine=QUIET,
    )[:, 0].mean(axis=2)
    intervals = [clustered_interval(row, 240) for row in right]
    covered = np.mean([low <= recall <= high for low, high in intervals])
    assert 0.92 < covered <= 1.0
    unclustered = np.mean([abs(row.mean() - recall) < 1.96 * np.sqrt(recall * (1 - recall) / 240) for row in right])
    assert unclustered < covered


def test_cluster_of_conversations_counts_once():
    table = scores_of(np.array([[[[True], [False], [False]]]]), builds=["base"], rungs=[448])
    table = table.set_column(4, "cluster_id", [["t0", "t1", "t1"]])
    assert conversation_means(make_cells(table, builds=["base"], rungs=[448]), 0).tolist() == [[1.0, 0.0]]
