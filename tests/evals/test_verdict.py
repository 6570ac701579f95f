"""The verdict rule: what convicts, what exonerates, and everything that must keep it from doing either."""

import dataclasses
import warnings

import numpy as np
import pytest

from longrecall.evals.cells import make_cells
from longrecall.evals.paired import min_conversations_any_time
from longrecall.evals.schema import Score, VerdictConfig
from longrecall.evals.scores_file import ScoresError, read_scores, write_scores
from longrecall.evals.simulate import IDENTICAL, NOISY, QUIET, draw_builds, scores_of
from longrecall.evals.verdict import judge
from longrecall.runners.schema import Build

RUNGS = [448, 1024, 2048]
ROLES = {"base": "base", "base-again": "aa", "bad": "positive-control", "noop": "negative-control"}
RECALL = {"bad": [0.5, 0.05, 0.02], "leaky": [0.5, 0.3, 0.25], "dull": [0.2, 0.2, 0.2]}

pytestmark = pytest.mark.filterwarnings("error")


def make_builds(*names):
    return [Build(build_id=n, patch_ids=(), role=ROLES.get(n, "suspect")) for n in names]


DEFAULT = ("base", "base-again", "bad", "noop", "leaky", "harmless")


def campaign(names=DEFAULT, *, conversations=60, probes=8, engine=QUIET, seed=0, base=0.5, rungs=RUNGS, recall=RECALL):
    rng = np.random.default_rng(seed)
    right = np.stack(
        [
            draw_builds(
                rng,
                reps=1,
                conversations=conversations,
                probes=probes,
                base_recall=base,
                recalls=[recall.get(n, [base] * len(rungs))[r] for n in names],
                icc=0.2,
                engine=engine,
            )[0]
            for r in range(len(rungs))
        ],
        axis=1,
    )
    return right, make_builds(*names)


def to_scores(right, builds, rungs=RUNGS):
    table = scores_of(right, builds=[b.build_id for b in builds], rungs=list(rungs))
    return [Score(**row) for row in table.to_pylist()]


def verdicts(judgement):
    return {v.patch: v for v in judgement.verdicts}


def controls(judgement):
    return {c.name: c for c in judgement.controls}


def change(scores, condition, **fields):
    return [dataclasses.replace(s, **fields) if condition(s) else s for s in scores]


@pytest.fixture(scope="module")
def sound():
    right, builds = campaign()
    return to_scores(right, builds), builds


def test_loss_is_convicted_and_the_others_exonerated(sound):
    scores, builds = sound
    got = verdicts(judge(scores, builds, rungs=RUNGS))
    assert {k: v.verdict for k, v in got.items()} == {
        "bad": "culprit",
        "noop": "exonerated",
        "leaky": "culprit",
        "harmless": "exonerated",
    }
    leaky = got["leaky"]
    assert leaky.rung in (1024, 2048) and leaky.delta_recall < -0.15 and leaky.ci_high < 0
    assert leaky.n_conversations == 60 and leaky.n_probes == 480 and leaky.p_value < 1e-4
    assert got["harmless"].p_value < 0.05 and got["harmless"].more_conversations_needed is None


def test_same_scores_give_the_same_judgement_in_any_row_order(sound):
    scores, builds = sound
    order = [f"c{i:05d}" for i in range(60)]
    shuffled = [scores[i] for i in np.random.default_rng(1).permutation(len(scores))]
    assert judge(scores, builds, rungs=RUNGS, order=order) == judge(shuffled, builds, rungs=RUNGS, order=order)


def test_verdicts_come_out_of_the_stored_file_alone(sound, tmp_path):
    scores, builds = sound
    write_scores(scores, tmp_path / "scores.parquet")
    assert read_scores(tmp_path / "scores.parquet") == scores
    assert judge(read_scores(tmp_path / "scores.parquet"), builds, rungs=RUNGS) == judge(scores, builds, rungs=RUNGS)


