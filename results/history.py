"""Run history: every served build that was ever measured, as immutable content-addressed files.

    v1/suite=<hash12>/<utc>_<commit12>_<build>_<run>_<hash16>.json       manifest: who, when, recall per rung
    v1/suite=<hash12>/<the same stem>.parquet                            probe rows (evals/scores_file.py)
    v1/settings/<utc>_<kind>_<name>_<hash16>.json                        pinned baselines and thresholds, append-only
    transcripts/<run>/replays.jsonl.zst, conversations.parquet           never in git

The last part of a manifest's name is the sha256 of its bytes; the manifest holds the sha256 of its Parquet file, whose
metadata holds the sha256 of the manifest's identity. Any flipped byte is found, two writers never share a file, and
merging two histories is the union of their files. A manifest is written after its rows: without it they do not count,
so a killed writer leaves no half-run. A run stored without rows is completed by a second manifest that differs only in
naming them; the first no longer counts. Trend reads manifests alone; databases are caches made from the rows.

A series is keyed by the suite hash: other prompts are another series. Columns and fields are only ever added.
"""

import json
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from longrecall.evals.schema import VerdictName
from longrecall.needles.collection import no_collection
from longrecall.results.run_folder import CAMPAIGN, first_problem, load_campaign
from longrecall.results.storage import Folder, HistoryError, Storage, sha256

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
ROOT = "v1"
SETTINGS = f"{ROOT}/settings"
IDENTITY_KEY = b"longrecall.identity"
ORPHAN_AGE_S = 24 * 3600
"""Rows without a manifest this old belong to a writer that died; younger ones may still get theirs."""

COMMIT_CHARACTERS = 7
"""A commit may be named by so many of its characters, as git shows it."""


@dataclass(frozen=True, kw_only=True)
class RungPoint:
    """Recall of the build at one context length, over the judged arm."""

    rung: int
    recall: float | None
    ci_low: float | None
    ci_high: float | None
    n_conversations: int
    n_probes: int
    n_missing: int = 0


@dataclass(frozen=True, kw_only=True)
class NoisePoint:
    """A/A difference of the run at one rung: what no change at all looked like that day."""

    rung: int
    delta: float | None
    ci_low: float | None
    ci_high: float | None


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The probe rows behind a manifest."""

    sha256: str
    n_bytes: int
    n_rows: int
    columns: str = ""
    """Hash of the column names and types; files that share it are read together."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One build of one run: a manifest of the history."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    build_id: str
    role: str
    line: str
    """The series it belongs to ("base", a branch, an engine); one point of a line per run."""
    suite_hash: str
    created: str
    """UTC, ISO 8601: time of the measured commit where known, else of the run. Orders a line."""
    commit: str | None
    engine: str
    margin: float
    points: tuple[RungPoint, ...]
    noise: tuple[NoisePoint, ...] = ()
    l50_tokens: float | None = None
    """Context length at which recall has halved; None when that lies beyond the rungs."""
    l50_low: float | None = None
    l50_high: float | None = None
    controls: dict[str, bool] = field(default_factory=dict)
    verdict: VerdictName | None = None
    analysis_version: str = ""
    longrecall_version: str = ""
    build: dict[str, Any] = field(default_factory=dict)
    """Provenance: source, tree and diff hash, arguments, packages, hardware."""
    note: str = ""
    rows: Rows | None = None


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A decision that is part of the history: which run is a baseline, which thresholds hold."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["baseline", "thresholds"]
    name: str
    value: dict[str, Any]
    reason: str
    created: str
    author: str = ""


class Stored(NamedTuple):
    """A manifest with its name in the storage."""

    name: str
    entry: Entry

    @property
    def id(self) -> str:
        """The content hash in the name; what people type, as short as is unique."""
        return self.name.rsplit("_", 1)[1].removesuffix(".json")

    @property
    def ids(self) -> set[str]:
        """Its id, and the one it has or had without its rows: what a baseline pinned then goes by."""
        return {self.id, encode(replace(self.entry, rows=None), None)[0].id}

    @property
    def rows_name(self) -> str:
        return self.name.removesuffix(".json") + ".parquet"


class Problem(NamedTuple):
    """A file that cannot be used; the rest of the history is read all the same."""

    name: str
    message: str


_entries: TypeAdapter[Entry] = TypeAdapter(Entry)
_settings: TypeAdapter[Setting] = TypeAdapter(Setting)


