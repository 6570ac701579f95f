"""Unified diffs, applied exactly: no fuzz and no offset.

`patch(1)` searches for a place where a hunk nearly fits. A build made that way may differ from its base by something
nobody wrote down, so here every context and removed line must stand at the line the hunk names, byte for byte.
Where the same lines stand elsewhere in the file the error says so: the diff was made against another base and has to
be made again (`git diff`), not guessed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longrecall.kernels.contract.source_tree import SourceTree

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NOT_APPLIED = ("rename ", "copy from", "GIT binary patch", "Binary files", "old mode", "new mode")
_NO_NEWLINE = "\\ No newline at end of file"


def _split(text: str) -> list[str]:
    """Lines with their ends, split at "\n" alone: str.splitlines would also split at form feeds and U+2028."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


class DiffError(ValueError):
    """A diff that is malformed or does not apply; the message names file, hunk, expected and found line."""


@dataclass(frozen=True, kw_only=True)
class Hunk:
    """One `@@` block: `before` must stand at line `start` (1-based) and is replaced by `after`."""

    number: int
    start: int
    before: tuple[str, ...]
    """Lines with their line ends."""
    after: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FileDiff:
    """What a diff does to one file."""

    path: str
    """Relative to the root of the tree, after -p1."""
    creates: bool
    deletes: bool
    hunks: tuple[Hunk, ...]


def _target(field: str, where: str) -> str | None:
    """The path of a `---`/`+++` line after -p1; None for /dev/null."""
    name = field.split("\t")[0].rstrip()
    if name == "/dev/null":
        return None
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts:
        raise DiffError(f"{where}: path {name!r} leaves the tree; paths are like a/kernels/moe/reference.py")
    if len(parts) < 2:
        raise DiffError(f"{where}: path {name!r} has no a/ or b/ in front of it; make the diff with `git diff`")
    return "/".join(parts[1:])


def parse_diff(text: str, name: str) -> tuple[FileDiff, ...]:
    """The files that a unified diff changes; `name` is the diff's own name, for messages.

    Raises:
        DiffError: not a unified diff, or one with renames, modes or binary parts, which are not supported.
    """
    lines = _split(text)
    files: list[FileDiff] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        for word in (
            "rename from",
            "rename to",
            "copy from",
            "GIT binary patch",
            "Binary files",
            "old mode",
            "new mode",
        ):
            if line.startswith(word):
                raise DiffError(
                    f"{name} line {i + 1}: {line.strip()!r}: only plain changes of text files can be applied"
                )
        if not line.startswith("--- "):
            if line.startswith("@@"):
                raise DiffError(f"{name} line {i + 1}: a hunk without the --- and +++ lines of its file")
            i += 1
            continue
        if i + 1 >= len(lines) or not lines[i + 1].startswith("+++ "):
            raise DiffError(f"{name} line {i + 1}: '---' is not followed by '+++'")
        old = _target(line[4:], f"{name} line {i + 1}")
        new = _target(lines[i + 1][4:], f"{name} line {i + 2}")
        if old is None and new is None:
            raise DiffError(f"{name} line {i + 1}: both sides are /dev/null")
        if old is not None and new is not None and old != new:
            raise DiffError(f"{name} line {i + 1}: {old!r} becomes {new!r}: renames cannot be applied")
        path = new if new is not None else old
        assert path is not None
        i += 2
        hunks: list[Hunk] = []
        while i < len(lines) and lines[i].startswith("@@"):
            hunk, i = _parse_hunk(lines, i, len(hunks) + 1, path, name)
            hunks.append(hunk)
        if not hunks:
            raise DiffError(f"{name}: {path}: no hunk")
        files.append(FileDiff(path=path, creates=old is None, deletes=new is None, hunks=tuple(hunks)))
    if not files:
        raise DiffError(f"{name}: holds no change: not a unified diff, or an empty one")
    paths = [file.path for file in files]
    if len(set(paths)) != len(paths):
        raise DiffError(f"{name}: {next(p for p in paths if paths.count(p) > 1)} is changed twice")
    return tuple(files)


def _parse_hunk(lines: list[str], i: int, number: int, path: str, name: str) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[i])
    if not match:
        raise DiffError(f"{name} line {i + 1}: {lines[i].strip()!r} is not a hunk header")
    start, n_before, _, n_after = (1 if group is None else int(group) for group in match.groups())
    header = i + 1
    before: list[str] = []
    after: list[str] = []
    i += 1
    while i < len(lines) and (len(before) < n_before or len(after) < n_after):
        sign, body = lines[i][:1], lines[i][1:]
        if sign == "\\":
            _drop_newline(before, after, lines[i - 1][:1])
        elif sign == " " or lines[i] in ("\n", "\r\n"):  # editors strip the blank of an empty context line
            content = body if sign == " " else lines[i]
            before.append(content)
            after.append(content)
        elif sign == "-":
            before.append(body)
        elif sign == "+":
            after.append(body)
        else:
            break
        i += 1
    if i < len(lines) and lines[i].startswith(_NO_NEWLINE):
        _drop_newline(before, after, lines[i - 1][:1])
        i += 1
    if (len(before), len(after)) != (n_before, n_after):
        raise DiffError(
            f"{name} line {header}: {path} hunk {number} announces {n_before} lines before and {n_after} after,"
            f" and has {len(before)} and {len(after)}: the diff was cut or edited by hand"
        )
    # "-0,0" (a new file) means before line 1.
    return Hunk(number=number, start=start if n_before else start + 1, before=tuple(before), after=tuple(after)), i


