"""`longrecall history`: keep and read the run history.

    longrecall history add results/runs/20261129-reference --line main --commit "$GITHUB_SHA"
    longrecall history list --line main
    longrecall history diff 3f2a 9c01
    longrecall history verify

`--store` is a folder, git:REPOSITORY#BRANCH, or an fsspec URL (s3://…). Manifests in git need their rows elsewhere:
`--rows`. Both can be set by LONGRECALL_STORE and LONGRECALL_ROWS.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec

import typer

from longrecall.results.report_command import fail

if TYPE_CHECKING:
    from longrecall.results.history import History, Stored

P = ParamSpec("P")
app = typer.Typer(no_args_is_help=True)

Store = Annotated[str, typer.Option("--store", envvar="LONGRECALL_STORE", help="Folder, git:REPO#BRANCH or URL.")]
RowsAt = Annotated[str | None, typer.Option("--rows", envvar="LONGRECALL_ROWS", help="Where probe rows live, for git.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DEFAULT_STORE = "history"
NO_ROWS = "kept without probe rows: good for list and trend, not for gate --baseline, diff, query"


def open_history(store: str, rows: str | None) -> "History":
    """The history behind the two options."""
    from longrecall.results.history import History
    from longrecall.results.storage import open_storage

    return History(open_storage(store), open_storage(rows) if rows else None)


def plain_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Bad input ends a command with one line and exit code 2."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except OSError as error:
            raise fail(f"{error.filename}: {error.strerror}" if error.filename else error) from error
        except ValueError as error:
            raise fail(error) from error

    return wrapped


def warn(message: str) -> None:
    """A file that is left out, a time that looks wrong: said on standard error, and work goes on."""
    typer.echo(f"longrecall: warning: {message}", err=True)


def read_entries(history: "History", suite: str | None = None, line: str | None = None) -> "list[Stored]":
    """Entries of a suite and line, with a warning for each file that cannot be read."""
    found, problems = history.entries(suite)
    for problem in problems:
        warn(problem.message)
    return [stored for stored in found if line is None or stored.entry.line == line]


@app.command()
@plain_errors
def add(
    run_dir: Annotated[Path, typer.Argument(help="Finished run folder.")],
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    line: Annotated[str, typer.Option(help="Series of the base build: a branch, an engine.")] = "base",
    commit: Annotated[str | None, typer.Option(help="Measured commit. Default: CI's, else the run's.")] = None,
    time: Annotated[str | None, typer.Option(help="Time of the point. Default: CI's commit's, else the run's.")] = None,
    build: Annotated[list[str] | None, typer.Option(help="Only this build; may be repeated.")] = None,
    note: Annotated[str, typer.Option(help="Free text.")] = "",
    transcripts: Annotated[bool, typer.Option("--transcripts", help="Keep the replies too (zstd).")] = False,
    push: Annotated[str | None, typer.Option(help="git: unite with this remote and push.")] = None,
) -> None:
    """Add the builds of a finished run."""
    from longrecall.results.history import clock_warning, short_commit
    from longrecall.results.record import commit_from_environment, commit_time, entries_of, store_transcripts
    from longrecall.results.run_folder import load_campaign
    from longrecall.results.storage import GitBranch, HistoryError

    history = open_history(store, rows)
    commit = commit or commit_from_environment()
    created = time or (commit_time(commit) if commit else None)
    if not commit and (commit := load_campaign(run_dir).longrecall_commit):
        dirty = ", with uncommitted changes" if commit.endswith("+") else ""
        noted = f"no commit was named: it is kept as {short_commit(commit)}, longrecall's checkout in that run{dirty}"
        typer.echo(f"longrecall: note: {noted}; --commit names another", err=True)
    made = entries_of(run_dir, line=line, commit=commit, created=created, note=note, builds=build)
    known = read_entries(history, made[0][0].suite_hash if made else None)
    warning = clock_warning(made[0][0], known, datetime.now(UTC)) if made else None
    stored = history.add_many(made)
    if warning:
        warn(warning)
    if any(one.entry.rows is None for one in stored):
        warn(f"{store}: {NO_ROWS}; add the run again with --rows FOLDER (or a bucket; LONGRECALL_ROWS) to complete it")
    names = [one.name for one in stored]
    if transcripts:
        if history.rows is None:
            raise HistoryError(f"{store}: transcripts do not belong in git; give a folder or bucket with --rows")
        names += store_transcripts(run_dir, history.rows)
    if push:
        if not isinstance(history.storage, GitBranch):
            raise HistoryError(f"{store}: --push is for a git history")
        history.storage.sync(push)
    typer.echo(json.dumps({"added": [one.id for one in stored], "files": names}, separators=(",", ":")))


@app.command("list")
@plain_errors
def list_(
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    suite: Annotated[str | None, typer.Option(help="Suite hash or its beginning.")] = None,
    line: Annotated[str | None, typer.Option(help="Series.")] = None,
    last: Annotated[int, typer.Option("--last", "-n", min=1, help="Newest entries shown.")] = 40,
    as_json: AsJson = False,
) -> None:
    """List entries, oldest first."""
    found = read_entries(open_history(store, rows), suite, line)[-last:]
    if as_json:
        typer.echo(json.dumps([{"id": s.id, "file": s.name, **asdict(s.entry)} for s in found]))
        return
    from rich.markup import escape

    from longrecall.results import charts, terminal
    from longrecall.results.history import short_commit

    lengths = sorted({p.rung for s in found for p in s.entry.points})
    shown = terminal.table(
        ["id", "time", "line", "commit", "verdict"], [*(charts.tokens(rung) for rung in lengths), "L50", "suite"]
    )
    shown.columns[0].no_wrap = shown.columns[4].no_wrap = True
    for s in found:
        by = {p.rung: p.recall for p in s.entry.points}
        shown.add_row(
            s.id[:8],
            s.entry.created[:16].replace("T", " "),
            escape(s.entry.line),
            escape(short_commit(s.entry.commit or "–", 10)),
            s.entry.verdict or "",
            *(charts.points(by.get(rung)) for rung in lengths),
            f"{s.entry.l50_tokens:,.0f}" if s.entry.l50_tokens else "–",
            s.entry.suite_hash[:8],
        )
    terminal.console().print(shown)
    typer.echo(f"{len(found)} entries")


@app.command()
@plain_errors
def show(
    entry: Annotated[str, typer.Argument(help="Id, run (id, folder or commit: its base), or RUN:BUILD.")],
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
) -> None:
    """Print one entry whole, as JSON."""
    stored = open_history(store, rows).find(entry)
    typer.echo(json.dumps({"id": stored.id, "file": stored.name, **asdict(stored.entry)}, indent=1))


def provenance_changes(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Fields of the two builds' provenance that differ."""
    from longrecall.results.panels import flatten

    a, b = dict(flatten(one)), dict(flatten(other))
    return {k: (a.get(k, "–"), b.get(k, "–")) for k in sorted(set(a) | set(b)) if a.get(k) != b.get(k)}


