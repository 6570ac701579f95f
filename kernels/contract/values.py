"""What the abstract interpreter computes with, and what it reports."""

import ast
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longrecall.kernels.contract.abstract import Interpreter

_ids = itertools.count(1)
Exponents = frozenset[int]
FACTOR = "routed_scaling_factor"


class PathEnd(Exception):
    """The path being followed raises in the program under reading."""


class Budget(Exception):
    """The reading grew past its bound."""


class Value:
    """Base of the abstract values."""


@dataclass(eq=False)
class Unknown(Value):
    """A value nothing is known of."""

    why: str = ""


@dataclass(eq=False)
class Known(Value):
    """A Python constant."""

    value: object


@dataclass(eq=False)
class Scale(Value):
    """A scalar factor**n, n one of `powers`."""

    powers: Exponents


@dataclass(eq=False)
class Tensor(Value):
    """A tensor; what it carries lives in the heap under `ident`, because views and in-place operations share it."""

    ident: int = field(default_factory=lambda: next(_ids))
    label: str = ""
    either: "tuple[Tensor, ...]" = ()
    """Tensors this one may be, where a condition was not decided: a write to it may be a write to them."""


Applied = frozenset[tuple[str, int, int]]
"""Multiplies a value has been through: (file, line, power). A set, so that weights handed to two kernels count once."""
Ways = frozenset[Applied]
"""The alternatives that undecided conditions leave."""
PLAIN: Ways = frozenset({frozenset()})
MAX_WAYS = 64


@dataclass(frozen=True)
class Carried:
    """Multiplies by the factor that a tensor's routed part and shared part have been through; None: no such part."""

    routed: Ways | None = None
    shared: Ways | None = None

    def scaled(self, powers: Exponents, file: str, line: int) -> "Carried":
        def shift(part: Ways | None) -> Ways | None:
            if part is None:
                return None
            return frozenset(way | {(file, line, p)} if p else way for way in part for p in powers)

        return Carried(shift(self.routed), shift(self.shared))

    def joined(self, other: "Carried") -> "Carried":
        def join(a: Ways | None, b: Ways | None) -> Ways | None:
            return a if b is None else b if a is None else a | b

        return Carried(join(self.routed, other.routed), join(self.shared, other.shared))

    def times(self, other: "Carried") -> "Carried":
        def product(a: Ways | None, b: Ways | None) -> Ways | None:
            if a is None or b is None:
                return b if a is None else a
            if len(a) * len(b) > MAX_WAYS:
                raise Budget("too many undecided conditions")
            return frozenset(x | y for x in a for y in b)

        return Carried(product(self.routed, other.routed), product(self.shared, other.shared))


NOTHING = Carried()


def exponents(ways: Ways | None) -> Exponents | None:
    """Exponents of the factor that the alternatives come to."""
    return None if ways is None else frozenset(sum(power for _, _, power in way) for way in ways)


@dataclass(eq=False)
class Sequence(Value):
    """A tuple or list of known length."""

    items: list[Value]


@dataclass(eq=False)
class Mapping(Value):
    """A dict with known string keys."""

    items: dict[str, Value]


@dataclass(eq=False)
class ModuleRef(Value):
    """A module of the tree (path) or an external one (path None)."""

    name: str
    path: str | None


@dataclass(eq=False)
class ClassRef(Value):
    """A class of the tree."""

    path: str
    node: ast.ClassDef

    @property
    def name(self) -> str:
        return self.node.name


@dataclass(eq=False)
class FunctionRef(Value):
    """A function or method of the tree, with what it is bound to and closes over."""

    path: str
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    bound: Value | None = None
    closure: dict[str, Value] | None = None
    owner: ClassRef | None = None

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "<lambda>")


@dataclass(eq=False)
class Instance(Value):
    """An object of a class of the tree; attributes live in the heap."""

    cls: ClassRef
    ident: int = field(default_factory=lambda: next(_ids))


@dataclass(eq=False)
class Record(Value):
    """An object made up by the driver (a config, an enum): attributes are values or functions of the arguments."""

    name: str
    attributes: dict[str, "Value | Callable[..., Value]"]
    missing: Callable[[str], Value] | None = None


@dataclass(eq=False)
class Native(Value):
    """A function modelled by the driver."""

    name: str
    call: Callable[["Interpreter", list[Value], dict[str, Value], ast.AST], Value]


@dataclass(eq=False)
class External(Value):
    """Something outside the tree: torch.ops.x.y, a compiled kernel."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Site:
    """One place that multiplies by the factor, or would under another condition."""

    file: str
    line: int
    where: str
    """Qualified function name."""
    code: str
    applies: bool
    condition: str
    """The condition as evaluated ("always", "False: not layer.should_fuse…")."""


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A place where the program raises under the conditions asked for."""

    file: str
    line: int
    where: str
    message: str


@dataclass
class State:
    """What differs between paths."""

    heap: dict[int, Carried] = field(default_factory=dict)
    attributes: dict[tuple[int, str], Value] = field(default_factory=dict)

    def copy(self) -> "State":
        return State(dict(self.heap), dict(self.attributes))


@dataclass
class Frame:
    """One function activation."""

    path: str
    qualname: str
    names: dict[str, Value]
    returns: list[tuple[Value, State]] = field(default_factory=list)
    yields: list[Value] = field(default_factory=list)
    owner: ClassRef | None = None
    self_value: Value | None = None
