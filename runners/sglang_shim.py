"""Stand-ins for compiled packages that SGLang imports and a text-only server on the CPU never calls.

`sglang_install.py` copies this file into SGLang's environment, where a .pth line runs `install()` at every start of
Python. It is no part of longrecall's own processes, and imports nothing of it.

    sgl_kernel     any function can be imported; calling one raises NotImplementedError with its name
    torchvision    any class can be imported (transformers' image processors name them); none does anything

Both come last on the import path: where the real package is installed, it wins.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence

VERSION = "0.0.0+longrecall"


def _absent(name: str) -> Callable[..., object]:
    def absent(*args: object, **kwargs: object) -> object:
        raise NotImplementedError(f"{name} is compiled code, and this environment has a stand-in for its package")

    absent.__name__ = name.rpartition(".")[2]
    return absent


class _Nothing(type):
    """A class whose attributes are such classes, for enums and nested names."""

    def __getattr__(cls, name: str) -> "_Nothing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _nothing(name)


def _nothing(name: str) -> _Nothing:
    return _Nothing(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _Package(types.ModuleType):
    """A package in which every public name exists."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        make = PACKAGES[self.__name__.partition(".")[0]]
        return make(f"{self.__name__}.{name}")


PACKAGES: dict[str, Callable[[str], object]] = {"sgl_kernel": _absent, "torchvision": _nothing}


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages that are stood in for, and what is below torchvision.

    Nothing is below sgl_kernel: SGLang catches the ImportError and takes its own way without it.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package, below, _ = fullname.partition(".")
        if package not in PACKAGES or (below and package == "sgl_kernel"):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Package(spec.name)
        module.__dict__["__version__"] = VERSION
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run: `_Package.__getattr__` makes the names."""


def install() -> None:
    """Put the finder behind all others; safe to call twice."""
    if not any(type(finder).__name__ == Finder.__name__ and isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())
