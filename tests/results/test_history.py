"""The run history: nothing is lost, nothing is half there, every flipped byte is found, the rest stays readable."""

import json
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from longrecall.evals.schema import Score
from longrecall.evals.scores_file import scores_table
from longrecall.results.against import pinned
from longrecall.results.history import (
    Entry,
    History,
    RungPoint,
    Setting,
    canonical,
    clock_warning,
    decode,
    encode,
)
from longrecall.results.main import build_app
from longrecall.results.record import COMMIT_VARIABLES
from longrecall.results.storage import Folder, GitBranch, HistoryError, open_storage, sha256


def entry_of(run_id: str = "run-1", build_id: str = "base", **changes: Any) -> Entry:
    made = Entry(
        run_id=run_id,
        build_id=build_id,
        role="base",
        line="main",
        suite_hash="ab" * 32,
        created="2026-11-29T14:02:33+00:00",
        commit="0123456789abcdef",
        engine="reference",
        margin=0.1,
        points=(RungPoint(rung=448, recall=0.9, ci_low=0.85, ci_high=0.95, n_conversations=40, n_probes=320),),
    )
    return replace(made, **changes)


def rows_of(run_id: str = "run-1", build_id: str = "base", n: int = 24) -> Any:
    return scores_table(
        Score(
            run_id=run_id,
            build_id=build_id,
            conversation_id=f"c{i // 4}",
            cluster_id=f"c{i // 4}",
            probe_id=f"p{i % 4}",
            probe_kind="single",
            rung=448,
            arm="warm",
            repeat=0,
            outcome="ok" if i % 5 else "near-miss",
            answer=str(i),
        )
        for i in range(n)
    )


@pytest.fixture
def history(tmp_path: Path) -> History:
    """An empty history in a folder."""
    return History(Folder(tmp_path / "history"))


def test_what_is_added_reads_back(history: History) -> None:
    stored = history.add(entry_of(), rows_of())
    [found], problems = history.entries()
    assert problems == []
    assert found == stored
    assert history.scores(found).num_rows == 24
    assert history.find("run-1") == history.find(stored.id[:6]) == history.find("results/runs/run-1/") == found


def test_adding_the_same_again_changes_nothing(history: History, tmp_path: Path) -> None:
    history.add(entry_of(), rows_of())
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.json")}
    history.add(entry_of(), rows_of())
    assert set(tmp_path.rglob("*.json")) == set(before)


def test_a_run_is_never_changed(history: History) -> None:
    history.add(entry_of(), rows_of())
    with pytest.raises(
        HistoryError, match=r"run run-1, build base is already\s+stored with another content: v1/suite="
    ):
        history.add(entry_of(note="second thoughts"), rows_of())
    assert len(history.entries()[0]) == 1


def test_two_runs_with_one_id_from_two_writers_are_reported_and_readable(history: History, tmp_path: Path) -> None:
    other = History(Folder(tmp_path / "other"))
    history.add(entry_of(), rows_of())
    other.add(entry_of(note="another machine"), rows_of())
    history.storage.write_many(dict(other.storage.read_many(other.storage.names())))
    found, problems = history.entries()
    assert len(found) == 2
    assert len(problems) == 1
    assert "run run-1, build base is also" in problems[0].message


def _add_runs(folder: str, writer: int, barrier: Any, runs: int) -> None:
    history = History(Folder(Path(folder)))
    barrier.wait(30)
    for n in range(runs):
        run = f"w{writer:02d}-{n}"
        history.add(entry_of(run), rows_of(run))


