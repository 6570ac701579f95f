"""Patchset files: a base build and the patches under suspicion, in TOML, read strictly.

    name = "reference"
    engine = "reference"            # reference, openai, llamacpp, …: runners/engines.py
    margin = 0.10                   # largest loss of recall that still counts as none
    args = ["--index-topk", "512"]  # launch arguments of every build
    env = { LONGRECALL_LOG = "info" }

    [[patch]]
    id = "index-keys-fp8"
    title = "fp8 index keys, per-token scale"
    diffs = ["patches/index-keys-fp8.diff"]   # relative to this file
    expect = "exonerated"

A key that is not known is an error that names the nearest one that is: a misspelt `diff = […]` would otherwise
serve the unpatched base under the patch's name, and exonerate it.
"""

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args

from longrecall.runners.schema import Deployment, Expect, Patch, PatchSet, Role

RESERVED_IDS = frozenset({"base", "base-again"})
_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOP_KEYS = (
    "schema_version", "name", "engine", "source", "python", "env", "args", "model_override", "deployment", "margin",
    "onset_tokens", "patch",
)  # fmt: skip
_PATCH_KEYS = (
    "id", "title", "role", "diffs", "env", "args", "endpoint", "changes", "model_override", "source_patcher",
    "build_command", "expect",
)  # fmt: skip
_DEPLOYMENT_KEYS = tuple(item.name for item in fields(Deployment))


class PatchsetError(ValueError):
    """A patchset file that cannot be used; the message names the file and the value."""


def _unknown(key: str, known: tuple[str, ...], where: str) -> PatchsetError:
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
    return PatchsetError(f"{where}: unknown key {key!r}; {hint}")


def _check_keys(table: Mapping[str, object], known: tuple[str, ...], where: str) -> None:
    for key in table:
        if key not in known:
            raise _unknown(key, known, where)


def _string(table: Mapping[str, object], key: str, where: str, *, default: str | None = None) -> str:
    value = table.get(key, default)
    if value is None:
        raise PatchsetError(f"{where}: key {key!r} is missing")
    if not isinstance(value, str):
        raise PatchsetError(f"{where}: {key} = {value!r} is not a string")
    return value


def _strings(table: Mapping[str, object], key: str, where: str) -> tuple[str, ...]:
    value = table.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise PatchsetError(f"{where}: {key} = {value!r} is not a list of strings")
    return tuple(value)


def _env(table: Mapping[str, object], where: str) -> dict[str, str]:
    value = table.get("env", {})
    if not isinstance(value, dict):
        raise PatchsetError(f'{where}: env = {value!r} is not a table of strings, as in {{ NAME = "value" }}')
    for name, text in value.items():
        if not _ENV_NAME.fullmatch(name):
            raise PatchsetError(f"{where}: env name {name!r} is not a variable name")
        if not isinstance(text, str):
            raise PatchsetError(f'{where}: env {name} = {text!r} is not a string; write {name} = "{text}"')
    return dict(value)