def test_comparison_numbers_are_those_of_the_raw_replies(sound):
    scores, builds = sound
    got = next(c for c in judge(scores, builds, rungs=RUNGS).comparisons if c.candidate == "leaky" and c.rung == 1024)
    ok = {(s.build_id, s.conversation_id, s.probe_id): s.outcome == "ok" for s in scores if s.rung == 1024}
    pairs = [(v, ok["leaky", c, p]) for (b, c, p), v in ok.items() if b == "base"]
    assert got.lost == sum(a and not b for a, b in pairs)
    assert got.gained == sum(b and not a for a, b in pairs)
    assert got.delta_recall == pytest.approx(
        sum(b for _, b in pairs) / len(pairs) - sum(a for a, _ in pairs) / len(pairs)
    )
    assert got.recall_candidate == pytest.approx(sum(b for _, b in pairs) / len(pairs))


def test_pooled_comparison_names_its_rungs(sound):
    scores, builds = sound
    pooled = [c for c in judge(scores, builds, rungs=RUNGS).comparisons if c.rung is None]
    assert len(pooled) == 5 and all(c.pooled_rungs == tuple(RUNGS) for c in pooled)


@pytest.mark.parametrize(
    ("absent", "why"),
    [("base-again", "no second run of the base"), ("bad", "no build that is known to lose recall")],
)
def test_no_verdict_without_the_control(sound, absent, why):
    scores, builds = sound
    kept = [b for b in builds if b.build_id != absent]
    judgement = judge([s for s in scores if s.build_id != absent], kept, rungs=RUNGS)
    for verdict in judgement.verdicts:
        assert verdict.verdict == "inconclusive" and why in verdict.reason
        assert verdict.more_conversations_needed is None


def test_missing_no_op_patch_is_shown_and_does_not_block(sound):
    scores, builds = sound
    kept = [b for b in builds if b.build_id != "noop"]
    judgement = judge([s for s in scores if s.build_id != "noop"], kept, rungs=RUNGS)
    assert controls(judgement)["negative"].build is None and not controls(judgement)["negative"].passed
    assert verdicts(judgement)["leaky"].verdict == "culprit"


def test_uncaught_positive_control_blocks_every_verdict():
    right, builds = campaign(recall={"leaky": [0.3] * 3})  # the "bad" build is as good as the base
    judgement = judge(to_scores(right, builds), builds, rungs=RUNGS)
    assert not controls(judgement)["positive"].passed
    assert {v.verdict for v in judgement.verdicts} == {"inconclusive"}
    reason = judgement.verdicts[0].reason
    assert "was not caught" in reason and "more conversations would help, or a control known bad" in reason
    own = [c for c in controls(judgement)["positive"].comparisons if c.rung is not None]
    most = min(own, key=lambda c: c.delta_recall)
    low, high = (f"{100 * v:+z.1f}".replace("-", "−") for v in (most.ci_low, most.ci_high))
    assert f" points [{low}, {high}] at {most.rung} tokens)" in reason


def test_base_that_differs_from_itself_blocks_every_verdict():
    right, builds = campaign(recall=RECALL | {"base-again": [0.35] * 3})
    judgement = judge(to_scores(right, builds), builds, rungs=RUNGS)
    assert not controls(judgement)["aa"].passed and "differs from itself" in controls(judgement)["aa"].detail
    assert {v.verdict for v in judgement.verdicts} == {"inconclusive"}


def test_base_noisier_than_the_margin_blocks_every_verdict():
    right, builds = campaign(conversations=40, probes=1)
    flip = np.random.default_rng(0).random(right.shape[1:]) < 0.5
    right[1] = np.where(flip, ~right[0], right[0])
    judgement = judge(to_scores(right, builds), builds, rungs=RUNGS)
    assert not controls(judgement)["aa"].passed
    assert {v.verdict for v in judgement.verdicts} == {"inconclusive"}


def test_convicted_no_op_blocks_every_verdict():
    right, builds = campaign(recall=RECALL | {"noop": [0.2] * 3})
    judgement = judge(to_scores(right, builds), builds, rungs=RUNGS)
    assert not controls(judgement)["negative"].passed
    assert {v.verdict for v in judgement.verdicts} == {"inconclusive"}