def test_sixteen_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(16)
    writers = [context.Process(target=_add_runs, args=(str(tmp_path / "h"), w, barrier, 8)) for w in range(16)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [w.exitcode for w in writers] == [0] * 16
    history = History(Folder(tmp_path / "h"))
    found, problems = history.entries()
    assert problems == []
    assert {s.entry.run_id for s in found} == {f"w{w:02d}-{n}" for w in range(16) for n in range(8)}
    assert history.verify() == (256, [])


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import importlib.util
spec = importlib.util.spec_from_file_location("th", {module!r})
th = importlib.util.module_from_spec(spec); spec.loader.exec_module(th)
history = th.History(th.Folder(Path({folder!r})))
n = 0
while True:
    run = f"killed-{{n}}"
    history.add(th.entry_of(run), th.rows_of(run, n=4000))
    print(n, flush=True)
    n += 1
"""


def test_a_killed_writer_leaves_no_half_run(tmp_path: Path) -> None:
    code = WRITER.format(tests=str(Path(__file__).parent), module=__file__, folder=str(tmp_path / "h"))
    rng = random.Random(5)
    history = History(Folder(tmp_path / "h"))
    for _ in range(4):
        writer = subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert writer.stdout is not None
        assert writer.stdout.readline()  # it is in the middle of its work now
        time.sleep(rng.uniform(0, 0.03))
        writer.send_signal(signal.SIGKILL)
        writer.wait(60)
        found, problems = history.entries()
        assert problems == []
        assert found
        for stored in found:
            assert history.scores(stored).num_rows == 4000
        assert [p for p in history.verify()[1] if "without a manifest" not in p.message] == []
        for leaf in (tmp_path / "h").rglob("*"):  # the next writer begins anew; what is old enough is pruned
            os.utime(leaf, (0, 0))
        history.prune(keep_days=None, dry_run=False)
        assert history.verify()[1] == []
        assert not list((tmp_path / "h").rglob(".*.tmp"))
        for stored in found:
            history.storage.delete([stored.name, stored.rows_name])


def test_verify_finds_every_flipped_byte(history: History, tmp_path: Path) -> None:
    stored = history.add(entry_of(), rows_of(n=8))
    history.set(
        Setting(kind="baseline", name="main", value={"entry": stored.id}, reason="first", created=entry_of().created)
    )
    assert history.verify()[1] == []
    for path in [p for p in (tmp_path / "history").rglob("*") if p.is_file()]:
        whole = path.read_bytes()
        path.chmod(0o644)
        for at in range(0, len(whole), max(1, len(whole) // 40)):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
            problems = history.verify()[1]
            assert problems and path.name in problems[0].message, (path.name, at)
        path.write_bytes(whole[: len(whole) // 2])
        assert history.verify()[1]
        path.unlink()
        problems = history.verify()[1]
        assert problems or "settings" in str(path)
        path.write_bytes(whole)
    assert history.verify()[1] == []


def test_rows_of_another_run_are_found(history: History, tmp_path: Path) -> None:
    """The manifest binds its rows, and the rows bind their manifest: swapping both hashes and files shows."""
    one, two = history.add(entry_of("a"), rows_of("a")), history.add(entry_of("b"), rows_of("a"))
    manifest = asdict(one.entry)
    manifest["rows"] = asdict(two.entry)["rows"]
    forged, data, _ = encode(replace(one.entry, rows=None), None)
    record = json.loads(data)
    record["rows"] = manifest["rows"]
    data = canonical(record)

    name = forged.name.rsplit("_", 1)[0] + f"_{sha256(data)[:16]}.json"
    history.storage.delete([one.name, one.rows_name])
    history.storage.write_many(
        {name: data, name.removesuffix(".json") + ".parquet": history.storage.read(two.rows_name)}
    )
    assert ["belongs to another manifest" in p.message for p in history.verify()[1]] == [True]


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"schema_version":' + b"9" * 5000 + b"}", b"[]", b"\xff"])
def test_a_manifest_that_is_none_is_named(data: bytes) -> None:
    name = f"v1/suite=abababababab/20261129T140233Z_x_base_run-1_{sha256(data)[:16]}.json"
    with pytest.raises(HistoryError, match=f"^{name}: not "):
        decode(name, data)


def test_damaged_and_newer_files_are_named_and_the_rest_is_read(history: History, tmp_path: Path) -> None:
    good = history.add(entry_of("good"), rows_of("good"))
    bad = history.add(entry_of("bad"), rows_of("bad"))
    newer, data, _ = encode(entry_of("newer"), None)
    record = json.loads(data)
    record["schema_version"] = 99

    changed = canonical(record)
    name = newer.name.rsplit("_", 1)[0] + f"_{sha256(changed)[:16]}.json"
    history.storage.write_many({name: changed})
    path = tmp_path / "history" / bad.name
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:100])
    found, problems = history.entries()
    assert found == [good]
    assert any(bad.name in p.message and "damaged or cut short" in p.message for p in problems)
    assert any(name in p.message and "schema_version 99 is newer than 1" in p.message for p in problems)


def test_fields_of_a_later_minor_version_are_ignored() -> None:
    _, data, _ = encode(entry_of(), None)

    changed = canonical({**json.loads(data), "added_later": 1})
    assert decode(f"v1/suite=x/t_c_b_r_{sha256(changed)[:16]}.json", changed) == entry_of()


@settings(max_examples=6)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["base", "p1"])), unique=True), st.randoms())
def test_merge_is_the_union_whatever_the_order(
    tmp_path_factory: pytest.TempPathFactory, runs: list[tuple[int, str]], rng: random.Random
) -> None:
    folders = [tmp_path_factory.mktemp("h") for _ in range(3)]
    parts = [History(Folder(folder)) for folder in folders]
    for run, build in runs:
        for part in rng.sample(parts, rng.randint(1, 3)):
            part.add(entry_of(f"r{run}", build), rows_of(f"r{run}", build))
    merged = []
    for order in (parts, parts[::-1]):
        target = Folder(tmp_path_factory.mktemp("m"))
        for part in order:
            target.write_many(dict(part.storage.read_many(part.storage.names())))
        merged.append(dict(target.read_many(target.names())))
    assert merged[0] == merged[1]
    assert len(merged[0]) == 2 * len(runs)


def test_newest_setting_holds_and_older_ones_stay(history: History) -> None:
    for day, entry in ((1, "aa"), (3, "cc"), (2, "bb")):
        created = f"2026-11-0{day}T00:00:00+00:00"
        history.set(Setting(kind="baseline", name="main", value={"entry": entry}, reason=entry, created=created))
    now = history.current("baseline", "main")
    assert now is not None and now.value == {"entry": "cc"}
    assert [s.reason for s in history.settings("baseline")[0]] == ["aa", "bb", "cc"]


def test_prune_keeps_what_is_pinned(history: History) -> None:
    old = (datetime.now(UTC) - timedelta(days=90)).isoformat()
    pinned, unpinned = (
        history.add(entry_of("a", created=old), rows_of("a")),
        history.add(entry_of("b", created=old), None),
    )
    new = history.add(entry_of("c", created=datetime.now(UTC).isoformat()), None)
    setting = Setting(kind="baseline", name="main", value={"entry": pinned.id}, reason="pin", created=old)
    history.set(setting)
    assert history.prune(keep_days=30, dry_run=True) == [unpinned.name]
    assert len(history.entries()[0]) == 3
    assert history.prune(keep_days=30, dry_run=False) == [unpinned.name]
    assert {s.id for s in history.entries()[0]} == {pinned.id, new.id}
    assert history.verify()[1] == []


def test_clock_going_backwards_is_said(history: History) -> None:
    stored = history.add(entry_of("a", created="2026-11-29T12:00:00+00:00"), None)
    now = datetime(2026, 11, 29, 13, tzinfo=UTC)
    back = clock_warning(entry_of("b", created="2026-11-29T11:00:00+00:00"), [stored], now)
    assert back is not None and "is before 2026-11-29T12:00:00+00:00 of run a" in back
    ahead = clock_warning(entry_of("b", created="2026-11-29T15:00:00+00:00"), [stored], now)
    assert ahead is not None and "lies in the future" in ahead
    assert clock_warning(entry_of("b", created="2026-11-29T12:30:00+00:00"), [stored], now) is None


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(HistoryError, match=r"cannot (read|write to) the history .*file/history"):
        History(Folder(tmp_path / "file" / "history")).add(entry_of(), None)


def test_fsspec_storage_keeps_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    remote = History(open_storage(f"memory://{tmp_path.name}"))
    local = History(Folder(tmp_path / "h"))
    for history in (remote, local):
        history.add(entry_of(), rows_of())
    assert remote.storage.names() == local.storage.names()
    assert remote.scores(remote.find("run-1")).equals(local.scores(local.find("run-1")))
    assert remote.verify() == (2, [])


# git


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and one uncommitted change."""
    folder = tmp_path / "repo"
    subprocess.run(["git", "init", "-q", "-b", "main", str(folder)], check=True, timeout=60)
    (folder / "a.txt").write_text("one")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "start")
    (folder / "a.txt").write_text("work in progress")
    return folder


