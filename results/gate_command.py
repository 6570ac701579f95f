"""`longrecall gate`: pass or fail a commit on its measured recall.

    longrecall gate results/runs/20261129-reference
    longrecall gate --baseline main --store history --junit recall.xml --comment comment.md

Without RUN_DIR the newest run folder is judged. With --baseline its base build is also compared, paired by probe, with
the pinned run. Exit codes: 0 passed, 1 culprit, 2 usage, 3 unfinished run or failed controls, 4 inconclusive.
The last line on standard output is one JSON document.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrecall.results.history_command import DEFAULT_STORE, RowsAt, Store, open_history, plain_errors, warn

if TYPE_CHECKING:
    from longrecall.results.gate import Gate
    from longrecall.results.history import History


def newest_run(runs_dir: Path) -> Path:
    """The run folder written last. Raises HistoryError when there is none."""
    from longrecall.results.run_folder import CAMPAIGN
    from longrecall.results.storage import HistoryError

    found = sorted(runs_dir.glob(f"*/{CAMPAIGN}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise HistoryError(f"no run folder in {runs_dir}; name one, or run: longrecall eval")
    return found[-1].parent


def make_gate(run_dir: Path, history: "History | None", baseline: str | None, fail_on: tuple[str, ...]) -> "Gate":
    """The gate of a run, against a pinned baseline where one is named."""
    from dataclasses import replace

    from longrecall.evals.scores_file import scores_table
    from longrecall.results.against import controls_of, judge_joint, label_of, pinned, same_suite
    from longrecall.results.gate import Gate, joined
    from longrecall.results.history import short_commit
    from longrecall.results.record import commit_from_environment
    from longrecall.results.report import assemble_with_scores
    from longrecall.results.words import ordered_verdicts, suspects

    report, campaign, scores = assemble_with_scores(run_dir)
    wanted = suspects(report)
    gate = Gate(
        title=report.run_id,
        partial=report.partial,
        config=report.verdict_config,
        controls=tuple(report.controls.values()),
        verdicts=tuple(v for v in ordered_verdicts(report) if v.patch in wanted),
        comparisons=report.comparisons,
        curves=report.curves,
        rungs=report.rungs,
        fail_on=fail_on,
        suite_hash=report.suite_hash,
        baseline=None,
    )
    if history is None or baseline is None:
        return gate
    stored = pinned(history, baseline)
    commit = commit_from_environment() or campaign.longrecall_commit
    label = f"base@{short_commit(commit, 20)}" if commit else f"base, run {report.run_id}"
    same_suite(stored, report.suite_hash, label)
    from longrecall.results.thresholds import current_thresholds

    margin = current_thresholds(history).margin
    config = replace(report.verdict_config, margin=margin) if margin is not None else report.verdict_config
    base = next(b.build_id for b in report.builds if b.role == "base")
    rows = scores_table([s for s in scores if s.build_id == base])
    name = f"{baseline} ({label_of(stored)})"
    controls = controls_of(history, stored)
    judgement = judge_joint((name, history.scores(stored)), controls, [(label, rows)], config)
    return joined(gate, judgement, label, name)


@plain_errors
def gate(
    run_dir: Annotated[Path | None, typer.Argument(help="Run folder. Default: the newest.")] = None,
    baseline: Annotated[str | None, typer.Option(help="Pinned baseline to compare the base build with.")] = None,
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    runs_dir: Annotated[Path, typer.Option(help="Where run folders are.")] = Path("results/runs"),
    fail_on: Annotated[str | None, typer.Option(help="culprit, inconclusive, within-margin; with commas.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML.")] = None,
    summary: Annotated[
        Path | None, typer.Option(envvar="GITHUB_STEP_SUMMARY", help="Append the Markdown step summary.")
    ] = None,
    comment: Annotated[Path | None, typer.Option(help="Write the pull request comment.")] = None,
    openmetrics: Annotated[Path | None, typer.Option(help="Write OpenMetrics text.")] = None,
    benchmark: Annotated[Path | None, typer.Option(help="Write github-action-benchmark JSON.")] = None,
    link: Annotated[str | None, typer.Option(help="Where the report can be read, for the Markdown.")] = None,
) -> None:
    """Pass or fail a commit: exit code, JUnit, Markdown, OpenMetrics."""
    from longrecall.results import gate as writer
    from longrecall.results.run_folder import write_bytes
    from longrecall.results.storage import HistoryError
    from longrecall.results.thresholds import FAIL_ON, current_thresholds

    run_dir = run_dir or newest_run(runs_dir)
    history = open_history(store, rows) if baseline else None
    if fail_on is not None:
        kinds = tuple(part.strip() for part in fail_on.split(",") if part.strip())
        wrong = [kind for kind in kinds if kind not in FAIL_ON]
        if wrong:
            raise HistoryError(f"--fail-on {wrong[0]!r}: it takes {', '.join(FAIL_ON)}")
    else:
        kinds = current_thresholds(history).fail_on if history else ("culprit", "inconclusive")
    if history:
        for problem in history.entries()[1]:
            warn(problem.message)
    made = make_gate(run_dir, history, baseline, kinds)
    if junit:
        write_bytes(junit, writer.junit(made))
    if comment:
        write_bytes(comment, writer.comment(made, link=link).encode())
    if openmetrics:
        write_bytes(openmetrics, writer.openmetrics(made).encode())
    if benchmark:
        write_bytes(benchmark, writer.benchmark_json(made).encode())
    if summary:
        with open(summary, "ab") as file:  # other steps of the job write to it too
            file.write(writer.markdown(made, link=link).encode() + b"\n")
    typer.echo(f"longrecall gate {writer.outcome_line(made)}", err=True)
    typer.echo(json.dumps(writer.document(made), separators=(",", ":")))
    code = writer.exit_code(made)
    if code:
        raise typer.Exit(code)
