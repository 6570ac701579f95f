"""Builds: base, base again, and the base plus one patch each; made, described and compared.

    tree = copy of the base source + the patch's diffs      content-addressed in the cache, read-only, hard-linked
    manifest = hashes of base, tree and diff, launch arguments, environment, package versions, weights, hardware,
               and what the server says of itself

Two builds of one campaign may differ by the named patch and by nothing else. `differences` computes from the patch
what may differ and returns everything that does and may not; a campaign with such a difference is refused.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from longrecall.needles.whole_file import write_text
from longrecall.runners.ask_python import AskError, ask_python
from longrecall.runners.diffs import DiffError, apply_diff
from longrecall.runners.engines import ROOT, SOURCE_SUFFIXES, BaseSource, Engine, is_volatile
from longrecall.runners.patchset import read_diffs, read_source_patcher
from longrecall.runners.schema import Build, Manifest, Patch, PatchSet

BASE = "base"
BASE_AGAIN = "base-again"
_KEEP_TREES_S = 14 * 86400
_PASSED_ENV = (
    "PATH", "HOME", "USER", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "LONGRECALL_CACHE",
    "XDG_CACHE_HOME", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip
_SECRET_KEY = re.compile(r"api_?key|secret|passw|credential", re.IGNORECASE)
_SECRET = re.compile(r"KEY|TOKEN(?!IZ)|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)

# An editable install adds an import hook that would complete a patched tree from the checkout: a module deleted by a
# patch, or one never copied, would silently come from there. Python runs this at start-up, from the tree.
_SITECUSTOMIZE = '''\
"""Keep imports of this build inside this build: drop the import hooks of editable installs of longrecall."""

import sys


def _is_ours(thing):
    name = getattr(thing, "__module__", "") or getattr(type(thing), "__module__", "")
    return name.startswith("__editable___longrecall")


sys.meta_path[:] = [finder for finder in sys.meta_path if not _is_ours(finder)]
sys.path_hooks[:] = [hook for hook in sys.path_hooks if not _is_ours(hook)]
sys.path[:] = [entry for entry in sys.path if not entry.startswith("__editable__.longrecall")]
sys.path_importer_cache.clear()
'''


class BuildError(ValueError):
    """A build that cannot be made, or that differs from the base by more than its patch."""


@dataclass(frozen=True, kw_only=True)
class PreparedBuild:
    """A build ready to be launched (or, for engine "openai", to be asked)."""

    build: Build
    tree: Path | None
    command: tuple[str, ...]
    """With "{port}" for the port."""
    env: dict[str, str]
    """The whole environment of the process."""
    endpoint: str | None = None


def cache_dir() -> Path:
    """The user's cache folder of longrecall: LONGRECALL_CACHE or ~/.cache/longrecall."""
    given = os.environ.get("LONGRECALL_CACHE")
    folder = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longrecall"
    return folder.absolute()  # builds run in folders of their own


Suffixes = frozenset[str] | None
"""Suffixes of the files that are source; None: every file."""
SOURCE_PATCHER_ENV = "DUMPER_SOURCE_PATCHER_CONFIG"
_BUILD_COMMAND_S = 3600.0


def source_files(root: Path, folders: Sequence[str], suffixes: Suffixes = SOURCE_SUFFIXES) -> Iterator[Path]:
    """Code files below `root`'s folders, relative and sorted: what git would track, without asking git."""
    for folder in sorted(folders):
        for path in sorted((root / folder).rglob("*")):
            relative = path.relative_to(root)
            hidden = any(part.startswith(".") or part == "__pycache__" for part in relative.parts)
            if not hidden and (suffixes is None or path.suffix in suffixes) and path.is_file():
                yield relative


def hash_tree(root: Path, folders: Sequence[str], suffixes: Suffixes = SOURCE_SUFFIXES) -> str:
    """sha256 over the sorted (relative path, file bytes)."""
    digest = hashlib.sha256()
    for relative in source_files(root, folders, suffixes):
        data = (root / relative).read_bytes()
        digest.update(f"{relative.as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def _new_temp(store: Path) -> Path:
    store.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".tmp-{os.getpid()}-", dir=store))


