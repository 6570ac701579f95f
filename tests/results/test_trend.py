"""Trend: change points against Otava's answers, series, noise floor, bridges, and the page in a browser."""

import json
import math
import os
import random
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from longrecall.results.changes import change_points, t_test
from longrecall.results.history import Entry, History, NoisePoint, RungPoint, Setting
from longrecall.results.main import build_app
from longrecall.results.otava import OtavaSeries, analyze, export
from longrecall.results.storage import Folder
from longrecall.results.thresholds import Thresholds
from longrecall.results.trend import bridges, trends


def step_series(seed: int, n: int, changes: dict[int, float], sd: float = 0.006) -> list[float]:
    rng = random.Random(seed)
    level, values = 0.9, []
    for i in range(n):
        level += changes.get(i, 0.0)
        values.append(level + rng.gauss(0, sd))
    return values


def test_change_is_found_where_it_is() -> None:
    found = change_points(step_series(1, 80, {40: -0.04}), min_magnitude=0.02)
    assert [c.index for c in found] == [40]
    assert found[0].mean_after - found[0].mean_before == pytest.approx(-0.04, abs=0.005)
    assert (found[0].n_before, found[0].n_after) == (40, 40)


def test_several_changes_in_a_long_series() -> None:
    assert [
        c.index for c in change_points(step_series(2, 400, {120: -0.05, 250: 0.03, 330: -0.04}), min_magnitude=0.02)
    ] == [
        120,
        250,
        330,
    ]


def test_noise_alone_rarely_changes() -> None:
    alarms = sum(len(change_points(step_series(seed, 40, {}), min_magnitude=0.02)) for seed in range(50))
    assert alarms <= 1


@pytest.mark.parametrize("values", [[], [0.9], [0.9, 0.8], [0.9] * 50, [None] * 20, [0.9, None] * 10, [math.nan, 0.9]])
def test_degenerate_series_have_no_change(values: list[float | None]) -> None:
    assert change_points(values) == []


def test_identical_values_then_another_level_is_a_change() -> None:
    [change] = change_points([0.9] * 10 + [0.8] * 5)
    assert (change.index, change.p_value) == (10, 0.0)


def test_missing_points_do_not_shift_the_place() -> None:
    values: list[float | None] = list(step_series(1, 80, {40: -0.04}))
    values[3] = values[39] = None
    assert [c.index for c in change_points(values, min_magnitude=0.02)] == [40]


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=120), st.floats(0.001, 1000), st.floats(-10, 10))
def test_scale_and_shift_do_not_matter(values: list[float], scale: float, shift: float) -> None:
    rounded = [round(v, 3) for v in values]
    moved = [v * scale + shift for v in rounded]
    assert [c.index for c in change_points(rounded)] == [c.index for c in change_points(moved)]


def test_t_test_agrees_with_scipy() -> None:
    import numpy as np
    from scipy import stats

    rng = np.random.default_rng(0)
    for n, m in ((2, 3), (5, 1), (30, 20)):
        left, right = rng.normal(size=n), rng.normal(0.5, size=m)
        assert t_test(left, right) == pytest.approx(stats.ttest_ind(left, right).pvalue, rel=1e-9)


# Indices that apache-otava 0.8.0 gave for step_series(seed, n, changes) with window 50, p 0.001, magnitude 0.
OTAVA_ANSWERS = json.loads((Path(__file__).parent / "otava_answers.json").read_text())


def otavas_t_test(left: Any, right: Any) -> float:
    """The t-test with Otava's population deviations where the formula wants those of a sample."""
    from scipy import stats

    if len(left) + len(right) <= 2:
        return 1.0
    p = stats.ttest_ind_from_stats(left.mean(), left.std(), len(left), right.mean(), right.std(), len(right)).pvalue
    return float(p)


