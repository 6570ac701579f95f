"""`longrecall bench history`: how fast a large history lists, trends and answers.

    longrecall bench history                       10,000 runs × 1,000 probes in a temporary folder
    longrecall bench history --runs 500 --folder /mnt/shared/bench

Builds the history first (that time is reported apart), then measures each step in a new process, as a user would meet
it: `list_s` manifests read and checked, `trend_s` the same plus series and change points, `query_s` a DuckDB query
over every probe row. The last line on standard output is one JSON document.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

if TYPE_CHECKING:
    import pyarrow as pa

    from longrecall.results.history import Entry

RUNGS = (1024, 4096, 16384, 65536)
LINES = ("main", "release", "nightly", "vllm", "sglang")

STEPS = {
    "list_s": "found, problems = history.entries(); assert not problems; print(len(found))",
    "trend_s": (
        "from longrecall.results.trend import trends\n"
        "from longrecall.results.thresholds import Thresholds\n"
        "found, problems = history.entries(); made = trends(found, Thresholds(), last=10**9)\n"
        "print(sum(len(one.entries) for one in made))"
    ),
    "query_s": (
        "from longrecall.results.probes import connect\n"
        "found, problems = history.entries(); connection = connect(history, found)\n"
        "sql = \"select rung, count(*), avg((outcome = 'ok')::int) from probes group by rung\"\n"
        "rows = connection.execute(sql).fetchall()\n"
        "print(sum(row[1] for row in rows))"
    ),
}
STEP = """
import time
start = time.perf_counter()
from pathlib import Path
from longrecall.results.history import History
from longrecall.results.storage import Folder
history = History(Folder(Path({folder!r})))
{code}
print(time.perf_counter() - start, time.process_time())
"""


def synthetic_rows(rng: random.Random, run_id: str, probes: int) -> "pa.Table":
    """Probe rows of one run: `probes` replies over the rungs, with the columns and spread of real ones."""
    import numpy as np
    import pyarrow as pa

    from longrecall.evals.scores_file import SCORES_SCHEMA

    noise = np.random.default_rng(rng.getrandbits(32))
    index = np.arange(probes)
    conversation = index // (len(RUNGS) * 10)
    outcomes = np.where(noise.random(probes) < 0.9, "ok", "near-miss")
    rung = np.array(RUNGS)[index % len(RUNGS)]
    columns = {
        "schema_version": np.ones(probes, np.int64),
        "run_id": [run_id] * probes,
        "build_id": ["base"] * probes,
        "conversation_id": [f"c{i:05d}" for i in conversation],
        "cluster_id": [f"c{i:05d}" for i in conversation],
        "probe_id": [f"p{i:02d}" for i in index // len(RUNGS) % 10],
        "probe_kind": ["single"] * probes,
        "rung": rung,
        "arm": ["warm"] * probes,
        "repeat": np.zeros(probes, np.int64),
        "outcome": outcomes.tolist(),
        "answer": noise.integers(10_000, 99_999, probes).astype(str).tolist(),
        "gold_logprob": -noise.exponential(1.0, probes),
        "depth_pct": noise.random(probes) * 100,
        "distance_tokens": (noise.random(probes) * rung).astype(np.int64),
        "distance_turns": noise.integers(1, 60, probes),
        "context_tokens": rung,
        "cached_tokens": rung - 24,
        "send_order": noise.permutation(probes),
        "reply_hash": [f"{value:016x}" for value in noise.integers(2**63, size=probes)],
    }
    return pa.table({name: pa.array(columns[name], SCORES_SCHEMA.field(name).type) for name in SCORES_SCHEMA.names})


def synthetic_entry(rng: random.Random, n: int) -> "Entry":
    """Manifest number `n`: five lines in turn, one of which loses four points half-way."""
    from longrecall.results.history import Entry, NoisePoint, RungPoint

    line = LINES[n % len(LINES)]
    drop = 0.04 if line == "main" and n > 5_000 else 0.0
    points, noise = [], []
    for i, rung in enumerate(RUNGS):
        recall = 0.95 - 0.03 * i - drop + rng.gauss(0, 0.006)
        points.append(
            RungPoint(
                rung=rung, recall=recall, ci_low=recall - 0.03, ci_high=recall + 0.02, n_conversations=25, n_probes=250
            )
        )
        noise.append(NoisePoint(rung=rung, delta=rng.gauss(0, 0.008), ci_low=-0.02, ci_high=0.02))
    created = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=20 * n)
    length = 131_072 * 2 ** rng.gauss(0, 0.1)
    return Entry(
        run_id=f"bench-{n:06d}",
        build_id="base",
        role="base",
        line=line,
        suite_hash="be" * 32,
        created=created.isoformat(timespec="seconds"),
        commit=f"{rng.getrandbits(160):040x}",
        engine="synthetic",
        margin=0.1,
        points=tuple(points),
        noise=tuple(noise),
        l50_tokens=length,
        l50_low=length * 0.9,
        l50_high=length * 1.1,
        controls={"aa": True, "positive": True, "negative": True},
        build={
            "source_hash": f"{rng.getrandbits(256):064x}",
            "tree_hash": f"{rng.getrandbits(256):064x}",
            "args": ["--tp", "8", "--kv-cache-dtype", "fp8_e4m3"],
            "packages": {"torch": "2.13.0", "sglang": "0.5.23", "flashinfer": "0.6.1", "transformers": "5.24.0"},
            "hardware": "8 × H200",
        },
    )


def fill(folder: Path, runs: int, probes: int) -> None:
    """Write `runs` runs of `probes` rows. Rows repeat after 100 runs: here their size matters, not their news."""
    import pyarrow as pa

    from longrecall.results.history import encode

    rng = random.Random(7)
    shared = [synthetic_rows(rng, f"shared-{i}", probes) for i in range(min(100, runs))]
    for n in range(runs):
        entry = synthetic_entry(rng, n)
        table = shared[n % len(shared)]
        column = table.schema.get_field_index("run_id")
        table = table.set_column(column, "run_id", pa.array([entry.run_id] * probes, pa.string()))
        stored, manifest, rows = encode(entry, table)
        assert rows is not None
        # no fsync of 20,000 files: how fast a disk is belongs to another question
        for name, data in ((stored.rows_name, rows), (stored.name, manifest)):
            path = folder / name
            if n == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


@contextmanager
def bench_folder(folder: Path | None) -> Iterator[Path]:
    """The given folder, or one that is removed afterwards."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="longrecall-bench-") as made:
        yield Path(made)