def clean_store(store: Path) -> list[Path]:
    """Remove half-made trees of processes that are gone, and trees nobody used for two weeks; returns them."""
    removed = []
    for path in store.glob(".tmp-*") if store.is_dir() else ():
        pid = path.name.split("-")[1]
        if not pid.isdigit() or not Path(f"/proc/{pid}").exists():
            removed.append(path)
    for path in store.glob("[0-9a-f]*") if store.is_dir() else ():
        if time.time() - path.stat().st_mtime > _KEEP_TREES_S:
            removed.append(path)
    for path in removed:
        shutil.rmtree(path, ignore_errors=True)
    return removed


def _finish_tree(temp: Path, store: Path, folders: Sequence[str], suffixes: Suffixes) -> tuple[Path, str]:
    """Give a made tree its links and its content-addressed name."""
    links = temp / ".ns" / "longrecall"
    links.mkdir(parents=True, exist_ok=True)
    for folder in folders:
        (links / folder).symlink_to(Path("../..") / folder)
    # Else the package goes on in an installed longrecall: a module that a patch deletes would come from there.
    (links / "__init__.py").touch()
    (temp / ".ns" / "sitecustomize.py").write_text(_SITECUSTOMIZE)
    tree_hash = hash_tree(temp, folders, suffixes)
    final = store / tree_hash[:16]
    if final.is_dir():
        if hash_tree(final, folders, suffixes) == tree_hash:
            os.utime(final)
            shutil.rmtree(temp)
            return final, tree_hash
        shutil.rmtree(final)  # somebody edited a cached tree
    os.replace(temp, final)
    return final, tree_hash


def make_base_tree(
    root: Path, folders: Sequence[str], store: Path, suffixes: Suffixes = SOURCE_SUFFIXES
) -> tuple[Path, str]:
    """Copy the base source into the store; returns its folder and hash.

    The hash is of the copied bytes, so an edit of the checkout during the copy cannot make it lie. A source that is in
    the store already, to the byte, is not copied: SGLang's has thousands of files.
    """
    temp = None
    try:
        known = hash_tree(root, folders, suffixes)
        kept = store / known[:16]
        if kept.is_dir() and hash_tree(kept, folders, suffixes) == known:
            os.utime(kept)
            return kept, known
        temp = _new_temp(store)
        for relative in source_files(root, folders, suffixes):
            target = temp / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / relative, target)  # with its time, by which Python knows its bytecode
            target.chmod(0o444)  # shared by hard links: an edit in place would change every build
        return _finish_tree(temp, store, folders, suffixes)
    except OSError as problem:
        raise BuildError(f"cannot copy the base source from {root} to {store}: {problem}") from None
    finally:
        if temp is not None:
            shutil.rmtree(temp, ignore_errors=True)


