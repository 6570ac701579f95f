"""The gate: exit codes, and files that the CI systems' own readers accept."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from longrecall.evals.schema import Comparison, ControlResult, CurvePoint, Verdict, VerdictConfig, VerdictName
from longrecall.results import gate as writer
from longrecall.results import markdown
from longrecall.results.gate import Gate
from longrecall.results.main import build_app


def comparison(patch: str, rung: int, p: float | None) -> Comparison:
    return Comparison(
        baseline="base",
        candidate=patch,
        rung=rung,
        n_conversations=40,
        n_probes=320,
        n_missing=0,
        recall_baseline=0.9,
        recall_candidate=0.7,
        delta_recall=-0.2,
        stderr=0.02,
        ci_low=-0.24,
        ci_high=-0.16,
        p_loss=p,
        p_loss_signflip=p,
        p_loss_holm=p,
        lower_bound_t=-0.23,
        lower_bound_tango=-0.25,
        lost=64,
        gained=0,
    )


def make_gate(
    verdicts: Sequence[VerdictName],
    *,
    controls: bool = True,
    partial: bool = False,
    fail_on: tuple[str, ...] = ("culprit", "inconclusive"),
    name: str = "patch",
) -> Gate:
    rungs = (448, 2048)
    patches = [f"{name}-{i}" for i in range(len(verdicts))]
    return Gate(
        title="run",
        partial=partial,
        config=VerdictConfig(),
        controls=(
            ControlResult(name="aa", build="base-again", passed=controls, detail="29 flips"),
            ControlResult(name="positive", build="topk-256", passed=True, detail="caught"),
        ),
        verdicts=tuple(
            Verdict(
                patch=patch,
                verdict=verdict,
                delta_recall=-0.2,
                ci_low=-0.24,
                ci_high=-0.16,
                p_value=0.001,
                rung=2048,
                n_conversations=40,
                n_probes=320,
                more_conversations_needed=None,
                reason="because",
            )
            for patch, verdict in zip(patches, verdicts, strict=True)
        ),
        comparisons=tuple(comparison(p, r, 0.9 if r == 448 else 1e-6) for p, r in product(patches, rungs)),
        curves=tuple(
            CurvePoint(
                build=b, rung=r, recall=0.9, ci_low=0.85, ci_high=0.95, n_conversations=40, n_probes=320, outcomes={}
            )
            for b, r in product(["base", *patches], rungs)
        ),
        rungs=rungs,
        fail_on=fail_on,
        suite_hash="ab" * 32,
        baseline=None,
    )


@pytest.mark.parametrize(
    ("verdicts", "changes", "code"),
    [
        (["exonerated", "exonerated"], {}, 0),
        (["exonerated", "within-margin"], {}, 0),
        (["exonerated", "within-margin"], {"fail_on": ("culprit", "within-margin")}, 1),
        (["exonerated", "culprit", "inconclusive"], {}, 1),
        (["exonerated", "culprit"], {"controls": False}, 1),
        (["exonerated", "inconclusive"], {}, 4),
        (["exonerated", "inconclusive"], {"fail_on": ("culprit",)}, 0),
        (["exonerated", "inconclusive"], {"controls": False}, 3),
        (["exonerated"], {"partial": True}, 3),
        ([], {}, 0),
    ],
)
def test_exit_codes(verdicts: list[VerdictName], changes: dict[str, Any], code: int) -> None:
    assert writer.exit_code(make_gate(verdicts, **changes)) == code


def test_junit_passes_only_what_is_exonerated() -> None:
    root = ET.fromstring(writer.junit(make_gate(["exonerated", "culprit", "within-margin", "inconclusive"])))
    states = {
        suite.get("name"): [
            next((e.tag for e in case if e.tag in ("failure", "skipped", "error")), "passed") for case in suite
        ]
        for suite in root
    }
    assert states == {
        "controls": ["passed", "passed"],
        "patch-0": ["passed", "passed"],
        "patch-1": ["skipped", "failure"],
        "patch-2": ["skipped", "skipped"],
        "patch-3": ["skipped", "skipped"],
    }
    assert (root.get("tests"), root.get("failures"), root.get("skipped"), root.get("errors")) == ("10", "1", "5", "0")
    properties = {p.get("name"): p.get("value") for p in root[2][1].iter("property")}
    assert properties["delta_recall"] == "-0.2"
    assert properties["n_conversations"] == "40"


def test_failed_control_is_an_error() -> None:
    root = ET.fromstring(writer.junit(make_gate(["inconclusive"], controls=False)))
    assert root[0][0].find("error") is not None
    assert root.get("errors") == "1"


@pytest.mark.parametrize(
    ("name", "code", "tag", "outcome"),
    [("negative", 0, "skipped", "passed"), ("positive", 3, "error", "invalid: control not passed: positive (absent)")],
)
def test_a_control_that_the_campaign_does_not_have_is_absent_and_not_failed(
    name: Any, code: int, tag: str, outcome: str
) -> None:
    gate = make_gate(["exonerated"])
    missing = ControlResult(name=name, build=None, passed=False, detail="the campaign has no such patch")
    gate = replace(gate, controls=(gate.controls[0], missing))
    assert (missing.state, writer.exit_code(gate), writer.outcome_line(gate)) == ("absent", code, outcome)
    case = ET.fromstring(writer.junit(gate))[0][1]
    assert [child.tag for child in case] == [tag]
    text = writer.markdown(gate)
    assert f"➖ **{name}**" in text and "❌" not in text


def test_markdown_stays_under_the_limits_with_whole_sections() -> None:
    many = make_gate(["culprit"] * 400, name="patch-with-a-rather-long-name-" * 3)
    for text, limit in ((writer.comment(many), 65_536), (writer.markdown(many), 1_024 * 1_024)):
        assert len(text.encode()) <= limit
        assert text.count("<details>") == text.count("</details>")
    assert "sections left out" in writer.comment(many)
    small = writer.comment(make_gate(["exonerated"]))
    assert "left out" not in small
    assert small.startswith(writer.COMMENT_MARK)


def test_hostile_names_stay_text() -> None:
    name = 'x"><script>|`](http://evil)@everyone\n\x1b[31m\u202e'
    gate = make_gate(["culprit"], name=name)
    text = writer.markdown(gate)
    assert "<script>" not in text
    assert "\u202e" not in text and "\x1b" not in text
    assert "@everyone" not in text
    ET.fromstring(writer.junit(gate))
    lines = writer.openmetrics(gate).splitlines()
    assert all(line.startswith(("#", "longrecall_")) for line in lines)


def test_a_commit_in_a_label_stays_readable_in_the_source() -> None:
    assert markdown.cell("main@0123456789ab") == "main@0123456789ab"
    assert markdown.cell("base@0123456789ab+, run 7") == "base@0123456789ab+, run 7"
    for text in ("@0123456789", "ask @everyone", "x@example.org", "a@abcdef0.org", "a@abcdef0-team"):
        assert "@" not in markdown.cell(text), text
    assert markdown.cell("<b>#1") == "&#60;b&#62;\\#1"


def test_openmetrics_and_benchmark_json() -> None:
    gate = make_gate(["exonerated"])
    text = writer.openmetrics(gate)
    assert 'longrecall_recall{build="base",length="2048"} 0.9' in text
    assert 'longrecall_culprit{build="patch-0"} 0' in text
    assert text.endswith("# EOF\n")
    rows = json.loads(writer.benchmark_json(gate))
    assert {"name", "unit", "value", "range", "extra"} == set(rows[0])
    assert rows[0]["value"] == 90.0


def test_unmeasured_recall_is_left_out_not_zero() -> None:
    gate = make_gate(["exonerated"])
    gate = replace(gate, curves=(replace(gate.curves[0], recall=None, ci_low=None, ci_high=None),))
    assert json.loads(writer.benchmark_json(gate)) == []
    assert "longrecall_recall{" not in writer.openmetrics(gate)


def run(*arguments: str, env: dict[str, str] | None = None) -> Any:
    return CliRunner().invoke(build_app(["gate"]), ["gate", *arguments], env=env)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory, campaign40: Any, run_writer: Callable[..., Path]) -> Path:
    return run_writer(tmp_path_factory.mktemp("runs") / campaign40.campaign.run_id, campaign40)


def test_command_gates_the_newest_run(run_dir: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("from an earlier step\n")
    done = run("--runs-dir", str(run_dir.parent), "--junit", str(tmp_path / "j.xml"), "--summary", str(summary))
    assert done.exit_code == 1, done.output
    document = json.loads(done.output.splitlines()[-1])
    assert document["verdicts"]["hash-topk-double-scaling"] == "culprit"
    assert "topk-256" not in document["verdicts"]
    assert summary.read_text().startswith("from an earlier step\n")
    assert ET.parse(tmp_path / "j.xml").getroot().get("errors") == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fail-on", "culprits"], "--fail-on 'culprits': it takes culprit, within-margin, inconclusive"),
        (["--runs-dir", "nowhere"], "no run folder in nowhere"),
        (["--baseline", "main"], "no baseline 'main'"),
        (["--summary", "/no-such-folder/summary.md"], "/no-such-folder/summary.md: No such file or directory"),
    ],
)
def test_usage_errors_exit_2(run_dir: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    place = [] if "--runs-dir" in arguments else [str(run_dir)]
    done = run(*place, *arguments, "--store", str(tmp_path / "h"))
    assert done.exit_code == 2
    assert message in done.output


def test_baseline_of_another_suite_is_refused(
    run_dir: Path, tmp_path: Path, simulated: Callable[..., Any], run_writer: Callable[..., Path]
) -> None:
    other = run_writer(tmp_path / "other", simulated(conversations=10, probes=3, seed=9, run_id="other"))
    history = ["--store", str(tmp_path / "h")]
    history_app = build_app(["history"])
    for command in (["add", str(other)], ["baseline", "main", "other", "--reason", "x"]):
        assert CliRunner().invoke(history_app, ["history", *command, *history]).exit_code == 0
    done = run(str(run_dir), "--baseline", "main", *history)
    assert done.exit_code == 2
    assert "not the same prompts" in done.output