class Taken(NamedTuple):
    """One measurement of a step."""

    wall_s: float
    cpu_s: float
    counted: int


def measure(folder: Path, code: str) -> Taken:
    """One step in a new process: wall time with our imports, processor time of the whole process, what it counted."""
    program = STEP.format(folder=str(folder), code=code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment, timeout=600
    )
    count, wall, cpu = done.stdout.split()
    return Taken(float(wall), float(cpu), int(count))


def bench(
    runs: Annotated[int, typer.Option(min=1, help="Runs in the history.")] = 10_000,
    probes: Annotated[int, typer.Option(min=1, help="Probe rows per run.")] = 1_000,
    folder: Annotated[Path | None, typer.Option(help="Where; an existing bench history is used again.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times each step is measured; the median counts.")] = 3,
) -> None:
    """List, trend and query a large run history."""
    with bench_folder(folder) as place:
        start = time.perf_counter()
        if not (place / "v1").is_dir():
            fill(place, runs, probes)
        fill_s = time.perf_counter() - start
        result: dict[str, float | int | str] = {"bench": "history", "runs": runs, "probes": probes}
        for name, code in STEPS.items():
            taken = sorted(measure(place, code) for _ in range(repeats))[repeats // 2]
            result[name] = round(taken.wall_s, 3)
            result[name.replace("_s", "_cpu_s")] = round(taken.cpu_s, 3)
            counted = f"{taken.counted:,} {'rows' if name == 'query_s' else 'entries'}"
            typer.echo(f"{name:8} {taken.wall_s:8.3f} s, processor {taken.cpu_s:.3f} s  ({counted})", err=True)
        n_bytes = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
        manifests = [path.stat().st_size for path in place.rglob("*.json")]
        result["runs"] = len(manifests)
    result |= {
        "fill_s": round(fill_s, 1),
        "total_mib": round(n_bytes / 2**20, 1),
        "manifest_bytes": round(sum(manifests) / len(manifests)),
        "cpus": os.cpu_count() or 0,
    }
    typer.echo(json.dumps(result, separators=(",", ":")))