def _drop_newline(before: list[str], after: list[str], sign: str) -> None:
    for side in (before,) if sign == "-" else (after,) if sign == "+" else (before, after):
        side[-1] = side[-1].removesuffix("\n")


def apply_to_text(text: str, diff: FileDiff, name: str) -> str:
    """`text` with the hunks of `diff` applied at exactly the lines they name.

    Raises:
        DiffError: a line is not what the hunk expects; names diff, file, hunk, line, expected and found.
    """
    lines = _split(text)
    out: list[str] = []
    done = 0
    for hunk in diff.hunks:
        at = hunk.start - 1
        if at < done:
            raise DiffError(f"{name}: {diff.path} hunk {hunk.number} overlaps the one before it")
        for offset, expected in enumerate(hunk.before):
            found = lines[at + offset] if at + offset < len(lines) else None
            if found != expected:
                raise DiffError(
                    f"{name}: {diff.path} hunk {hunk.number} does not apply at line {at + offset + 1}:"
                    f" expected {expected!r}, found {'the end of the file' if found is None else repr(found)}"
                    f"{_elsewhere(lines, hunk)}"
                )
        out += lines[done:at] + list(hunk.after)
        done = at + len(hunk.before)
        if done > len(lines):
            raise DiffError(
                f"{name}: {diff.path} hunk {hunk.number} begins after the end of the file (line {hunk.start})"
            )
    return "".join(out + lines[done:])


def _elsewhere(lines: list[str], hunk: Hunk) -> str:
    size = len(hunk.before)
    places = [i + 1 for i in range(len(lines) - size + 1) if tuple(lines[i : i + size]) == hunk.before]
    if size < 2 or not places:
        return ""
    return f"; the same {size} lines stand at line {places[0]}: make the diff again against this base"


def apply_diff(tree: Path, text: str, name: str, *, prefix: str = "") -> tuple[str, ...]:
    """Apply a unified diff (-p1) to the files under `tree`; returns the paths changed.

    `prefix` is dropped from paths that begin with it (a repository that keeps the source in python/). All files are
    checked before the first is written. A changed file gets a new inode, so that a hard-linked base stays as it is.
    """
    results: dict[str, str | None] = {}
    for parsed in parse_diff(text, name):
        diff = replace(parsed, path=parsed.path.removeprefix(prefix))
        file = tree / diff.path
        if diff.creates:
            if file.exists():
                raise DiffError(f"{name}: {diff.path} is to be created and exists already")
            current = ""
        else:
            if not file.is_file():
                raise DiffError(f"{name}: {diff.path} is not a file of the base source")
            with file.open(encoding="utf-8", newline="") as stream:
                current = stream.read()
        changed = apply_to_text(current, diff, name)
        if diff.deletes and changed:
            raise DiffError(f"{name}: {diff.path} is to be deleted, and lines of it would be left: {changed[:60]!r}")
        results[diff.path] = None if diff.deletes else changed
    for path, content in results.items():
        file = tree / path
        file.unlink(missing_ok=True)
        if content is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("w", encoding="utf-8", newline="") as stream:
                stream.write(content)
    return tuple(results)


def with_diffs(tree: "SourceTree", paths: Sequence[Path]) -> "SourceTree":
    """A source tree to read with diffs applied in memory; paths in a diff may start at python/sglang or at sglang.

    Raises:
        SourceError: a diff that cannot be read or does not apply.
    """
    from longrecall.kernels.contract.source_tree import SourceError

    for path in paths:
        try:
            changed: dict[str, str] = {}
            for file_diff in parse_diff(path.read_text(encoding="utf-8"), str(path)):
                target = file_diff.path.removeprefix("python/")
                if tree.package == "longrecall":
                    target = f"longrecall/{target}"
                    if not tree.exists(target):
                        continue  # a patch of the reference build may touch files the tracer does not read
                before = tree.text(target) if tree.exists(target) else ""
                changed[target] = apply_to_text(before, file_diff, str(path))
        except OSError as error:
            raise SourceError(f"{path}: {error.strerror}") from None
        except DiffError as error:
            raise SourceError(str(error)) from None
        tree = tree.with_overrides(changed)
    return tree
