"""The five folders are parts of one namespace package; each rule here guards a trap that was reproduced."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("evals", "needles", "kernels", "runners", "results")
# A script run by path puts its own folder first on sys.path: a module of that name would replace the library.
FORBIDDEN_STEMS = {
    "types", "token", "tokenize", "select", "statistics", "trace", "profile", "queue", "bisect", "platform", "triton",
    "torch", "datasets", "openai", "jinja2", "scipy", "numpy", "typing", "json", "random", "copy", "utils", "helpers",
    "common", "misc",
}  # fmt: skip


def code_files() -> list[Path]:
    return [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if "runs" not in path.parts]


@pytest.mark.parametrize("folder", FOLDERS)
def test_root_folder_has_no_init(folder: str) -> None:
    assert not (ROOT / folder / "__init__.py").exists(), "a regular root package shadows libraries of that name"


def test_no_module_is_named_like_a_library() -> None:
    assert [path for path in code_files() if path.stem in FORBIDDEN_STEMS] == []


def test_every_code_folder_is_packaged() -> None:
    packages = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {"longrecall." + ".".join(path.relative_to(ROOT).parent.parts) for path in code_files()}
    assert folders <= packages, f"add to [tool.setuptools] packages: {sorted(folders - packages)}"


def test_no_init_in_tests() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []


def test_import_kernels_from_the_root_is_not_ours() -> None:
    probe = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    out = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert str(ROOT) not in out


def test_imports_come_from_this_checkout() -> None:
    import longrecall.needles.schema as schema

    assert Path(schema.__file__).resolve() == ROOT / "needles" / "schema.py"


def test_every_command_exists() -> None:
    import importlib

    from longrecall.results.main import BENCHES, COMMANDS

    for command in (*COMMANDS.values(), *BENCHES.values()):
        module, attribute = command.target.split(":")
        assert hasattr(importlib.import_module(module), attribute), command.target