def test_same_change_points_as_otava_with_its_t_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cases differ: there Otava judges a point by the p-value that it had before its right neighbour went.

    With `recompute` in its merge called on both neighbours of the removed point, it gives our answer in these two also.
    """
    monkeypatch.setattr("longrecall.results.changes.t_test", otavas_t_test)
    ours = [[c.index for c in change_points(case["values"])] for case in OTAVA_ANSWERS]
    different = [(a, case["indices"]) for a, case in zip(ours, OTAVA_ANSWERS, strict=True) if a != case["indices"]]
    assert different == [([5, 36], [5]), ([6, 45], [6, 30, 45])]


def test_sample_deviations_find_at_most_what_otava_finds() -> None:
    ours = [{c.index for c in change_points(case["values"])} for case in OTAVA_ANSWERS]
    theirs = [set(case["indices"]) for case in OTAVA_ANSWERS]
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 21
    assert sum(len(a - b) for a, b in zip(ours, theirs, strict=True)) <= 1


@pytest.mark.skipif(
    not (os.environ.get("OTAVA") or shutil.which("otava")),
    reason="apache-otava is not installed (set OTAVA to its path)",
)
def test_otava_itself_reads_what_is_exported(tmp_path: Path) -> None:
    executable = Path(os.environ.get("OTAVA") or shutil.which("otava") or "")
    values: list[float | None] = list(step_series(1, 60, {40: -0.04}))
    values[5] = None
    times = tuple((datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=i)).isoformat() for i in range(60))
    series = OtavaSeries(
        name="recall_1024-main", times=times, commits=tuple(f"{i:x}" for i in range(60)), values=tuple(values)
    )
    assert analyze(executable, [series], max_pvalue=0.001, window_len=50) == {"recall_1024-main": [40]}
    assert export([series], tmp_path).read_text().startswith("tests:\n  recall_1024-main:\n    type: csv\n")


def fill(history: History, n: int = 60, *, line: str = "main", suite: str = "ab", drop_at: int | None = 40) -> None:
    rng = random.Random(f"{line}{suite}")
    new: list[Any] = []
    for i in range(n):
        fall = 0.05 if drop_at is not None and i >= drop_at else 0.0
        points, noise = [], []
        for rung, level in ((448, 0.93), (1024, 0.9), (4096, 0.8)):
            recall = level + rng.gauss(0, 0.005) - (fall if rung > 512 else 0)
            points.append(
                RungPoint(
                    rung=rung,
                    recall=recall,
                    ci_low=recall - 0.03,
                    ci_high=recall + 0.03,
                    n_conversations=40,
                    n_probes=320,
                )
            )
            noise.append(NoisePoint(rung=rung, delta=rng.gauss(0, 0.006), ci_low=-0.02, ci_high=0.02))
        created = datetime(2026, 9, 1, tzinfo=UTC) + timedelta(hours=9 * i)
        new.append(
            (
                Entry(
                    run_id=f"{line}-{suite}-{i}",
                    build_id="base",
                    role="base",
                    line=line,
                    suite_hash=suite * 32,
                    created=created.isoformat(timespec="seconds"),
                    commit=f"{i:04x}" * 10,
                    engine="reference",
                    margin=0.1,
                    points=tuple(points),
                    noise=tuple(noise),
                    l50_tokens=8000.0 * (0.7 if fall else 1.0) * 2 ** rng.gauss(0, 0.04),
                ),
                None,
            )
        )
    history.add_many(new)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two lines, one of which falls at its 40th commit, and a second suite measured on two of its commits."""
    folder = tmp_path_factory.mktemp("trend") / "history"
    history = History(Folder(folder))
    fill(history)
    fill(history, 30, line="release", drop_at=None)
    fill(history, 2, suite="cd", drop_at=None)
    return folder


def test_change_names_the_commit_range(store: Path) -> None:
    entries, problems = History(Folder(store)).entries()
    assert problems == []
    made = trends(entries, Thresholds())
    by_line = {(t.line, t.suite_hash[:2]): t for t in made}
    main = {s.metric: s for s in by_line["main", "ab"].series}
    assert main["recall_448"].found == ()
    for metric in ("recall_1024", "recall_4096", "log2_l50"):
        [found] = main[metric].found
        assert (found.last_good, found.first_bad) == (f"{39:04x}" * 10, f"{40:04x}" * 10)
        assert found.worse and not found.tentative
    assert 0.005 < (main["recall_1024"].noise or 0) < 0.02
    assert all(s.found == () for s in by_line["release", "ab"].series)