def make_patched_tree(
    base: Path,
    folders: Sequence[str],
    store: Path,
    diffs: Sequence[tuple[str, str]],
    patch_id: str,
    suffixes: Suffixes = SOURCE_SUFFIXES,
    *,
    prefix: str = "",
    build_command: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    base_name: str | None = None,
) -> tuple[Path, str]:
    """The base tree with `diffs` applied and `build_command` run; unchanged files are hard links to the base's.

    With a build command every file is a copy, since what a compiler or script does to a file is not known here.

    base_name: what the base is ("sglang 0.5.23"), said where a diff does not fit it.

    Raises:
        BuildError: a diff does not apply exactly, or touches files that are no part of the base source; the command
            failed.
    """
    temp = _new_temp(store)
    try:
        for relative in source_files(base, folders, suffixes):
            target = temp / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            if build_command:
                shutil.copy2(base / relative, target)
                target.chmod(0o644)
            else:
                os.link(base / relative, target)
        for name, text in diffs:
            for path in apply_diff(temp, text, name, prefix=prefix):
                known = suffixes is None or Path(path).suffix in suffixes
                if path.split("/")[0] not in folders or not known:
                    raise BuildError(
                        f"patch {patch_id!r}: {name} changes {path}, which is no part of the base source"
                        f" ({', '.join(f'{folder}/' for folder in folders)})"
                    )
        if build_command:
            _run_build_command(build_command, temp, env, patch_id)
        return _finish_tree(temp, store, folders, suffixes)
    except DiffError as problem:
        on = f" on {base_name}" if base_name else ""
        raise BuildError(f"patch {patch_id!r}{on}: {problem}") from None
    except OSError as problem:
        raise BuildError(f"patch {patch_id!r}: its tree cannot be made in {store}: {problem}") from None
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _run_build_command(command: Sequence[str], tree: Path, env: Mapping[str, str] | None, patch_id: str) -> None:
    """Run a patch's build command in its tree; BuildError carries the end of what it said."""
    where = f"patch {patch_id!r}: build_command {' '.join(command)}"
    try:
        done = subprocess.run(
            command, cwd=tree, env=None if env is None else dict(env), stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=_BUILD_COMMAND_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise BuildError(f"{where} did not end within {_BUILD_COMMAND_S:g} s") from None
    except OSError as problem:
        raise BuildError(f"{where}: {problem}") from None
    if done.returncode:
        tail = "\n".join("    " + line for line in (done.stdout + done.stderr).strip().splitlines()[-15:])
        raise BuildError(f"{where} ended with code {done.returncode}:\n{tail}")


def hardware() -> str:
    """One line naming the processor; what a server runs on beyond it the server itself reports."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return f"{model} x {os.cpu_count()}, {platform.system()} {platform.machine()}"


def package_versions(names: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def recorded_env(env: Mapping[str, str]) -> dict[str, str]:
    """`env` for a manifest: values of variables that look like secrets are replaced by a hash."""
    return {
        name: f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}" if _SECRET.search(name) else value
        for name, value in sorted(env.items())
    }


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """The served weights and tokenizer, with their hashes."""

    path: Path
    weights_hash: str | None
    tokenizer_hash: str | None
    template_hash: str | None


class Tree(NamedTuple):
    """The source of one build, in the store."""

    folder: Path
    hash: str
    diff_hash: str | None = None


@dataclass(frozen=True, kw_only=True)
class Trees:
    """The sources of a patchset's builds."""

    source: BaseSource
    base: Tree
    patched: Mapping[str, Tree]
    """By patch_id; a patch that leaves the source as it is has none of its own."""


def make_trees(patchset: PatchSet, engine: Engine, *, threads: int) -> Trees:
    """Apply every diff and run every build command of a patchset; needs no model.

    Raises:
        BuildError: a tree cannot be made, or a patch leaves the source as it was.
    """
    store = cache_dir() / "builds"
    clean_store(store)
    source = engine.base_source(patchset, store, ROOT)
    folders, suffixes = source.folders, engine.source_suffixes
    base_tree, source_hash = make_base_tree(source.root, folders, store, suffixes)
    engine.finish_tree(source.root, base_tree)
    version = (source.packages or {}).get(engine.name)
    patched = {}
    for patch in patchset.patches:
        diffs = read_diffs(patchset, patch)
        if not diffs and not patch.build_command:
            continue
        tree, tree_hash = make_patched_tree(
            base_tree, folders, store, diffs, patch.patch_id, suffixes, prefix=engine.diff_prefix,
            build_command=patch.build_command, env=_passed_env() | declared_env(patchset, patch, threads),
            base_name=f"{engine.name} {version}" if version else None,
        )  # fmt: skip
        engine.finish_tree(base_tree, tree)
        if tree_hash == source_hash:
            raise BuildError(f"patch {patch.patch_id!r}: its diffs leave the source as it was")
        patched[patch.patch_id] = Tree(tree, tree_hash, diff_hash(diffs))
    return Trees(source=source, base=Tree(base_tree, source_hash), patched=patched)


def prepare_builds(
    patchset: PatchSet, engine: Engine, model: ModelFolder, *, threads: int, trees: Trees | None = None
) -> list[PreparedBuild]:
    """Make every build of a patchset: base, base again, then one for each patch.

    trees: those of `make_trees`, where they were made before the model was known.

    Raises:
        BuildError: a tree cannot be made, or two builds differ by more than the named patch.
    """
    trees = trees or make_trees(patchset, engine, threads=threads)
    source = trees.source
    packages = package_versions(engine.packages) if source.packages is None else source.packages
    machine = ", ".join(filter(None, (hardware(), source.hardware)))
    prepared = []
    members: list[tuple[str, Patch | None]] = [(BASE, None), (BASE_AGAIN, None)]
    members += [(patch.patch_id, patch) for patch in patchset.patches]
    for build_id, patch in members:
        declared = declared_env(patchset, patch, threads)
        tree = trees.patched.get(build_id, trees.base)
        args = patchset.args + (patch.args if patch else ()) + override_args(patchset, patch)
        manifest = Manifest(
            source_hash=trees.base.hash,
            tree_hash=tree.hash,
            diff_hash=tree.diff_hash,
            args=(*engine.fixed_args(threads), *args),
            env=recorded_env(declared),
            packages=packages,
            weights_hash=model.weights_hash,
            template_hash=model.template_hash,
            tokenizer_hash=model.tokenizer_hash,
            hardware=machine,
        )
        role = "base" if build_id == BASE else "aa" if patch is None else patch.role
        env = _passed_env() | engine.compiled_env(trees.base.folder, tree.folder) | declared
        env |= engine.import_env(tree.folder, source, env)
        command = engine.command(model.path, threads, args)
        if command[0] == sys.executable:
            command = (source.python, *command[1:])
        prepared.append(
            PreparedBuild(
                build=Build(
                    build_id=build_id, patch_ids=(build_id,) if patch else (), role=role, manifest=manifest
                ),
                tree=tree.folder,
                command=command,
                env=env,
            )
        )  # fmt: skip
    check_builds([item.build for item in prepared], patchset, engine)
    check_imports(prepared, engine.imports(source.folders))
    return prepared


_WHERE = """
import importlib.util, json, sys
places = []
for name in sys.argv[1:]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of a parent
        spec = None
    places.append(next(iter(spec.submodule_search_locations or [spec.origin])) if spec else None)
answer(places)
"""
_WHERE_S = 300.0
"""A cold environment on a network disk takes a minute."""


def check_imports(prepared: Sequence[PreparedBuild], packages: Sequence[str]) -> None:
    """Ask every build's interpreter, under the build's variables, where it would import `packages` from.

    A path that a .pth file or an import hook puts before PYTHONPATH wins over the build's source: every build is then
    the unpatched one, and they all answer alike. Nothing is imported beyond the packages' parents.

    Raises:
        BuildError: another source than the build's own, or an interpreter that does not answer.
    """
    questions: dict[tuple[object, ...], PreparedBuild] = {}
    for item in prepared:
        if item.tree is not None:
            questions.setdefault((item.tree, item.command[0], *sorted(item.env.items())), item)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for _ in pool.map(lambda item: _check_imports_of(item, packages), questions.values()):
            pass


def _check_imports_of(item: PreparedBuild, packages: Sequence[str]) -> None:
    python, where = item.command[0], f"build {item.build.build_id!r}"
    assert item.tree is not None
    if os.pathsep in str(item.tree):
        raise BuildError(
            f"{where}: {item.tree} has {os.pathsep!r} in it and cannot be on PYTHONPATH; set LONGRECALL_CACHE to a"
            " folder without"
        )
    try:
        places = ask_python(python, _WHERE, packages, env=item.env, timeout_s=_WHERE_S, cwd=item.tree.parent)
    except AskError as problem:
        raise BuildError(f"{where}: {python} cannot look for {', '.join(packages)}: {problem}") from None
    tree = item.tree.resolve()
    for package, found in zip(packages, places, strict=True):
        if not found or not Path(found).resolve().is_relative_to(tree):
            raise BuildError(
                f"{where}: {python} would import {package} from {found or 'nowhere'} and not from this build's source"
                f" in {tree}, so no patch would be served; a .pth file or import hook of that environment goes before"
                " PYTHONPATH: remove it, or name another environment"
            )


def _passed_env() -> dict[str, str]:
    return {name: os.environ[name] for name in _PASSED_ENV if name in os.environ}


def override_args(patchset: PatchSet, patch: Patch | None) -> tuple[str, ...]:
    """The launch argument for the model_override of the patchset with the patch's own keys over it."""
    merged = patchset.model_override | (patch.model_override if patch else {})
    if not merged:
        return ()
    return ("--json-model-override-args", json.dumps(merged, sort_keys=True, separators=(",", ":")))


def patch_env(patchset: PatchSet, patch: Patch | None) -> dict[str, str]:
    """The variables a patch sets, the one that hands its source-patcher file to the server included."""
    if patch is None:
        return {}
    text = read_source_patcher(patchset, patch)
    if not text:
        return dict(patch.env)
    # By its content, so that the file a server reads is the one of the manifest, whatever is edited meanwhile.
    file = cache_dir() / "source-patchers" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.yaml"
    if not file.is_file():
        write_text(file, text)
    return {SOURCE_PATCHER_ENV: str(file), **patch.env}


def declared_env(patchset: PatchSet, patch: Patch | None, threads: int) -> dict[str, str]:
    """What the campaign sets on purpose: thread counts, no network, then the patchset's and the patch's variables."""
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONHASHSEED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }
    return fixed | patchset.env | patch_env(patchset, patch)


