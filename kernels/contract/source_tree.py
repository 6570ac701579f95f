"""A Python package read as files: an installed package, a checkout, a wheel, or a version fetched with `pip download`.

Nothing of the package is imported or run. Files may be overridden in memory: a patch is read before it is served.
"""

import ast
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

REFERENCE = "reference"
"""Names the reference build's own source in `open_source`."""


class SourceError(ValueError):
    """The source is not what was asked for; the message says what was looked for and where."""


class SourceTree:
    """The files of one package.

    Args:
        package: import name of the package ("sglang").
        origin: what the user named, for messages.
        read: mapping from path ("sglang/srt/…") to text; missing paths are absent files.
    """

    def __init__(self, package: str, origin: str, files: Mapping[str, str], overrides: Mapping[str, str] | None = None):
        self.package = package
        self.origin = origin
        self._files = files
        self._overrides = dict(overrides or {})
        self._modules: dict[str, ast.Module] = {}

    def with_overrides(self, overrides: Mapping[str, str]) -> "SourceTree":
        """The same tree with some files replaced; paths as in `files`."""
        return SourceTree(self.package, self.origin, self._files, {**self._overrides, **overrides})

    def exists(self, path: str) -> bool:
        """Whether the tree has that file."""
        return path in self._overrides or path in self._files

    def text(self, path: str) -> str:
        """Text of one file. Raises SourceError when it is absent."""
        if path in self._overrides:
            return self._overrides[path]
        try:
            return self._files[path]
        except KeyError:
            raise SourceError(f"{self.origin}: no file {path}") from None

    def paths(self, prefix: str = "", suffix: str = ".py") -> list[str]:
        """Sorted paths below `prefix` that end in `suffix`."""
        return sorted(p for p in {*self._files, *self._overrides} if p.startswith(prefix) and p.endswith(suffix))

    def module_path(self, module: str) -> str | None:
        """File of a dotted module name, or None when the package has no such module."""
        base = module.replace(".", "/")
        for path in (f"{base}.py", f"{base}/__init__.py"):
            if self.exists(path):
                return path
        return None

    def module_ast(self, path: str) -> ast.Module:
        """Syntax tree of one file. Raises SourceError naming file and line on a syntax error."""
        if path not in self._modules:
            try:
                self._modules[path] = ast.parse(self.text(path), filename=path)
            except SyntaxError as error:
                raise SourceError(f"{self.origin}: {path}:{error.lineno}: syntax error: {error.msg}") from None
        return self._modules[path]

    def version(self) -> str | None:
        """Version the tree says of itself, if it does."""
        for path in (f"{self.package}/_version.py", f"{self.package}/version.py"):
            if self.exists(path):
                for node in ast.walk(self.module_ast(path)):
                    if (
                        isinstance(node, ast.Assign)
                        and any(isinstance(t, ast.Name) and t.id in ("__version__", "version") for t in node.targets)
                        and isinstance(node.value, ast.Constant)
                        and isinstance(node.value.value, str)
                    ):
                        return node.value.value
        return None


class _ZipFiles(Mapping[str, str]):
    """Texts of a wheel, read when asked for."""

    def __init__(self, path: Path):
        self._zip = zipfile.ZipFile(path)
        self._names = set(self._zip.namelist())

    def __getitem__(self, key: str) -> str:
        if key not in self._names:
            raise KeyError(key)
        return self._zip.read(key).decode("utf-8", "replace")

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self):
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _FolderFiles(Mapping[str, str]):
    """Texts below a folder, read when asked for; keys start with the package name."""

    def __init__(self, package_folder: Path):
        self._root = package_folder.parent
        self._folder = package_folder
        self._names: set[str] | None = None

    def _path(self, key: str) -> Path:
        return self._root / key

    def __getitem__(self, key: str) -> str:
        path = self._path(key)
        if not path.is_file():
            raise KeyError(key)
        return path.read_text(encoding="utf-8", errors="replace")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._path(key).is_file()

    def __iter__(self):
        if self._names is None:
            files = (p for p in self._folder.rglob("*") if p.suffix in (".py", ".cuh", ".cu") and p.is_file())
            self._names = {str(p.relative_to(self._root)) for p in files}
        return iter(self._names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _from_folder(folder: Path, package: str, origin: str) -> SourceTree:
    for candidate in (folder, folder / package, folder / "python" / package):
        if candidate.name == package and (candidate / "__init__.py").is_file():
            return SourceTree(package, origin, _FolderFiles(candidate))
    raise SourceError(
        f"{origin}: no {package} package here (looked for __init__.py in {package}/ and in python/{package}/)"
    )


def _from_wheel(path: Path, package: str, origin: str) -> SourceTree:
    try:
        files = _ZipFiles(path)
    except zipfile.BadZipFile:
        raise SourceError(f"{origin}: not a wheel (not a zip archive)") from None
    if f"{package}/__init__.py" not in files:
        top = sorted({name.split("/")[0] for name in files if not name.split("/")[0].endswith((".dist-info", ".data"))})
        raise SourceError(f"{origin}: a wheel of {', '.join(top[:3]) or 'nothing'}, not of {package}")
    return SourceTree(package, origin, files)


def open_source(where: str, package: str = "sglang") -> SourceTree:
    """Open the source of `package`.

    Args:
        where: "reference" (this checkout's reference build), "installed", a folder (a checkout, a site-packages, or the
            package folder), a .whl file, or a version
            number, which `pip download --no-deps` fetches into a temporary folder.

    Raises:
        SourceError: nothing usable there; the message says what was looked for and where.
    """
    if where == REFERENCE:
        root = Path(__file__).resolve().parents[2]
        files = [*(root / "kernels").rglob("*.py"), *(root / "runners" / "reference").rglob("*.py")]
        texts = {f"longrecall/{path.relative_to(root)}": path.read_text(encoding="utf-8") for path in files}
        return SourceTree("longrecall", "the reference build", texts)
    if where == "installed":
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise SourceError(f"{package} is not installed in {sys.prefix}; name a folder, a wheel file or a version")
        return _from_folder(Path(next(iter(spec.submodule_search_locations))), package, f"installed {package}")
    path = Path(where).expanduser()
    if path.is_dir():
        return _from_folder(path.resolve(), package, where)
    if path.suffix == ".whl":
        if not path.is_file():
            raise SourceError(f"{where}: no such wheel file")
        return _from_wheel(path, package, where)
    if path.exists():
        raise SourceError(f"{where}: neither a folder nor a .whl file")
    if not where[:1].isdigit():
        raise SourceError(f"{where}: no such folder or wheel file, and not a version number like 0.5.23")
    with tempfile.TemporaryDirectory(prefix="longrecall-wheel-") as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["-d", folder, f"{package}=={where}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            detail = done.stderr.strip().splitlines()
            raise SourceError(f"pip could not download {package}=={where}: {detail[-1] if detail else 'no wheel'}")
        keep = _ZipFiles(wheels[0])
        suffixes = (".py", ".cuh", ".cu")
        texts = {name: keep[name] for name in keep if name.endswith(suffixes) and name.startswith(f"{package}/")}
        if f"{package}/__init__.py" not in texts:
            raise SourceError(f"{package}=={where}: the wheel holds no {package}/__init__.py")
        return SourceTree(package, f"{package}=={where}", texts)
