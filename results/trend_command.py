"""`longrecall trend`: recall against context length over commits, with change points.

    longrecall trend --store history --out results/pages
    longrecall trend --line main --otava /opt/otava/bin/otava
    longrecall trend --export-otava out/ --json

Writes trend.html; the last line on standard output is one JSON document.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longrecall.results.history_command import DEFAULT_STORE, RowsAt, Store, open_history, plain_errors, warn

if TYPE_CHECKING:
    from longrecall.results.history import History, Problem, Stored
    from longrecall.results.trend import Paired, Trend
    from longrecall.results.trend_page import TrendData


def against_baseline(
    history: "History", name: str, made: "list[Trend]", problems: "list[Problem]"
) -> "tuple[Stored | None, list[Paired]]":
    """The pinned entry, and the newest base point of each line on its suite compared with it.

    A baseline that cannot be read goes to `problems`.
    """
    from longrecall.results.against import judge_entries, label_of, labels_of, pinned
    from longrecall.results.history import Problem
    from longrecall.results.storage import HistoryError
    from longrecall.results.trend import Paired

    if history.current("baseline", name) is None:
        return None, []
    try:
        baseline = pinned(history, name)
    except HistoryError as error:  # its file is damaged or gone: the series are shown without it
        problems.append(Problem(name, str(error)))
        return None, []
    found = []
    for trend in made:
        newest = trend.entries[-1]
        if trend.suite_hash != baseline.entry.suite_hash or newest.id == baseline.id or newest.entry.role != "base":
            continue
        try:
            judgement = judge_entries(history, baseline, newest)
        except HistoryError as error:  # rows may live elsewhere; the series are shown without them
            warn(f"line {trend.line} is not compared with {name}: {error}")
            continue
        label = label_of(newest)
        names = labels_of(baseline, newest)
        found.append(
            Paired(
                line=trend.line,
                baseline=names[0],
                candidate=names[1],
                verdict=next(v for v in judgement.verdicts if v.patch == label),
                comparisons=tuple(c for c in judgement.comparisons if c.candidate == label),
            )
        )
    return baseline, found


def trend_data(
    history: "History",
    *,
    line: str | None = None,
    suite: str | None = None,
    baseline: str = "main",
    store: str | None = None,
    last: int = 2000,
    otava: Path | None = None,
) -> "TrendData":
    """What the trend page shows of a history now."""
    from longrecall.results.report import version
    from longrecall.results.thresholds import current_thresholds
    from longrecall.results.trend import bridges, trends
    from longrecall.results.trend_page import TrendData

    found, problems = history.entries(suite)
    entries = [s for s in found if line is None or s.entry.line == line]
    made = trends(entries, current_thresholds(history), last=last, otava=otava)
    pinned, paired = against_baseline(history, baseline, made, problems)
    return TrendData(
        trends=made,
        paired=paired,
        bridges=bridges(entries),
        problems=problems,
        baseline=baseline,
        pinned=pinned,
        store=store or history.storage.url,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        version=version(),
    )


def nothing_found(history: "History", store: str, line: str | None, suite: str | None) -> str:
    """Why there is no series to show, and which there are."""
    found, problems = history.entries()
    if found:
        asked = [f"{name} {value!r}" for name, value in (("line", line), ("suite", suite)) if value is not None]
        there = sorted({(s.entry.line, s.entry.suite_hash[:8]) for s in found})
        lines = ", ".join(f"{one} (suite {on})" for one, on in there[:20])
        return f"{store}: no run of {' on '.join(asked)}; there are {lines}{', …' * (len(there) > 20)}"
    if problems:
        return f"{store}: none of its {len(problems)} files can be read"
    if history.storage.exists():
        return f"{store}: the history is there, and no run was added yet; longrecall history add RUN adds one"
    return f"{store}: no history there; --store (or LONGRECALL_STORE) names one, longrecall history add RUN begins one"


@plain_errors
def trend(
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    line: Annotated[str | None, typer.Option(help="Only this series.")] = None,
    suite: Annotated[str | None, typer.Option(help="Only this suite (hash or its beginning).")] = None,
    baseline: Annotated[str, typer.Option(help="Pinned baseline for the paired test.")] = "main",
    out: Annotated[Path, typer.Option(help="Folder for trend.html.")] = Path("results/pages"),
    last: Annotated[int, typer.Option(min=1, help="Newest runs of a line that are looked at.")] = 2000,
    otava: Annotated[Path | None, typer.Option(help="Find change points with this otava executable.")] = None,
    export_otava: Annotated[Path | None, typer.Option(help="Also write CSV and otava.yaml here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON line only.")] = False,
) -> None:
    """Recall against context length over commits: series, noise floor, change points, trend.html."""
    from longrecall.results.history import short_commit
    from longrecall.results.history_chart import change_text, value_text
    from longrecall.results.otava import export
    from longrecall.results.run_folder import write_bytes
    from longrecall.results.storage import HistoryError
    from longrecall.results.trend import bisect_command, otava_series
    from longrecall.results.trend_page import trend_html

    history = open_history(store, rows)
    data = trend_data(history, line=line, suite=suite, baseline=baseline, store=store, last=last, otava=otava)
    for problem in data.problems:
        warn(problem.message)
    if not data.trends:
        raise HistoryError(nothing_found(history, store, line, suite))
    made, paired = data.trends, data.paired
    path = out / "trend.html"
    write_bytes(path, trend_html(data).encode())
    if export_otava:
        export([series for one in made for series in otava_series(one)], export_otava)
    document = {
        "trend": str(path),
        "entries": sum(len(one.entries) for one in made),
        "unreadable": len(data.problems),
        "lines": [
            {
                "line": one.line,
                "suite": one.suite_hash,
                "n": len(one.entries),
                "changes": [
                    {"metric": s.metric, **asdict(f), "tentative": f.tentative} for s in one.series for f in s.found
                ],
            }
            for one in made
        ],
        "paired": {p.line: p.verdict.verdict for p in paired},
    }
    if not as_json:
        for one in made:
            typer.echo(f"{one.line} (suite {one.suite_hash[:8]}, {len(one.entries)} runs)")
            for s in one.series:
                newest = next((v for v in reversed(s.values) if v is not None), None)
                typer.echo(f"  {s.label:>14}  {value_text(s, newest)}")
                for f in s.found:
                    sure = " (one run: measure it again)" if f.tentative else ""
                    typer.echo(
                        f"    {change_text(s, f)} in {short_commit(f.last_good)}..{short_commit(f.first_bad)}{sure}"
                    )
                    if f.worse and f.index >= len(one.entries) - 10:
                        typer.echo(f"      {bisect_command(f, baseline)}")
        for p in paired:
            typer.echo(f"{p.line}: newest against {baseline}: {p.verdict.verdict}. {p.verdict.reason}")
    typer.echo(json.dumps(document, separators=(",", ":")))