def test_too_few_conversations_never_exonerate_however_spotless():
    right, builds = campaign(conversations=24, engine=IDENTICAL)
    got = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))["noop"]
    assert got.verdict == "inconclusive" and "no fewer than 25" in got.reason
    assert got.more_conversations_needed == 1 and got.delta_recall == 0.0
    assert got.ci_low < -0.1  # identical on all replies is still only 24 conversations
    right, builds = campaign(conversations=25, engine=IDENTICAL)
    assert verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))["noop"].verdict == "exonerated"


def test_real_loss_inside_the_margin_is_named_as_both():
    right, builds = campaign(
        ("base", "base-again", "bad", "slight"),
        conversations=400,
        recall={"bad": [0.1] * 3, "slight": [0.47] * 3},
    )
    got = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))["slight"]
    assert got.verdict == "within-margin" and "is excluded" in got.reason


def test_loss_at_one_rung_only_is_never_exonerated():
    right, builds = campaign(recall=RECALL | {"leaky": [0.5, 0.5, 0.41]}, conversations=60)
    assert verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))["leaky"].verdict != "exonerated"


def test_inconclusive_says_how_many_more_and_that_many_do_settle_it():
    names = ("base", "base-again", "bad", "leaky")
    recall = {"bad": [0.1] * 3, "leaky": [0.5, 0.5, 0.43]}
    right, builds = campaign(names, recall=recall, conversations=20, seed=7)
    got = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))["leaky"]
    assert got.verdict == "inconclusive" and got.more_conversations_needed is not None
    assert str(got.more_conversations_needed) in got.reason
    settled = 0
    for seed in range(8):
        right, builds = campaign(names, recall=recall, conversations=20 + got.more_conversations_needed, seed=seed)
        settled += verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))["leaky"].verdict != "inconclusive"
    assert settled >= 4


def test_errors_are_not_wrong_answers_and_unequal_errors_block_exoneration(sound):
    scores, builds = sound
    hit = change(scores, lambda s: s.build_id == "harmless" and s.conversation_id < "c00004", outcome="error")
    judgement = judge(hit, builds, rungs=RUNGS, planned=1440)
    got = verdicts(judgement)["harmless"]
    assert got.verdict == "inconclusive" and "are missing" in got.reason and "to +" in got.reason
    missing = next(m for m in judgement.missing if m.build == "harmless")
    assert missing.by_outcome == {"error": 96} and missing.n_planned == missing.n_asked == 1440
    point = next(c for c in judgement.curves if c.build == "harmless" and c.rung == 448)
    assert point.n_conversations == 56 and point.recall > 0.4


def test_a_patch_cannot_hide_a_large_loss_behind_errors(sound):
    scores, builds = sound
    hit = change(scores, lambda s: s.build_id == "leaky" and s.conversation_id < "c00002", outcome="error")
    got = verdicts(judge(hit, builds, rungs=RUNGS))["leaky"]
    assert got.verdict == "culprit" and "in the patch's favour" in got.reason


def test_errors_alone_never_convict():
    right, builds = campaign()
    scores = change(
        to_scores(right, builds),
        lambda s: s.build_id == "harmless" and s.probe_id in ("p0", "p1", "p2"),
        outcome="error",
    )
    assert verdicts(judge(scores, builds, rungs=RUNGS))["harmless"].verdict == "inconclusive"


def test_equal_missing_shares_do_not_block(sound):
    scores, builds = sound
    hit = change(scores, lambda s: s.probe_id == "p0" and s.conversation_id < "c00008", outcome="truncated")
    got = verdicts(judge(hit, builds, rungs=RUNGS))
    assert got["harmless"].verdict == "exonerated" and got["leaky"].verdict == "culprit"


def test_build_without_half_its_rungs_is_neither_exonerated_nor_averaged_in(sound):
    scores, builds = sound
    half = [s for s in scores if not (s.build_id == "harmless" and s.rung != 448)]
    judgement = judge(half, builds, rungs=RUNGS, planned=1440)
    got = verdicts(judgement)["harmless"]
    assert got.verdict == "inconclusive" and "1024, 2048" in got.reason
    pooled = next(c for c in judgement.comparisons if c.candidate == "harmless" and c.rung is None)
    assert pooled.n_conversations == 0 and pooled.delta_recall is None
    point = next(c for c in judgement.curves if c.build == "harmless" and c.rung == 1024)
    assert point.recall is None and point.n_probes == 0
    assert next(m for m in judgement.missing if m.build == "harmless").n_asked == 480