def test_git_history_leaves_the_checkout_alone(repository: Path, tmp_path: Path) -> None:
    history = History(GitBranch(repository, "recall-history"), Folder(tmp_path / "rows"))
    history.add(entry_of(), rows_of())
    assert (
        git(repository, "status", "--porcelain") == "M a.txt" or git(repository, "status", "--porcelain") == " M a.txt"
    )
    assert git(repository, "ls-tree", "-r", "--name-only", "recall-history").endswith(".json")
    assert history.scores(history.find("run-1")).num_rows == 24
    assert history.verify() == (2, [])
    with pytest.raises(HistoryError, match="does not belong in git"):
        history.storage.write_many({"v1/x.parquet": b""})


def _add_to_branch(repository: str, writer: int) -> None:
    history = History(GitBranch(Path(repository), "recall-history"))
    for n in range(2):
        history.add(entry_of(f"g{writer}-{n}"), None)


def test_concurrent_git_writers_lose_nothing(repository: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_to_branch, args=(str(repository), w)) for w in range(6)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    assert [w.exitcode for w in writers] == [0] * 6
    found, problems = History(GitBranch(repository, "recall-history")).entries()
    assert problems == []
    assert len(found) == 12


def test_two_clones_unite_without_conflict(repository: Path, tmp_path: Path) -> None:
    bare = tmp_path / "origin.git"
    subprocess.run(["git", "clone", "-q", "--bare", str(repository), str(bare)], check=True, timeout=60)
    clones = []
    for name in ("one", "two", "three"):
        subprocess.run(["git", "clone", "-q", str(bare), str(tmp_path / name)], check=True, timeout=60)
        clones.append(GitBranch(tmp_path / name, "recall-history"))
        History(clones[-1]).add(entry_of(f"run-{name}"), None)
    for clone in clones:
        clone.sync("origin")
    clones[0].sync("origin")
    assert {s.entry.run_id for s in History(clones[0]).entries()[0]} == {"run-one", "run-two", "run-three"}
    # what one prunes is gone after the union, not brought back by it
    History(clones[0]).storage.delete([History(clones[0]).find("run-two").name])
    clones[0].sync("origin")
    clones[1].sync("origin")
    assert {s.entry.run_id for s in History(clones[1]).entries()[0]} == {"run-one", "run-three"}


