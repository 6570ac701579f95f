"""Where the run history lives: a folder, a git branch, or object storage; immutable files, any number of writers.

    open_storage("history")                         a folder, local or on a shared disk
    open_storage("git:.#recall-history")            a branch of a repository, never checked out
    open_storage("s3://bucket/recall")              anything that fsspec speaks

A file's name carries the hash of its content (results/history.py), so two writers that choose one name wrote one
thing, merging two histories is the union of their files, and nothing is ever locked or overwritten.
"""

import contextlib
import hashlib
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

WRITE_TRIES = 60
"""Attempts to move a git branch that other writers move too; 16 writers at once need about 16."""


class HistoryError(ValueError):
    """The history cannot be read or written there; the message names the place."""


class Storage(Protocol):
    """Immutable named files. Names are relative, with forward slashes."""

    url: str
    keeps_rows: bool
    """False for git: Parquet and transcripts are refused there, because a branch never forgets its size."""

    def exists(self) -> bool:
        """Whether anything was ever made there, if only an empty folder."""

    def names(self, prefix: str = "") -> list[str]:
        """Sorted names of the complete files below `prefix` (a folder)."""

    def read(self, name: str) -> bytes:
        """Raises FileNotFoundError."""

    def read_many(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        """The files in the order asked for; one that is gone meanwhile is skipped."""

    def write_many(self, files: Mapping[str, bytes]) -> None:
        """Add files in this order, each complete or not at all. A file that is there already is left as it is."""

    def delete(self, names: list[str]) -> None:
        """Remove files; one that is not there is no error."""

    def local_path(self, name: str) -> str | None:
        """A path that other programs can open, where there is one."""


def open_storage(url: str) -> Storage:
    """The storage behind a folder path, "git:REPOSITORY#BRANCH" or an fsspec URL."""
    if url.startswith("git:"):
        repository, _, branch = url.removeprefix("git:").partition("#")
        if not branch:
            raise HistoryError(
                f"{url!r} names no branch: write git:REPOSITORY#BRANCH, for example git:.#recall-history"
            )
        return GitBranch(Path(repository or "."), branch)
    if url.startswith("file://"):
        return Folder(Path(url.removeprefix("file://")))
    if "://" in url:
        return Remote(url)
    return Folder(Path(url))


class Folder:
    """A folder. Files appear by fsync and link, so a reader never meets half of one."""

    keeps_rows = True

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def exists(self) -> bool:
        return self.root.is_dir()

    def names(self, prefix: str = "") -> list[str]:
        start = self.root / prefix
        found: list[str] = []
        waiting = [start]
        while waiting:
            try:
                with os.scandir(waiting.pop()) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(Path(entry.path))
                        elif not entry.name.startswith("."):
                            found.append(entry.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise HistoryError(f"cannot read the history {self.root}: {error.strerror}") from error
        cut = len(str(self.root)) + 1 if str(self.root) != "." else 0
        return sorted(name[cut:].replace(os.sep, "/") for name in found)

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def read_many(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        root = str(self.root)
        for name in names:
            try:
                with open(f"{root}/{name}", "rb", buffering=0) as file:  # 10,000 small files: no buffers, no Path
                    data = file.readall()
            except FileNotFoundError:
                continue
            yield name, data

    def write_many(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            self._write(self.root / name, data)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
        except OSError as error:
            raise HistoryError(f"cannot write to the history {self.root}: {error.strerror} ({path.parent})") from error
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o444)  # immutable: an editor at least has to ask
            os.replace(temporary, path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise HistoryError(f"cannot write {path}: {error.strerror}") from error
        finally:
            Path(temporary).unlink(missing_ok=True)

    def delete(self, names: list[str]) -> None:
        for name in names:
            (self.root / name).unlink(missing_ok=True)

    def leftovers(self, older_than_s: float) -> list[Path]:
        """Temporary files of writers that were killed, older than `older_than_s` seconds."""
        limit = time.time() - older_than_s
        return sorted(p for p in self.root.rglob(".*.tmp") if p.stat().st_mtime < limit)

    def local_path(self, name: str) -> str | None:
        return str(self.root / name)


class Remote:
    """Object storage and other remote file systems through fsspec."""

    keeps_rows = True
    _WHOLE_OBJECTS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "r2", "memory", "hf"})
    """An object appears there when its upload is complete; elsewhere a temporary name is moved into place."""

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise HistoryError(f"{url}: reading it needs fsspec: pip install fsspec") from error
        self.url = url
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise HistoryError(f"{url}: {error}") from error
        protocol = self._fs.protocol if isinstance(self._fs.protocol, str) else self._fs.protocol[0]
        self._whole = protocol in self._WHOLE_OBJECTS

    def _at(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def exists(self) -> bool:
        return bool(self._fs.exists(self._root))

    def names(self, prefix: str = "") -> list[str]:
        start = self._at(prefix)
        try:
            found = self._fs.find(start)
        except FileNotFoundError:
            return []
        cut = len(self._root.rstrip("/")) + 1
        return sorted(n[cut:] for n in found if not n.rsplit("/", 1)[-1].startswith("."))

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._at(name)))

    def read_many(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        found: dict[str, Any] = self._fs.cat([self._at(n) for n in names], on_error="omit") if names else {}
        for name in names:
            if self._at(name) in found:
                yield name, bytes(found[self._at(name)])

    def write_many(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            target = self._at(name)
            self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
            if self._whole:
                self._fs.pipe_file(target, data)
            else:
                folder, leaf = target.rsplit("/", 1)
                temporary = f"{folder}/.{leaf}.{os.getpid()}.tmp"
                self._fs.pipe_file(temporary, data)
                self._fs.mv(temporary, target)

    def delete(self, names: list[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(self._at(name))

    def local_path(self, name: str) -> str | None:
        return None


class GitBranch:
    """A branch that holds manifests only. Written through the object database: no checkout, no index of yours touched.

    The branch moves by compare-and-swap, so writers in one repository lose nothing; `sync` merges with a remote as the
    union of both trees, which cannot conflict.
    """

    keeps_rows = False

    def __init__(self, repository: Path, branch: str) -> None:
        self.repository = repository
        self.branch = branch
        self.url = f"git:{repository}#{branch}"
        self._ref = f"refs/heads/{branch}"
        try:
            self._git("rev-parse", "--git-dir")
        except HistoryError as error:
            raise HistoryError(f"{self.url}: {repository} is not a git repository") from error

    def _git(self, *arguments: str, data: bytes | None = None, index: str | None = None) -> bytes:
        environment = dict(os.environ)
        if index:
            environment["GIT_INDEX_FILE"] = index
        for role in ("AUTHOR", "COMMITTER"):  # a CI machine has no identity; a person's own is used where set
            if arguments[0] == "commit-tree" and not self._has_identity():
                environment.setdefault(f"GIT_{role}_NAME", "longrecall")
                environment.setdefault(f"GIT_{role}_EMAIL", "longrecall@localhost")
        command = ["git", "-C", str(self.repository), *arguments]
        try:
            done = subprocess.run(command, input=data, capture_output=True, env=environment, check=False, timeout=300)
        except FileNotFoundError as error:
            raise HistoryError(f"{self.url}: git is not installed") from error
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip().splitlines()
            raise HistoryError(f"{self.url}: git {arguments[0]} failed: {said[-1] if said else done.returncode}")
        return done.stdout

    def _has_identity(self) -> bool:
        command = ["git", "-C", str(self.repository), "config", "user.email"]
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0

    def head(self) -> str | None:
        """The branch's commit, None before the first write."""
        found = self._git("for-each-ref", "--format=%(objectname)", self._ref).decode().strip()
        return found or None

    def exists(self) -> bool:
        return self.head() is not None

    def names(self, prefix: str = "") -> list[str]:
        head = self.head()
        if head is None:
            return []
        listed = self._git("ls-tree", "-r", "-z", "--name-only", head, "--", *([prefix] if prefix else []))
        return sorted(name for name in listed.decode().split("\0") if name)

    def read(self, name: str) -> bytes:
        found = dict(self.read_many([name]))
        if name not in found:
            raise FileNotFoundError(name)
        return found[name]

    def read_many(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        head = self.head()
        if head is None or not names:
            return
        asked = "".join(f"{head}:{name}\n" for name in names).encode()
        answer = self._git("cat-file", "--batch", data=asked)
        at = 0
        for name in names:
            line, at = answer[at : answer.index(b"\n", at)], answer.index(b"\n", at) + 1
            if line.endswith(b" missing"):
                continue
            size = int(line.rsplit(b" ", 1)[1])
            yield name, answer[at : at + size]
            at += size + 1

    def write_many(self, files: Mapping[str, bytes]) -> None:
        refused = [name for name in files if not name.endswith(".json")]
        if refused:
            raise HistoryError(f"{self.url}: {refused[0]} does not belong in git: give a folder or bucket with --rows")
        blobs = {
            name: self._git("hash-object", "-w", "--stdin", data=data).decode().strip() for name, data in files.items()
        }
        self._commit(blobs, (), f"Add {len(blobs)} file{'s' * (len(blobs) > 1)} to the run history")

    def delete(self, names: list[str]) -> None:
        if names:
            self._commit({}, names, f"Prune {len(names)} file{'s' * (len(names) > 1)} from the run history")

    def _commit(self, blobs: Mapping[str, str], gone: tuple[str, ...] | list[str], message: str) -> None:
        pause = random.Random(os.getpid())
        for _ in range(WRITE_TRIES):
            head = self.head()
            new = self._tree_commit(head, [head] if head else [], blobs, gone, message)
            if new == head:
                return
            try:
                self._git("update-ref", self._ref, new, head or "0" * 40)
                return
            except HistoryError:
                time.sleep(pause.uniform(0.01, 0.2))  # another writer was faster; take its commit and go on
        raise HistoryError(f"{self.url}: the branch kept moving, {WRITE_TRIES} attempts to write failed")

    def _tree_commit(
        self,
        base: str | None,
        parents: list[str],
        blobs: Mapping[str, str],
        gone: tuple[str, ...] | list[str],
        message: str,
    ) -> str:
        """A commit of `base`'s tree with blobs added and names gone; `base` itself when that changes nothing."""
        with tempfile.TemporaryDirectory() as folder:
            index = os.path.join(folder, "index")
            if base:
                self._git("read-tree", base, index=index)
            lines = [f"100644 {blob}\t{name}\n" for name, blob in blobs.items()]
            lines += [f"0 {'0' * 40}\t{name}\n" for name in gone]
            self._git("update-index", "--add", "--index-info", data="".join(lines).encode(), index=index)
            tree = self._git("write-tree", index=index).decode().strip()
        if base and len(parents) == 1 and self._git("rev-parse", f"{base}^{{tree}}").decode().strip() == tree:
            return base
        arguments = [part for parent in parents for part in ("-p", parent)]
        return self._git("commit-tree", tree, *arguments, "-m", message).decode().strip()

    def sync(self, remote: str = "origin") -> None:
        """Fetch the remote branch, unite both histories, push; again when another job pushed in between."""
        pause = random.Random(os.getpid())
        for _ in range(WRITE_TRIES):
            self._unite(remote)
            head = self.head()
            if head is None:
                return
            try:
                self._git("push", "--quiet", remote, f"{head}:{self._ref}")
                return
            except HistoryError as error:
                if "rejected" not in str(error) and "failed to push" not in str(error):
                    raise
                time.sleep(pause.uniform(0.05, 0.5))
        raise HistoryError(f"{self.url}: {remote} kept moving, {WRITE_TRIES} attempts to push failed")

    def _unite(self, remote: str) -> None:
        listed = self._git("ls-remote", remote, self._ref).decode().split()
        if not listed:
            return
        self._git("fetch", "--quiet", remote, self._ref)
        theirs = listed[0]
        for _ in range(WRITE_TRIES):
            ours = self.head()
            if ours == theirs:
                return
            if ours is None:
                new = theirs
            else:
                base = self._git("merge-base", ours, theirs).decode().strip() if self._related(ours, theirs) else None
                if base == theirs:
                    return
                if base == ours:
                    new = theirs
                else:
                    blobs = self._blobs(ours)
                    gone = [name for name in self._blobs(base) if name not in blobs] if base else []
                    new = self._tree_commit(theirs, [ours, theirs], blobs, gone, "Unite two run histories")
            try:
                self._git("update-ref", self._ref, new, ours or "0" * 40)
                return
            except HistoryError:
                continue

    def _related(self, one: str, other: str) -> bool:
        command = ["git", "-C", str(self.repository), "merge-base", one, other]
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0

    def _blobs(self, commit: str) -> dict[str, str]:
        listed = self._git("ls-tree", "-r", "-z", commit).decode().split("\0")
        return {name: meta.split()[2] for line in listed if line for meta, name in [line.split("\t", 1)]}

    def local_path(self, name: str) -> str | None:
        return None


def sha256(data: bytes) -> str:
    """Hex digest."""
    return hashlib.sha256(data).hexdigest()