@app.command()
@plain_errors
def diff(
    baseline: Annotated[str, typer.Argument(help="Id, run (id, folder or commit), RUN:BUILD, or a baseline's name.")],
    candidate: Annotated[str, typer.Argument(help="Id, run (id, folder or commit), or RUN:BUILD.")],
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    as_json: AsJson = False,
) -> None:
    """Compare two stored builds, paired by probe, whenever they were measured."""
    from rich.markup import escape

    from longrecall.results import charts, terminal
    from longrecall.results.against import judge_entries, label_of, labels_of, pinned
    from longrecall.results.words import VERDICT_WORDS, interval, p_text, short, signed

    history = open_history(store, rows)
    named = history.current("baseline", baseline)
    a = pinned(history, baseline) if named else history.find(baseline)
    b = history.find(candidate)
    judgement = judge_entries(history, a, b)
    compared = [c for c in judgement.comparisons if c.candidate == label_of(b)]
    verdict = next(v for v in judgement.verdicts if v.patch == label_of(b))
    changed = provenance_changes(a.entry.build, b.entry.build)
    if as_json:
        document = {
            "baseline": {"id": a.id, "run_id": a.entry.run_id, "build_id": a.entry.build_id, "commit": a.entry.commit},
            "candidate": {"id": b.id, "run_id": b.entry.run_id, "build_id": b.entry.build_id, "commit": b.entry.commit},
            "verdict": asdict(verdict),
            "comparisons": [asdict(c) for c in compared],
            "changed": {k: list(v) for k, v in changed.items()},
        }
        typer.echo(json.dumps(document))
        return
    names = [escape(label) for label in labels_of(a, b)]
    shown = terminal.table([], ["length", *names, "points, 95 % interval", "p loss", "lost", "gained"])
    for column in shown.columns[1:3]:
        column.no_wrap, column.overflow = False, "fold"
    for c in compared:
        shown.add_row(
            "pooled" if c.rung is None else f"{c.rung:,}",
            charts.points(c.recall_baseline),
            charts.points(c.recall_candidate),
            f"{signed(c.delta_recall)} {escape(interval(c.ci_low, c.ci_high))}",
            p_text(c.p_loss),
            f"{c.lost:,}",
            f"{c.gained:,}",
        )
    console = terminal.console()
    console.print(shown)
    console.print(f"{VERDICT_WORDS[verdict.verdict]}: {escape(verdict.reason)}")
    for name, (before, after) in changed.items():
        console.print(f"  {escape(name)}: {escape(short(before))} → {escape(short(after))}")


