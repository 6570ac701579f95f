"""Probe rows of the history as one DuckDB view, built anew from the files each time: the database is never kept.

probes(run_id, build_id, conversation_id, probe_id, rung, outcome, …, line, commit_id, created, suite, entry)
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from longrecall.results.history import History, Stored
from longrecall.results.storage import HistoryError

if TYPE_CHECKING:
    import duckdb


class Answer(NamedTuple):
    """What a question came to."""

    columns: list[str]
    rows: list[tuple[Any, ...]]
    left_out: list[str]
    """What is wrong with each file of rows that could not be asked."""


def connect(history: History, entries: Sequence[Stored]) -> "duckdb.DuckDBPyConnection":
    """A connection with the views `probes` and `runs`. Raises HistoryError when DuckDB or the rows are not there."""
    try:
        import duckdb
    except ImportError as error:
        raise HistoryError("asking the rows needs DuckDB: pip install duckdb") from error
    import pyarrow as pa

    if history.rows is None:
        raise HistoryError(f"{history.storage.url} holds manifests only; say where the rows are with --rows")
    connection = duckdb.connect()
    connection.execute("set enable_progress_bar = false")  # it would be printed between our rows
    runs = pa.table(
        {
            "entry": [s.id for s in entries],
            "run": [s.entry.run_id for s in entries],
            "build": [s.entry.build_id for s in entries],
            "line": [s.entry.line for s in entries],
            "commit_id": [s.entry.commit for s in entries],
            "created": [s.entry.created for s in entries],
            "suite": [s.entry.suite_hash for s in entries],
        }
    )
    connection.register("runs", runs)
    held = [s for s in entries if s.entry.rows is not None]
    paths = [history.rows.local_path(s.rows_name) for s in held]
    parts: list[str] = []
    if held and all(path is not None for path in paths):
        # Reading thousands of files by name (union_by_name) opens each twice; those with the same columns need not.
        groups: dict[str, list[Any]] = defaultdict(list)
        for stored, path in zip(held, paths, strict=True):
            groups[stored.entry.rows.columns if stored.entry.rows else ""].append(path)
        for files in groups.values():
            listed = ",".join("'" + str(path).replace("'", "''") + "'" for path in files)
            parts.append(f"select * from read_parquet([{listed}])")
    elif held:
        try:
            tables = [history.scores(stored) for stored in held]
        except HistoryError as error:
            raise RowsError(str(error)) from error
        connection.register("remote_rows", pa.concat_tables(tables, promote_options="default"))
        parts.append("select * from remote_rows")
    if not parts:
        raise HistoryError(f"{history.storage.url}: no entry has probe rows")
    union = " union all by name ".join(parts)
    ask(
        connection,
        f"create view probes as select p.*, r.line, r.commit_id, r.created, r.suite, r.entry from ({union}) p"
        " left join runs r on p.run_id = r.run and p.build_id = r.build",
    )
    return connection


class RowsError(HistoryError):
    """A file of probe rows that DuckDB cannot read; the message names it."""


def answer(history: History, entries: Sequence[Stored], sql: str) -> Answer:
    """Ask all rows; when a file of them cannot be read, those that are damaged are left out and named."""
    try:
        asked = ask(connect(history, entries), sql)
        return Answer([column[0] for column in asked.description or ()], _fetched(asked), [])
    except RowsError:
        said = {s.name: history.rows_problem(s) for s in entries if s.entry.rows is not None}
        left_out = [problem for problem in said.values() if problem is not None]
        if not left_out:
            raise
    asked = ask(connect(history, [s for s in entries if said.get(s.name) is None]), sql)
    return Answer([column[0] for column in asked.description or ()], _fetched(asked), left_out)


def _fetched(asked: "duckdb.DuckDBPyConnection") -> list[tuple[Any, ...]]:
    import duckdb

    try:
        rows: list[tuple[Any, ...]] = asked.fetchall()
    except duckdb.Error as error:
        raise RowsError(" ".join(str(error).split())[:600]) from error
    return rows


def ask(connection: "duckdb.DuckDBPyConnection", sql: str) -> "duckdb.DuckDBPyConnection":
    """The answer to a question. Raises HistoryError with what DuckDB says of the SQL or of a file it cannot read."""
    import duckdb

    if not sql.strip():
        raise HistoryError("no SQL was given; ask like: select rung, count(*) from probes group by rung")
    try:
        return connection.execute(sql)
    except (duckdb.IOException, duckdb.InvalidInputException) as error:
        raise RowsError(" ".join(str(error).split())[:600]) from error
    except duckdb.Error as error:
        raise HistoryError(" ".join(str(error).split())[:600]) from error