def test_bridge_shows_both_suites_on_one_commit(store: Path) -> None:
    entries, _ = History(Folder(store)).entries()
    found = [b for b in bridges(entries) if b.line == "main"]
    assert {b.commit for b in found} == {"0000" * 10, "0001" * 10}
    assert all(set(b.offsets) == {448, 1024, 4096} for b in found)
    assert all(abs(v) < 0.03 for b in found for v in b.offsets.values())


def run(*arguments: str) -> Any:
    return CliRunner().invoke(build_app(["trend"]), ["trend", *arguments])


def test_command_writes_the_page_and_one_json_line(store: Path, tmp_path: Path) -> None:
    done = run("--store", str(store), "--out", str(tmp_path), "--export-otava", str(tmp_path / "otava"))
    assert done.exit_code == 0, done.output
    assert "git bisect start" in done.output or "points in" in done.output
    document = json.loads(done.output.splitlines()[-1])
    assert document["entries"] == 92
    [main] = [one for one in document["lines"] if one["line"] == "main" and one["suite"].startswith("ab")]
    assert {c["metric"] for c in main["changes"]} == {"recall_1024", "recall_4096", "log2_l50"}
    assert (tmp_path / "otava" / "otava.yaml").is_file()
    assert len(list((tmp_path / "otava").glob("*.csv"))) == 12


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--store", "{tmp}/mistyped"], "mistyped: no history there"),
        (["--store", "{tmp}/empty"], "empty: the history is there, and no run was added yet"),
        (["--store", "git:{tmp}/repo#recall-histroy"], "#recall-histroy: no history there"),
        (
            ["--store", "{store}", "--line", "mian"],
            "no run of line 'mian'; there are main (suite abababab), main (suite c",
        ),
        (
            ["--store", "{store}", "--line", "release", "--suite", "cd"],
            "no run of line 'release' on suite 'cd'; there are",
        ),
    ],
)
def test_nothing_to_show_is_one_error_that_says_what_there_is(
    store: Path, tmp_path: Path, asked: list[str], said: str
) -> None:
    (tmp_path / "empty").mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path / "repo")], check=True, timeout=60)
    done = run(*(part.format(tmp=tmp_path, store=store) for part in asked), "--out", str(tmp_path / "site"))
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert said in done.stderr
    assert not (tmp_path / "site").exists()


def test_first_run_is_no_trend_and_a_loss_against_the_baseline_comes_first(
    tmp_path: Path, simulated: Any, run_writer: Any
) -> None:
    history, shown = str(tmp_path / "h"), tmp_path / "trend.html"

    def add(name: str, commit: str, fall: float) -> None:
        losses = {"base": (0, fall), "base-again": (0, fall), "topk-256": (0, 0.45 + fall), "noop": (0, fall)}
        run_dir = run_writer(tmp_path / name, simulated(run_id=name, conversations=26, losses=losses, seed=4))
        arguments = ["add", str(run_dir), "--store", history, "--line", "main", "--commit", commit]
        assert CliRunner().invoke(build_app(["history"]), ["history", *arguments]).exit_code == 0

    add("good", "a" * 40, 0.0)
    assert run("--store", history, "--out", str(tmp_path)).exit_code == 0
    assert "<h1>One run so far</h1>" in shown.read_text()
    pin = ["history", "baseline", "main", "good", "--store", history, "--reason", "first"]
    assert CliRunner().invoke(build_app(["history"]), pin).exit_code == 0
    add("worse", "b" * 40, 0.3)
    done = run("--store", history, "--out", str(tmp_path))
    assert json.loads(done.output.splitlines()[-1])["paired"] == {"main": "culprit"}
    assert re.search("<h1>Recall on main is [0-9.]+ points below the baseline</h1>", shown.read_text())
    lines = [one["line"] for one in json.loads(done.output.splitlines()[-1])["lines"]]
    assert lines[0] == "main" and len(lines) > 1


