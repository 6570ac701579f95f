"""CI gate: verdicts → an exit code and the files that CI systems read.

A case passes only when its patch is exonerated, never because nothing was found. JUnit: suite = patch, case = context
length. Markdown stays under GitHub's limits (a step summary is dropped whole above 1 MiB, a comment refused above
65,536 characters).
"""

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from longrecall.evals.schema import Comparison, ControlResult, CurvePoint, Judgement, Verdict, VerdictConfig
from longrecall.results import charts
from longrecall.results.flips import visible
from longrecall.results.markdown import SIGNS, cell, table
from longrecall.results.words import CONTROL_SIGNS, VERDICT_WORDS, interval, p_text, signed

SUMMARY_BYTES = 1_000_000
COMMENT_CHARACTERS = 65_000
COMMENT_MARK = "<!-- longrecall gate -->"
"""First line of the comment, by which a workflow finds and replaces its own."""

PASS, CULPRIT, INVALID, INCONCLUSIVE = 0, 1, 3, 4


@dataclass(frozen=True, kw_only=True)
class Gate:
    """What the gate looked at, and what it says."""

    title: str
    partial: bool
    config: VerdictConfig
    controls: tuple[ControlResult, ...]
    verdicts: tuple[Verdict, ...]
    comparisons: tuple[Comparison, ...]
    curves: tuple[CurvePoint, ...]
    rungs: tuple[int, ...]
    fail_on: tuple[str, ...]
    suite_hash: str
    baseline: str | None
    """What "base" is in the comparison with a pinned baseline, for people."""


def exit_code(gate: Gate) -> int:
    """0 pass, 1 a culprit (or within-margin where that fails), 3 partial run or failed controls, 4 inconclusive.

    A culprit outranks failed controls: a loss that large is told even where an exoneration could not be given.
    """
    said = {v.verdict for v in gate.verdicts}
    if "culprit" in said and "culprit" in gate.fail_on:
        return CULPRIT
    if gate.partial or any(c.blocks for c in gate.controls):
        return INVALID
    if "within-margin" in said and "within-margin" in gate.fail_on:
        return CULPRIT
    if "inconclusive" in said and "inconclusive" in gate.fail_on:
        return INCONCLUSIVE
    return PASS


def outcome_line(gate: Gate) -> str:
    """The gate's answer in a few words."""
    code = exit_code(gate)
    guilty = [v.patch for v in gate.verdicts if v.verdict == "culprit"]
    failed = [f"{c.name} ({c.state})" if c.state == "absent" else c.name for c in gate.controls if c.blocks]
    if code == CULPRIT:
        return f"failed: {', '.join(guilty) or 'a loss within the margin'} loses recall"
    if code == INVALID:
        return "invalid: " + ("the run is not finished" if gate.partial else f"control not passed: {', '.join(failed)}")
    if code == INCONCLUSIVE:
        open_ = [v.patch for v in gate.verdicts if v.verdict == "inconclusive"]
        return f"inconclusive: {', '.join(open_)}"
    return "passed"


def _comparisons(gate: Gate, patch: str) -> list[Comparison]:
    own = [c for c in gate.comparisons if c.candidate == patch and c.rung is not None]
    return sorted(own, key=lambda c: c.rung or 0)


def case_state(
    verdict: Verdict, comparison: Comparison, config: VerdictConfig
) -> Literal["passed", "failed", "skipped"]:
    """One length of one patch: failed where its loss is significant, passed only under an exoneration."""
    if verdict.verdict == "exonerated":
        return "passed"
    lost = comparison.p_loss_holm is not None and comparison.p_loss_holm <= config.alpha
    return "failed" if verdict.verdict == "culprit" and lost else "skipped"


