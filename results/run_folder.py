"""The run folder `results/runs/<run_id>/`: its file names, and how each file is read and written.

Every whole file is written to a temporary name in the same folder, flushed to the disk and renamed, so a reader sees
the file before or after the write and never half of it. The journal replays.jsonl alone grows in place (its writer is
runners/journal.py); its last line may be torn by a crash and is then left out.

Records are the frozen dataclasses of the schema modules; pydantic checks them on the way in, so a wrong value is
reported with the file and the field, and a field that a newer version added is ignored.
"""

import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from longrecall.evals.schema import Score
from longrecall.results.schema import SCHEMA_VERSION, Campaign, Report
from longrecall.runners.schema import SCHEMA_VERSION as REPLAY_VERSION
from longrecall.runners.schema import Replay

CAMPAIGN = "campaign.json"
CONVERSATIONS = "conversations.parquet"
CONCAT = "concat.parquet"
REPLAYS = "replays.jsonl"
SCORES = "scores.parquet"
TIMING = "timing.json"
REPORT_JSON = "report.json"
REPORT_MD = "report.md"
REPORT_HTML = "report.html"
FLIPS = "flips.jsonl"
CHARTS = "charts"

T = TypeVar("T")


class RunFolderError(ValueError):
    """A file of a run folder is missing, damaged or from a newer longrecall; the message names it."""


_adapters: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(record: type[T]) -> TypeAdapter[T]:
    if record not in _adapters:  # building one takes milliseconds
        _adapters[record] = TypeAdapter(record)
    return _adapters[record]


def from_json(record: type[T], data: Any, *, where: str, newest: int) -> T:
    """`data` checked and built as `record`; raises RunFolderError naming `where` and the field at fault."""
    version = data.get("schema_version") if isinstance(data, dict) else None
    if isinstance(version, int) and version > newest:
        raise RunFolderError(
            f"{where}: schema_version {version} is newer than {newest}, the newest this longrecall reads"
        )
    try:
        return _adapter(record).validate_python(data)
    except ValidationError as error:
        raise RunFolderError(f"{where}: {first_problem(error)}") from error


def first_problem(error: ValidationError) -> str:
    """The first fault of a pydantic error, on one line."""
    fault = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in fault["loc"]) or "the record"
    return f"{place}: {fault['msg']} (got {str(fault['input'])[:80]!r})"


def fsync_folder(folder: Path) -> None:
    """Make a rename in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file so that it appears complete or not at all (tmp + fsync + rename)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except OSError as error:
        Path(temporary).unlink(missing_ok=True)
        raise RunFolderError(f"cannot write {path}: {error.strerror or error}") from error
    fsync_folder(path.parent)


def write_json(path: Path, record: object) -> None:
    """Write a record as indented JSON; NaN and infinity are refused, unknown is null."""
    data = asdict(record) if is_dataclass(record) and not isinstance(record, type) else record
    write_bytes(path, (json.dumps(data, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The JSON document in `path`; raises RunFolderError naming the file, line and column at fault."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(f"no such file: {path}") from None
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RunFolderError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RunFolderError(f"{path}: not JSON at line {error.lineno} column {error.colno}: {error.msg}") from error


def write_campaign(run_dir: Path, campaign: Campaign) -> None:
    """Write campaign.json, the first file of a run."""
    write_json(run_dir / CAMPAIGN, campaign)


def load_campaign(run_dir: Path) -> Campaign:
    """What was asked for; raises RunFolderError when `run_dir` is no run folder."""
    path = run_dir / CAMPAIGN
    if not path.is_file():
        from longrecall.evals.stored_run import no_run_folder

        raise RunFolderError(no_run_folder(run_dir))
    campaign = from_json(Campaign, read_json(path), where=str(path), newest=SCHEMA_VERSION)
    fault = _fault(campaign)
    if fault is not None:
        raise RunFolderError(f"{path}: {fault}")
    return campaign


def _fault(campaign: Campaign) -> str | None:
    """What no campaign can have; None for a sound one."""
    n_base = sum(build.role == "base" for build in campaign.builds)
    if n_base != 1:
        return f"builds: exactly one has role base; here {n_base} of {len(campaign.builds)} have"
    if not set(campaign.arms) - {"mirrored"}:
        return f"arms: one besides mirrored is needed, such as warm (got {list(campaign.arms)})"
    for name in ("rungs", "conversation_order"):
        values = getattr(campaign, name)
        if not values or len(set(values)) < len(values):
            return f"{name}: at least one, and none twice, is needed (got {str(list(values))[:80]})"
    for name in ("block_size", "repeats"):
        if getattr(campaign, name) < 1:
            return f"{name}: 1 or more is needed (got {getattr(campaign, name)})"
    for name, value in asdict(campaign.verdict).items():
        most = 1.0 if name == "max_missing_difference" else 0.5
        if not (0 < value < most or (value == 0.0 and name == "max_missing_difference")):
            return f"verdict.{name}: a share between 0 and {most:g} is needed (got {value})"
    return None


def load_timing(run_dir: Path) -> dict[str, float]:
    """Seconds by stage; empty before there are any."""
    path = run_dir / TIMING
    if not path.is_file():
        return {}
    try:
        return _adapter(dict[str, float]).validate_python(read_json(path))
    except ValidationError as error:
        raise RunFolderError(f"{path}: {first_problem(error)}") from error


def load_report(run_dir: Path) -> Report:
    """report.json as it was written."""
    path = run_dir / REPORT_JSON
    return from_json(Report, read_json(path), where=str(path), newest=SCHEMA_VERSION)


def iter_replays(run_dir: Path) -> Iterator[Replay]:
    """Replays in the order they were written.

    A last line without its newline that does not parse is a write cut short and is skipped; any other bad line raises
    RunFolderError with its number. A campaign that has not asked anything yet has no journal and yields nothing.
    """
    path = run_dir / REPLAYS
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error
    adapter = _adapter(Replay)
    with file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield adapter.validate_json(line)
            except ValidationError as error:
                repaired = _without_surrogates(line)
                if repaired is not None:
                    yield adapter.validate_json(repaired)
                elif not line.endswith(b"\n"):
                    return
                else:
                    raise RunFolderError(f"{path}:{number}: {first_problem(error)}") from error


def _without_surrogates(line: bytes) -> bytes | None:
    """The line with lone surrogates replaced by U+FFFD, or None when it has none or is no JSON at all.

    A server that cuts an emoji in half sends "\\ud83d", which JSON allows and no Unicode text can hold.
    """
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False)
    except (UnicodeDecodeError, json.JSONDecodeError):
        return None
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return clean.encode() if clean != text else None


def load_replays(run_dir: Path) -> list[Replay]:
    """All replays of the run; see `iter_replays`."""
    replays = list(iter_replays(run_dir))
    for replay in replays:
        if replay.schema_version > REPLAY_VERSION:
            raise RunFolderError(
                f"{run_dir / REPLAYS}: schema_version {replay.schema_version} is newer than {REPLAY_VERSION},"
                " the newest this longrecall reads"
            )
    return replays


def write_scores(run_dir: Path, scores: Iterable[Score]) -> None:
    """Write scores.parquet."""
    from longrecall.evals.scores_file import write_scores as write

    try:
        write(scores, run_dir / SCORES)
    except OSError as error:
        raise RunFolderError(f"cannot write {run_dir / SCORES}: {error.strerror or error}") from error
