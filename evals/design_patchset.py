"""A design as a patchset: every combination of patches becomes one patch that `longrecall eval` serves.

Diffs are made against the same base, so two of them are joined hunk by hunk on that base; hunks that change the same
or touching lines, one environment variable set to two values, or one flag given twice are a conflict, found here and
named before any server starts.
"""

import difflib
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from longrecall.evals.designs import Combination, Design, DesignError, combinations_of
from longrecall.needles.whole_file import write_text
from longrecall.runners.diffs import DiffError, FileDiff, apply_to_text, parse_diff
from longrecall.runners.patchset import read_diffs
from longrecall.runners.schema import Patch, PatchSet


class _Change(NamedTuple):
    """Lines [start, end) of the base file (0-based) become `after`."""

    start: int
    end: int
    after: tuple[str, ...]
    patch: str


def conflicts_of(patchset: PatchSet, patches: Sequence[Patch]) -> dict[tuple[str, str], str]:
    """Pairs of patches that cannot be served together, each with the reason."""
    changes = {p.patch_id: _changes(patchset, p) for p in patches}
    found = {}
    for a, b in itertools.combinations(patches, 2):
        reason = _text_conflict(changes[a.patch_id], changes[b.patch_id]) or _setting_conflict(a, b)
        if reason is not None:
            found[a.patch_id, b.patch_id] = reason
    return found


def _changes(patchset: PatchSet, patch: Patch) -> dict[str, list[_Change]]:
    """Per file what the patch's diffs change, without the context around it."""
    made: dict[str, list[_Change]] = {}
    for name, text in read_diffs(patchset, patch):
        for file in parse_diff(text, name):
            if file.path in made:
                raise DesignError(f"patch {patch.patch_id} changes {file.path} in two diffs: join them into one")
            if file.deletes:
                raise DesignError(f"patch {patch.patch_id} deletes {file.path}: it cannot be joined with others")
            made[file.path] = _hunks(file, patch.patch_id)
    return made


def _hunks(file: FileDiff, patch: str) -> list[_Change]:
    made = []
    for hunk in file.hunks:
        matcher = difflib.SequenceMatcher(None, hunk.before, hunk.after, autojunk=False)
        for tag, i1, i2, j1, j2 in matcher.get_opcodes():
            if tag != "equal":
                at = max(hunk.start - 1, 0)  # a created file has its hunk at line 0
                made.append(_Change(at + i1, at + i2, hunk.after[j1:j2], patch))
    return made


def _text_conflict(a: dict[str, list[_Change]], b: dict[str, list[_Change]]) -> str | None:
    for path in sorted(a.keys() & b.keys()):
        for x, y in itertools.product(a[path], b[path]):
            if (x.start, x.end, x.after) == (y.start, y.end, y.after):
                continue  # both make the same change
            if x.start <= y.end and y.start <= x.end:
                return f"both change {path} at line {max(x.start, y.start) + 1}"
    return None


def _setting_conflict(a: Patch, b: Patch) -> str | None:
    if a.endpoint or b.endpoint:
        return "servers that already run cannot be combined"
    for name in sorted(a.env.keys() & b.env.keys()):
        if a.env[name] != b.env[name]:
            return f"both set {name}"
    flags = {arg for arg in a.args if arg.startswith("-")} & {arg for arg in b.args if arg.startswith("-")}
    if flags and a.args != b.args:
        return f"both give {min(flags)}"
    return None


def with_suspects(patchset: PatchSet, only: Sequence[str]) -> PatchSet:
    """The patchset with these patches as its suspects, controls among them too; its own suspects when none is named.

    Where the known-bad patch becomes a suspect and no other is left, it is served once more as the control that it was:
    without one no verdict would count. Raises DesignError naming an unknown patch.
    """
    if not only:
        return patchset
    known = [p.patch_id for p in patchset.patches]
    for name in only:
        if name not in known:
            raise DesignError(f"--only {name}: {patchset.path} has {', '.join(known)}")
    kept = [replace(p, role="suspect") if p.patch_id in only else p for p in patchset.patches]
    kept = [p for p in kept if p.patch_id in only or p.role != "suspect"]
    known_bad = [p for p in patchset.patches if p.role == "positive-control"]
    if known_bad and not any(p.role == "positive-control" for p in kept):
        kept.append(replace(known_bad[0], patch_id=f"{known_bad[0].patch_id}-control"))
    return replace(patchset, patches=tuple(kept))