def test_build_without_any_reply_is_shown_as_such(sound):
    scores, builds = sound
    none = [s for s in scores if s.build_id != "harmless"]
    got = verdicts(judge(none, builds, rungs=RUNGS))["harmless"]
    assert (got.verdict, got.n_conversations, got.delta_recall) == ("inconclusive", 0, None)


def test_no_scores_at_all_is_inconclusive_not_a_crash():
    judgement = judge([], make_builds(*DEFAULT), rungs=RUNGS, planned=1440)
    assert {v.verdict for v in judgement.verdicts} == {"inconclusive"}
    assert not any(c.passed for c in judgement.controls)
    assert all(c.recall is None for c in judgement.curves)


def test_baseline_with_nothing_to_lose_exonerates_nobody():
    right, builds = campaign(base=0.5)
    right[:, 2] = False  # all-zero cell: the harness, or the rung, is broken
    got = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))
    assert got["harmless"].verdict == "inconclusive" and "too little is there to lose" in got["harmless"].reason


def test_all_one_cells_are_exonerated_by_the_score_bound_alone():
    right, builds = campaign()
    right[:] = True
    right[2] = False
    got = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))
    assert got["harmless"].verdict == "exonerated" and got["bad"].verdict == "culprit"


def test_one_conversation_says_nothing():
    right, builds = campaign(conversations=1)
    judgement = judge(to_scores(right, builds), builds, rungs=RUNGS)
    assert {v.verdict for v in judgement.verdicts} == {"inconclusive"}
    cell = judgement.comparisons[0]
    assert cell.stderr is None and cell.ci_low is None and cell.p_loss is None and cell.delta_recall is not None


def test_total_loss_in_three_conversations_does_not_convict():
    right, builds = campaign(conversations=3)
    right[:2], right[2:] = True, False
    assert {v.verdict for v in judge(to_scores(right, builds), builds, rungs=RUNGS).verdicts} == {"inconclusive"}


def test_margin_above_half_of_the_positive_controls_loss_exonerates_nobody():
    right, builds = campaign(recall={"bad": [0.33, 0.33, 0.33]}, conversations=120)
    got = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))["harmless"]
    assert got.verdict == "inconclusive" and "positive control lost" in got.reason


def test_conversations_of_one_template_are_one_unit(sound):
    scores, builds = sound
    clustered = [dataclasses.replace(s, cluster_id=f"t{int(s.conversation_id[1:]) // 4}") for s in scores]
    judgement = judge(clustered, builds, rungs=RUNGS)
    assert judgement.comparisons[0].n_conversations == 15
    assert verdicts(judgement)["harmless"].verdict == "inconclusive"


def test_repeats_of_a_probe_are_averaged_and_add_no_conversations():
    right, builds = campaign()
    again, _ = campaign(seed=0)
    scores = to_scores(right, builds) + [dataclasses.replace(s, repeat=1) for s in to_scores(again, builds)]
    judgement = judge(scores, builds, rungs=RUNGS)
    single = judge(to_scores(right, builds), builds, rungs=RUNGS)
    assert [c.stderr for c in judgement.comparisons] == pytest.approx([c.stderr for c in single.comparisons])


def test_other_arms_are_not_mixed_in(sound):
    scores, builds = sound
    cold = [dataclasses.replace(s, arm="cold", outcome="other") for s in scores]
    assert judge(scores + cold, builds, rungs=RUNGS).comparisons == judge(scores, builds, rungs=RUNGS).comparisons
    assert all(c.recall == 0 for c in judge(scores + cold, builds, rungs=RUNGS, arm="cold").curves)