def canonical(record: Mapping[str, Any]) -> bytes:
    """The one byte form of a record: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def safe(text: str, limit: int = 40) -> str:
    """A piece of a file name."""
    return re.sub(r"[^A-Za-z0-9.-]+", "-", text)[:limit].strip("-.") or "x"


def compact_time(created: str) -> str:
    """20261129T140233Z, which sorts as text."""
    return parse_time(created).strftime("%Y%m%dT%H%M%SZ")


def parse_time(text: str) -> datetime:
    """An ISO 8601 time in UTC; a time without a zone is UTC. Raises HistoryError."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError as error:
        raise HistoryError(f"{text!r} is not a time; write it like 2026-11-29T14:02:33+00:00") from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)


def short_commit(commit: str, n: int = 12) -> str:
    """A commit by its first characters, with the "+" of uncommitted changes; any other name whole, a run's id too."""
    return re.sub(rf"^([0-9a-f]{{{n}}})[0-9a-f]+(\+?)$", r"\1\2", commit)


def called(stored: Stored, n: int = 12) -> str:
    """The commit of an entry for people to read; its run where no commit is known."""
    return short_commit(stored.entry.commit, n) if stored.entry.commit else f"run {stored.entry.run_id}"


class History:
    """Reads and writes a history. `rows` holds Parquet and transcripts where the manifests live in git."""

    def __init__(self, storage: Storage, rows: Storage | None = None) -> None:
        self.storage = storage
        self.rows = rows if rows is not None else storage if storage.keeps_rows else None

    # writing

    def add(self, entry: Entry, table: "pa.Table | None") -> Stored:
        """Store one build of a run with its probe rows; the same content again is no change.

        What was stored without rows is completed by the same run with them. Raises HistoryError when the same run and
        build is stored with another content.
        """
        [stored] = self.add_many([(entry, table)])
        return stored

    def add_many(self, new: Sequence[tuple[Entry, "pa.Table | None"]]) -> list[Stored]:
        """As `add`, with one commit where the storage is a git branch."""
        manifests: dict[str, bytes] = {}
        rows: dict[str, bytes] = {}
        done = []
        for entry, table in new:
            stored, data, parquet = encode(entry, table if self.rows is not None else None)
            done.append(stored)
            manifests[stored.name] = data
            if parquet is not None:
                rows[stored.rows_name] = parquet
        complete = self._refuse_changed_runs(done)
        if self.rows is not None and rows:
            self.rows.write_many(rows)
        self.storage.write_many({name: data for name, data in manifests.items() if name not in complete})
        return [complete.get(stored.name, stored) for stored in done]

    def _refuse_changed_runs(self, new: Sequence[Stored]) -> dict[str, Stored]:
        """What is stored with its rows already, by the name it would get without them."""
        complete = {}
        for suite in {stored.name.rsplit("/", 1)[0] for stored in new}:
            taken = defaultdict(set)
            for name in self.storage.names(suite):
                if name.endswith(".json"):
                    taken[_run_part(name)].add(name)
            for stored in new:
                others = taken[_run_part(stored.name)] - {stored.name} if stored.name.startswith(suite) else set()
                for name, data in self.storage.read_many(sorted(others)):
                    try:
                        other = Stored(name, decode(name, data))
                    except HistoryError:
                        other = None
                    if other is None or not _differ_in_rows_alone(stored, other):
                        raise HistoryError(self._changed(stored, name, other))
                    if other.entry.rows is not None:
                        complete[stored.name] = other
        return complete

    def _changed(self, stored: Stored, name: str, other: Stored | None) -> str:
        now, was = (json.loads(canonical(asdict(s.entry))) for s in (stored, other or stored))
        fields = [f for f, value in now.items() if f != "rows" and value != was[f]]
        differing = f" (differing: {', '.join(fields)})" if fields else ""
        return (
            f"{self.storage.url}: run {stored.entry.run_id}, build {stored.entry.build_id} is already"
            f" stored with another content: {name}{differing}. A run is never"
            " changed; give the new one an id of its own"
        )

    def set(self, setting: Setting) -> str:
        """Append a baseline or thresholds; the newest of a kind and name holds."""
        data = canonical(asdict(setting))
        name = (
            f"{SETTINGS}/{compact_time(setting.created)}_{setting.kind}_{safe(setting.name)}_{sha256(data)[:16]}.json"
        )
        self.storage.write_many({name: data})
        return name

    # reading

    def entries(self, suite: str | None = None) -> tuple[list[Stored], list[Problem]]:
        """Every readable manifest, oldest first, and what could not be read.

        suite: a suite hash or the beginning of one.
        """
        found, _, problems = self._read(suite)
        return found, problems

    def _read(self, suite: str | None = None) -> tuple[list[Stored], list[Stored], list[Problem]]:
        """As `entries`, with what was stored without rows and is stored with them since between the two."""
        wanted = [
            name
            for name in self.storage.names(ROOT)
            if name.endswith(".json")
            and name.startswith(f"{ROOT}/suite=")
            and (suite is None or name.startswith(f"{ROOT}/suite={suite[:12]}"))
        ]
        found, problems = [], []
        with no_collection():
            for name, data in self.storage.read_many(wanted):
                try:
                    found.append(Stored(name, decode(name, data)))
                except HistoryError as error:
                    problems.append(Problem(name, str(error)))
        found.sort(key=lambda stored: (stored.entry.created, stored.name))
        by_run: dict[tuple[str, str], Stored] = {}
        bare = []
        for stored in found:
            key = (stored.entry.run_id, stored.entry.build_id)
            first = by_run.setdefault(key, stored)
            if first is stored:
                continue
            if _differ_in_rows_alone(first, stored):
                bare.append(stored if stored.entry.rows is None else first)
                by_run[key] = first if stored.entry.rows is None else stored
            else:
                problems.append(
                    Problem(
                        stored.name,
                        f"{stored.name}: run {key[0]}, build {key[1]} is also {first.name}; one of them is wrong",
                    )
                )
        hidden = {stored.name for stored in bare}
        return [stored for stored in found if stored.name not in hidden], bare, problems

    def settings(self, kind: str) -> tuple[list[Setting], list[Problem]]:
        """All settings of a kind, oldest first."""
        found, problems = [], []
        names = [n for n in self.storage.names(SETTINGS) if n.endswith(".json") and f"_{kind}_" in n]
        for name, data in self.storage.read_many(names):
            try:
                _check_hash(name, data)
                found.append(_settings.validate_json(data))
            except (HistoryError, ValidationError) as error:
                said = first_problem(error) if isinstance(error, ValidationError) else str(error)
                problems.append(Problem(name, f"{name}: {said}"))
        return sorted(found, key=lambda s: s.created), problems

    def current(self, kind: str, name: str) -> Setting | None:
        """The setting that holds now."""
        own = [s for s in self.settings(kind)[0] if s.name == name]
        return own[-1] if own else None

    def find(self, wanted: str) -> Stored:
        """The entry with this id (or its beginning), or RUN:BUILD; RUN is a run's id, its folder, or a commit.

        Without ":BUILD" it is the base.

        Raises:
            HistoryError: there is none, or more than one.
        """
        found, _ = self.entries()
        name, _, build = wanted.partition(":")
        built = [s for s in found if s.entry.build_id == (build or "base")]
        run = load_campaign(Path(name)).run_id if (Path(name) / CAMPAIGN).is_file() else Path(name).name
        matches = [s for s in found if s.id.startswith(wanted)] if re.fullmatch(r"[0-9a-f]{4,16}", wanted) else []
        matches = matches or [s for s in built if s.entry.run_id == run]
        if not matches and len(name) >= COMMIT_CHARACTERS:
            matches = [s for s in built if (s.entry.commit or "").startswith(name)]
        if len(matches) == 1:
            return matches[0]
        if not matches:
            raise HistoryError(
                f"{self.storage.url}: no entry {wanted!r}"
                " (give an entry's id, a run's id, folder or commit, or RUN:BUILD)"
            )
        raise HistoryError(
            f"{self.storage.url}: {wanted!r} means {len(matches)} entries: {', '.join(s.id for s in matches[:8])}"
        )

    def scores(self, stored: Stored) -> "pa.Table":
        """The probe rows of an entry. Raises HistoryError naming the file when it is missing or damaged."""
        import io

        import pyarrow as pa
        import pyarrow.parquet as pq

        if stored.entry.rows is None:
            rows = shlex.quote(self.rows.url) if self.rows is not None else "FOLDER"
            raise HistoryError(
                f"{stored.name}: stored without probe rows, which comparing needs. Where the run's folder is kept:"
                f" {_add_command(stored.entry, self.storage.url)} --rows {rows} completes it; then give the same --rows"
                " here (or LONGRECALL_ROWS)"
            )
        if self.rows is None:
            raise HistoryError(f"{stored.rows_name}: the rows are not in {self.storage.url}; say where with --rows")
        try:
            data = self.rows.read(stored.rows_name)
        except FileNotFoundError as error:
            raise HistoryError(
                f"{self.rows.url}: {stored.rows_name} is not there; the rows of run {stored.entry.run_id} must be kept"
                " where its job wrote them (--rows, LONGRECALL_ROWS)"
            ) from error
        except (OSError, HistoryError) as error:
            raise HistoryError(f"{self.rows.url}: cannot read {stored.rows_name} ({error})") from error
        if sha256(data) != stored.entry.rows.sha256:
            raise HistoryError(f"{stored.rows_name}: damaged, its sha256 is not the one in {stored.name}")
        try:
            return pq.read_table(io.BytesIO(data))
        except pa.ArrowException as error:
            raise HistoryError(f"{stored.rows_name}: not a readable Parquet file ({error})") from error

    # keeping

    def verify(self) -> tuple[int, list[Problem]]:
        """Check every byte: names against contents, rows against manifests, manifests against rows.

        Returns the number of files checked and every problem found.
        """
        names = [n for n in self.storage.names(ROOT) if n.endswith(".json")]
        found, bare, problems = self._read()
        problems += [p for kind in ("baseline", "thresholds") for p in self.settings(kind)[1]]
        known = {stored.name for stored in (*found, *bare)} | {p.name for p in problems}
        problems += [
            Problem(n, f"{n}: not a file of a history") for n in names if n not in known and not n.startswith(SETTINGS)
        ]
        checked = len(names)
        if self.rows is not None:
            owned = {s.rows_name: s for s in found if s.entry.rows is not None}
            present = [n for n in self.rows.names(ROOT) if n.endswith(".parquet")]
            checked += len(present)
            for name, stored in owned.items():
                said = self.rows_problem(stored)
                if said:
                    problems.append(Problem(name, said))
            named = {n.removesuffix(".json") for n in names}
            for name in present:
                if name not in owned and name.removesuffix(".parquet") not in named:
                    problems.append(
                        Problem(name, f"{name}: rows without a manifest (a writer died); prune removes them")
                    )
        return checked, problems

    def rows_problem(self, stored: Stored) -> str | None:
        """What is wrong with the probe rows of an entry, every byte read; None when nothing is."""
        import io

        import pyarrow as pa
        import pyarrow.parquet as pq

        assert stored.entry.rows is not None and self.rows is not None
        try:
            data = self.rows.read(stored.rows_name)
        except OSError:
            return f"{stored.rows_name}: missing, {stored.name} names it"
        if sha256(data) != stored.entry.rows.sha256 or len(data) != stored.entry.rows.n_bytes:
            return f"{stored.rows_name}: damaged, its sha256 is not the one in {stored.name}"
        try:
            metadata = pq.read_metadata(io.BytesIO(data))
        except pa.ArrowException as error:
            return f"{stored.rows_name}: not a readable Parquet file ({error})"
        if (metadata.metadata or {}).get(IDENTITY_KEY) != identity(stored.entry).encode():
            return f"{stored.rows_name}: belongs to another manifest than {stored.name}"
        return None

    def prune(self, *, keep_days: int | None, dry_run: bool) -> list[str]:
        """Remove what no longer counts, and runs older than `keep_days`; baselines stay. Returns the names removed."""
        found, bare, _ = self._read()
        pinned = {s.value.get("entry") for s in self.settings("baseline")[0]}
        gone = [s.name for s in bare]
        gone_rows: list[str] = []
        if keep_days is not None:
            limit = datetime.now(UTC) - timedelta(days=keep_days)
            old = [s for s in found if parse_time(s.entry.created) < limit and pinned.isdisjoint(s.ids)]
            gone += [s.name for s in old]
            gone_rows = [s.rows_name for s in old if s.entry.rows is not None]
        if self.rows is not None:
            manifests = {n.removesuffix(".json") for n in self.storage.names(ROOT) if n.endswith(".json")}
            for name in self.rows.names(ROOT):
                orphan = name.endswith(".parquet") and name.removesuffix(".parquet") not in manifests
                if orphan and self._age_s(name) > ORPHAN_AGE_S:
                    gone_rows.append(name)
        if not dry_run:
            # manifests first: without its manifest a run is gone at once, never half there
            self.storage.delete(gone)
            if self.rows is not None:
                self.rows.delete(gone_rows)
        leftovers: list[str] = []
        for place in {id(s): s for s in (self.storage, self.rows) if isinstance(s, Folder)}.values():
            for path in place.leftovers(ORPHAN_AGE_S):
                leftovers.append(str(path))
                if not dry_run:
                    path.unlink(missing_ok=True)
        return [*gone, *gone_rows, *leftovers]

    def _age_s(self, name: str) -> float:
        path = self.rows.local_path(name) if self.rows is not None else None
        if path is None:  # no clock to trust there: its own time, from its name
            return (
                datetime.now(UTC) - datetime.strptime(_time_part(name), "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
            ).total_seconds()
        return datetime.now().timestamp() - os.stat(path).st_mtime


def _time_part(name: str) -> str:
    return name.rsplit("/", 1)[-1].split("_", 1)[0]


def _run_part(name: str) -> tuple[str, ...]:
    """Build and run of a manifest's name; other commits or times of the same run are the same run."""
    parts = name.rsplit("/", 1)[-1].split("_")
    return tuple(parts[2:4])


def _differ_in_rows_alone(one: Stored, other: Stored) -> bool:
    """Whether one is the other stored without its rows."""
    bare = [s.entry.rows is None for s in (one, other)]
    return bare[0] != bare[1] and identity(one.entry) == identity(other.entry)


def _add_command(entry: Entry, store: str) -> str:
    """The command that stores this run again, the same to the byte."""
    given = {"--line": entry.line if entry.role == "base" else None, "--commit": entry.commit, "--time": entry.created}
    given |= {"--note": entry.note or None, "--store": store}
    options = " ".join(f"{name} {shlex.quote(value)}" for name, value in given.items() if value is not None)
    return f"longrecall history add {shlex.quote(f'results/runs/{entry.run_id}')} {options}"


def identity(entry: Entry) -> str:
    """sha256 of the manifest without its `rows`: what the Parquet file is bound to."""
    record = asdict(entry)
    record.pop("rows")
    return sha256(canonical(record))


def encode(entry: Entry, table: "pa.Table | None") -> tuple[Stored, bytes, bytes | None]:
    """An entry with its name and the bytes of manifest and rows."""
    parquet = None
    record = asdict(entry)
    record["rows"] = None
    if table is not None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        bare = table.replace_schema_metadata(None)
        sink = pa.BufferOutputStream()
        with pq.ParquetWriter(sink, bare.schema, compression="zstd", store_schema=False) as writer:
            writer.write_table(bare)
            writer.add_key_value_metadata({IDENTITY_KEY.decode(): identity(entry)})
        parquet = sink.getvalue().to_pybytes()
        columns = sha256(str([(f.name, str(f.type)) for f in table.schema]).encode())[:12]
        record["rows"] = asdict(
            Rows(sha256=sha256(parquet), n_bytes=len(parquet), n_rows=table.num_rows, columns=columns)
        )
    data = canonical(record)
    stem = "_".join(
        (
            compact_time(entry.created),
            safe((entry.commit or "none")[:12]),
            safe(entry.build_id),
            safe(entry.run_id, 60),
            sha256(data)[:16],
        )
    )
    name = f"{ROOT}/suite={entry.suite_hash[:12]}/{stem}.json"
    return Stored(name, _entries.validate_python(record)), data, parquet


def _check_hash(name: str, data: bytes) -> None:
    if sha256(data)[:16] != name.rsplit("_", 1)[-1].removesuffix(".json"):
        raise HistoryError(f"{name}: damaged or cut short, its sha256 is not the one in its name")


def decode(name: str, data: bytes) -> Entry:
    """A manifest read back. Raises HistoryError naming the file: damaged, newer, or not a manifest."""
    _check_hash(name, data)
    try:
        entry = _entries.validate_json(data)  # without Python objects between: most of the time of a listing
        if entry.schema_version <= SCHEMA_VERSION and b'"schema_version":' in data:
            return entry
    except ValidationError:
        pass  # said below, by what is wrong first
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise HistoryError(f"{name}: not JSON ({error})") from error
    try:
        version = record.get("schema_version")
        if not isinstance(version, int):
            raise HistoryError(f"{name}: schema_version is missing")
        if version > SCHEMA_VERSION:
            raise HistoryError(f"{name}: schema_version {version} is newer than {SCHEMA_VERSION}; upgrade longrecall")
        return _entries.validate_python(record)
    except ValidationError as error:
        raise HistoryError(f"{name}: {first_problem(error)}") from error
    except AttributeError:
        raise HistoryError(f"{name}: not a manifest, which is a JSON object") from None


def clock_warning(entry: Entry, others: Iterable[Stored], now: datetime) -> str | None:
    """What to say when a run's time cannot be right: in the future, or before the line's newest point."""
    created = parse_time(entry.created)
    if created > now + timedelta(minutes=5):
        return f"{entry.run_id}: its time {entry.created} lies in the future; is this machine's clock right?"
    newest = max((s for s in others if s.entry.line == entry.line), key=lambda s: s.entry.created, default=None)
    if newest is not None and created < parse_time(newest.entry.created):
        return (
            f"{entry.run_id}: its time {entry.created} is before {newest.entry.created} of run {newest.entry.run_id},"
            f" the newest of line {entry.line!r}; it takes its place in time order (--time sets another)"
        )
    return None