def write_design(patchset: PatchSet, design: Design, path: Path, *, root: Path) -> tuple[Combination, ...]:
    """Write the patchset of a design (and its joined diffs beside it); controls go along as they are.

    root: the folder that the diffs' paths are relative to. Raises DesignError naming a pair that conflicts.
    """
    if path.is_dir():
        raise DesignError(f"cannot write {path}: it is a folder; give a file's name, such as {path / 'design.toml'}")
    suspects = [p for p in patchset.patches if p.role == "suspect"]
    by_id = {p.patch_id: p for p in suspects}
    pairs = conflicts_of(patchset, suspects)
    try:
        combos = combinations_of(design, [p.patch_id for p in suspects], pairs)
    except DesignError as error:
        for pair, reason in pairs.items():
            if f"patches {pair[0]} and {pair[1]} " in str(error):
                raise DesignError(f"{error} ({reason})") from None
        raise
    if design == "bisect":
        ids = tuple(by_id)
        steps = [Combination(build_id=f"first-{k}", patch_ids=ids[:k]) for k in range(1, len(ids))]
        combos = (*combos, *steps)
    lines = [f"name = {json.dumps(f'{patchset.name}-{design}')}", f"engine = {json.dumps(patchset.engine)}"]
    for key in ("source", "margin", "onset_tokens"):
        value = getattr(patchset, key)
        if value is not None:
            lines.append(f"{key} = {json.dumps(value)}")
    if patchset.args:
        lines.append(f"args = {json.dumps(list(patchset.args))}")
    lines += _env_line(patchset.env)
    folder = path.parent / f"{path.stem}-diffs"
    origin = Path(patchset.path).parent
    files: dict[Path, str] = {}
    entries: list[tuple[str, list[Patch], str]] = [
        (c.build_id, [by_id[i] for i in c.patch_ids], "suspect") for c in combos if c.patch_ids
    ]
    entries += [(p.patch_id, [p], p.role) for p in patchset.patches if p.role != "suspect"]
    for build_id, parts, role in entries:
        if len(parts) == 1:
            diffs = [os.path.relpath(origin / d, path.parent) for d in parts[0].diffs]
        else:
            for part in parts:
                _check_applies(patchset, part, root)
            joined = _join([_changes(patchset, p) for p in parts], root)
            diffs = []
            if joined:
                files[folder / f"{build_id}.diff"] = joined
                diffs = [f"{folder.name}/{build_id}.diff"]
        lines += ["", "[[patch]]", f"id = {json.dumps(build_id)}", f"title = {json.dumps(_title(parts))}"]
        if role != "suspect":
            lines.append(f"role = {json.dumps(role)}")
        if diffs:
            lines.append(f"diffs = {json.dumps(diffs)}")
        lines += _env_line({k: v for p in parts for k, v in p.env.items()})
        args = list(dict.fromkeys(p.args for p in parts))
        if any(args):
            lines.append(f"args = {json.dumps([a for group in args for a in group])}")
        changes = sorted({c for p in parts for c in p.changes})
        if changes:
            lines.append(f"changes = {json.dumps(changes)}")
    files[path] = "\n".join(lines) + "\n"  # last: where it is, its diffs are
    for file, text in files.items():
        try:
            write_text(file, text)
        except OSError as error:
            raise DesignError(f"cannot write {file}: {error.strerror}") from None
    return combos


def _check_applies(patchset: PatchSet, patch: Patch, root: Path) -> None:
    """Joining trusts the line numbers of the hunks, so each diff must apply to this base by itself."""
    for name, text in read_diffs(patchset, patch):
        for file in parse_diff(text, name):
            target = root / file.path
            try:
                before = target.read_text(encoding="utf-8") if target.exists() else ""
                apply_to_text(before, file, name)
            except (OSError, UnicodeDecodeError, DiffError) as error:
                raise DesignError(f"patch {patch.patch_id} cannot be joined with others: {error}") from None


def _title(parts: Sequence[Patch]) -> str:
    return parts[0].title if len(parts) == 1 else " + ".join(p.patch_id for p in parts)


def _env_line(env: dict[str, str]) -> list[str]:
    pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in env.items())
    return [f"env = {{ {pairs} }}"] if env else []


def _join(parts: Sequence[dict[str, list[_Change]]], root: Path) -> str:
    """One unified diff that makes all changes at once on the base under `root`."""
    text = []
    for path in sorted({p for part in parts for p in part}):
        file = root / path
        try:
            before = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            raise DesignError(f"{file}: the base of a diff cannot be read ({error})") from None
        if not before and not any(c.after for part in parts for c in part.get(path, [])):
            raise DesignError(f"{path} is not in the base source {root}")
        after = list(before)
        unique = {(c.start, c.end, c.after): c for part in parts for c in part.get(path, [])}
        for change in sorted(unique.values(), reverse=True):
            after[change.start : change.end] = change.after
        made = difflib.unified_diff(before, after, f"a/{path}" if before else "/dev/null", f"b/{path}")
        for line in made:
            text.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(text)
