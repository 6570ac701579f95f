"""`compare` and `plan` on stored runs: the same numbers as JSON, refusals that name the file, exit codes."""

import json

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from longrecall.evals.planning import make_plan
from longrecall.evals.scores_file import write_scores
from longrecall.evals.simulate import QUIET, Engine, draw_builds, scores_of
from longrecall.results.main import build_app

RUNGS = [448, 2048]
NAMES = ["base", "base-again", "patched"]


def run_command(*args):
    return CliRunner().invoke(build_app(list(args)), list(args))


def store_run(
    folder, *, run_id="run-a", suite="a" * 64, rungs=RUNGS, conversations=40, patched=0.3, seed=0, scores=True
):
    folder.mkdir()
    campaign = {
        "schema_version": 1,
        "run_id": run_id,
        "suite_hash": suite,
        "rungs": rungs,
        "conversation_order": [f"c{i:05d}" for i in range(conversations)],
        "builds": [
            {"build_id": n, "patch_ids": [], "role": r, "manifest": None}
            for n, r in zip(NAMES, ("base", "aa", "suspect"), strict=True)
        ],
        "verdict": {"margin": 0.1, "alpha": 0.05, "max_missing_difference": 0.01, "aa_alpha": 0.01},
        "onset_tokens": 512,
    }
    (folder / "campaign.json").write_text(json.dumps(campaign))
    if scores:
        right = np.stack(
            [
                draw_builds(
                    np.random.default_rng((seed, r)),
                    reps=1,
                    conversations=conversations,
                    probes=8,
                    base_recall=0.6,
                    recalls=[0.6, 0.6, patched],
                    icc=0.1,
                    engine=QUIET,
                )[0]
                for r in range(len(rungs))
            ],
            axis=1,
        )
        write_scores(scores_of(right, builds=NAMES, rungs=list(rungs), run_id=run_id), folder / "scores.parquet")
    return folder


def _edit(run, **changes):
    campaign = json.loads((run / "campaign.json").read_text())
    (run / "campaign.json").write_text(json.dumps({**campaign, **changes}))


def test_compare_shows_a_loss_with_pairs_interval_and_unscored(tmp_path):
    run = store_run(tmp_path / "a")
    result = run_command("compare", f"{run}:base", f"{run}:patched", "--json", "--fail-on-loss")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert document["result"] == "loss shown" and document["analysis_version"]
    first = document["comparisons"][0]
    assert first["n_conversations"] == 40 and first["n_probes"] == 320 and first["n_missing"] == 0
    assert first["ci_high"] < 0 and first["baseline"] == "run-a:base" and first["candidate"] == "run-a:patched"
    text = run_command("compare", f"{run}:base", f"{run}:patched")
    assert text.exit_code == 0 and "loss shown" in text.stdout and "unscored" in text.stdout


def test_compare_across_two_runs_uses_shared_rungs_and_says_it_has_no_controls(tmp_path):
    a = store_run(tmp_path / "a")
    b = store_run(tmp_path / "b", run_id="run-b", rungs=[2048, 8192])
    document = json.loads(run_command("compare", str(a), f"{b}:base-again", "--json").stdout)
    assert [c["rung"] for c in document["comparisons"]] == [2048]
    assert any("no A/A" in n for n in document["notes"]) and any("448, 8192" in n for n in document["notes"])


def test_compare_excludes_a_loss_only_with_enough_conversations(tmp_path):
    small, large = store_run(tmp_path / "s", conversations=20), store_run(tmp_path / "l", conversations=80)
    assert (
        json.loads(run_command("compare", f"{small}:base", f"{small}:base-again", "--json").stdout)["result"]
        == "cannot tell"
    )
    assert (
        json.loads(run_command("compare", f"{large}:base", f"{large}:base-again", "--json").stdout)["result"]
        == "loss excluded"
    )


