"""History entries as runs of MLflow or Weights & Biases: thin, one way, for teams that look there.

Recall is logged with the context length as step, so their own line charts show recall against length. Both packages
are the caller's to install; nothing of the history depends on them.
"""

from collections.abc import Sequence
from typing import Any

from longrecall.results.history import Stored
from longrecall.results.storage import HistoryError


def summary_of(stored: Stored) -> dict[str, Any]:
    """What identifies an entry, as flat text values."""
    entry = stored.entry
    return {
        "entry": stored.id,
        "run_id": entry.run_id,
        "build_id": entry.build_id,
        "line": entry.line,
        "commit": entry.commit or "",
        "suite_hash": entry.suite_hash,
        "engine": entry.engine,
        "created": entry.created,
        "verdict": entry.verdict or "",
    }


def to_mlflow(entries: Sequence[Stored], *, uri: str, experiment: str) -> int:
    """One MLflow run per entry; returns how many. Raises HistoryError when mlflow is not installed."""
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise HistoryError("exporting to MLflow needs it: pip install mlflow-skinny") from error
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    place = found.experiment_id if found else client.create_experiment(experiment)
    for stored in entries:
        tags = {f"longrecall.{name}": value for name, value in summary_of(stored).items()}
        run = client.create_run(place, run_name=f"{stored.entry.run_id} {stored.entry.build_id}", tags=tags)
        for p in stored.entry.points:
            if p.recall is not None:
                client.log_metric(run.info.run_id, "recall", p.recall, step=p.rung)
        if stored.entry.l50_tokens is not None:
            client.log_metric(run.info.run_id, "l50_tokens", stored.entry.l50_tokens)
        client.set_terminated(run.info.run_id)
    return len(entries)


def to_wandb(entries: Sequence[Stored], *, project: str) -> int:
    """One W&B run per entry; returns how many. WANDB_MODE=offline writes them to disk."""
    try:
        import wandb
    except ImportError as error:
        raise HistoryError("exporting to Weights & Biases needs it: pip install wandb") from error
    for stored in entries:
        name = f"{stored.entry.run_id} {stored.entry.build_id}"
        with wandb.init(project=project, name=name, id=stored.id, config=summary_of(stored), reinit=True) as run:
            for p in sorted(stored.entry.points, key=lambda p: p.rung):
                if p.recall is not None:
                    run.log({"recall": p.recall, "context_tokens": p.rung}, step=p.rung)
            if stored.entry.l50_tokens is not None:
                run.summary["l50_tokens"] = stored.entry.l50_tokens
    return len(entries)
