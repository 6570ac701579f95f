"""`longrecall report RUN_DIR`: write the reports of a stored run again, from its replies, without a server.

longrecall report results/runs/20261129-reference
longrecall report results/runs/20261129-reference --png
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from longrecall.results.schema import Report


def fail(message: object, code: int = 2) -> "typer.Exit":
    """Print one error line; raise what it returns."""
    typer.echo(f"longrecall: error: {message}", err=True)
    return typer.Exit(code)


def print_summary(report: "Report", console: "Console") -> None:
    """Controls, verdict table and recall by length for a terminal."""
    from rich.markup import escape

    from longrecall.results import charts
    from longrecall.results.terminal import table
    from longrecall.results.words import VERDICT_WORDS, headline, interval, lede, ordered_verdicts, p_text, signed

    styles = {"culprit": "bold red", "exonerated": "cyan", "within-margin": "yellow", "inconclusive": "magenta"}
    console.print(f"\n[bold]{escape(headline(report))}[/bold]")
    console.print(escape(lede(report)))
    if report.partial:
        console.print("[yellow]Partial run: verdicts can still change.[/yellow]")
    for name, control in report.controls.items():
        style = {"passed": "cyan", "failed": "bold red", "absent": "magenta"}[control.state]
        console.print(f"  control {name}: [{style}]{control.state}[/]  {escape(control.detail)}")
    verdicts = table(["patch", "verdict"], ["points, 95 % interval", "p", "at"])
    verdicts.columns[1].no_wrap = True
    for v in ordered_verdicts(report):
        verdicts.add_row(
            escape(v.patch),
            f"[{styles[v.verdict]}]{VERDICT_WORDS[v.verdict]}[/]",
            f"{signed(v.delta_recall)} {escape(interval(v.ci_low, v.ci_high))}",
            p_text(v.p_value),
            "all" if v.rung is None else f"{v.rung:,}",
        )
    console.print(verdicts)
    recall = table(["recall, %"], [f"{rung:,}" for rung in report.rungs])
    by = {(p.build, p.rung): p.recall for p in report.curves}
    for build in report.builds:
        recall.add_row(escape(build.build_id), *(charts.points(by.get((build.build_id, r))) for r in report.rungs))
    console.print(recall)


def report(
    run_dir: Annotated[Path, typer.Argument(help="Run folder, results/runs/<run_id>.")],
    png: Annotated[bool, typer.Option("--png", help="Also write charts/*.png.")] = False,
    inspect: Annotated[Path | None, typer.Option(help="Also write Inspect AI logs (.eval) to this folder.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the JSON line only.")] = False,
) -> None:
    """Write report.json, report.md and report.html of a stored run again, from its replies."""
    from longrecall.results import charts, run_folder, terminal
    from longrecall.results.report import export_logs, summary_line, write_reports

    try:
        made = write_reports(run_dir)
        if png:
            for path in sorted((run_dir / run_folder.CHARTS).glob("*.svg")):
                run_folder.write_bytes(path.with_suffix(".png"), charts.png(path.read_text(encoding="utf-8")))
        if inspect:
            export_logs(run_dir, inspect)
    except ValueError as error:
        raise fail(error) from error
    if not quiet:
        print_summary(made, terminal.console())
    typer.echo(json.dumps(summary_line(run_dir, made), separators=(",", ":")))