def test_not_a_repository_is_said(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match="is not a git repository"):
        open_storage(f"git:{tmp_path}#recall-history")
    with pytest.raises(HistoryError, match="names no branch"):
        open_storage("git:.")


def test_a_run_stored_without_rows_is_completed_by_the_same_run_with_them(repository: Path, tmp_path: Path) -> None:
    branch = GitBranch(repository, "recall-history")
    bare = History(branch).add(entry_of(), None)
    pin = Setting(kind="baseline", name="main", value={"entry": bare.id}, reason="first", created=entry_of().created)
    History(branch).set(pin)
    history = History(branch, Folder(tmp_path / "rows"))
    with pytest.raises(HistoryError, match=r"stored with another content: .*\(differing: note\)\. A run is never"):
        history.add(entry_of(note="another run"), rows_of())
    whole = history.add(entry_of(), rows_of())
    assert history.entries() == ([whole], [])
    assert history.scores(pinned(history, "main")).num_rows == 24
    assert History(branch).add(entry_of(), None) == whole  # forgetting them later takes nothing away
    assert history.verify()[1] == []
    # the same after what is replaced was removed, and after another clone brought it back
    assert history.prune(keep_days=1, dry_run=False) == [bare.name]
    assert pinned(history, "main") == whole
    branch.write_many({bare.name: encode(entry_of(), None)[1]})
    assert history.entries() == ([whole], [])


# command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(["history"]), ["history", *arguments])


