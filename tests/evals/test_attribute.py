"""Attribution: faults with a known signature are named, rivals ruled out, and the next arm is one that separates."""

import dataclasses
import json
import re
import shlex

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from longrecall.evals.attribute import (
    attribute,
    family_probabilities,
    fit_causes,
    length_dependent_share,
    load_observations,
    next_arm,
    observe,
    observe_client_arm,
)
from longrecall.evals.calibration import attribution_table
from longrecall.evals.causes import CAUSES, FEATURES, LEVELS, level_log_density
from longrecall.evals.cells import make_cells
from longrecall.evals.next_arm import unavailable, write_next_patchset
from longrecall.evals.schema import NextArm, Observation
from longrecall.evals.scores_file import ScoresError, read_scores_table, write_scores
from longrecall.evals.simulate import QUIET, cells_of, draw_builds, scores_of
from longrecall.results.main import build_app
from longrecall.runners.patchset import load_patchset

pytestmark = pytest.mark.filterwarnings("error:invalid value")
RUNGS = [448, 1024, 2048]
BASE = 0.6
# share of the base's recall lost at 448, 1024, 2048 tokens
FAULTS = {
    "rotation": (0.0, 0.9, 0.97),
    "scaling": (0.9, 0.95, 0.95),
    "harmless": (0.0, 0.0, 0.0),
}


def replies(faults, *, conversations=40, seed=0, rungs=RUNGS):
    return np.stack(
        [
            draw_builds(
                np.random.default_rng((seed, r)),
                reps=1,
                conversations=conversations,
                probes=8,
                base_recall=BASE,
                recalls=[BASE, *(BASE * (1 - lost[r]) for lost in faults.values())],
                icc=0.2,
                engine=QUIET,
            )[0]
            for r in range(len(rungs))
        ],
        axis=1,
    )


def cells(faults=FAULTS, **options):
    return cells_of(replies(faults, **options), builds=["base", *faults], rungs=options.get("rungs", RUNGS))


def seen(feature, estimate, stderr=0.05):
    return Observation(patch="p", feature=feature, estimate=estimate, stderr=stderr, n=40, source="served")


def test_levels_are_densities():
    for level, (low, high) in LEVELS.items():
        x = np.linspace(low - 1, high + 1, 4001)
        density = np.exp([level_log_density(level, v, 0.05) for v in x])
        assert np.trapezoid(density, x) == pytest.approx(1.0, abs=1e-3), level
    assert level_log_density("none", 0.9, 0.05) < -100  # far out it stays finite and tiny


def test_every_cause_speaks_of_known_features_and_of_both_sides_of_the_onset():
    for cause in CAUSES:
        assert {"short", "long", "growth"} & set(cause.signature)
        assert set(cause.signature) <= set(FEATURES)


def test_loss_that_needs_the_longer_context_is_index_keys_and_routed_scaling_is_ruled_out():
    found = attribute(cells(), "base", "rotation", onset=512)
    families = family_probabilities(found.causes)
    assert families["index keys"] == max(families.values()) and families["routed scaling"] < 0.02
    assert found.length_dependent_share == pytest.approx(1.0, abs=0.1) and found.share_ci_low > 0.85
    scaling = next(f for f in found.causes if f.cause == "routed-scaling")
    assert "short" in scaling.contradicted_by
    assert "routed scaling ruled out by" in found.sentence
    assert "begins there, the most that index keys can account for" in found.sentence  # whichever cause in them it is
    assert "0 % [0, 0] is lost at every length" in found.sentence and "fp8" not in found.sentence
    assert found.families == families and f"index keys ({100 * families['index keys']:.0f} %)" in found.sentence


def test_loss_at_every_length_is_routed_scaling_and_index_keys_are_ruled_out():
    found = attribute(cells(), "base", "scaling", onset=512)
    families = family_probabilities(found.causes)
    assert families["index keys"] < 0.02 and families["routed scaling"] > 0.1
    assert found.length_dependent_share < 0.2
    assert "index keys ruled out by" in found.sentence
    assert found.next_arm is not None and "routed scaling" in found.next_arm.separates