def _override(table: Mapping[str, object], where: str) -> dict[str, object]:
    value = table.get("model_override", {})
    if not isinstance(value, dict):
        raise PatchsetError(f"{where}: model_override = {value!r} is not a table, as in {{ index_topk = 1024 }}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as problem:
        raise PatchsetError(f"{where}: model_override cannot be written as JSON: {problem}") from None
    return dict(value)


def _deployment(table: Mapping[str, object], where: str) -> Deployment | None:
    value = table.get("deployment")
    if value is None:
        return None
    where = f"{where}: deployment"
    if not isinstance(value, dict):
        raise PatchsetError(f'{where} = {value!r} is not a table, as in {{ kind = "pd", prefill = 1, decode = 1 }}')
    _check_keys(value, _DEPLOYMENT_KEYS, where)
    kind = _choice(value, "kind", ("pd", "replicas"), where)
    if kind is None:
        raise PatchsetError(f"{where}: key 'kind' is missing: pd or replicas")
    for name in ("prefill", "decode", "replicas", "gpus_per_server"):
        number = value.get(name, 1)
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise PatchsetError(f"{where}: {name} = {number!r} is not a positive whole number")
    for name in ("transfer_backend", "policy"):
        _string(value, name, where, default="")
    return Deployment(**value)


def _choice(table: Mapping[str, object], key: str, choices: tuple[str, ...], where: str) -> str | None:
    value = table.get(key)
    if value is not None and value not in choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise PatchsetError(f"{where}: {key} = {value!r} is none of {', '.join(choices)}{hint}")
    return value


def _patch(table: object, path: Path, number: int) -> Patch:
    where = f"{path}: [[patch]] number {number}"
    if not isinstance(table, dict):
        raise PatchsetError(f"{where} is not a table")
    patch_id = _string(table, "id", where)
    where = f"{path}: patch {patch_id!r}"
    if not _ID.fullmatch(patch_id):
        raise PatchsetError(f"{where}: an id is lower-case letters, digits, '.', '_', '-', at most 64, as in fp8-keys")
    if patch_id in RESERVED_IDS:
        raise PatchsetError(f"{where}: the id is taken by the base builds; rename the patch")
    _check_keys(table, _PATCH_KEYS, where)
    patch = Patch(
        patch_id=patch_id,
        title=_string(table, "title", where, default=""),
        role=_choice(table, "role", get_args(Role), where) or "suspect",  # type: ignore[arg-type]
        diffs=_strings(table, "diffs", where),
        env=_env(table, where),
        args=_strings(table, "args", where),
        endpoint=_string(table, "endpoint", where) if "endpoint" in table else None,
        changes=_strings(table, "changes", where),
        model_override=_override(table, where),
        source_patcher=_string(table, "source_patcher", where) if "source_patcher" in table else None,
        build_command=_strings(table, "build_command", where),
        expect=_choice(table, "expect", get_args(Expect), where),  # type: ignore[arg-type]
    )
    if not (changes_build(patch) or patch.endpoint):
        raise PatchsetError(f"{where} changes nothing: give diffs, env, args or endpoint")
    for kind, names in (("diff", patch.diffs), ("source_patcher", (patch.source_patcher,))):
        for name in names:
            if name is not None and not (path.parent / name).is_file():
                raise PatchsetError(f"{where}: {kind} {name!r} is not a file (looked for {path.parent / name})")
    return patch


def changes_build(patch: Patch) -> bool:
    """Whether a patch changes a build that is launched here (and does not only name a server that runs)."""
    return bool(
        patch.diffs or patch.env or patch.args or patch.model_override or patch.source_patcher or patch.build_command
    )


def _is_base(patch: Patch, env: Mapping[str, str], args: tuple[str, ...]) -> bool:
    """Whether the patch only repeats what every build is launched with: it would be exonerated untested."""
    if not (patch.env or patch.args) or patch.endpoint:
        return False
    if patch.diffs or patch.model_override or patch.source_patcher or patch.build_command:
        return False
    size = len(patch.args)
    repeated = any(args[i : i + size] == patch.args for i in range(len(args) - size + 1))
    return repeated and all(env.get(name) == value for name, value in patch.env.items())


def parse_patchset(text: str, path: Path) -> PatchSet:
    """The patchset written in `text`; `path` is the file it came from, which diffs are relative to."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise PatchsetError(f"{path}: not TOML: {problem}") from None
    where = str(path)
    _check_keys(table, _TOP_KEYS, where)
    version = table.get("schema_version", 1)
    if version != 1:
        raise PatchsetError(f"{where}: schema_version = {version!r}; this longrecall reads version 1")
    margin = table.get("margin")
    if margin is not None and (isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 < margin < 0.5):
        raise PatchsetError(f"{where}: margin = {margin!r} is not a share of recall between 0 and 0.5, such as 0.10")
    onset = table.get("onset_tokens")
    if onset is not None and (isinstance(onset, bool) or not isinstance(onset, int) or onset < 1):
        raise PatchsetError(f"{where}: onset_tokens = {onset!r} is not a positive whole number")
    tables = table.get("patch", [])
    if not isinstance(tables, list) or not tables:
        raise PatchsetError(f"{where}: no [[patch]]: there is nothing under suspicion")
    patches = tuple(_patch(item, path, number) for number, item in enumerate(tables, 1))
    seen: set[str] = set()
    for patch in patches:
        if patch.patch_id in seen:
            raise PatchsetError(f"{where}: two patches have the id {patch.patch_id!r}")
        seen.add(patch.patch_id)
    env, args, name = (
        _env(table, where),
        _strings(table, "args", where),
        _string(table, "name", where, default=path.stem),
    )
    if not name or len(name) > 100 or re.search(r"[/\\\x00-\x1f]", name):
        raise PatchsetError(f"{where}: name = {name!r} names run folders: 1 to 100 characters, no slash or line break")
    for patch in patches:
        if _is_base(patch, env, args):
            raise PatchsetError(f"{where}: patch {patch.patch_id!r}: the base has its env and args already: no change")
    return PatchSet(
        name=name,
        path=str(path),
        engine=_string(table, "engine", where),
        source=_string(table, "source", where) if "source" in table else None,
        python=_string(table, "python", where) if "python" in table else None,
        env=env,
        args=args,
        model_override=_override(table, where),
        deployment=_deployment(table, where),
        patches=patches,
        margin=None if margin is None else float(margin),
        onset_tokens=onset,
    )


def load_patchset(path: Path) -> PatchSet:
    """Read a patchset file.

    Raises:
        PatchsetError: the file cannot be read, or holds a key or value that is not known.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        here = ", ".join(sorted(str(item) for item in path.parent.glob("*.toml"))) if path.parent.is_dir() else ""
        raise PatchsetError(f"{path}: no such patchset{f'; there is {here}' if here else ''}") from None
    except (OSError, UnicodeDecodeError) as problem:
        raise PatchsetError(f"{path}: cannot be read: {problem}") from None
    return parse_patchset(text, path)


def read_diffs(patchset: PatchSet, patch: Patch) -> tuple[tuple[str, str], ...]:
    """(name, text) of each diff of `patch`, in order."""
    found = []
    for diff in patch.diffs:
        file = Path(patchset.path).parent / diff
        try:
            # newline="": a diff against a CRLF file keeps its line ends.
            with file.open(encoding="utf-8", newline="") as stream:
                found.append((diff, stream.read()))
        except (OSError, UnicodeDecodeError) as problem:
            raise PatchsetError(f"{file}: cannot be read: {problem}") from None
    return tuple(found)


def read_source_patcher(patchset: PatchSet, patch: Patch) -> str:
    """The text of the patch's source-patcher YAML; "" without one."""
    if patch.source_patcher is None:
        return ""
    file = Path(patchset.path).parent / patch.source_patcher
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise PatchsetError(f"{file}: cannot be read: {problem}") from None


def content_hash(patchset: PatchSet) -> str:
    """sha256 over what the patchset says and the diffs it names; where the file lies does not matter."""
    digest = hashlib.sha256()
    fields = asdict(patchset)
    del fields["path"]
    digest.update(repr(sorted(fields.items())).encode())
    for patch in patchset.patches:
        for name, text in read_diffs(patchset, patch):
            digest.update(f"\0{patch.patch_id}\0{name}\0{text}".encode())
        if patch.source_patcher:
            digest.update(f"\0{patch.patch_id}\0{read_source_patcher(patchset, patch)}".encode())
    return digest.hexdigest()