@pytest.fixture(scope="module")
def two_runs(
    tmp_path_factory: pytest.TempPathFactory, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> tuple[Path, str, str]:
    """A history with a good run and one whose base lost recall: same suite, other day."""
    folder = tmp_path_factory.mktemp("two")
    good = simulated(run_id="good", conversations=30, losses=None, seed=4)
    worse = simulated(
        run_id="worse",
        conversations=30,
        seed=4,
        losses={"base": (0, 0.3), "base-again": (0, 0.3), "topk-256": (0, 0.75), "noop": (0, 0.3)},
    )
    store = str(folder / "history")
    for campaign, commit, time_ in ((good, "a" * 40, "2026-11-01"), (worse, "b" * 40, "2026-11-02")):
        run_dir = run_writer(folder / campaign.campaign.run_id, campaign)
        done = run("add", str(run_dir), "--store", store, "--line", "main", "--commit", commit, "--time", time_)
        assert done.exit_code == 0, done.output
    return folder, store, str(folder / "good")


def test_add_list_show_diff_verify(two_runs: tuple[Path, str, str]) -> None:
    _, store, _ = two_runs
    listed = json.loads(run("list", "--store", store, "--line", "main", "--json").output)
    assert [e["run_id"] for e in listed] == ["good", "worse"]
    assert listed[0]["points"][0]["n_conversations"] == 30
    assert len(listed[0]["noise"]) == 3
    for columns in ("80", "200"):
        shown = CliRunner().invoke(
            build_app(["history"]), ["history", "list", "--store", store], env={"COLUMNS": columns}
        )
        assert all(entry["id"][:8] in shown.output for entry in listed) and "…" not in shown.output
    assert json.loads(run("show", "good", "--store", store).output)["commit"] == "a" * 40
    compared = json.loads(run("diff", "good", "worse", "--store", store, "--json").output)
    assert compared["verdict"]["verdict"] == "culprit"
    by_rung = {c["rung"]: c for c in compared["comparisons"]}
    assert by_rung[2048]["delta_recall"] < -0.15
    assert by_rung[448]["ci_low"] < 0 < by_rung[448]["ci_high"]
    assert run("diff", "good", "worse", "--store", store).exit_code == 0
    verified = run("verify", "--store", store)
    assert verified.exit_code == 0
    assert json.loads(verified.output)["problems"] == 0


def test_a_run_is_found_by_its_folder_and_by_its_commit(two_runs: tuple[Path, str, str], tmp_path: Path) -> None:
    _, store, good = two_runs
    shutil.copytree(good, tmp_path / "measured-for-pr-7")
    for name in (str(tmp_path / "measured-for-pr-7"), "a" * 40, "a" * 7):
        assert json.loads(run("show", name, "--store", store).output)["run_id"] == "good", name
    assert json.loads(run("show", f"{'b' * 7}:noop", "--store", store).output)["run_id"] == "worse"
    compared = json.loads(run("diff", "a" * 8, "b" * 8, "--store", store, "--json").output)
    assert compared["verdict"]["verdict"] == "culprit"
    missing = run("show", "c" * 7, "--store", store)
    assert missing.exit_code == 2 and "folder or commit" in missing.stderr


@pytest.fixture
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a person's machine: no CI system says which commit is measured."""
    for name in COMMIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("noted", "label", "said"),
    [
        ("b1e6904" + "0" * 33, "base@b1e690400000", "kept as b1e690400000, longrecall's checkout in that run;"),
        ("b1e6904" + "0" * 33 + "+", "base@b1e690400000+", "in that run, with uncommitted changes;"),
        (None, "base, run 20261130-044448-x", ""),
    ],
)
def test_outside_ci_the_commit_is_the_one_that_the_run_noted_and_a_run_is_called_one(
    no_ci: None,
    noted: str | None,
    label: str,
    said: str,
    tmp_path: Path,
    simulated: Callable[..., Any],
    run_writer: Callable[..., Path],
) -> None:
    made = simulated(run_id="20261130-044448-x", conversations=26, probes=3, seed=4)
    made = replace(made, campaign=replace(made.campaign, longrecall_commit=noted))
    run_dir = str(run_writer(tmp_path / "run", made))
    store = ["--store", str(tmp_path / "h")]
    added = run("add", run_dir, *store)
    assert added.exit_code == 0 and said in added.stderr and bool(added.stderr) == bool(said)
    shown = json.loads(run("show", "20261130-044448-x", *store).output)
    assert (shown["commit"], shown["created"]) == (noted, made.campaign.created)
    assert ("b1e6904000" + ("+" if noted and "+" in noted else " ")) in run("list", *store).output or not noted
    assert run("baseline", "main", "20261130-044448-x", *store, "--reason", "first").exit_code == 0
    comment = tmp_path / "comment.md"
    gate = ["gate", run_dir, "--baseline", "main", *store, "--comment", str(comment)]
    done = CliRunner().invoke(build_app(["gate"]), gate)
    assert done.exit_code in (0, 1, 4), done.stderr
    assert f"main ({label})" in comment.read_text()
    own = next(name for name in json.loads(done.stdout.splitlines()[-1])["verdicts"] if name.startswith("base"))
    assert own == (label if noted is None else f"base@{noted[:20]}{noted[40:]}")