@app.command()
@plain_errors
def verify(store: Store = DEFAULT_STORE, rows: RowsAt = None) -> None:
    """Check every byte of the history; exit code 1 when a file is damaged, missing or out of place."""
    checked, problems = open_history(store, rows).verify()
    for problem in problems:
        typer.echo(f"longrecall: error: {problem.message}", err=True)
    typer.echo(json.dumps({"checked": checked, "problems": len(problems)}))
    if problems:
        raise typer.Exit(1)


@app.command()
@plain_errors
def prune(
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    keep_days: Annotated[int | None, typer.Option(min=1, help="Also remove runs older than this.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Remove; without it only say what would go.")] = False,
) -> None:
    """Remove what killed writers left behind, and old runs; pinned baselines stay."""
    gone = open_history(store, rows).prune(keep_days=keep_days, dry_run=not apply)
    for name in gone:
        typer.echo(f"{'removed' if apply else 'would remove'} {name}", err=True)
    typer.echo(json.dumps({"removed" if apply else "would_remove": len(gone)}))


@app.command()
@plain_errors
def merge(
    source: Annotated[str, typer.Argument(help="Another history: folder, git:REPO#BRANCH or URL.")],
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
) -> None:
    """Take over every file of another history that this one does not have."""
    history, other = open_history(store, rows), open_history(source, None)
    mine = set(history.storage.names("v1"))
    theirs = [name for name in other.storage.names("v1") if name not in mine]
    manifests = [name for name in theirs if name.endswith(".json")]
    parquet = [name for name in theirs if name.endswith(".parquet")]
    if history.rows is not None:
        have = set(history.rows.names("v1"))
        for name, data in other.storage.read_many([name for name in parquet if name not in have]):
            history.rows.write_many({name: data})
    history.storage.write_many(dict(other.storage.read_many(manifests)))
    typer.echo(json.dumps({"manifests": len(manifests), "rows": len(parquet) if history.rows is not None else 0}))


