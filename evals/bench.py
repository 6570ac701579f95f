"""How long verdicts take on a large campaign.

longrecall bench verdict
longrecall bench verdict --builds 12 --rungs 8 --conversations 200 --probes 10
"""

import json
import sys
import time
from typing import Annotated

import typer


def bench(
    builds: Annotated[int, typer.Option(min=4, help="Builds, base, A/A and controls included.")] = 12,
    rungs: Annotated[int, typer.Option(min=1)] = 8,
    conversations: Annotated[int, typer.Option(min=2)] = 200,
    probes: Annotated[int, typer.Option(min=1)] = 10,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs.")] = 5,
) -> None:
    """Verdicts on a large campaign; the last line is one JSON document with wall_s (median of the timed runs)."""
    import tempfile
    from pathlib import Path

    import numpy as np

    from longrecall.evals.scores_file import read_scores_table, write_scores
    from longrecall.evals.simulate import QUIET, draw_builds, scores_of
    from longrecall.evals.verdict import ANALYSIS_VERSION, judge
    from longrecall.runners.schema import Build

    names = ["base", "base-again", "positive", "noop", *(f"patch-{i}" for i in range(builds - 4))]
    roles = {"base": "base", "base-again": "aa", "positive": "positive-control", "noop": "negative-control"}
    made = [Build(build_id=n, patch_ids=(), role=roles.get(n, "suspect")) for n in names]  # type: ignore[arg-type]
    lengths = [1024 * 2**r for r in range(rungs)]
    rng = np.random.default_rng(0)
    recall = {"positive": 0.5, "patch-0": 0.85}
    right = np.stack(
        [
            draw_builds(
                rng,
                reps=1,
                conversations=conversations,
                probes=probes,
                base_recall=0.95 - 0.05 * r,
                recalls=[recall.get(n, 0.95) - 0.05 * r for n in names],
                icc=0.3,
                engine=QUIET,
            )[0]
            for r in range(rungs)
        ],
        axis=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scores.parquet"
        write_scores(scores_of(right, builds=names, rungs=lengths), path)
        seconds, judge_seconds, cpu_seconds = [], [], []
        for _ in range(repeats):
            start, cpu_start = time.perf_counter(), time.process_time()
            table = read_scores_table(path)
            read = time.perf_counter()
            judgement = judge(table, made, rungs=lengths)
            seconds.append(time.perf_counter() - start)
            judge_seconds.append(time.perf_counter() - read)
            cpu_seconds.append(time.process_time() - cpu_start)
    verdicts: dict[str, int] = {}
    for verdict in judgement.verdicts:
        verdicts[verdict.verdict] = verdicts.get(verdict.verdict, 0) + 1
    print(f"{right.size} scores: {', '.join(f'{n} {name}' for name, n in sorted(verdicts.items()))}", file=sys.stderr)
    print(
        json.dumps(
            {
                "bench": "verdict",
                "wall_s": round(sorted(seconds)[len(seconds) // 2], 4),
                "wall_s_min": round(min(seconds), 4),
                "judge_s": round(sorted(judge_seconds)[len(judge_seconds) // 2], 4),
                "cpu_s": round(sorted(cpu_seconds)[len(cpu_seconds) // 2], 4),
                "builds": builds,
                "rungs": rungs,
                "conversations": conversations,
                "probes": probes,
                "scores": int(right.size),
                "analysis_version": ANALYSIS_VERSION,
            },
            separators=(",", ":"),
        )
    )
