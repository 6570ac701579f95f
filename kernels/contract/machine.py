"""The state of a reading: values and what they carry, how two paths join, and the multiplies that were seen."""

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from longrecall.kernels.contract.source_tree import SourceTree
from longrecall.kernels.contract.values import (
    FACTOR,
    NOTHING,
    Carried,
    ClassRef,
    Exponents,
    Frame,
    FunctionRef,
    Instance,
    Known,
    Mapping,
    ModuleRef,
    Native,
    PathEnd,
    Record,
    Refusal,
    Scale,
    Sequence,
    Site,
    State,
    Tensor,
    Unknown,
    Value,
)


class Machine(ABC):
    """What every part of the interpreter works on.

    Args:
        tree: source to read.
        natives: models by function name, used wherever a function of that name is called.
        environment: value of an environment variable by its name.
        flag_default: value of an attribute that the reading finds nowhere, by its name.
        max_steps: bound on statements read.
        max_depth: bound on call nesting; deeper calls are opaque.
    """

    def __init__(
        self,
        tree: SourceTree,
        natives: dict[str, Native],
        *,
        environment: Callable[[str], Value],
        flag_default: Callable[[str], Value],
        max_steps: int = 400_000,
        max_depth: int = 40,
    ):
        self.tree = tree
        self.natives = natives
        self.environment = environment
        self.flag_default = flag_default
        self.max_steps, self.max_depth = max_steps, max_depth
        self.steps = 0
        self.state = State()
        self.frames: list[Frame] = []
        self.conditions: list[str] = []
        self.sites: dict[tuple[str, int], Site] = {}
        self.refusals: list[Refusal] = []
        self.unresolved: dict[tuple[str, int], str] = {}
        self.forks = 0
        self._globals: dict[tuple[str, str], Value] = {}
        self._resolving: set[tuple[str, str]] = set()
        self._top: dict[str, dict[str, list[tuple[ast.stmt, list[ast.expr]]]]] = {}

    @abstractmethod
    def evaluate(self, node: ast.expr) -> Value:
        """The value of an expression."""

    @abstractmethod
    def statement(self, node: ast.stmt) -> None:
        """Run one statement; one of a kind that is not known does nothing."""

    @abstractmethod
    def assign(self, target: ast.expr, value: Value) -> None:
        """Bind a value to a name, an attribute or a part."""

    @abstractmethod
    def call(self, function: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """What a call gives."""

    def truth(self, value: Value) -> bool | None:
        if isinstance(value, Known):
            return bool(value.value)
        if isinstance(value, (Instance, ClassRef, FunctionRef, ModuleRef, Native, Tensor, Record)):
            return True
        if isinstance(value, Sequence):
            return bool(value.items)
        if isinstance(value, Mapping):
            return bool(value.items) or None
        if isinstance(value, Scale):
            return True
        return None

    def carried(self, value: Value) -> Carried:
        return self.state.heap.get(value.ident, Carried()) if isinstance(value, Tensor) else Carried()

    def write(self, tensor: Tensor, carried: Carried) -> None:
        """An in-place write."""
        if tensor.label == "index":
            return
        before = self.carried(tensor)
        self.state.heap[tensor.ident] = carried
        for other in tensor.either:
            # where it is this one, it held what the joined tensor held; where it is not, nobody reads it on
            known = self.carried(other)
            self.write(other, carried if known in (before, Carried()) else known.joined(carried))

    def tensor(self, carried: Carried = NOTHING, label: str = "") -> Tensor:
        out = Tensor(label=label)
        self.state.heap[out.ident] = carried
        return out

    def join_values(self, a: Value, b: Value, heap_a: dict[int, Carried], heap_b: dict[int, Carried]) -> Value:
        if a is b:
            return a
        if isinstance(a, Known) and isinstance(b, Known) and type(a.value) is type(b.value) and a.value == b.value:
            return a
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.ident == b.ident:
                return a
            joined = heap_a.get(a.ident, Carried()).joined(heap_b.get(b.ident, Carried()))
            out = Tensor(label=a.label if a.label == b.label else "", either=(a, b))
            self.state.heap[out.ident] = joined
            return out
        scale_a, scale_b = self.as_scale(a), self.as_scale(b)
        if scale_a and scale_b and (isinstance(a, Scale) or isinstance(b, Scale)):
            return Scale(scale_a | scale_b)
        if isinstance(a, Sequence) and isinstance(b, Sequence) and len(a.items) == len(b.items):
            return Sequence([self.join_values(x, y, heap_a, heap_b) for x, y in zip(a.items, b.items, strict=True)])
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            shared = {k: self.join_values(v, b.items[k], heap_a, heap_b) for k, v in a.items.items() if k in b.items}
            return Mapping({**a.items, **b.items, **shared})
        if isinstance(a, ClassRef) and isinstance(b, ClassRef) and a.node is b.node:
            return a
        if isinstance(a, Instance) and isinstance(b, Instance) and a.cls.node is b.cls.node:
            merged = Instance(a.cls)
            for ident, name in list(self.state.attributes):
                if ident == a.ident:
                    left = self.state.attributes[a.ident, name]
                    right = self.state.attributes.get((b.ident, name))
                    self.state.attributes[merged.ident, name] = (
                        left if right is None else self.join_values(left, right, heap_a, heap_b)
                    )
            return merged
        # a None beside a real thing is the "nothing to do" of the other path: the thing is what matters
        solid = (Tensor, Instance, FunctionRef, Record, Native)
        if isinstance(a, (Known, Unknown)) and isinstance(b, solid):
            return b
        if isinstance(b, (Known, Unknown)) and isinstance(a, solid):
            return a
        return Unknown("differs between paths")

    def join_states(self, a: State, b: State) -> State:
        joined = State()
        joined.heap = dict(a.heap)
        for ident, carried in b.heap.items():
            joined.heap[ident] = joined.heap[ident].joined(carried) if ident in joined.heap else carried
        self.state = joined
        joined.attributes = dict(a.attributes)
        for key, value in b.attributes.items():
            mine = a.attributes.get(key)
            joined.attributes[key] = value if mine is None else self.join_values(mine, value, a.heap, b.heap)
        return joined

    def as_scale(self, value: Value) -> Exponents | None:
        if isinstance(value, Scale):
            return value.powers
        if isinstance(value, Known) and isinstance(value.value, (int, float)) and not isinstance(value.value, bool):
            return frozenset({0})
        return None

    def _where(self) -> tuple[str, str]:
        frame = self.frames[-1]
        return frame.path, frame.qualname

    def scale_at(self, node: ast.AST, carried: Carried, powers: Exponents, note: str = "") -> Carried:
        """The multiply at `node`, recorded as a site when it touches a routed or shared part."""
        if carried == Carried():
            return carried
        self.site(node, powers != frozenset({0}), note)
        return carried.scaled(powers, self._where()[0], getattr(node, "lineno", 0))

    def site(self, node: ast.AST, applies: bool, note: str = "") -> None:
        path, where = self._where()
        line = getattr(node, "lineno", 0)
        condition = " and ".join(self.conditions[-3:]) or "always"
        if note:
            condition = f"{condition}; {note}"
        known = self.sites.get((path, line))
        if known is None or (applies and not known.applies):
            code = ast.unparse(node).replace("\n", " ")
            self.sites[path, line] = Site(
                file=path, line=line, where=where, code=code[:160], applies=applies, condition=condition
            )

    def scan_untaken(self, body: Iterable[ast.stmt], condition: str) -> None:
        """Multiplies that the evaluated condition keeps from happening, listed as not applying."""
        for statement in body:
            for node in ast.walk(statement):
                if mentions_multiply(node):
                    path, where = self._where()
                    line = getattr(node, "lineno", 0)
                    self.sites.setdefault(
                        (path, line),
                        Site(
                            file=path,
                            line=line,
                            where=where,
                            code=ast.unparse(node).replace("\n", " ")[:160],
                            applies=False,
                            condition=condition,
                        ),
                    )

    def refuse(self, node: ast.AST, message: str) -> None:
        path, where = self._where()
        self.refusals.append(Refusal(file=path, line=getattr(node, "lineno", 0), where=where, message=message[:200]))
        raise PathEnd

    def note_unresolved(self, text: str) -> None:
        path, where = self._where()
        self.unresolved.setdefault((path, len(self.unresolved)), f"{path}: {where}: {text}")


def mentions_multiply(node: ast.AST) -> bool:
    """Whether a node is a multiply by something named like the factor."""
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
        return FACTOR in ast.unparse(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return any(FACTOR in ast.unparse(side) and len(ast.unparse(side)) < 80 for side in (node.left, node.right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("mul_", "mul"):
            return any(FACTOR in ast.unparse(a) for a in node.args)
        if node.func.attr in ("add_", "add"):
            return any(k.arg == "alpha" and FACTOR in ast.unparse(k.value) for k in node.keywords)
    return False