@app.command()
@plain_errors
def baseline(
    name: Annotated[str, typer.Argument(help="Baseline's name.")] = "main",
    entry: Annotated[
        str | None,
        typer.Argument(help="Run (id, folder or commit), RUN:BUILD or entry id to pin; without it the pin is shown."),
    ] = None,
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept in the history.")] = None,
) -> None:
    """Show or pin the run that the gate compares against."""
    from longrecall.results.storage import HistoryError

    history = open_history(store, rows)
    if entry is None:
        log = [s for s in history.settings("baseline")[0] if s.name == name]
        if not log:
            raise HistoryError(f"{store}: no baseline {name!r}; set one with: longrecall history baseline {name} ENTRY")
        typer.echo(json.dumps({"name": name, **log[-1].value, "reason": log[-1].reason, "changes": len(log)}))
        return
    stored = history.find(entry)
    value = {"entry": stored.id, "run_id": stored.entry.run_id, "build_id": stored.entry.build_id}
    value["commit"] = stored.entry.commit or ""
    _decide(history, "baseline", name, value, reason)
    if stored.entry.rows is None:
        warn(f"run {stored.entry.run_id} is {NO_ROWS}; add it again with --rows")
    typer.echo(json.dumps({"name": name, **value}))


@app.command()
@plain_errors
def thresholds(
    file: Annotated[Path | None, typer.Argument(help="TOML file; without it the thresholds are shown.")] = None,
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    reason: Annotated[str | None, typer.Option(help="Why; kept in the history.")] = None,
) -> None:
    """Show or set the thresholds of gate and trend; every edit stays in the history."""
    from longrecall.results.thresholds import current_thresholds, read_thresholds

    history = open_history(store, rows)
    if file is None:
        log = history.settings("thresholds")[0]
        document = {**asdict(current_thresholds(history)), "changes": len(log)}
        document["reason"] = log[-1].reason if log else "defaults"
        typer.echo(json.dumps(document))
        return
    value = asdict(read_thresholds(file))
    _decide(history, "thresholds", "all", value, reason)
    typer.echo(json.dumps(value))


def _decide(
    history: "History", kind: Literal["baseline", "thresholds"], name: str, value: dict[str, Any], reason: str | None
) -> None:
    """Append a decision to the history, with its reason, time and author."""
    from longrecall.results.history import Setting
    from longrecall.results.storage import HistoryError

    if not reason:
        raise HistoryError(f"{kind}: it decides what passes, so say why with --reason")
    created = datetime.now(UTC).isoformat()
    history.set(Setting(kind=kind, name=name, value=value, reason=reason, created=created, author=_author()))


def _author() -> str:
    import os

    return os.environ.get("GITHUB_ACTOR") or os.environ.get("GITLAB_USER_LOGIN") or os.environ.get("USER") or ""


@app.command()
@plain_errors
def query(
    sql: Annotated[str, typer.Argument(help="SQL over the view `probes`: one row per reply of every build.")],
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    suite: Annotated[str | None, typer.Option(help="Suite hash or its beginning.")] = None,
) -> None:
    """Ask the probe rows with DuckDB; prints CSV."""
    import csv
    import sys

    from longrecall.results.probes import answer

    history = open_history(store, rows)
    found = answer(history, read_entries(history, suite), sql)
    for problem in found.left_out:
        warn(problem)
    out = csv.writer(sys.stdout)
    out.writerow(found.columns)
    out.writerows(found.rows)


@app.command()
@plain_errors
def export(
    entry: Annotated[list[str], typer.Argument(help="Ids, run ids (their base), or RUN:BUILD.")],
    store: Store = DEFAULT_STORE,
    rows: RowsAt = None,
    mlflow: Annotated[str | None, typer.Option(help="MLflow tracking URI.")] = None,
    experiment: Annotated[str, typer.Option(help="MLflow experiment.")] = "longrecall",
    wandb: Annotated[str | None, typer.Option(help="Weights & Biases project.")] = None,
) -> None:
    """Copy entries to MLflow or Weights & Biases, recall with the context length as step."""
    from longrecall.results.storage import HistoryError
    from longrecall.results.trackers import to_mlflow, to_wandb

    if not mlflow and not wandb:
        raise HistoryError("say where to: --mlflow URI or --wandb PROJECT")
    history = open_history(store, rows)
    found = [history.find(wanted) for wanted in entry]
    done = {}
    if mlflow:
        done["mlflow"] = to_mlflow(found, uri=mlflow, experiment=experiment)
    if wandb:
        done["wandb"] = to_wandb(found, project=wandb)
    typer.echo(json.dumps(done))