def test_no_loss_is_said_to_be_none():
    found = attribute(cells(conversations=200), "base", "harmless", onset=512)
    assert found.length_dependent_share is None and "no loss to explain" in found.sentence


def test_without_rungs_below_the_onset_causes_stay_open():
    found = attribute(cells({"rotation": (0.9, 0.95)}, rungs=[1024, 2048]), "base", "rotation", onset=512)
    assert [o.feature for o in found.observations] == ["long"] and found.length_dependent_share is None
    assert len([f for f in family_probabilities(found.causes).values() if f > 0.02]) >= 3
    unknown = attribute(cells(), "base", "rotation", onset=None)
    assert unknown.observations == () and "nothing was measured" in unknown.sentence


def test_a_cause_that_says_nothing_of_a_feature_does_not_lose_to_one_that_predicts_none():
    untouched = [seen("reuse_changed", 0.0, 0.003), seen("age", 0.0, 0.05)]
    lost = [seen("short", 0.15, 0.05), seen("long", 0.85), seen("growth", 0.7)]
    before, after = (family_probabilities(fit_causes(o)) for o in (lost, [*lost, *untouched]))
    cache, chunks = "cache/transfer", "prefill chunks"
    assert after[chunks] / after[cache] < 5 * before[chunks] / before[cache]


