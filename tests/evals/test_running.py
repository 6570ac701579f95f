"""Verdicts during the run: the same e-values as afterwards, in any order of arrival, and never too early."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.evals.paired import log_e_equivalent, log_e_loss
from longrecall.evals.running import RunningVerdicts
from longrecall.evals.schema import Score, VerdictConfig
from longrecall.evals.scores_file import ScoresError
from longrecall.evals.simulate import QUIET, draw_builds, scores_of
from longrecall.evals.verdict import judge
from longrecall.runners.schema import Build

BUILDS = ["base", "bad", "harmless"]


def _scores(conversations=12, recalls=(0.9, 0.3, 0.9), seed=0, probes=4):
    right = draw_builds(
        np.random.default_rng(seed),
        reps=1,
        conversations=conversations,
        probes=probes,
        base_recall=0.9,
        recalls=list(recalls),
        icc=0.2,
        engine=QUIET,
    )[0][:, None]
    return right, [Score(**row) for row in scores_of(right, builds=BUILDS, rungs=[448]).to_pylist()]


def _running(conversations=12, probes=4):
    return RunningVerdicts(
        base="base",
        candidates=BUILDS[1:],
        rungs=[448],
        order=[f"c{i:05d}" for i in range(conversations)],
        probes_per_conversation=probes,
        config=VerdictConfig(),
    )


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_running_e_values_are_those_of_the_analysis_whatever_order_replies_arrive_in(seed):
    right, scores = _scores()
    running = _running()
    for i in np.random.default_rng(seed).permutation(len(scores)):
        running.add(scores[i])
    d = (right[1:, 0].mean(axis=2) - right[0, 0].mean(axis=1)).reshape(2, 12)
    for row, build in enumerate(BUILDS[1:]):
        cell = running.cell(build, 448)
        assert cell.n_conversations == 12
        assert cell.delta_recall == pytest.approx(d[row].mean())
        assert np.log(cell.e_loss) == pytest.approx(max(0, log_e_loss(d)[row].max()), abs=1e-9)
        assert np.log(cell.e_equivalent) == pytest.approx(max(0, log_e_equivalent(d, margin=0.1)[row].max()), abs=1e-9)


def test_a_conversation_waits_until_it_is_complete_and_its_turn_has_come():
    _, scores = _scores()
    running = _running()
    late = next(s for s in scores if s.conversation_id == "c00000" and s.build_id == "base")
    for score in scores:
        if score is not late:
            running.add(score)
    assert running.cell("bad", 448).n_conversations == 0
    running.add(late)
    assert running.cell("bad", 448).n_conversations == 12


def test_loss_is_called_early_and_innocence_only_after_the_minimum():
    _, scores = _scores(conversations=80)
    running = _running(conversations=80)
    called = {}
    for score in sorted(scores, key=lambda s: s.conversation_id):
        running.add(score)
        for build in BUILDS[1:]:
            if build not in called and (decision := running.decision(build)):
                called[build] = (decision, running.cell(build, 448).n_conversations)
    assert called["bad"][0] == "culprit" and called["bad"][1] <= 15
    assert called["harmless"][0] == "exonerated" and called["harmless"][1] >= 25


def test_missing_replies_leave_their_pair_out_but_do_not_hold_the_run_up():
    _, scores = _scores()
    running = _running()
    for score in scores:
        lost = score.build_id == "bad" and score.probe_id == "p0"
        running.add(dataclasses.replace(score, outcome="error") if lost else score)
    assert running.cell("bad", 448).n_conversations == 12
    assert running.cell("bad", 448).recall < 0.6


@pytest.mark.parametrize("bad", [{"build_id": "x"}, {"rung": 9}, {"conversation_id": "c9"}, {}])
def test_unplanned_or_repeated_scores_are_refused(bad):
    _, scores = _scores()
    running = _running()
    running.add(scores[0])
    with pytest.raises(ScoresError):
        running.add(dataclasses.replace(scores[0], **bad))


def test_false_convictions_stay_rare_however_often_one_looks():
    right = draw_builds(
        np.random.default_rng(9),
        reps=1500,
        conversations=60,
        probes=8,
        base_recall=0.9,
        recalls=[0.9, 0.9],
        icc=0.3,
        engine=QUIET,
    ).mean(axis=3)
    peak = log_e_loss(right[:, 1] - right[:, 0]).max(axis=1)
    assert (peak >= np.log(20)).mean() <= 0.05


def test_a_decision_is_one_that_the_final_analysis_reaches_too():
    """Six patches, one with a weak loss at one rung: at a bar below the final one it stayed undecided, unasked."""
    roles = ["base", "aa", *["suspect"] * 6, "positive-control"]
    names = ["base", "base-again", *(f"p{i}" for i in range(6)), "bad"]
    builds = [Build(build_id=n, patch_ids=(), role=r) for n, r in zip(names, roles, strict=True)]  # type: ignore[arg-type]
    for seed in range(3):
        rng = np.random.default_rng(seed)
        right = np.stack(
            [
                draw_builds(
                    rng,
                    reps=1,
                    conversations=48,
                    probes=4,
                    base_recall=0.85,
                    recalls=[0.85, 0.85, guilty, *[0.85] * 5, 0.3],
                    icc=0.2,
                    engine=QUIET,
                )[0]
                for guilty in (0.85, 0.7)
            ],
            axis=1,
        )
        scores = [Score(**row) for row in scores_of(right, builds=names, rungs=[448, 1024]).to_pylist()]
        running = RunningVerdicts(
            base="base", candidates=names[1:], rungs=[448, 1024], order=[f"c{i:05d}" for i in range(48)],
            probes_per_conversation=4, config=VerdictConfig(), n_suspects=7,
        )  # fmt: skip
        of = {(s.conversation_id, s.build_id): [] for s in scores}
        for score in scores:
            of[score.conversation_id, score.build_id].append(score)
        taken, decided = [], {}
        for c in range(48):
            for name in names:
                if name not in decided:
                    for score in of[f"c{c:05d}", name]:
                        running.add(score)
                        taken.append(score)
            for name in names[2:]:
                if name not in decided and (found := running.decision(name)) is not None:
                    decided[name] = found
        final = {v.patch: v.verdict for v in judge(taken, builds, rungs=[448, 1024], stopped_early=True).verdicts}
        assert decided["p0"] == "culprit" and {name: final[name] for name in decided} == decided


def test_base_against_itself_is_known_once_its_interval_fits_the_margin():
    running = _running(conversations=3, probes=2)
    _, scores = _scores(conversations=3, probes=2)
    quiet, noisy = BUILDS[1:]
    for score in scores:
        flip = score.build_id == noisy and score.conversation_id == "c00000"
        running.add(dataclasses.replace(score, outcome="other" if flip else "ok"))
    assert running.within_margin(quiet) and not running.within_margin(noisy)