def junit(gate: Gate) -> bytes:
    """JUnit XML; evidence in properties, control failures as errors."""
    root = ET.Element("testsuites", name="longrecall")
    controls = ET.SubElement(root, "testsuite", name="controls", tests=str(len(gate.controls)))
    for control in gate.controls:
        case = ET.SubElement(controls, "testcase", classname="longrecall.controls", name=control.name, time="0")
        if control.blocks:
            ET.SubElement(case, "error", message=visible(control.detail, 400), type="control")
        elif control.state == "absent":
            ET.SubElement(case, "skipped", message=visible(control.detail, 400))
    controls.set("errors", str(sum(c.blocks for c in gate.controls)))
    controls.set("skipped", str(sum(c.state == "absent" and not c.blocks for c in gate.controls)))
    for verdict in gate.verdicts:
        suite = ET.SubElement(root, "testsuite", name=visible(verdict.patch))
        states = []
        for comparison in _comparisons(gate, verdict.patch):
            name = f"recall at {comparison.rung} tokens"
            case = ET.SubElement(
                suite, "testcase", classname=f"longrecall.{visible(verdict.patch)}", name=name, time="0"
            )
            _properties(case, verdict, comparison)
            state = case_state(verdict, comparison, gate.config)
            states.append(state)
            told = f"{VERDICT_WORDS[verdict.verdict]}: {signed(comparison.delta_recall)} points"
            told += f" {interval(comparison.ci_low, comparison.ci_high)}; {visible(verdict.reason, 400)}"
            if state == "failed":
                ET.SubElement(case, "failure", message=told, type=verdict.verdict)
            elif state == "skipped":
                ET.SubElement(case, "skipped", message=told)
        suite.set("tests", str(len(states)))
        suite.set("failures", str(states.count("failed")))
        suite.set("skipped", str(states.count("skipped")))
    for name in ("tests", "failures", "errors", "skipped"):
        root.set(name, str(sum(int(suite.get(name, "0")) for suite in root)))
    ET.indent(root)
    body: bytes = ET.tostring(root, encoding="utf-8")
    return b'<?xml version="1.0" encoding="utf-8"?>\n' + body + b"\n"


def _properties(case: ET.Element, verdict: Verdict, c: Comparison) -> None:
    properties = ET.SubElement(case, "properties")
    values = {
        "verdict": verdict.verdict,
        "recall_baseline": c.recall_baseline,
        "recall_candidate": c.recall_candidate,
        "delta_recall": c.delta_recall,
        "ci_low": c.ci_low,
        "ci_high": c.ci_high,
        "p_loss_holm": c.p_loss_holm,
        "lower_bound_t": c.lower_bound_t,
        "lower_bound_tango": c.lower_bound_tango,
        "n_conversations": c.n_conversations,
        "n_probes": c.n_probes,
        "lost": c.lost,
        "gained": c.gained,
    }
    for name, value in values.items():
        if value is not None:
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            ET.SubElement(properties, "property", name=name, value=text)


def _sections(gate: Gate) -> list[str]:
    """The Markdown in falling order of importance; each section stands alone."""
    sign = {PASS: "✅", CULPRIT: "❌", INVALID: "⛔", INCONCLUSIVE: "❔"}[exit_code(gate)]
    parts = [f"### {sign} longrecall: {cell(outcome_line(gate))}"]
    if gate.baseline:
        parts.append(f"Against the pinned baseline {cell(gate.baseline)}.")
    rows = [
        [
            cell(v.patch),
            f"{SIGNS[v.verdict]} {VERDICT_WORDS[v.verdict]}",
            f"{signed(v.delta_recall)} {interval(v.ci_low, v.ci_high)}",
            "all" if v.rung is None else f"{v.rung:,}",
            cell(v.reason),
        ]
        for v in gate.verdicts
    ]
    parts.append(table(["Patch", "Verdict", "Difference, points", "At", "Why"], rows, right=[2, 3]))
    lines = [f"- {CONTROL_SIGNS[c.state]} **{c.name}**: {cell(c.detail)}" for c in gate.controls]
    parts.append("<details><summary>Controls</summary>\n\n" + "\n".join(lines) + "\n\n</details>")
    by = {(p.build, p.rung): p for p in gate.curves}
    builds = list(dict.fromkeys(p.build for p in gate.curves))
    recall = [[cell(b), *(charts.points(by[b, r].recall) if (b, r) in by else "–" for r in gate.rungs)] for b in builds]
    heads = ["Recall, %", *(f"{r:,}" for r in gate.rungs)]
    parts.append(
        "<details><summary>Recall against context length</summary>\n\n"
        + table(heads, recall, right=range(1, len(heads)))
        + "\n\n</details>"
    )
    for v in gate.verdicts:
        rows = [
            [
                f"{c.rung:,}",
                signed(c.delta_recall),
                interval(c.ci_low, c.ci_high),
                p_text(c.p_loss_holm),
                signed(c.lower_bound_t),
                signed(c.lower_bound_tango),
                f"{c.lost}",
                f"{c.gained}",
            ]
            for c in _comparisons(gate, v.patch)
        ]
        heads = ["Length", "Difference", "95 % interval", "p (Holm)", "bound (t)", "bound (Tango)", "lost", "gained"]
        body = table(heads, rows, right=range(8))
        parts.append(f"<details><summary>{cell(v.patch)}, by length</summary>\n\n{body}\n\n</details>")
    return parts