@pytest.mark.parametrize(
    ("observations", "family"),
    [
        ([seen("short", 0.0, 0.01), seen("long", 0.5), seen("topk_recovers", 0.9)], "index keys"),
        ([seen("short", 0.5), seen("long", 0.5), seen("scaling_recovers", 0.95)], "routed scaling"),
        (
            [seen("short", 0.1), seen("long", 0.5), seen("decode_recovers", 0.9), seen("decode_kl", 0.8)],
            "decode kernel",
        ),
        ([seen("short", 0.1), seen("long", 0.5), seen("cache_off_recovers", 1.0)], "cache/transfer"),
        (
            [seen("short", 0.0), seen("long", 0.4), seen("residue", 0.4), seen("scaling_recovers", 0.0)],
            "compressor/residue",
        ),
        ([seen("short", 0.0, 0.01), seen("long", 0.4), seen("chunk_recovers", 0.9)], "prefill chunks"),
        ([seen("short", 0.3), seen("long", 0.4), seen("concat_recovers", 0.9)], "template"),
        ([seen("short", 0.05, 0.01), seen("long", 0.05, 0.01), seen("growth", 0.0, 0.01)], "MHC"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_each_family_is_named_by_its_own_sign(observations, family):
    fits = fit_causes(observations)
    assert fits[0].family == family
    assert sum(f.probability for f in fits) == pytest.approx(1.0)


def test_selection_at_chance_tells_a_broken_transform_from_a_coarse_format():
    common = [seen("short", 0.0, 0.01), seen("long", 0.6), seen("growth", 0.6)]
    assert fit_causes([*common, seen("selection_chance", 0.95)])[0].cause == "index-key-transform"
    assert fit_causes([*common, seen("selection_chance", 0.04, 0.01)])[0].cause == "index-key-format"


def test_next_arm_is_cheap_unmeasured_and_available():
    fits = fit_causes([seen("short", 0.0, 0.01), seen("long", 0.5), seen("growth", 0.5)])
    first = next_arm(fits, ["short", "long", "growth"])
    second = next_arm(fits, ["short", "long", "growth"], unavailable=[first.feature])
    assert first.bits / first.cost >= second.bits / second.cost and first.feature != second.feature
    assert next_arm(fits, FEATURES) is None
    settled = [seen("short", 0.9), seen("long", 0.9), seen("scaling_recovers", 0.95), seen("scale_exponent", 1.0, 0.01)]
    assert next_arm(fit_causes(settled), [o.feature for o in settled]) is None


def test_intervention_builds_in_the_scores_are_read_as_recovery():
    faults = {
        "base-again": (0.0, 0.0, 0.0),
        "rotation": (0.0, 0.9, 0.97),
        "rotation--topk-x2": (0.0, 0.0, 0.97),
        "base--topk-x2": (0.0, 0.0, 0.0),
        "rotation--again": (0.0, 0.9, 0.97),
    }
    found = {o.feature: o for o in observe(cells(faults), "base", "rotation", onset=512)}
    assert found["topk_recovers"].estimate == pytest.approx(1.0, abs=0.1)  # read at 1024, between the two onsets
    assert abs(found["unrepeatable"].estimate) < 0.1
    fits = fit_causes(list(found.values()))
    assert family_probabilities(fits)["index keys"] > 0.8


def test_share_needs_a_shown_loss():
    assert length_dependent_share(cells(), "base", "harmless", onset=512) is None


def test_simulated_faults_are_attributed_to_the_right_family():
    rows = {r.rule: r for r in attribution_table(25, 1)}
    assert rows["right family named with the arms it asks for"].value >= 0.9
    assert rows["right family ruled out"].verdict == "within the bar"
    assert rows["median further arms until settled"].value <= 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such evidence file"),
        ("{", "not JSON"),
        ("3", "not an observation"),
        ('[{"patch": "x"}]', "entry 0 is not an observation"),
        (
            '[{"patch": "x", "feature": "mood", "estimate": 1, "stderr": 0, "n": 1, "source": "in-process"}]',
            "feature 'mood'; known: short",
        ),
        (
            '[{"patch": "x", "feature": "long", "estimate": NaN, "stderr": 0, "n": 1, "source": "in-process"}]',
            "estimate nan",
        ),
    ],
)
def test_evidence_files_that_say_nothing_usable_are_refused(tmp_path, text, message):
    path = tmp_path / "evidence.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ScoresError, match=message):
        load_observations(path)


def store(folder, faults, *, seed=0, engine="reference"):
    folder.mkdir(parents=True)
    (folder / "patches").mkdir()
    names = ["base", *faults]
    campaign = {
        "run_id": folder.name,
        "suite_hash": "a" * 64,
        "rungs": RUNGS,
        "conversation_order": [f"c{i:05d}" for i in range(40)],
        "builds": [{"build_id": n, "patch_ids": [], "role": "base" if n == "base" else "suspect"} for n in names],
        "verdict": {"margin": 0.1, "alpha": 0.05, "max_missing_difference": 0.01, "aa_alpha": 0.01},
        "onset_tokens": 512,
        "recipe": "reference",
        "seed": 0,
        "max_tokens": 16,
        "patchset": {
            "name": "demo",
            "path": str(folder / "demo.toml"),
            "engine": engine,
            "margin": 0.1,
            "args": ["--prefix-cache-mb", "64"],
            "env": {},
            "patches": [
                {"patch_id": n, "title": n, "role": "suspect", "diffs": [f"patches/{n}.diff"], "env": {}, "args": []}
                for n in faults
            ],
        },
    }
    for n in faults:
        (folder / "patches" / f"{n}.diff").write_text("--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    (folder / "campaign.json").write_text(json.dumps(campaign))
    write_scores(
        scores_of(replies(faults, seed=seed), builds=names, rungs=RUNGS, run_id=folder.name), folder / "scores.parquet"
    )
    return folder


def run_command(*args):
    return CliRunner().invoke(build_app(list(args)), list(args))


def test_command_explains_the_losing_patches_largest_first(tmp_path):
    run = store(tmp_path / "a", FAULTS)
    document = json.loads(run_command("attribute", str(run), "--json").stdout)
    assert {a["patch"] for a in document} == {"rotation", "scaling"}
    text = run_command("attribute", str(run), "--patch", "rotation")
    assert text.exit_code == 0 and "index keys" in text.stdout and "ruled out" in text.stdout
    assert (
        "nothing to attribute" in run_command("attribute", str(store(tmp_path / "b", {"harmless": (0, 0, 0)}))).stdout
    )


def test_evidence_and_later_runs_settle_what_the_ladder_leaves_open(tmp_path):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]})
    later = store(
        tmp_path / "b",
        {"rotation": (0, 0.9, 0.97), "rotation--topk-x2": (0, 0, 0.97), "base--topk-x2": (0, 0, 0)},
        seed=1,
    )
    (settled,) = json.loads(run_command("attribute", str(run), str(later), "--json").stdout)
    assert settled["causes"][0]["family"] == "index keys"
    assert sum(c["probability"] for c in settled["causes"] if c["family"] == "index keys") > 0.85
    assert len({o["feature"] for o in settled["observations"]}) == len(settled["observations"])
    evidence = tmp_path / "evidence.json"
    row = {"patch": "rotation", "feature": "selection_chance", "estimate": 0.97, "stderr": 0.01, "n": 64}
    evidence.write_text(json.dumps([{**row, "source": "in-process"}]))
    (found,) = json.loads(run_command("attribute", str(run), "--evidence", str(evidence), "--json").stdout)
    assert found["causes"][0]["cause"] == "index-key-transform"
    assert any(o["source"] == "in-process" for o in found["observations"])


