"""Combinations of patches as a patchset: joined diffs apply, conflicts are named first, stored designs read back."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from longrecall.evals.design_patchset import conflicts_of, with_suspects, write_design
from longrecall.evals.designs import DesignError, combinations_of
from longrecall.evals.scores_file import write_scores
from longrecall.evals.simulate import QUIET, draw_builds, scores_of
from longrecall.results.main import build_app
from longrecall.runners.diffs import apply_diff
from longrecall.runners.patchset import load_patchset

BASE = "".join(f"line {i}\n" for i in range(1, 41))


def diff(at, new, *, inserted=0):
    """Replace line `at` (with one line of context around it), and put `inserted` more lines behind it."""
    before = [f"line {at - 1}", f"line {at}", f"line {at + 1}"]
    after = [f"+{new}", *(f"+extra {i}" for i in range(inserted))]
    body = [f" {before[0]}", f"-{before[1]}", *after, f" {before[2]}"]
    head = f"--- a/kernels/x.py\n+++ b/kernels/x.py\n@@ -{at - 1},3 +{at - 1},{3 + inserted} @@\n"
    return head + "\n".join(body) + "\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "x.py").write_text(BASE)
    (tmp_path / "p").mkdir()
    for name, text in {
        "early": diff(5, "early", inserted=3),
        "late": diff(30, "late"),
        "near": diff(31, "near"),
    }.items():
        (tmp_path / "p" / f"{name}.diff").write_text(text)
    return tmp_path


def patchset_of(folder, *entries):
    text = 'name = "demo"\nengine = "reference"\nmargin = 0.1\nargs = ["--threads", "1"]\n'
    for entry in entries:
        text += "\n[[patch]]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in entry.items() if k != "env") + "\n"
        if "env" in entry:
            text += "env = { " + ", ".join(f'{k} = "{v}"' for k, v in entry["env"].items()) + " }\n"
    path = folder / "demo.toml"
    path.write_text(text)
    return load_patchset(path)


EARLY = {"id": "early", "diffs": ["p/early.diff"], "changes": ["k"]}
LATE = {"id": "late", "diffs": ["p/late.diff"], "env": {"A": "1"}}
NEAR = {"id": "near", "diffs": ["p/near.diff"]}
FLAG = {"id": "flag", "args": ["--x", "1"]}


@pytest.mark.parametrize("out", ["taken", "file/out.toml"])
def test_a_patchset_that_cannot_be_written_leaves_nothing(folder, out):
    (folder / "taken").mkdir()
    (folder / "file").write_text("")
    patchset = patchset_of(folder, EARLY, LATE, FLAG)
    before = sorted(folder.rglob("*"))
    with pytest.raises(DesignError, match=f"cannot write .*{out.partition('/')[0]}"):
        write_design(patchset, "oat", folder / out, root=folder)
    assert sorted(folder.rglob("*")) == before


def test_joined_diff_makes_both_changes_on_the_base_though_lines_shift(folder):
    made = write_design(patchset_of(folder, EARLY, LATE, FLAG), "oat+loo", folder / "out.toml", root=folder)
    written = load_patchset(folder / "out.toml")
    by_id = {p.patch_id: p for p in written.patches}
    assert {c.build_id for c in made} == {"base", *by_id}
    everything = by_id["all"]
    assert everything.env == {"A": "1"} and everything.args == ("--x", "1") and everything.changes == ("k",)
    apply_diff(folder, (folder / everything.diffs[0]).read_text(), "all.diff")
    text = (folder / "kernels" / "x.py").read_text()
    assert "early\nextra 0" in text and "\nlate\n" in text and "line 5\n" not in text and "line 30\n" not in text


def test_single_patches_keep_their_own_diffs_and_controls_come_along(folder):
    control = {**NEAR, "role": "positive-control"}
    write_design(patchset_of(folder, EARLY, LATE, control), "oat", folder / "out.toml", root=folder)
    by_id = {p.patch_id: p for p in load_patchset(folder / "out.toml").patches}
    assert by_id["early"].diffs == ("p/early.diff",) and by_id["near"].role == "positive-control"
    assert by_id["all"].env == {"A": "1"} and "near" not in (folder / by_id["all"].diffs[0]).read_text()


def test_a_known_bad_patch_under_suspicion_is_also_served_as_the_control_that_it_was(folder):
    bad, noop = {**LATE, "role": "positive-control"}, {"id": "noop", "env": {"N": "1"}, "role": "negative-control"}
    patchset = with_suspects(patchset_of(folder, EARLY, bad, noop), ["early", "late"])
    made = write_design(patchset, "factorial", folder / "out.toml", root=folder)
    by_id = {p.patch_id: p for p in load_patchset(folder / "out.toml").patches}
    assert [c.build_id for c in made] == ["base", "early", "late", "all"]
    assert by_id["late"].role == "suspect" and by_id["late-control"].role == "positive-control"
    assert by_id["late-control"].diffs == by_id["late"].diffs
    another = {"id": "other", "env": {"B": "1"}, "role": "positive-control"}
    left = with_suspects(patchset_of(folder, EARLY, bad, another), ["early", "late"])
    assert [p.patch_id for p in left.patches] == ["early", "late", "other"]


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ((LATE, NEAR), "both change kernels/x.py at line 31"),
        ((FLAG, {"id": "flag2", "args": ["--x", "2"]}), "both give --x"),
        ((LATE, {"id": "env2", "env": {"A": "2"}}), "both set A"),
        ((EARLY, {"id": "served", "endpoint": "http://127.0.0.1:1/v1"}), "servers that already run"),
    ],
)
def test_conflicts_are_found_and_named_before_any_server(folder, entries, reason):
    patchset = patchset_of(folder, *entries)
    (found,) = conflicts_of(patchset, patchset.patches).values()
    assert reason in found
    with pytest.raises(DesignError, match="do not apply together") as caught:
        write_design(patchset, "oat", folder / "out.toml", root=folder)
    assert reason in str(caught.value) and not (folder / "out.toml").exists()


def test_diff_made_against_another_base_is_refused_and_named(folder):
    (folder / "kernels" / "x.py").write_text("another first line\n" + BASE)
    patchset = patchset_of(folder, EARLY, LATE)
    with pytest.raises(DesignError, match=r"patch early cannot be joined with others: .*does not apply at line 4"):
        write_design(patchset, "oat", folder / "out.toml", root=folder)
    assert not (folder / "out.toml").exists()


def test_bisect_serves_the_first_k_of_the_stack(folder):
    made = write_design(patchset_of(folder, EARLY, LATE, FLAG), "bisect", folder / "out.toml", root=folder)
    assert [c.build_id for c in made] == ["base", "all", "first-1", "first-2"]


def run_command(*args):
    return CliRunner().invoke(build_app(list(args)), list(args))


def test_command_writes_a_design_and_names_what_is_wrong(folder):
    patchset_of(folder, EARLY, LATE, FLAG)
    args = ("design", "make", str(folder / "demo.toml"), "--source", str(folder))
    result = run_command(*args, "--design", "factorial", "--only", "early", "--only", "late")
    assert result.exit_code == 0 and "4 builds" in result.stdout
    assert {p.patch_id for p in load_patchset(folder / "demo-factorial.toml").patches} == {"early", "late", "all"}
    for extra, message in (
        (("--design", "magic"), "choose one of screen"),
        (("--only", "ghost"), "--only ghost"),
    ):
        result = run_command(*args, *extra)
        assert result.exit_code == 2 and message in result.stderr


def store(folder, ids, recalls, *, conversations=40):
    folder.mkdir()
    builds = [
        {"build_id": i, "patch_ids": [], "role": {"base": "base", "base-again": "aa"}.get(i, "suspect")} for i in ids
    ]
    campaign = {
        "run_id": "r",
        "suite_hash": "a",
        "rungs": [2048],
        "conversation_order": [f"c{i:05d}" for i in range(conversations)],
        "builds": builds,
        "verdict": {},
    }
    (folder / "campaign.json").write_text(json.dumps(campaign))
    right = draw_builds(
        np.random.default_rng(0),
        reps=1,
        conversations=conversations,
        probes=8,
        base_recall=0.8,
        recalls=recalls,
        icc=0.2,
        engine=QUIET,
    )[0][:, None]
    write_scores(scores_of(right, builds=ids, rungs=[2048]), folder / "scores.parquet")
    return str(folder)


def test_stored_design_reads_back_with_interactions_and_shares(tmp_path):
    ids = [c.build_id for c in combinations_of("oat+loo", ["a", "b", "c", "d"])]
    together = [
        0.5 if {"a", "b"} <= set(c.patch_ids) else 0.8 for c in combinations_of("oat+loo", ["a", "b", "c", "d"])
    ]
    found = json.loads(run_command("design", "read", store(tmp_path / "x", ids, together), "--json").stdout)
    assert found["pairs_to_run"] == [["a", "b"]]
    assert {e["patch"]: e["reading"] for e in found["effects"]}["a"] == "only together"
    two = store(tmp_path / "y", ["base", "keys", "scale", "all"], [0.8, 0.7, 0.5, 0.4])
    found = json.loads(run_command("design", "read", two, "--json").stdout)
    assert found["split"]["share_first"] == pytest.approx(0.25, abs=0.12)
    assert found["shapley"]["keys"]["estimate"] == pytest.approx(-0.1, abs=0.06)
    assert "keys explains" in run_command("design", "read", two, "--rung", "2048").stdout
    assert run_command("design", "read", two, "--rung", "9").exit_code == 2


def test_stored_bisect_names_the_patch_that_began_the_loss(tmp_path):
    ids = ["base", "base-again", "all", "first-1", "first-2", "first-3"]
    run = store(tmp_path / "x", ids, [0.8, 0.8, 0.5, 0.8, 0.8, 0.5])
    found = json.loads(run_command("design", "read", run, "--json").stdout)
    assert np.argmax(found["bisect_posterior"]) == 2 and "patch 3 of the stack" in found["sentences"][0]


def test_eval_names_conflicting_patches_before_any_server_starts(folder):
    patchset_of(folder, LATE, NEAR)
    args = ("eval", str(folder / "demo.toml"), "--design", "oat", "--runs-dir", str(folder / "runs"))
    result = run_command(*args)
    assert result.exit_code == 2 and "late and near do not apply together" in result.stderr
    assert "both change kernels/x.py" in result.stderr and not list(folder.glob("runs/*-demo*"))
    unknown = run_command(*args[:2], "--design", "latin-square")
    assert unknown.exit_code == 2 and "choose one of screen, oat" in unknown.stderr
    missing = run_command(*args, "--only", "ghost")
    assert missing.exit_code == 2 and "--only ghost" in missing.stderr
