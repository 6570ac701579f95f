"""What the analysis reads of a stored run: a few keys of campaign.json, and scores.parquet.

Only reading, and only what judging needs, so that the analysis does not depend on how reports are made.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from longrecall.evals.schema import VerdictConfig
from longrecall.evals.scores_file import ScoresError, read_scores_table
from longrecall.runners.schema import Build


@dataclass(frozen=True, kw_only=True)
class StoredRun:
    """One run folder."""

    path: Path
    run_id: str
    suite_hash: str
    rungs: tuple[int, ...]
    order: tuple[str, ...]
    builds: tuple[Build, ...]
    config: VerdictConfig
    onset_tokens: int | None
    scores: pa.Table


def load_run(path: Path) -> StoredRun:
    """Raises ScoresError naming the file and what is missing in it."""
    campaign = path / "campaign.json"
    try:
        stored: dict[str, Any] = json.loads(campaign.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ScoresError(f"{path} is not a run folder: it has no campaign.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ScoresError(f"{campaign}: not JSON ({error})") from None
    if not (path / "scores.parquet").is_file():
        raise ScoresError(f"{path} has no scores.parquet yet: run `longrecall report {path}` first")
    try:
        return StoredRun(
            path=path,
            run_id=stored["run_id"],
            suite_hash=stored["suite_hash"],
            rungs=tuple(stored["rungs"]),
            order=tuple(stored["conversation_order"]),
            builds=tuple(
                Build(build_id=b["build_id"], patch_ids=tuple(b["patch_ids"]), role=b["role"]) for b in stored["builds"]
            ),
            config=VerdictConfig(**stored["verdict"]),
            onset_tokens=stored.get("onset_tokens"),
            scores=read_scores_table(path / "scores.parquet"),
        )
    except (KeyError, TypeError) as error:
        raise ScoresError(f"{campaign}: {error} is missing or not what a campaign holds") from None


def parse_target(text: str) -> tuple[Path, str | None]:
    """ "RUN" or "RUN:BUILD" as folder and build_id."""
    path = Path(text)
    if path.is_dir() or ":" not in text:
        return path, None
    folder, _, build = text.rpartition(":")
    return Path(folder), build or None