def test_rows_that_were_not_kept_are_named_with_the_run_that_wrote_them(
    two_runs: tuple[Path, str, str], tmp_path: Path
) -> None:
    done = run("diff", "good", "worse", "--store", two_runs[1], "--rows", str(tmp_path / "empty"))
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert ".parquet is not there; the rows of run worse must be kept" in done.stderr


def test_forgotten_rows_are_said_at_once_and_the_gate_names_the_command_that_mends_it(
    two_runs: tuple[Path, str, str], repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(two_runs[2], tmp_path / "results" / "runs" / "good")
    store, run_dir = f"git:{repository}#recall-history", "results/runs/good"
    added = run("add", run_dir, "--store", store, "--line", "main", "--note", "a note")
    assert added.exit_code == 0 and "not for gate --baseline" in added.stderr and "--rows" in added.stderr
    pin = run("baseline", "main", "good", "--store", store, "--reason", "first")
    assert pin.exit_code == 0 and "without probe rows" in pin.stderr
    for place in ([], ["--rows", "kept rows"]):
        gate = ["gate", run_dir, "--baseline", "main", "--store", store, *place]
        done = CliRunner().invoke(build_app(["gate"]), gate)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        command = re.search(r"longrecall (history add .*?) completes it", done.stderr)
        assert command is not None
    again = shlex.split(command[1])
    refused = CliRunner().invoke(build_app(["history"]), [*again, "--line", "other"])
    assert refused.exit_code == 2 and "(differing: line)" in refused.stderr
    assert again[-2:] == ["--rows", "kept rows"]
    mended = CliRunner().invoke(build_app(["history"]), again)
    assert mended.exit_code == 0 and "without probe rows" not in mended.stderr
    done = CliRunner().invoke(build_app(["gate"]), gate)
    assert json.loads(done.stdout.splitlines()[-1])["verdicts"], done.stderr


def test_verify_fails_loudly(two_runs: tuple[Path, str, str], tmp_path: Path) -> None:
    _, store, _ = two_runs
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", store, str(copy)], check=True, timeout=60)
    victim = next(copy.rglob("*.parquet"))
    victim.chmod(0o644)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = run("verify", "--store", str(copy))
    assert done.exit_code == 1
    assert victim.name in done.output


def test_baseline_and_thresholds_are_logged(two_runs: tuple[Path, str, str], tmp_path: Path) -> None:
    _, store, _ = two_runs
    assert "say why with --reason" in run("baseline", "main", "good", "--store", store).output
    assert run("baseline", "main", "good", "--store", store, "--reason", "release 1").exit_code == 0
    assert json.loads(run("baseline", "main", "--store", store).output)["reason"] == "release 1"
    file = tmp_path / "t.toml"
    file.write_text("[gate]\nmargin = 0.05\n[trend]\nmin_magnitude = 0.03\n")
    assert run("thresholds", str(file), "--store", store, "--reason", "tighter").exit_code == 0
    shown = json.loads(run("thresholds", "--store", store).output)
    assert (shown["margin"], shown["min_magnitude"], shown["changes"]) == (0.05, 0.03, 1)
    file.write_text("[gate]\nmargn = 0.05\n")
    done = run("thresholds", str(file), "--store", store, "--reason", "typo")
    assert done.exit_code == 2
    assert "unknown key gate.margn" in done.output


@pytest.mark.parametrize(
    ("sql", "said"),
    [("select * from scores", 'Did you mean "probes"'), ("selec 1", "Parser Error"), (" ", "no SQL was given")],
)
def test_sql_that_cannot_be_answered_is_one_message(two_runs: tuple[Path, str, str], sql: str, said: str) -> None:
    done = run("query", sql, "--store", two_runs[1])
    assert done.exit_code == 2 and said in done.stderr and done.stderr.count("\n") == 1


def test_a_damaged_file_of_rows_is_named_and_the_others_answer(two_runs: tuple[Path, str, str], tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    copy = tmp_path / "copy"
    shutil.copytree(two_runs[1], copy)
    victim = min(path for path in copy.rglob("*.parquet") if "_noop_" in path.name)
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes()[:500])
    sql = "select distinct run_id, build_id from probes"
    whole, done = (run("query", sql, "--store", store) for store in (two_runs[1], str(copy)))
    assert done.exit_code == 0 and victim.name in done.stderr
    missing = set(whole.stdout.splitlines()) - set(done.stdout.splitlines())
    assert [line.rpartition(",")[2] for line in missing] == ["noop"]
    wrong = run("query", "select nothing from probes", "--store", str(copy))
    assert wrong.exit_code == 2 and "nothing" in wrong.stderr


def test_query_reads_every_reply(two_runs: tuple[Path, str, str]) -> None:
    pytest.importorskip("duckdb")
    _, store, _ = two_runs
    sql = "select line, rung, count(*) n from probes where line = 'main' group by all order by rung"
    done = run("query", sql, "--store", store)
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[1:] == ["main,448,480", "main,1024,480", "main,2048,480"]


def test_merge_takes_over_files(two_runs: tuple[Path, str, str], tmp_path: Path) -> None:
    _, store, _ = two_runs
    done = run("merge", store, "--store", str(tmp_path / "new"))
    assert done.exit_code == 0, done.output
    assert json.loads(run("verify", "--store", str(tmp_path / "new")).output)["problems"] == 0
    again = json.loads(run("merge", store, "--store", str(tmp_path / "new")).output)
    assert again["manifests"] == 0


def test_unfinished_run_is_not_history(
    tmp_path: Path, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> None:
    folder = run_writer(tmp_path / "run", simulated(conversations=4, probes=2))
    journal = folder / "replays.jsonl"
    journal.write_bytes(journal.read_bytes()[:-300])
    done = run("add", str(folder), "--store", str(tmp_path / "h"))
    assert done.exit_code == 2
    assert "the run is not finished" in done.output
    assert not (tmp_path / "h").exists()


def test_transcripts_are_kept_apart_and_readable(two_runs: tuple[Path, str, str], tmp_path: Path) -> None:
    import io

    import pyarrow as pa

    _, _, run_dir = two_runs
    done = run("add", run_dir, "--store", str(tmp_path / "h"), "--transcripts")
    assert done.exit_code == 0, done.output
    [packed] = (tmp_path / "h" / "transcripts").rglob("*.zst")
    with pa.CompressedInputStream(io.BytesIO(packed.read_bytes()), "zstd") as stream:
        assert stream.read() == (Path(run_dir) / "replays.jsonl").read_bytes()


def test_mlflow_gets_recall_with_length_as_step(two_runs: tuple[Path, str, str], tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    _, store, _ = two_runs
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    done = run("export", "good", "worse", "--store", store, "--mlflow", uri)
    assert done.exit_code == 0, done.output
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("longrecall")
    runs = client.search_runs([experiment.experiment_id])
    assert {r.data.tags["longrecall.run_id"] for r in runs} == {"good", "worse"}
    assert [m.step for m in client.get_metric_history(runs[0].info.run_id, "recall")] == [448, 1024, 2048]


def test_export_says_what_is_missing(two_runs: tuple[Path, str, str]) -> None:
    _, store, _ = two_runs
    done = run("export", "good", "--store", store)
    assert done.exit_code == 2
    assert "--mlflow URI or --wandb PROJECT" in done.output


def test_probe_rows_open_as_a_dataset(two_runs: tuple[Path, str, str]) -> None:
    datasets = pytest.importorskip("datasets")
    _, store, _ = two_runs
    files = [str(path) for path in Path(store).rglob("*_base_*.parquet")]
    rows = datasets.Dataset.from_parquet(files, cache_dir=str(Path(store).parent / "cache"))
    assert len(rows) == 2 * 30 * 8 * 3
    assert {"conversation_id", "rung", "outcome"} <= set(rows.column_names)