@pytest.mark.parametrize(
    ("make", "args", "message"),
    [
        (lambda t: store_run(t / "b", suite="b" * 64), ("{t}/a", "{t}/b"), "asked suite aaaaaaaaaaaa and"),
        (lambda t: store_run(t / "b", rungs=[4096, 8192]), ("{t}/a", "{t}/b"), "share no rung"),
        (lambda t: store_run(t / "b", scores=False), ("{t}/a", "{t}/b"), "has no scores.parquet yet"),
        (lambda t: (t / "b").mkdir(), ("{t}/a", "{t}/b"), "is not a run folder"),
        (lambda t: None, ("{t}/a", "{t}/nowhere"), "is not a run folder"),
        (lambda t: None, ("{t}/a", "{t}/a:ghost"), "no build 'ghost'; it has base, base-again, patched"),
        (lambda t: None, ("{t}/a", "{t}/a:base"), "the same build of the same run"),
        (lambda t: None, ("{t}/a", "{t}/a:patched", "--margin", "0.9"), "margin 0.9"),
        (lambda t: (t / "a" / "campaign.json").write_text("{"), ("{t}/a", "{t}/a:patched"), "not JSON"),
        (lambda t: (t / "a" / "campaign.json").write_text("{}"), ("{t}/a", "{t}/a:patched"), "rungs: Field required"),
        (
            lambda t: _edit(t / "a", schema_version=9),
            ("{t}/a", "{t}/a:patched"),
            "schema_version 9, this",
        ),
        (
            lambda t: _edit(t / "a", verdict={"alpha": "x"}),
            ("{t}/a", "{t}/a:patched"),
            "verdict.alpha: Input",
        ),
        (
            lambda t: _edit(t / "a", rungs=["far"]),
            ("{t}/a", "{t}/a:patched"),
            "campaign.json: rungs.0: Input",
        ),
    ],
)
def test_compare_refuses_what_cannot_be_compared(tmp_path, make, args, message):
    store_run(tmp_path / "a")
    make(tmp_path)
    result = run_command("compare", *(a.format(t=tmp_path) for a in args))
    assert result.exit_code == 2 and message in result.stderr and result.stdout == ""


def test_unequal_missing_replies_make_a_comparison_undecided(tmp_path):
    run = store_run(tmp_path / "a")
    from longrecall.evals.scores_file import read_scores_table

    table = read_scores_table(run / "scores.parquet")
    hit = [
        "error" if b == "patched" and c < "c00004" else o
        for b, c, o in zip(*(table[n].to_pylist() for n in ("build_id", "conversation_id", "outcome")), strict=True)
    ]
    write_scores(
        table.set_column(table.column_names.index("outcome"), "outcome", pa.array(hit)), run / "scores.parquet"
    )
    document = json.loads(run_command("compare", f"{run}:base", f"{run}:patched", "--json").stdout)
    assert document["result"] == "cannot tell" and "missing" in document["reason"]


def test_plan_reads_flips_and_spread_from_a_stored_run(tmp_path):
    run = store_run(tmp_path / "a")
    document = json.loads(run_command("plan", "--from-run", str(run), "--json", "--tokens-per-second", "1000").stdout)
    assert "measured: run-a" in document["source"] and [c["rung"] for c in document["cells"]] == RUNGS
    assert 0.01 < document["cells"][0]["flips"] < 0.1 and document["n_probes"] == 8
    assert document["seconds_warm"] == document["tokens_warm"] / 1000
    assert document["tokens_warm"] < document["tokens_cold"]
    assert "conversations exonerate" in run_command("plan", "--from-run", str(run)).stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--rungs", "far"), "--rungs 'far'"),
        (("--rungs", "5,5"), "must increase"),
        (("--margin", "0"), "--margin 0.0"),
        (("--flips", "2"), "--flips 2.0"),
        (("--tail-tokens", "-5"), "--tail-tokens"),
        (("--tokens-per-second", "0"), "--tokens-per-second 0.0"),
        (("--from-run", "nowhere"), "nowhere is not a run folder"),
    ],
)
def test_plan_refuses_impossible_numbers(args, message):
    result = run_command("plan", *args)
    assert result.exit_code == 2 and message in result.stderr


def test_planned_size_does_exonerate_the_innocent_about_as_often_as_planned():
    from longrecall.evals.paired import cluster_t, tango_lower

    engine = Engine(name="some", noise=0.03)
    y = draw_builds(
        np.random.default_rng(0),
        reps=300,
        conversations=60,
        probes=8,
        base_recall=0.6,
        recalls=[0.6, 0.6],
        icc=0.2,
        engine=engine,
    ).astype(float)
    flips, spread = float(np.abs(y[:, 1] - y[:, 0]).mean()), float((y[:, 1] - y[:, 0]).mean(axis=2).std())
    rho = max(0.0, (spread**2 * 8 / flips - 1) / 7)
    plan = make_plan(
        rungs=[1, 2, 3],
        margin=0.1,
        loss=0.1,
        n_patches=4,
        n_probes=8,
        from_run=None,
        flips=flips,
        rho=rho,
        tail_tokens=64,
        tokens_per_second=None,
    )
    n = plan.cells[0].to_exonerate
    y = draw_builds(
        np.random.default_rng(1),
        reps=1200,
        conversations=n,
        probes=8,
        base_recall=0.6,
        recalls=[0.6, 0.6],
        icc=0.2,
        engine=engine,
    ).astype(float)
    d = y[:, 1] - y[:, 0]
    t = cluster_t(d.mean(axis=2), margin=0.1, alpha=0.05)
    score = tango_lower(
        np.maximum(-d, 0).mean(axis=2).sum(axis=1),
        np.maximum(d, 0).mean(axis=2).sum(axis=1),
        np.full(1200, float(n)),
        alpha=0.05,
    )
    power = ((t.lower > -0.1) & (score > -0.1)).reshape(-1, 3).all(axis=1).mean()
    assert 0.7 < power < 0.95