def test_what_a_look_inside_kept_in_the_run_folder_is_read_without_being_named(tmp_path):
    lost = {"stale": (0.4, 0.5, 0.5)}
    run, later = store(tmp_path / "a", lost), store(tmp_path / "b", lost, seed=1)
    (before,) = json.loads(run_command("attribute", str(run), "--json").stdout)
    row = {"patch": "stale", "feature": "decode_kl", "estimate": 0.9, "stderr": 0.05, "n": 4, "source": "served"}
    (later / "inside-evidence.json").write_text(json.dumps([row, {**row, "patch": "another"}]))
    (after,) = json.loads(run_command("attribute", str(run), str(later), "--json").stdout)
    assert "decode_kl" not in {o["feature"] for o in before["observations"]}
    assert after["causes"][0]["family"] == "decode kernel" != before["causes"][0]["family"]
    (later / "inside-evidence.json").write_text("{")
    assert "inside-evidence.json: not JSON" in run_command("attribute", str(run), str(later)).stderr


def test_arms_of_a_run_whose_base_is_not_seen_to_be_the_same_are_said_not_to_be_read(tmp_path):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]})
    later = store(tmp_path / "b", {"rotation--topk-x2": (0, 0, 0.97), "base--topk-x2": (0, 0, 0)}, seed=1)
    (found,) = json.loads(run_command("attribute", str(run), str(later), "--json").stdout)
    assert "topk_recovers" not in {o["feature"] for o in found["observations"]}
    assert found["sentence"].endswith("; the arms of b are not read: its base answers otherwise than a's")
    (alone,) = json.loads(run_command("attribute", str(run), "--json").stdout)
    assert "not read" not in alone["sentence"]


def test_next_arm_is_written_as_a_patchset_that_can_be_served(tmp_path):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]}, engine="sglang")
    result = run_command("attribute", str(run), "--next", "--dry-run")
    assert result.exit_code == 0 and "longrecall eval" in result.stdout
    (path,) = run.glob("next-rotation-*.toml")
    assert (
        "--seed 0" in result.stdout and "--recipe reference" in result.stdout and "--conversations 8" in result.stdout
    )
    patchset = load_patchset(path)
    by_id = {p.patch_id: p for p in patchset.patches}
    suffix = next(i for i in by_id if i.startswith("rotation--")).partition("--")[2]
    assert (path.parent / by_id[f"rotation--{suffix}"].diffs[0]).is_file()
    arm, base = by_id[f"rotation--{suffix}"], by_id[f"base--{suffix}"]
    assert (arm.args, arm.model_override) == (base.args, base.model_override) != ((), {})