def test_a_damaged_baseline_is_named_and_the_series_are_shown(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "h")
    history = History(Folder(tmp_path / "h"))
    pinned = history.entries()[0][0]
    history.set(
        Setting(kind="baseline", name="main", value={"entry": pinned.id}, reason="r", created="2026-11-29", author="a")
    )
    victim = tmp_path / "h" / pinned.name
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes()[:50])
    done = run("--store", str(tmp_path / "h"), "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "baseline 'main' is entry" in done.stderr
    assert "2 parts of the history could not be used" in (tmp_path / "trend.html").read_text()


def test_damaged_file_is_named_on_the_page(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "h")
    victim = sorted((tmp_path / "h").rglob("*.json"))[0]
    victim.chmod(0o644)
    victim.write_bytes(victim.read_bytes()[:50])
    done = run("--store", str(tmp_path / "h"), "--out", str(tmp_path))
    assert done.exit_code == 0
    assert victim.name in (tmp_path / "trend.html").read_text()
    assert json.loads(done.output.splitlines()[-1])["unreadable"] == 1


def test_page_draws_in_a_browser_without_error_or_request(browser: Any, store: Path, tmp_path: Path) -> None:
    run("--store", str(store), "--out", str(tmp_path))
    for dark, width in ((False, 1280), (True, 390)):
        page = browser.open(tmp_path / "trend.html", dark=dark, width=width)
        assert page.errors == []
        assert [url for url in page.requests if not url.startswith("data:")] == page.requests[:1]
        assert page.js("document.querySelectorAll('svg[role=img]').length") == 15
        assert page.js("document.documentElement.scrollWidth") <= width
    assert page.js("document.querySelector('h1').textContent").startswith("Recall on main fell")
    page.js("document.querySelector('td details summary').focus()")
    page.press("Enter", 13, "\r")
    assert page.js("document.querySelector('td details').open")
    assert "git bisect start" in page.js("document.querySelector('td details pre').textContent")


def test_hostile_commit_names_stay_text(browser: Any, tmp_path: Path) -> None:
    history = History(Folder(tmp_path / "h"))
    fill(history, 3, drop_at=None)
    bad = "<script>window.owned=1</script>'; rm -rf ~; '"
    entry = history.entries()[0][0].entry
    from dataclasses import replace

    history.add(replace(entry, run_id="evil", commit=bad, line=bad, note=bad), None)
    history.set(Setting(kind="baseline", name="main", value={"entry": "x"}, reason=bad, created=entry.created))
    done = run("--store", str(tmp_path / "h"), "--baseline", "other", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    page = browser.open(tmp_path / "trend.html")
    assert page.js("typeof window.owned") == "undefined"
    assert page.errors == []


def test_site_serves_reports_and_trend(store: Path, tmp_path: Path, campaign40: Any, run_writer: Any) -> None:
    from starlette.testclient import TestClient

    from longrecall.results.report import write_reports
    from longrecall.results.serve_report import make_site

    runs = tmp_path / "runs"
    write_reports(run_writer(runs / "good", campaign40))
    (runs / "bad").mkdir()
    (runs / "bad" / "report.json").write_text("{")
    (tmp_path / "secret.html").write_text("secret")
    client = TestClient(make_site(runs, History(Folder(store))))
    index = client.get("/")
    assert index.status_code == 200
    assert "hash-topk-double-scaling lose recall" in index.text.replace("</span>", "")
    assert "This report cannot be read" in index.text
    assert client.get("/runs/good/report.html").text.startswith("<!doctype html>")
    assert client.get("/trend").status_code == 200
    for path in ("/", "/trend", "/runs/good/report.html", "/runs/good/flips.jsonl", "/runs/none/report.html"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
    for path in (
        "/runs/../secret.html",
        "/runs/good/..%2f..%2fsecret.html",
        "/runs/%2e%2e/secret.html",
        "/runs/good/campaign.json",
    ):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "secret" not in answer.text or "no such page" in answer.text
    assert client.post("/").status_code == 405


def test_bench_prints_its_figures(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        build_app(["bench", "history"]), ["bench", "history", "--runs", "20", "--probes", "50", "--repeats", "1"]
    )
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output.splitlines()[-1])
    assert {"list_s", "trend_s", "query_s"} <= set(figures)
    assert figures["runs"] == 20
