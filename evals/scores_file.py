"""scores.parquet: one row per scored replay, one column per field of `Score`.

Written whole (temporary file, fsync, rename). Reading as a table is the fast way for the verdict engine; reading as
records is for reports. Columns may be added by later versions; a missing column that has a default reads as it.
"""

import os
from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from longrecall.evals.schema import SCHEMA_VERSION, Score


class ScoresError(ValueError):
    """Scores that cannot be judged as they stand: the message names the row, the file and what would be right."""


_TYPES: dict[str, pa.DataType] = {
    "schema_version": pa.int64(),
    "run_id": pa.string(),
    "build_id": pa.string(),
    "conversation_id": pa.string(),
    "cluster_id": pa.string(),
    "probe_id": pa.string(),
    "probe_kind": pa.string(),
    "rung": pa.int64(),
    "arm": pa.string(),
    "repeat": pa.int64(),
    "outcome": pa.string(),
    "answer": pa.string(),
    "gold_logprob": pa.float64(),
    "depth_pct": pa.float64(),
    "distance_tokens": pa.int64(),
    "distance_turns": pa.int64(),
    "context_tokens": pa.int64(),
    "cached_tokens": pa.int64(),
    "send_order": pa.int64(),
    "reply_hash": pa.string(),
}
SCORES_SCHEMA = pa.schema(list(_TYPES.items()))


def scores_table(scores: Iterable[Score]) -> pa.Table:
    """The records as columns, in their order."""
    rows = list(scores)
    return pa.table({name: pa.array([getattr(s, name) for s in rows], type=t) for name, t in _TYPES.items()})


def write_scores(scores: Iterable[Score] | pa.Table, path: Path) -> None:
    """Write the file whole or not at all."""
    table = scores if isinstance(scores, pa.Table) else scores_table(scores)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            pq.write_table(table, file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_scores_table(path: Path) -> pa.Table:
    """The file as columns of the known types. Raises ScoresError naming the file when it is not a scores file."""
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise ScoresError(f"{path}: no such scores file") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ScoresError(f"{path}: not a readable Parquet file ({error})") from None
    defaults = {f.name: f.default for f in fields(Score) if f.default is not MISSING}
    columns = {}
    for name, type_ in _TYPES.items():
        if name in table.column_names:
            try:
                columns[name] = table[name].cast(type_)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise ScoresError(f"{path}: column {name} is not {type_} ({error})") from None
        elif name in defaults:
            columns[name] = pa.array([defaults[name]] * table.num_rows, type=type_)
        else:
            raise ScoresError(f"{path}: column {name} is missing; is this a scores file of longrecall?")
    versions = columns["schema_version"].unique().to_pylist() if table.num_rows else []
    if any(v is None or v > SCHEMA_VERSION for v in versions):
        raise ScoresError(f"{path}: schema_version {versions}, this longrecall reads up to {SCHEMA_VERSION}")
    return pa.table(columns)


def read_scores(path: Path) -> list[Score]:
    """The file as records."""
    rows: list[dict[str, Any]] = read_scores_table(path).to_pylist()
    return [Score(**row) for row in rows]