def test_next_arm_serves_the_model_of_the_run_with_its_thinking_policy(tmp_path):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]}, engine="sglang")
    assert "--model-folder" not in run_command("attribute", str(run), "--next", "--dry-run").stdout
    campaign = json.loads((run / "campaign.json").read_text())
    campaign |= {"model_folder": "/models/my own", "template_args": {"enable_thinking": False}}
    (run / "campaign.json").write_text(json.dumps(campaign))
    told = run_command("attribute", str(run), "--next", "--dry-run").stdout.splitlines()[-1]
    words = shlex.split(told)
    assert words[words.index("--model-folder") + 1] == "/models/my own"
    assert json.loads(words[words.index("--template-args") + 1]) == {"enable_thinking": False}


def arm_of(run, feature, engine):
    path = run / "arm.toml"
    how = NextArm(feature=feature, question="?", how="!", cost=1.0, bits=1.0, separates=())
    write_next_patchset(run, "rotation", how, path)
    return {p.patch_id: p for p in load_patchset(path).patches}


def test_interventions_are_flags_of_the_reference_server(tmp_path):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]})
    assert "selection" in run_command("attribute", str(run), "--next", "--dry-run").stdout  # in-process first: cheapest
    raised = arm_of(run, "topk_recovers", "reference")
    # selection is the identity at every rung: 512 doubled until 2,048 tokens and the answer fit
    assert raised["rotation--topk-x2"].args == raised["base--topk-x2"].args == ("--index-topk", "4096")
    assert arm_of(run, "decode_recovers", "reference")["base--decode-backend"].args == ("--decode-backend", "dense")
    assert list(arm_of(run, "scaling_recovers", "reference")) == ["rotation--scaling-1", "base--scaling-1"]
    assert list(arm_of(run, "residue", "reference")) == ["rotation"]
    campaign = json.loads((run / "campaign.json").read_text())
    campaign["patchset"]["model_override"] = {"routed_scaling_factor": 2.25}
    (run / "campaign.json").write_text(json.dumps(campaign))
    scaled = arm_of(run, "scaling_recovers", "reference")
    assert '"routed_scaling_factor": 1.5' in scaled["rotation--scaling-sqrt"].args[1]
    assert "base--scaling-sqrt" not in scaled and "base--scaling-1" in scaled


@pytest.mark.parametrize(("topk", "doubled"), [(512, 1024), (1024, 2048), (2048, None)])
def test_sglang_doubles_the_models_index_topk_and_never_beyond_its_kernels(tmp_path, topk, doubled):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]}, engine="sglang")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"index_topk": topk}))
    campaign = json.loads((run / "campaign.json").read_text()) | {"model_folder": str(tmp_path / "model")}
    (run / "campaign.json").write_text(json.dumps(campaign))
    assert ("topk_recovers" in unavailable(run)) == (doubled is None)
    if doubled is None:
        with pytest.raises(ScoresError, match="index_topk is 2048; SGLang selects 2048 at most"):
            arm_of(run, "topk_recovers", "sglang")
    else:
        assert arm_of(run, "topk_recovers", "sglang")["base--topk-x2"].model_override == {"index_topk": doubled}