def given_builds(patchset: PatchSet) -> list[PreparedBuild]:
    """The builds of engine "openai": servers that run already, known by their URLs alone."""
    members: list[tuple[str, Patch | None]] = [(BASE, None), (BASE_AGAIN, None)]
    members += [(patch.patch_id, patch) for patch in patchset.patches]
    return [
        PreparedBuild(
            build=Build(
                build_id=build_id,
                patch_ids=(build_id,) if patch else (),
                role="base" if build_id == BASE else "aa" if patch is None else patch.role,
            ),
            tree=None,
            command=(),
            env={},
            endpoint=patch.endpoint if patch else patchset.source,
        )
        for build_id, patch in members
    ]


def diff_hash(diffs: Sequence[tuple[str, str]]) -> str | None:
    """sha256 over the diffs' texts in order; None without diffs."""
    if not diffs:
        return None
    return hashlib.sha256("\0".join(text for _, text in diffs).encode()).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One thing in which a build differs from the base, and which its patch does not name."""

    what: str
    base: object
    candidate: object

    def __str__(self) -> str:
        return f"{self.what}: base {_short(self.base)}, here {_short(self.candidate)}"


def _short(value: object) -> str:
    text = "(absent)" if value is None else repr(value)
    return text if len(text) <= 120 else text[:117] + "…"


def differences(
    base: Manifest, candidate: Manifest, patchset: PatchSet, patch: Patch | None, engine: Engine
) -> list[Difference]:
    """What differs between two manifests beyond `patch` (None: nothing may differ)."""
    found = []

    def expect(what: str, wanted: object, got: object) -> None:
        if wanted != got:
            found.append(Difference(what=what, base=wanted, candidate=got))

    patched = patch is not None and bool(patch.diffs or patch.build_command)
    expect("source", base.source_hash, candidate.source_hash)
    if not patched:
        expect("tree", base.tree_hash, candidate.tree_hash)
    expect("diff", diff_hash(read_diffs(patchset, patch)) if patch else None, candidate.diff_hash)
    common = base.args[: len(base.args) - len(override_args(patchset, None))]
    wanted_args = common + (patch.args if patch else ()) + override_args(patchset, patch)
    expect("arguments", wanted_args, candidate.args)
    wanted_env = base.env | recorded_env(patch_env(patchset, patch))
    for name in sorted(wanted_env.keys() | candidate.env.keys()):
        expect(f"environment {name}", wanted_env.get(name), candidate.env.get(name))
    for name in sorted(base.packages.keys() | candidate.packages.keys()):
        expect(f"package {name}", base.packages.get(name), candidate.packages.get(name))
    for name in ("weights_hash", "template_hash", "tokenizer_hash", "hardware"):
        expect(name, getattr(base, name), getattr(candidate, name))
    if base.server_info is not None or candidate.server_info is not None:
        allowed = allowed_server_keys(patch)
        told_base, told = flatten(base.server_info or {}), flatten(candidate.server_info or {})
        for key in sorted(told_base.keys() | told.keys()):
            parts = key.split(".")
            if allowed.intersection(parts) or any(is_volatile(engine, part) for part in parts):
                continue
            if patched and parts[-1] in SOURCE_KEYS:
                continue
            expect(f"server_info {key}", told_base.get(key), told.get(key))
    return found


SOURCE_KEYS = frozenset({"source_hash", "tree_hash"})
"""Keys under which a server may report the hash of its own source; a diff changes them."""


def allowed_server_keys(patch: Patch | None) -> set[str]:
    """Keys of the server's report that a patch may change: those it declares, and those its arguments name."""
    if patch is None:
        return set()
    args = patch.args + (("--json-model-override-args",) if patch.model_override else ())
    named = {arg.lstrip("-").partition("=")[0].replace("-", "_") for arg in args if arg.startswith("--")}
    return named | set(patch.changes) | {"args", "argv", "command"} if args else set(patch.changes)


