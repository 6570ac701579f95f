"""Whatever replies are missing, repeated or odd: a judgement comes out, holds no NaN, and keeps its own rules."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longrecall.evals.cells import OUTCOMES
from longrecall.evals.paired import min_conversations
from longrecall.evals.schema import MISSING, Score, VerdictConfig
from longrecall.evals.verdict import judge
from longrecall.runners.schema import Build

pytestmark = pytest.mark.filterwarnings("error")
BUILDS = [
    Build(build_id="base", patch_ids=(), role="base"),
    Build(build_id="base-again", patch_ids=(), role="aa"),
    Build(build_id="bad", patch_ids=(), role="positive-control"),
    Build(build_id="x", patch_ids=(), role="suspect"),
    Build(build_id="noop", patch_ids=(), role="negative-control"),
]
RUNGS = [64, 128]


shares = st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0])
recipes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "n": st.integers(1, 45),
        "recall": st.tuples(*[shares] * 5),
        "kept": st.tuples(*[st.sampled_from([0.0, 0.5, 0.95, 1.0, 1.0])] * 5),
        "failing": st.tuples(*[st.sampled_from([0.0, 0.0, 0.1, 1.0])] * 5),
        "paired": st.booleans(),
    }
)


def replies(recipe):
    rng = np.random.default_rng(recipe["seed"])
    wrong = [o for o in OUTCOMES if o not in MISSING and o != "ok"]
    rows = []
    for c in range(recipe["n"]):
        level = rng.random(3)
        for b, build in enumerate(BUILDS):
            for rung in RUNGS:
                for p in range(3):
                    if rng.random() > recipe["kept"][b]:
                        continue
                    right = (level[p] if recipe["paired"] else rng.random()) < recipe["recall"][b]
                    outcome = "ok" if right else str(rng.choice(wrong))
                    if rng.random() < recipe["failing"][b]:
                        outcome = str(rng.choice(sorted(MISSING)))
                    rows.append(
                        Score(
                            run_id="r",
                            build_id=build.build_id,
                            conversation_id=f"c{c}",
                            cluster_id=f"t{c % max(1, recipe['n'] - 2)}",
                            probe_id=f"p{p}",
                            probe_kind="k",
                            rung=rung,
                            arm="warm",
                            repeat=0,
                            outcome=outcome,
                            answer=None,
                            gold_logprob=float(rng.choice([-1.0, np.nan])),
                        )
                    )
    return rows


def numbers(record):
    for value in dataclasses.asdict(record).values():
        if isinstance(value, float):
            yield value


@settings(max_examples=40)
@given(recipes, st.booleans())
def test_any_campaign_is_judged_without_nan_and_by_its_own_rules(recipe, stopped_early):
    rows = replies(recipe)
    config = VerdictConfig(margin=0.2)
    judgement = judge(rows, BUILDS, rungs=RUNGS, config=config, stopped_early=stopped_early)
    records = (*judgement.curves, *judgement.comparisons, *judgement.verdicts, *judgement.flips)
    for record in (*records, *judgement.logprob_shifts, *judgement.length_fits):
        assert all(math.isfinite(v) for v in numbers(record)), record
    controls = {c.name: c for c in judgement.controls}
    cells = {(c.candidate, c.rung): c for c in judgement.comparisons}
    for v in judgement.verdicts:
        assert v.reason
        if v.verdict != "inconclusive":
            assert controls["aa"].passed and controls["positive"].passed and controls["negative"].passed
        if v.verdict == "culprit":
            assert v.delta_recall < 0 and v.p_value <= config.alpha
        if v.verdict == "exonerated":
            for rung in RUNGS:
                cell = cells[v.patch, rung]
                assert cell.n_conversations >= min_conversations(config.margin, config.alpha)
                bounds = cell.lower_bound_t, cell.lower_bound_tango
                assert stopped_early or min(bounds) > -config.margin
        if v.more_conversations_needed is not None:
            assert v.verdict == "inconclusive" and v.more_conversations_needed >= 1
    for c in judgement.comparisons:
        assert c.ci_low is None or -1 <= c.ci_low <= c.delta_recall <= c.ci_high <= 1


@settings(max_examples=12)
@given(recipes)
def test_more_errors_on_a_patch_never_exonerate_it(recipe):
    rows = replies(recipe)
    config = VerdictConfig(margin=0.2)
    before = {v.patch: v.verdict for v in judge(rows, BUILDS, rungs=RUNGS, config=config).verdicts}
    spoiled = [dataclasses.replace(s, outcome="error") if s.build_id == "x" and s.probe_id == "p0" else s for s in rows]
    after = {v.patch: v.verdict for v in judge(spoiled, BUILDS, rungs=RUNGS, config=config).verdicts}
    if before["x"] != "exonerated":
        assert after["x"] != "exonerated"