def test_nan_log_probabilities_do_not_touch_the_verdict(sound):
    scores, builds = sound
    spoiled = [dataclasses.replace(s, gold_logprob=float("nan")) for s in scores]
    assert judge(spoiled, builds, rungs=RUNGS).verdicts == judge(scores, builds, rungs=RUNGS).verdicts


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: [*s, s[0]], "scored twice, first build base, conversation c00000, probe p0, rung 448"),
        (lambda s: [*s, dataclasses.replace(s[0], run_id="other")], "scores of 2 runs"),
        (lambda s: [*s, dataclasses.replace(s[0], build_id="stranger")], "build 'stranger'"),
        (lambda s: [*s, dataclasses.replace(s[0], rung=4096)], "rung 4096"),
        (lambda s: [*s, dataclasses.replace(s[0], outcome="great")], "outcome 'great'"),
        (lambda s: [*s, dataclasses.replace(s[0], repeat=1, cluster_id="x")], "two clusters"),
    ],
)
def test_scores_that_would_make_an_average_a_lie_are_refused(sound, spoil, message):
    scores, builds = sound
    with pytest.raises(ScoresError, match=message):
        judge(spoil(scores), builds, rungs=RUNGS)


@pytest.mark.parametrize(
    ("builds", "rungs", "config", "message"),
    [
        (make_builds("a", "b"), RUNGS, VerdictConfig(), "exactly one base build"),
        (make_builds("base", "a", "a"), RUNGS, VerdictConfig(), "share one id: a"),
        (make_builds("base"), [], VerdictConfig(), "at least one"),
        (make_builds("base"), [1, 1], VerdictConfig(), "distinct"),
        (make_builds("base"), RUNGS, VerdictConfig(margin=0.0), "margin 0.0"),
        (make_builds("base"), RUNGS, VerdictConfig(alpha=0.7), "alpha 0.7"),
    ],
)
def test_impossible_campaigns_are_refused(builds, rungs, config, message):
    with pytest.raises(ScoresError, match=message):
        judge([], builds, rungs=rungs, config=config)


def test_conversation_outside_the_plan_is_refused(sound):
    scores, builds = sound
    with pytest.raises(ScoresError, match="never planned"):
        judge(scores, builds, rungs=RUNGS, order=["c00000"])


def test_run_stopped_on_its_results_is_judged_by_e_values_only():
    right, builds = campaign(conversations=120)
    fixed = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS))
    early = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS, stopped_early=True))
    assert fixed["harmless"].verdict == early["harmless"].verdict == "exonerated"
    assert early["leaky"].verdict == "culprit" and early["leaky"].p_value > fixed["leaky"].p_value
    right, builds = campaign(conversations=30)
    early = verdicts(judge(to_scores(right, builds), builds, rungs=RUNGS, stopped_early=True))["harmless"]
    assert early.verdict == "inconclusive" and "e-value" in early.reason
    assert early.more_conversations_needed >= min_conversations_any_time(0.10, 0.05) - 30


def test_what_the_e_values_exonerate_needs_no_bound_for_a_fixed_size():
    """Otherwise a build that is asked no further for being exonerated ends up inconclusive."""
    y = draw_builds(
        np.random.default_rng(1), reps=1, conversations=56, probes=8, base_recall=0.85,
        recalls=[0.85, 0.85, 0.3, 0.85], icc=0.3, engine=NOISY,
    )[0]  # fmt: skip
    builds = make_builds("base", "base-again", "bad", "innocent")
    found = judge(to_scores(y[:, None], builds, [1024]), builds, rungs=[1024], stopped_early=True)
    cell = next(c for c in found.comparisons if c.candidate == "innocent")
    assert cell.lower_bound_tango < -0.10 < 0 < 20 < cell.e_equivalent, "not the case this test is about"
    assert verdicts(found)["innocent"].verdict == "exonerated"


def test_log_probabilities_are_kept_beside_recall(sound):
    scores, builds = sound
    with_margin = change(scores, lambda s: True, gold_logprob=-2.0)
    cells = make_cells(with_margin, builds=[b.build_id for b in builds], rungs=RUNGS)
    assert (cells.logprob == -2.0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(make_cells(scores, builds=[b.build_id for b in builds], rungs=RUNGS).logprob).all()