def flatten(value: object, prefix: str = "") -> dict[str, object]:
    """Nested tables, and lists of tables, as one with dotted keys; other lists stay whole."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = {str(place): item for place, item in enumerate(value)}
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, object] = {}
    for key, item in value.items():
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat


def changed_keys(before: Mapping[str, object], after: Mapping[str, object], engine: Engine) -> list[str]:
    """What a server says otherwise than before, volatile keys aside, as "key: old -> new"."""
    old, new = flatten(before), flatten(after)
    return [
        f"{key}: {_short(old.get(key))} -> {_short(new.get(key))}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not any(is_volatile(engine, part) for part in key.split("."))
    ]


def check_builds(builds: Sequence[Build], patchset: PatchSet, engine: Engine) -> None:
    """Refuse builds that differ from the base by more than their patch.

    Raises:
        BuildError: naming the build and each difference.
    """
    manifests = {build.build_id: build.manifest for build in builds}
    base = manifests.get(BASE)
    if base is None:
        return
    patches = {patch.patch_id: patch for patch in patchset.patches}
    lines = []
    for build in builds:
        if build.build_id == BASE or build.manifest is None:
            continue
        patch = patches.get(build.build_id)
        for difference in differences(base, build.manifest, patchset, patch, engine):
            lines.append(f"  {build.build_id}: {difference}")
    if lines:
        raise BuildError(
            "builds differ by more than the named patch; a verdict would not be about the patch:\n" + "\n".join(lines)
        )


def with_server_info(build: Build, info: dict[str, object] | None) -> Build:
    """`build` with what its server says of itself in the manifest."""
    if build.manifest is None or info is None:
        return build
    return replace(build, manifest=replace(build.manifest, server_info=info))


def without_secrets(info: Mapping[str, object]) -> dict[str, object]:
    """A server's report, values of keys and passwords hashed (SGLang reports `api_key`), the home folder as ~."""
    home = f"{Path.home()}/"

    def clean(key: str, value: object) -> object:
        if isinstance(value, Mapping):
            return {name: clean(str(name), item) for name, item in value.items()}
        if isinstance(value, str) and value and _SECRET_KEY.search(key):
            return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:12]}"
        if isinstance(value, list):
            return [clean(key, item) for item in value]
        return value.replace(home, "~/") if isinstance(value, str) and home != "//" else value

    return {key: clean(key, value) for key, value in info.items()}
