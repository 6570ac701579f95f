"""The journal of a run: what was sent and what came back, append-only, on the disk before the next step.

`replays.jsonl` has one `Replay` a line, written once its answer is whole. `sent.jsonl` has one line for every probe
about to be sent, on the disk before it is sent. So after a crash, at any moment:

- a probe with a line in replays.jsonl is answered and is never sent again;
- a probe in sent.jsonl without an answer was in flight when the run died. It is sent again, because the answer it may
  have got is lost and no other source for it exists; the journal counts such probes and the campaign names them;
- a probe in neither was never sent.

No probe is ever answered twice in the journal. A torn last line (the crash came in the middle of a write) is cut off
when the run goes on. One process writes: a lock on the folder refuses a second.
"""

import asyncio
import fcntl
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from longrecall.runners.schema import Replay

REPLAYS = "replays.jsonl"
SENT = "sent.jsonl"


class JournalError(RuntimeError):
    """The journal cannot be read or written; the message names the file."""


class Key(NamedTuple):
    """What makes a replay the answer to one planned question."""

    build_id: str
    conversation_id: str
    probe_id: str
    rung: int
    arm: str
    repeat: int


def key_of(replay: Replay) -> Key:
    return Key(replay.build_id, replay.conversation_id, replay.probe_id, replay.rung, replay.arm, replay.repeat)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One line of sent.jsonl."""

    key: Key
    send_order: int


def encode_replay(replay: Replay) -> bytes:
    """One line; fields of the response that are unknown are left out."""
    # Not asdict, whose copies of every number would take twice the time of the JSON.
    response = {name: value for name, value in vars(replay.response).items() if value is not None}
    record = {**vars(replay), "response": response}
    return json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"


class AppendFile:
    """A file that grows by whole lines; a write that fails leaves the lines before it and nothing of its own.

    It is the last: whoever still has lines gets the same error. Written to and closed from different threads; closing
    waits for a write that has begun, whose failure would otherwise have no descriptor left to take it back with.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._problem: JournalError | None = None
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise JournalError(f"{path}: cannot be opened: {problem.strerror}") from None
        self._cut_torn_line()

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.ftruncate(self._fd, whole)
            os.fsync(self._fd)

    def append(self, lines: bytes) -> None:
        with self._lock:
            if self._problem is not None:
                raise self._problem
            before = os.fstat(self._fd).st_size
            try:
                rest = memoryview(lines)
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                os.fsync(self._fd)
            except OSError as problem:
                os.ftruncate(self._fd, before)
                self._problem = JournalError(
                    f"{self.path}: cannot be written: {problem.strerror}; what was answered so far is kept, free some"
                    " space and run the same command again to go on"
                )
                raise self._problem from problem

    def lines(self) -> Iterable[tuple[int, bytes]]:
        yield from enumerate(self.path.read_bytes().splitlines(), 1)

    def close(self) -> None:
        with self._lock:
            self._problem = self._problem or JournalError(f"{self.path}: written to after it was closed")
            os.close(self._fd)


class Journal:
    """Opened on a run folder, new or left behind by a crash.

    Attributes:
        folder: the run folder.
        answered: keys with an answer.
        in_flight: keys that an earlier process sent and whose answer it never wrote.
        next_send_order: one past the highest place given out so far.
    """

    def __init__(self, run_dir: Path) -> None:
        self.folder = run_dir
        self._lock_fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock_fd)
            raise JournalError(
                f"{run_dir} is being written by another process; wait for it or give another --run-dir"
            ) from None
        self._replays = AppendFile(run_dir / REPLAYS)
        self._sent = AppendFile(run_dir / SENT)
        self.answered: set[Key] = set()
        self.next_send_order = 0
        self._read_replays()
        sent = self._read_sent()
        self._places = {key: order for key, order in sent.items() if key not in self.answered}
        self.in_flight: tuple[Key, ...] = tuple(self._places)
        # Lines of several tasks share one fsync: the one who holds the lock writes what has gathered.
        self._waiting: dict[AppendFile, list[bytes]] = {self._replays: [], self._sent: []}
        self._asked = {self._replays: 0, self._sent: 0}
        self._done = {self._replays: 0, self._sent: 0}
        self._locks = {self._replays: asyncio.Lock(), self._sent: asyncio.Lock()}

    def _read_replays(self) -> None:
        for number, line in self._replays.lines():
            try:
                record = json.loads(line)
                fields = [record[name] for name in ("build_id", "conversation_id", "probe_id", "rung", "arm", "repeat")]
                order = int(record["send_order"])
                key = Key(*fields)
                hash(key)
            except (ValueError, KeyError, TypeError) as problem:
                raise JournalError(f"{self._replays.path} line {number}: not a replay: {problem!r}") from None
            if key in self.answered:
                raise JournalError(f"{self._replays.path} line {number}: {'/'.join(map(str, key))} is answered twice")
            self.answered.add(key)
            self.next_send_order = max(self.next_send_order, order + 1)

    def _read_sent(self) -> dict[Key, int]:
        found: dict[Key, int] = {}
        for number, line in self._sent.lines():
            try:
                order, *fields = json.loads(line)
                found.setdefault(Key(*fields), order)
            except (ValueError, TypeError) as problem:
                raise JournalError(f"{self._sent.path} line {number}: not a sent record: {problem!r}") from None
            self.next_send_order = max(self.next_send_order, order + 1)
        return found

    async def sending(self, keys: Iterable[Key]) -> list[Sent]:
        """Give each key its place in the send order and put the intent on the disk. Send only after this returns.

        A request of an earlier process that is asked again keeps its place: what is read off the order is then the
        same whether or not a run was broken off.
        """
        records = []
        for key in keys:
            if key in self.answered:
                raise JournalError(f"{'/'.join(map(str, key))} is answered already and must not be sent again")
            place = self._places.get(key, self.next_send_order)
            records.append(Sent(key=key, send_order=place))
            self.next_send_order = max(self.next_send_order, place + 1)
        lines = b"".join(json.dumps([r.send_order, *r.key], separators=(",", ":")).encode() + b"\n" for r in records)
        await self._append(self._sent, lines)
        return records

    async def record(self, replay: Replay) -> None:
        """Put an answer on the disk."""
        key = key_of(replay)
        if key in self.answered:
            raise JournalError(f"{'/'.join(map(str, key))} is answered already")
        self.answered.add(key)
        await self._append(self._replays, encode_replay(replay))

    async def _append(self, file: AppendFile, lines: bytes) -> None:
        self._waiting[file].append(lines)
        self._asked[file] += 1
        ticket = self._asked[file]
        # Shielded: a task cancelled here must not leave the lock while the thread still writes.
        flush = asyncio.ensure_future(self._flush(file, ticket))
        flush.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also when nobody awaits it
        await asyncio.shield(flush)

    async def _flush(self, file: AppendFile, ticket: int) -> None:
        async with self._locks[file]:
            if self._done[file] >= ticket:
                return
            batch, self._waiting[file] = self._waiting[file], []
            upto = self._asked[file]
            await asyncio.to_thread(file.append, b"".join(batch))
            self._done[file] = upto

    def close(self) -> None:
        self._replays.close()
        self._sent.close()
        os.close(self._lock_fd)