def _fit(parts: Sequence[str], last: str, room: int) -> str:
    """As many whole sections as fit, and a word about those that do not."""
    kept: list[str] = []
    used = len(last.encode()) + 80
    for part in parts:
        size = len(part.encode()) + 2
        if used + size > room:
            kept.append(f"*{len(parts) - len(kept)} sections left out: too long for this place.*")
            break
        kept.append(part)
        used += size
    return "\n\n".join([*kept, last]) + "\n"


def markdown(gate: Gate, *, link: str | None = None) -> str:
    """The step summary (GITHUB_STEP_SUMMARY)."""
    return _fit(_sections(gate), _last(gate, link), SUMMARY_BYTES)


def comment(gate: Gate, *, link: str | None = None) -> str:
    """The pull request comment. Its first line is COMMENT_MARK."""
    return COMMENT_MARK + "\n" + _fit(_sections(gate), _last(gate, link), COMMENT_CHARACTERS - len(COMMENT_MARK) - 1)


def _last(gate: Gate, link: str | None) -> str:
    where = f" · [report]({link})" if link else ""
    margin = f"margin {gate.config.margin * 100:g} points"
    return f"<sub>{cell(gate.title)} · suite {gate.suite_hash[:12]} · {margin}{where}</sub>"


def openmetrics(gate: Gate) -> str:
    """Text that GitLab's metrics reports and Prometheus read."""

    def label(text: str) -> str:
        return visible(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    lines = ["# TYPE longrecall_recall gauge", "# HELP longrecall_recall Share of planted facts recalled."]
    for p in gate.curves:
        if p.recall is not None:
            lines.append(f'longrecall_recall{{build="{label(p.build)}",length="{p.rung}"}} {p.recall:.6g}')
    lines += ["# TYPE longrecall_delta_recall gauge", "# HELP longrecall_delta_recall Patch minus base."]
    for c in gate.comparisons:
        if c.delta_recall is not None and c.rung is not None:
            lines.append(
                f'longrecall_delta_recall{{build="{label(c.candidate)}",length="{c.rung}"}} {c.delta_recall:.6g}'
            )
    lines += ["# TYPE longrecall_culprit gauge", "# HELP longrecall_culprit 1 where a patch is convicted."]
    lines += [f'longrecall_culprit{{build="{label(v.patch)}"}} {int(v.verdict == "culprit")}' for v in gate.verdicts]
    return "\n".join([*lines, "# EOF"]) + "\n"


def benchmark_json(gate: Gate) -> str:
    """github-action-benchmark's customBiggerIsBetter."""
    rows = [
        {
            "name": f"{visible(p.build)} / recall at {p.rung}",
            "unit": "%",
            "value": round(p.recall * 100, 3),
            "range": f"{p.ci_low * 100:.1f}-{p.ci_high * 100:.1f}"
            if p.ci_low is not None and p.ci_high is not None
            else "",
            "extra": f"{p.n_probes} probes in {p.n_conversations} conversations",
        }
        for p in gate.curves
        if p.recall is not None
    ]
    return json.dumps(rows, indent=1) + "\n"


def document(gate: Gate) -> dict[str, object]:
    """The last line on standard output."""
    return {
        "exit_code": exit_code(gate),
        "outcome": outcome_line(gate),
        "suite_hash": gate.suite_hash,
        "controls": {c.name: c.passed for c in gate.controls},
        "verdicts": {v.patch: v.verdict for v in gate.verdicts},
    }


def joined(campaign: Gate, judgement: Judgement, label: str, baseline: str) -> Gate:
    """The campaign's gate with the comparison of its base against a pinned baseline put first.

    The baseline's build is named `baseline` in curves and comparisons; its own controls join the campaign's, except
    for one that the campaign has passed and the baseline's run does not have.
    """
    verdicts = [v for v in judgement.verdicts if v.patch == label]
    comparisons = [c for c in judgement.comparisons if c.candidate == label]
    curves = [p for p in judgement.curves if p.build == "base"]
    renamed = tuple(_rename(p, baseline) for p in curves)
    controls = [
        c for c in judgement.controls if c.build is not None or c.name not in {o.name for o in campaign.controls}
    ]
    return Gate(
        title=campaign.title,
        partial=campaign.partial,
        config=campaign.config,
        controls=(*campaign.controls, *(_control(c) for c in controls)),
        verdicts=(*verdicts, *campaign.verdicts),
        comparisons=(*comparisons, *campaign.comparisons),
        curves=(*renamed, *campaign.curves),
        rungs=campaign.rungs,
        fail_on=campaign.fail_on,
        suite_hash=campaign.suite_hash,
        baseline=baseline,
    )


def _rename(point: CurvePoint, name: str) -> CurvePoint:
    return replace(point, build=name)


def _control(control: ControlResult) -> ControlResult:
    return replace(control, detail=f"baseline's run: {control.detail}")
