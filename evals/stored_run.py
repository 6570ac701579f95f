"""What the analysis reads of a stored run: a few keys of campaign.json, and scores.parquet.

Only reading, and only what judging needs, so that the analysis does not depend on how reports are made.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import TypeAdapter, ValidationError

from longrecall.evals.schema import SCHEMA_VERSION, VerdictConfig
from longrecall.evals.scores_file import ScoresError, read_scores_table
from longrecall.runners.schema import Build


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """What is checked by type; a field that a newer version added is ignored."""

    rungs: tuple[int, ...]
    verdict: VerdictConfig


_ADAPTER = TypeAdapter(_Checked)


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


def no_run_folder(path: Path) -> str:
    """What to say of a folder without campaign.json."""
    published = (path / "report.json").is_file()
    return f"{path} is not a run folder: it has no campaign.json" + (
        "; it holds reports only, as published folders do. Give a folder that `longrecall eval` wrote in results/runs"
        if published
        else ""
    )


def load_run(path: Path) -> StoredRun:
    """Raises ScoresError naming the file and what is missing in it."""
    campaign = path / "campaign.json"
    try:
        stored: dict[str, Any] = json.loads(campaign.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ScoresError(no_run_folder(path)) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ScoresError(f"{campaign}: not JSON ({error})") from None
    except OSError as error:
        raise ScoresError(f"{campaign}: cannot be read: {error.strerror}") from None
    version = stored.get("schema_version", 1) if isinstance(stored, dict) else None
    if not isinstance(version, int):
        raise ScoresError(f"{campaign}: not a campaign of longrecall")
    if version > SCHEMA_VERSION:
        raise ScoresError(f"{campaign}: schema_version {version}, this longrecall reads up to {SCHEMA_VERSION}")
    if not (path / "scores.parquet").is_file():
        raise ScoresError(f"{path} has no scores.parquet yet: run `longrecall report {path}` first")
    try:
        checked = _ADAPTER.validate_python(stored)
        return StoredRun(
            path=path,
            run_id=stored["run_id"],
            suite_hash=stored["suite_hash"],
            rungs=checked.rungs,
            order=tuple(stored["conversation_order"]),
            builds=tuple(
                Build(build_id=b["build_id"], patch_ids=tuple(b["patch_ids"]), role=b["role"]) for b in stored["builds"]
            ),
            config=checked.verdict,
            onset_tokens=stored.get("onset_tokens"),
            scores=read_scores_table(path / "scores.parquet"),
        )
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        place = ".".join(map(str, fault["loc"]))
        raise ScoresError(f"{campaign}: {place}: {fault['msg']} (got {str(fault['input'])[:80]!r})") from None
    except (KeyError, TypeError) as error:
        raise ScoresError(f"{campaign}: {error} is missing or not what a campaign holds") from None


def parse_target(text: str) -> tuple[Path, str | None]:
    """ "RUN" or "RUN:BUILD" as folder and build_id."""
    path = Path(text)
    if path.is_dir() or ":" not in text:
        return path, None
    folder, _, build = text.rpartition(":")
    return Path(folder), build or None