@pytest.mark.parametrize(
    ("info", "doubled"),
    [
        ({"a": {"b": {"index_topk": 512}}}, 1024),
        ({"index_topk": "512", "a": {"index_topk": -1}}, None),
        ({"index_topk": float("inf"), "a": "index_topk"}, None),
        (None, None),
    ],
)
def test_index_topk_is_a_number_above_0_that_the_base_told_wherever_it_stands(tmp_path, info, doubled):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]}, engine="sglang")
    campaign = json.loads((run / "campaign.json").read_text()) | {"builds": [{"manifest": {"server_info": info}}]}
    campaign["onset_tokens"] = 2048
    (run / "campaign.json").write_text(json.dumps(campaign))
    assert ("topk_recovers" in unavailable(run)) == (doubled is None)
    if doubled:
        assert arm_of(run, "topk_recovers", "sglang")["base--topk-x2"].model_override == {"index_topk": doubled}


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"builds": [None]}, "builds.0: "),
        ({"builds": [{"manifest": "x"}]}, "builds.0.manifest: "),
        ({"onset_tokens": "512"}, "onset_tokens: "),
        ({"rungs": None}, "rungs: "),
        ({"patchset": {"engine": ["sglang"], "path": "x", "patches": []}}, "patchset.engine: "),
        ({"patchset": {"engine": "sglang", "path": "x", "patches": [{}]}}, "patchset.patches.0.patch_id: "),
    ],
)
def test_a_campaign_of_which_no_arm_can_be_served_is_named_with_the_place(tmp_path, broken, said):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]})
    campaign = json.loads((run / "campaign.json").read_text()) | broken
    (run / "campaign.json").write_text(json.dumps(campaign))
    with pytest.raises(ScoresError, match=f"campaign.json: .*: {re.escape(said)}"):
        arm_of(run, "chunk_recovers", "sglang")
    assert "chunk_recovers" in unavailable(run)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--patch", "ghost"), "no patch 'ghost'; it has rotation"),
        (("--evidence", "nowhere.json"), "no such evidence file"),
    ],
)
def test_command_names_what_it_cannot_use(tmp_path, args, message):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"]})
    result = run_command("attribute", str(run), *args)
    assert result.exit_code == 2 and message in result.stderr
    assert run_command("attribute", str(tmp_path / "none")).exit_code == 2


def test_arms_are_not_themselves_suspects(tmp_path):
    run = store(tmp_path / "a", {"rotation": FAULTS["rotation"], "rotation--topk-x2": (0, 0.5, 0.9)})
    document = json.loads(run_command("attribute", str(run), "--json").stdout)
    assert [a["patch"] for a in document] == ["rotation"]
    table = make_cells(
        scores_of(replies(FAULTS), builds=["base", *FAULTS], rungs=RUNGS), builds=["base", *FAULTS], rungs=RUNGS
    )
    assert observe(table, "base", "rotation", onset=512)


def test_loss_that_is_gone_in_the_cold_arm_is_cache_reuse():
    lost = {"leak": (0.2, 0.6, 0.8)}
    warm, cold = cells(lost), dataclasses.replace(cells({"leak": (0.0, 0.0, 0.0)}, seed=1), arm="cold")
    found = observe_client_arm(warm, cold, "base", "leak")
    assert found.estimate == pytest.approx(1.0, abs=0.15) and found.feature == "cache_off_recovers"
    fits = attribute(warm, "base", "leak", onset=512, more=[dataclasses.replace(found, patch="leak")]).causes
    assert family_probabilities(fits)["cache/transfer"] == max(family_probabilities(fits).values())
    same = observe_client_arm(warm, dataclasses.replace(warm, arm="concat"), "base", "leak")
    assert same.feature == "concat_recovers"
    assert abs(same.estimate) < 0.05
    assert observe_client_arm(warm, cells(lost, conversations=10), "base", "leak") is None
    assert observe_client_arm(cold, warm, "base", "leak") is None  # no loss with reuse


def test_command_reads_the_cold_arm_of_the_same_run(tmp_path):
    run = store(tmp_path / "a", {"leak": (0.2, 0.6, 0.8)})
    warm = read_scores_table(run / "scores.parquet")
    cold = scores_of(replies({"leak": (0.0, 0.0, 0.0)}, seed=1), builds=["base", "leak"], rungs=RUNGS, run_id="a")
    cold = cold.set_column(cold.column_names.index("arm"), "arm", [["cold"] * cold.num_rows])
    write_scores(pa.concat_tables([warm, cold.cast(warm.schema)]), run / "scores.parquet")
    (found,) = json.loads(run_command("attribute", str(run), "--json").stdout)
    assert "cache_off_recovers" in {o["feature"] for o in found["observations"]}
    assert found["causes"][0]["family"] == "cache/transfer"
