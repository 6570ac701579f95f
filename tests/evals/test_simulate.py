"""The simulated replays have the recall, correlation and flip rates they are asked for."""

import numpy as np
import pytest

from longrecall.evals.cells import make_cells
from longrecall.evals.simulate import NOISY, QUIET, SHOCK, cells_of, draw_builds, flip_rate, scores_of


@pytest.mark.parametrize("engine", [QUIET, NOISY, SHOCK], ids=lambda e: e.name)
@pytest.mark.parametrize(("recall", "icc"), [(0.95, 0.3), (0.5, 0.1)])
def test_draws_have_the_asked_recall_correlation_and_flips(engine, recall, icc):
    y = draw_builds(
        np.random.default_rng(0),
        reps=400,
        conversations=50,
        probes=8,
        base_recall=recall,
        recalls=[recall, recall, recall - 0.1],
        icc=icc,
        engine=engine,
    ).astype(float)
    assert y[:, 0].mean() == pytest.approx(recall, abs=0.01)
    assert y[:, 2].mean() == pytest.approx(recall - 0.1, abs=0.01)
    assert (y[:, 0] != y[:, 1]).mean() == pytest.approx(flip_rate(recall, icc, engine), abs=0.005)
    rows = y[:, 0].reshape(-1, 8)
    within = ((rows.sum(1) ** 2 - rows.sum(1)) / (8 * 7)).mean() - rows.mean() ** 2
    assert within / (rows.mean() * (1 - rows.mean())) == pytest.approx(icc, abs=0.03)


def test_catastrophe_takes_whole_conversations():
    y = draw_builds(
        np.random.default_rng(0),
        reps=300,
        conversations=40,
        probes=8,
        base_recall=0.95,
        recalls=[0.95, 0.85],
        icc=0.3,
        engine=QUIET,
        loss="catastrophe",
    ).astype(float)
    assert y[:, 1].mean() == pytest.approx(0.85, abs=0.01)
    d = (y[:, 1] - y[:, 0]).mean(axis=2)
    assert (d < -0.6).mean() == pytest.approx(0.1, abs=0.03)
    assert (np.abs(d) > 0.4).mean() < 0.13


def test_engines_flip_as_often_as_the_published_tables_say():
    assert flip_rate(0.95, 0.1, QUIET) == pytest.approx(0.0135, abs=0.002)
    assert flip_rate(0.85, 0.5, QUIET) == pytest.approx(0.018, abs=0.002)
    assert flip_rate(0.95, 0.3, SHOCK) == pytest.approx(0.066, abs=0.003)
    assert flip_rate(0.95, 0.3, NOISY) == pytest.approx(0.049, abs=0.004)


def test_dense_arrays_are_those_that_the_score_table_reads_into():
    right = np.random.default_rng(0).random((3, 2, 5, 4)) < 0.6
    names, rungs = ["base", "x", "y"], [448, 1024]
    direct, read = (
        cells_of(right, builds=names, rungs=rungs),
        make_cells(scores_of(right, builds=names, rungs=rungs), builds=names, rungs=rungs),
    )
    for field in ("recall", "asked", "missing", "outcomes", "cluster"):
        assert np.array_equal(getattr(direct, field), getattr(read, field)), field
    assert (direct.conversations, direct.probes, direct.n_clusters) == (
        read.conversations,
        read.probes,
        read.n_clusters,
    )
