"""An abstract interpreter for Python source that follows one quantity: the exponent n of `routed_scaling_factor`**n.

It runs functions of a `SourceTree` on abstract values. A tensor carries the exponents its routed and its shared part
may have; the factor itself is a `Scale`. A condition that cannot be decided takes both ways and joins them. Anything
it does not know is an `Unknown`, which never decides a branch. External calls (torch, compiled kernels) are opaque:
they multiply when the factor is handed to them and no flag of the call says otherwise, and that is recorded as a site.

This is a reading aid for one contract, not a Python implementation: loops run once, exceptions end a path. It is one
long file because it is one class: each kind of statement and expression is a small method on the shared state.
"""

import ast
import functools
import itertools
from collections.abc import Callable, Iterable

from longrecall.kernels.contract.source_tree import SourceTree
from longrecall.kernels.contract.values import (
    FACTOR,
    NOTHING,
    Budget,
    Carried,
    ClassRef,
    Exponents,
    External,
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


class _Return(Exception):
    pass


TENSOR_MAKERS = {
    "empty",
    "empty_like",
    "zeros",
    "zeros_like",
    "new_empty",
    "new_zeros",
    "full",
    "ones",
    "empty_strided",
}
VIEWS = {
    "view", "reshape", "contiguous", "to", "float", "half", "bfloat16", "squeeze", "unsqueeze", "flatten", "expand",
    "transpose", "permute", "narrow", "detach", "type", "clone", "cuda", "cpu", "view_as", "T", "data", "chunk",
    "type_as", "expand_as", "record_stream",
}  # fmt: skip
STATISTICS = {"rsqrt", "rsqrt_", "square", "square_", "norm", "var", "std"}
SCALE_BINARY = (ast.Mult, ast.Div)


class Interpreter:
    """Runs functions of a tree abstractly.

    Args:
        tree: source to read.
        natives: models by function name, used wherever a function of that name is called.
        external: value of an external name by its dotted name, or None for an opaque External.
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

    # ---- names

    def _index(self, path: str) -> dict[str, list[tuple[ast.stmt, list[ast.expr]]]]:
        """Top-level bindings of a module: name → statements that bind it, with the conditions around them."""
        if path in self._top:
            return self._top[path]
        index: dict[str, list[tuple[ast.stmt, list[ast.expr]]]] = {}

        def visit(body: Iterable[ast.stmt], tests: list[ast.expr]) -> None:
            for node in body:
                names: list[str] = []
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                    names = [node.name]
                elif isinstance(node, ast.Import):
                    names = [a.asname or a.name.split(".")[0] for a in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [a.asname or a.name for a in node.names]
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        names += [n.id for n in ast.walk(target) if isinstance(n, ast.Name)]
                elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
                    names = [node.target.id]
                elif isinstance(node, ast.If):
                    visit(node.body, [*tests, node.test])
                    visit(node.orelse, [*tests, ast.UnaryOp(op=ast.Not(), operand=node.test)])
                elif isinstance(node, ast.Try):
                    # the body is what happens where the imports succeed; handlers bind names it does not
                    for handler in node.handlers:
                        visit(handler.body, [*tests, ast.Constant(value=None)])
                    visit(node.body, tests)
                elif isinstance(node, ast.With):
                    visit(node.body, tests)
                for name in names:
                    index.setdefault(name, []).append((node, tests))

        visit(self.tree.module_ast(path).body, [])
        self._top[path] = index
        return index

    def lookup_global(self, path: str, name: str) -> Value:
        """Value of a module-level name."""
        key = (path, name)
        if key in self._globals:
            return self._globals[key]
        if key in self._resolving:
            return Unknown(f"{name} is defined by itself")
        self._resolving.add(key)
        try:
            value = self._resolve_global(path, name)
        finally:
            self._resolving.discard(key)
        self._globals[key] = value
        return value

    def _resolve_global(self, path: str, name: str) -> Value:
        for node, tests in reversed(self._index(path).get(name, [])):
            frame = Frame(path, "<module>", {})
            self.frames.append(frame)
            try:
                if any(self.truth(self.evaluate(test)) is False for test in tests):
                    continue
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    return FunctionRef(path, node)
                if isinstance(node, ast.ClassDef):
                    return ClassRef(path, node)
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    self._import(node, frame)
                    return frame.names.get(name, Unknown(name))
                self._statement(node)
                return frame.names.get(name, Unknown(name))
            except PathEnd:
                continue
            finally:
                self.frames.pop()
        return External(name)

    def _module(self, dotted: str) -> ModuleRef:
        return ModuleRef(dotted, self.tree.module_path(dotted))

    def _import(self, node: ast.Import | ast.ImportFrom, frame: Frame) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    frame.names[alias.asname] = self._module(alias.name)
                else:
                    top = alias.name.split(".")[0]
                    frame.names[top] = self._module(top)
            return
        base = node.module or ""
        if node.level:
            package = frame.path.rsplit("/", 1)[0].split("/")
            package = package[: len(package) - (node.level - 1)]
            base = ".".join(package + ([base] if base else []))
        for alias in node.names:
            frame.names[alias.asname or alias.name] = self._member(base, alias.name)

    def _member(self, module: str, name: str, hops: int = 0) -> Value:
        path = self.tree.module_path(module)
        if path is None:
            sub = self.tree.module_path(f"{module}.{name}")
            return ModuleRef(f"{module}.{name}", sub) if sub else External(f"{module}.{name}")
        if name in self._index(path):
            return self.lookup_global(path, name)
        sub = self.tree.module_path(f"{module}.{name}")
        if sub:
            return ModuleRef(f"{module}.{name}", sub)
        if hops < 4:  # names that arrive by `from x import *`
            for node in self.tree.module_ast(path).body:
                if isinstance(node, ast.ImportFrom) and any(a.name == "*" for a in node.names) and node.module:
                    found = self._member(node.module, name, hops + 1)
                    if not isinstance(found, (External, Unknown)):
                        return found
        return External(f"{module}.{name}")

    def lookup(self, name: str) -> Value:
        frame = self.frames[-1]
        if name in frame.names:
            return frame.names[name]
        if name in self._index(frame.path):
            return self.lookup_global(frame.path, name)
        if name in ("True", "False", "None"):
            return Known({"True": True, "False": False, "None": None}[name])
        return External(name)

    # ---- classes

    def bases(self, cls: ClassRef) -> list[ClassRef]:
        """Method resolution order, depth first, classes of the tree only."""
        order = [cls]
        for base in cls.node.bases:
            self.frames.append(Frame(cls.path, "<class>", {}))
            try:
                value = self.evaluate(base.value if isinstance(base, ast.Subscript) else base)
            except PathEnd:
                continue
            finally:
                self.frames.pop()
            if isinstance(value, ClassRef):
                order += [c for c in self.bases(value) if all(c.node is not o.node for o in order)]
        return order

    def class_member(self, cls: ClassRef, name: str) -> tuple[ClassRef, ast.stmt] | None:
        """Definition of an attribute in the class or its bases."""
        for owner in self.bases(cls):
            for node in owner.node.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
                    return owner, node
                if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
                    return owner, node
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
                    return owner, node
        return None

    def is_open(self, cls: ClassRef) -> bool:
        """Whether objects of a class get attributes the reading does not see (weights registered at load)."""
        return False

    def is_subclass(self, cls: ClassRef, name: str) -> bool:
        return any(c.name == name for c in self.bases(cls))

    def record_fields(self, cls: ClassRef) -> list[str] | None:
        """Field names of a NamedTuple or dataclass, in order; None for other classes."""
        names = {ast.unparse(b).split("[")[0].split(".")[-1] for c in self.bases(cls) for b in c.node.bases}
        decorated = any("dataclass" in ast.unparse(d) for c in self.bases(cls) for d in c.node.decorator_list)
        if "NamedTuple" not in names and not decorated:
            return None
        fields: list[str] = []
        for owner in reversed(self.bases(cls)):
            for node in owner.node.body:
                if (
                    isinstance(node, ast.AnnAssign)
                    and isinstance(node.target, ast.Name)
                    and node.target.id not in fields
                ):
                    fields.append(node.target.id)
        return fields

    # ---- truth and joins

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

    # ---- sites

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
                if _mentions_multiply(node):
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

    # ---- statements

    def block(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        self.steps += 1
        if self.steps > self.max_steps:
            raise Budget(f"more than {self.max_steps} statements read")
        handler = getattr(self, f"_do_{type(node).__name__}", None)
        if handler is not None:
            handler(node)

    def _do_Expr(self, node: ast.Expr) -> None:
        self.evaluate(node.value)

    def _do_Assign(self, node: ast.Assign) -> None:
        value = self.evaluate(node.value)
        for target in node.targets:
            self.assign(target, value)

    def _do_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.assign(node.target, self.evaluate(node.value))

    def _do_AugAssign(self, node: ast.AugAssign) -> None:
        target = self.evaluate(_as_load(node.target))
        value = self.evaluate(node.value)
        if isinstance(target, Tensor):
            result = self.binary(node.op, target, value, node)
            self.write(target, self.carried(result))  # in place: every view sees it
            return
        self.assign(node.target, self.binary(node.op, target, value, node))

    def _do_Return(self, node: ast.Return) -> None:
        value = self.evaluate(node.value) if node.value is not None else Known(None)
        self.frames[-1].returns.append((value, self.state.copy()))
        raise _Return

    def _do_Raise(self, node: ast.Raise) -> None:
        self.refuse(node, ast.unparse(node.exc) if node.exc else "raise")

    def refuse(self, node: ast.AST, message: str) -> None:
        path, where = self._where()
        self.refusals.append(Refusal(file=path, line=getattr(node, "lineno", 0), where=where, message=message[:200]))
        raise PathEnd

    def _do_Assert(self, node: ast.Assert) -> None:
        if self.truth(self.evaluate(node.test)) is False:
            message = f"assert {ast.unparse(node.test)}"
            self.refuse(node, message + (f", {ast.unparse(node.msg)}" if node.msg else ""))

    def _do_Import(self, node: ast.Import) -> None:
        self._import(node, self.frames[-1])

    def _do_ImportFrom(self, node: ast.ImportFrom) -> None:
        self._import(node, self.frames[-1])

    def _do_FunctionDef(self, node: ast.FunctionDef) -> None:
        frame = self.frames[-1]
        frame.names[node.name] = FunctionRef(frame.path, node, closure=frame.names)

    def _do_Delete(self, node: ast.Delete) -> None:
        return None

    def _do_With(self, node: ast.With) -> None:
        for item in node.items:
            value = self.evaluate(item.context_expr)
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value)
        self.block(node.body)

    def _do_Try(self, node: ast.Try) -> None:
        before = self.state.copy()
        try:
            self.block(node.body)
        except PathEnd:
            if not node.handlers:
                raise
            self.state = before
            self.block(node.handlers[0].body)
        else:
            self.block(node.orelse)
        self.block(node.finalbody)

    def _do_For(self, node: ast.For) -> None:
        items = self.evaluate(node.iter)
        values: list[Value]
        if isinstance(items, Sequence) and 0 < len(items.items) <= 8:
            values = items.items
        else:
            values = [Unknown("loop variable")]

        def run(value: Value) -> None:
            self.assign(node.target, value)
            self.block(node.body)

        for value in values:
            self._optional(functools.partial(run, value))

    def _do_While(self, node: ast.While) -> None:
        if self.truth(self.evaluate(node.test)) is not False:
            self._optional(lambda: self.block(node.body))

    def _optional(self, run: Callable[[], object]) -> None:
        """Run a body that may or may not be run, and join."""
        before, names = self.state.copy(), dict(self.frames[-1].names)
        try:
            run()
        except PathEnd:
            self.state, self.frames[-1].names = before, names
            return
        except _Return:
            self.state, self.frames[-1].names = before, names
            return
        after, after_names = self.state, self.frames[-1].names
        self._merge(before, names, after, after_names)

    def _merge(self, a: State, names_a: dict[str, Value], b: State, names_b: dict[str, Value]) -> None:
        self.state = self.join_states(a, b)
        merged = dict(names_a)
        for name, value in names_b.items():
            mine = names_a.get(name)
            merged[name] = value if mine is None else self.join_values(mine, value, a.heap, b.heap)
        self.frames[-1].names.clear()
        self.frames[-1].names.update(merged)

    def _do_If(self, node: ast.If) -> None:
        test = ast.unparse(node.test).replace("\n", " ")[:140]
        decided = self.truth(self.evaluate(node.test))
        if decided is not None:
            taken, untaken = (node.body, node.orelse) if decided else (node.orelse, node.body)
            self.scan_untaken(untaken, f"{decided}: {test}")
            relevant = any(_mentions_multiply(n) for s in taken for n in ast.walk(s))
            if relevant:
                self.conditions.append(f"{decided}: {test}")
            try:
                self.block(taken)
            finally:
                if relevant:
                    self.conditions.pop()
            return
        self.forks += 1
        before, names = self.state.copy(), dict(self.frames[-1].names)
        ended: list[BaseException] = []
        outcomes: list[tuple[State, dict[str, Value]]] = []
        for branch, sign in ((node.body, ""), (node.orelse, "not ")):
            self.state = before.copy()
            self.frames[-1].names.clear()
            self.frames[-1].names.update(names)
            self.conditions.append(f"undecided: {sign}{test}")
            try:
                self.block(branch)
                outcomes.append((self.state, dict(self.frames[-1].names)))
            except (PathEnd, _Return) as end:
                ended.append(end)
            finally:
                self.conditions.pop()
        if not outcomes:
            raise next((e for e in ended if isinstance(e, _Return)), ended[0])
        self.state, merged = outcomes[0]
        self.frames[-1].names.clear()
        self.frames[-1].names.update(merged)
        if len(outcomes) == 2:
            self._merge(outcomes[0][0], outcomes[0][1], outcomes[1][0], outcomes[1][1])

    def assign(self, target: ast.expr, value: Value) -> None:
        if isinstance(target, ast.Name):
            index = target.id.endswith(("ids", "indices", "idx")) and "pack" not in target.id
            if isinstance(value, Tensor) and index:
                # expert numbers carry no factor; letting them would multiply the alternatives of the weights
                value = Tensor(label="index")
            self.frames[-1].names[target.id] = value
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts = self.unpack(value, len(target.elts))
            for element, part in zip(target.elts, parts, strict=True):
                self.assign(element.value if isinstance(element, ast.Starred) else element, part)
        elif isinstance(target, ast.Attribute):
            owner = self.evaluate(target.value)
            if isinstance(owner, Instance):
                self.state.attributes[owner.ident, target.attr] = value
            elif isinstance(owner, Record):
                owner.attributes[target.attr] = value
        elif isinstance(target, ast.Subscript):
            owner = self.evaluate(target.value)
            if isinstance(owner, Tensor):
                # x[...] = y writes part of x
                self.write(owner, self.carried(owner).joined(self.carried(value)))
            elif isinstance(owner, Mapping):
                key = self.evaluate(target.slice)
                if isinstance(key, Known) and isinstance(key.value, str):
                    owner.items[key.value] = value

    def unpack(self, value: Value, count: int) -> list[Value]:
        if isinstance(value, Sequence) and len(value.items) == count:
            return value.items
        if isinstance(value, Instance):
            fields = self.record_fields(value.cls)
            if fields and len(fields) == count:
                return [self.attribute(value, name, None) for name in fields]
        if isinstance(value, Tensor):
            return [value] * count
        return [Unknown("unpacked from an unknown value") for _ in range(count)]

    # ---- expressions

    def evaluate(self, node: ast.expr) -> Value:
        handler = getattr(self, f"_eval_{type(node).__name__}", None)
        return handler(node) if handler is not None else Unknown(type(node).__name__)

    def _eval_Constant(self, node: ast.Constant) -> Value:
        return Known(node.value)

    def _eval_Name(self, node: ast.Name) -> Value:
        return self.lookup(node.id)

    def _eval_JoinedStr(self, node: ast.JoinedStr) -> Value:
        return Unknown("a formatted string")

    def _eval_Tuple(self, node: ast.Tuple) -> Value:
        return Sequence([self.evaluate(e) for e in node.elts])

    def _eval_List(self, node: ast.List) -> Value:
        return Sequence([self.evaluate(e) for e in node.elts])

    def _eval_Set(self, node: ast.Set) -> Value:
        return Sequence([self.evaluate(e) for e in node.elts])

    def _eval_Dict(self, node: ast.Dict) -> Value:
        out: dict[str, Value] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            evaluated = self.evaluate(value)
            if key is None:
                if isinstance(evaluated, Mapping):
                    out.update(evaluated.items)
                continue
            name = self.evaluate(key)
            if isinstance(name, Known) and isinstance(name.value, str):
                out[name.value] = evaluated
        return Mapping(out)

    def _eval_Lambda(self, node: ast.Lambda) -> Value:
        frame = self.frames[-1]
        return FunctionRef(frame.path, node, closure=frame.names)

    def _eval_IfExp(self, node: ast.IfExp) -> Value:
        decided = self.truth(self.evaluate(node.test))
        if decided is not None:
            return self.evaluate(node.body if decided else node.orelse)
        left, right = self.evaluate(node.body), self.evaluate(node.orelse)
        return self.join_values(left, right, self.state.heap, self.state.heap)

    def _eval_BoolOp(self, node: ast.BoolOp) -> Value:
        stop = isinstance(node.op, ast.Or)
        undecided = False
        value: Value = Known(not stop)
        for operand in node.values:
            value = self.evaluate(operand)
            truth = self.truth(value)
            if truth is stop:
                return Known(stop) if undecided else value
            undecided = undecided or truth is None
        return Unknown(ast.unparse(node)[:80]) if undecided else value

    def _eval_UnaryOp(self, node: ast.UnaryOp) -> Value:
        value = self.evaluate(node.operand)
        if isinstance(node.op, ast.Not):
            truth = self.truth(value)
            return Unknown(ast.unparse(node)[:80]) if truth is None else Known(not truth)
        if isinstance(value, Known) and isinstance(value.value, (int, float)):
            return Known(-value.value if isinstance(node.op, ast.USub) else value.value)
        return value if isinstance(value, (Tensor, Scale)) else Unknown("unary")

    def _eval_Compare(self, node: ast.Compare) -> Value:
        if len(node.ops) != 1:
            return Unknown("chained comparison")
        left, right = self.evaluate(node.left), self.evaluate(node.comparators[0])
        op = node.ops[0]
        if (
            ast.unparse(node.left).endswith((".shape[0]", "num_tokens"))
            and isinstance(right, Known)
            and right.value == 0
        ):
            # the batch that is followed has tokens
            return Known(isinstance(op, (ast.Gt, ast.NotEq, ast.GtE)))
        if isinstance(op, (ast.Is, ast.IsNot)):
            same: bool | None = None
            none_left = isinstance(left, Known) and left.value is None
            none_right = isinstance(right, Known) and right.value is None
            if none_right or none_left:
                other = left if none_right else right
                if isinstance(other, Known):
                    same = other.value is None
                elif not isinstance(other, (Unknown, External)):
                    same = False
            elif isinstance(left, Known) and isinstance(right, Known):
                same = left.value == right.value
            elif isinstance(left, Record) and isinstance(right, Record):
                same = left.name == right.name
            return Unknown("identity") if same is None else Known(same == isinstance(op, ast.Is))
        if isinstance(op, (ast.In, ast.NotIn)):
            if isinstance(left, Known) and isinstance(right, Sequence):
                if all(isinstance(i, Known) for i in right.items):
                    inside = any(i.value == left.value for i in right.items if isinstance(i, Known))
                    return Known(inside == isinstance(op, ast.In))
            if isinstance(left, Known) and isinstance(right, Known) and isinstance(right.value, str):
                return Known((str(left.value) in right.value) == isinstance(op, ast.In))
            if isinstance(left, Record) and isinstance(right, Sequence):
                if all(isinstance(i, Record) for i in right.items):
                    inside = any(i.name == left.name for i in right.items if isinstance(i, Record))
                    return Known(inside == isinstance(op, ast.In))
            return Unknown("membership")
        if isinstance(left, External) and isinstance(right, External) and isinstance(op, (ast.Eq, ast.NotEq)):
            if left.name.startswith("torch.") and right.name.startswith("torch."):
                return Known((left.name == right.name) == isinstance(op, ast.Eq))
        if isinstance(left, Record) and isinstance(right, Record):
            same = left.name == right.name
            return Known(same == isinstance(op, ast.Eq)) if isinstance(op, (ast.Eq, ast.NotEq)) else Unknown("order")
        if isinstance(left, Scale) or isinstance(right, Scale):
            # the factor is neither 1, 0 nor negative, and of no further known size
            scale, other = (left, right) if isinstance(left, Scale) else (right, left)
            powers = scale.powers if isinstance(scale, Scale) else frozenset()
            if isinstance(other, Known) and isinstance(op, (ast.Eq, ast.NotEq)) and 0 not in powers:
                return Known(isinstance(op, ast.NotEq))
            return Unknown("comparison with the factor")
        if isinstance(left, Known) and isinstance(right, Known):
            try:
                result = {
                    ast.Eq: lambda a, b: a == b, ast.NotEq: lambda a, b: a != b, ast.Lt: lambda a, b: a < b,
                    ast.LtE: lambda a, b: a <= b, ast.Gt: lambda a, b: a > b, ast.GtE: lambda a, b: a >= b,
                }[type(op)](left.value, right.value)  # fmt: skip
            except (TypeError, KeyError):
                return Unknown("comparison")
            return Known(bool(result))
        return Unknown(ast.unparse(node)[:80])

    def _eval_BinOp(self, node: ast.BinOp) -> Value:
        return self.binary(node.op, self.evaluate(node.left), self.evaluate(node.right), node)

    def binary(self, op: ast.operator, left: Value, right: Value, node: ast.AST) -> Value:
        if isinstance(left, Known) and isinstance(right, Known):
            try:
                return Known(_ARITHMETIC[type(op)](left.value, right.value))
            except (KeyError, TypeError, ValueError, ZeroDivisionError, OverflowError):
                return Unknown("arithmetic")
        tensors = [v for v in (left, right) if isinstance(v, Tensor)]
        if tensors:
            if isinstance(op, SCALE_BINARY):
                scale = right if isinstance(left, Tensor) else left
                if isinstance(scale, Scale):
                    sign = -1 if isinstance(op, ast.Div) and isinstance(left, Tensor) else 1
                    powers = frozenset(sign * p for p in scale.powers)
                    return self.tensor(self.scale_at(node, self.carried(tensors[0]), powers))
                if len(tensors) == 2:
                    first, second = self.carried(left), self.carried(right)
                    # normalising by a sum of itself keeps the exponent at what it was before: weights / sum(weights)
                    if isinstance(op, ast.Div):
                        return self.tensor(first)
                    return self.tensor(first.times(second))
                return self.tensor(self.carried(tensors[0]))
            out = Carried()
            for tensor in tensors:
                out = out.joined(self.carried(tensor))
            return self.tensor(out)
        a, b = self.as_scale(left), self.as_scale(right)
        if a and b and isinstance(op, SCALE_BINARY):
            sign = -1 if isinstance(op, ast.Div) else 1
            return Scale(frozenset(x + sign * y for x in a for y in b))
        return Unknown("arithmetic")

    def _eval_Subscript(self, node: ast.Subscript) -> Value:
        owner = self.evaluate(node.value)
        if isinstance(owner, Tensor):
            return owner
        key = self.evaluate(node.slice)
        if isinstance(owner, Sequence) and isinstance(key, Known) and isinstance(key.value, int):
            if -len(owner.items) <= key.value < len(owner.items):
                return owner.items[key.value]
        if isinstance(owner, Mapping) and isinstance(key, Known):
            return owner.items.get(str(key.value), Unknown("a key that is not known"))
        if isinstance(owner, Instance):
            fields = self.record_fields(owner.cls)
            if fields and isinstance(key, Known) and isinstance(key.value, int) and key.value < len(fields):
                return self.attribute(owner, fields[key.value], node)
        if isinstance(owner, (External, FunctionRef)):
            return owner  # kernel[grid]
        return Unknown("subscript")

    def _eval_Starred(self, node: ast.Starred) -> Value:
        return self.evaluate(node.value)

    def _eval_NamedExpr(self, node: ast.NamedExpr) -> Value:
        value = self.evaluate(node.value)
        self.assign(node.target, value)
        return value

    def _eval_Await(self, node: ast.Await) -> Value:
        return self.evaluate(node.value)

    def _eval_Attribute(self, node: ast.Attribute) -> Value:
        return self.attribute(self.evaluate(node.value), node.attr, node)

    def attribute(self, owner: Value, name: str, node: ast.AST | None) -> Value:
        if isinstance(owner, Instance):
            key = (owner.ident, name)
            if key in self.state.attributes:
                return self.state.attributes[key]
            found = self.class_member(owner.cls, name)
            if found is None:
                if name == "_replace":
                    return Native("_replace", lambda i, a, k, n, o=owner: i.replace_fields(o, k))
                if name == "__class__":
                    return owner.cls
                return self.flag_default(name)
            where, definition = found
            if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
                decorators = {ast.unparse(d).split("(")[0].split(".")[-1] for d in definition.decorator_list}
                method = FunctionRef(where.path, definition, bound=owner, owner=where)
                if decorators & {"property", "cached_property"}:
                    return self.call(method, [], {}, node or definition)
                if "staticmethod" in decorators:
                    return FunctionRef(where.path, definition, owner=where)
                return method
            value = definition.value if isinstance(definition, (ast.Assign, ast.AnnAssign)) else None
            return self._class_value(where, value)
        if isinstance(owner, ClassRef):
            found = self.class_member(owner, name)
            if found is None:
                return External(f"{owner.name}.{name}")
            where, definition = found
            if isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
                decorators = {ast.unparse(d) for d in definition.decorator_list}
                bound = owner if "classmethod" in decorators else None
                return FunctionRef(where.path, definition, bound=bound, owner=where)
            if any("Enum" in ast.unparse(b) for c in self.bases(owner) for b in c.node.bases):
                value = definition.value if isinstance(definition, ast.Assign) else None
                return self.enum_member(owner, name, self._class_value(where, value))
            value = definition.value if isinstance(definition, (ast.Assign, ast.AnnAssign)) else None
            return self._class_value(where, value)
        if isinstance(owner, Record):
            if name == "_replace":
                return Native(
                    "_replace",
                    lambda i, a, k, n, o=owner: Record(o.name, {**o.attributes, **k}, o.missing),
                )
            if name in owner.attributes:
                found_value = owner.attributes[name]
                if isinstance(found_value, Value):
                    return found_value
                model = found_value
                return Native(f"{owner.name}.{name}", lambda interp, args, kwargs, at, f=model: f(*args))
            return owner.missing(name) if owner.missing else Unknown(f"{owner.name}.{name}")
        if isinstance(owner, ModuleRef):
            return self._member(owner.name, name) if owner.path else External(f"{owner.name}.{name}")
        if isinstance(owner, Tensor):
            if name == "dtype" and owner.label.startswith("torch."):
                return External(owner.label)
            if name in ("shape", "dtype", "device", "numel", "dim", "ndim", "is_cuda", "stride", "size", "ndimension"):
                return Unknown(name)
            if name in ("T", "data"):
                return owner
            return Native(
                f"tensor.{name}",
                lambda interp, args, kwargs, at, t=owner, m=name: interp.tensor_method(t, m, args, kwargs, at),
            )
        if isinstance(owner, External):
            return External(f"{owner.name}.{name}")
        if isinstance(owner, Mapping):
            return Native(
                f"dict.{name}", lambda interp, args, kwargs, at, d=owner, m=name: interp.dict_method(d, m, args, kwargs)
            )
        if isinstance(owner, Unknown):
            return self.flag_default(name)
        return Unknown(name)

    def replace_fields(self, owner: Instance, changes: dict[str, Value]) -> Value:
        """`namedtuple._replace`."""
        copy = Instance(owner.cls)
        for (ident, name), value in list(self.state.attributes.items()):
            if ident == owner.ident:
                self.state.attributes[copy.ident, name] = value
        for name, value in changes.items():
            self.state.attributes[copy.ident, name] = value
        return copy

    def enum_member(self, cls: ClassRef, name: str, value: Value) -> Value:
        """A member of an enum of the tree: its predicates (`is_x`) are interpreted on it."""
        member = Instance(cls)
        member.ident = -(abs(hash((cls.path, cls.name, name))) % (1 << 60)) - 1
        self.state.attributes[member.ident, "value"] = value
        self.state.attributes[member.ident, "name"] = Known(name)
        return Record(
            f"{cls.name}.{name}",
            {"value": value, "name": Known(name)},
            missing=lambda attr, c=cls, n=name: self._enum_predicate(c, n, attr),
        )

    def _enum_predicate(self, cls: ClassRef, member: str, attr: str) -> Value:
        if attr.startswith("is_"):
            found = self.class_member(cls, attr)
            if found is None:
                return Native(attr, lambda interp, args, kwargs, at: Known(False))
            definition = found[1]
            if isinstance(definition, ast.FunctionDef):
                members = {n.attr for n in ast.walk(definition) if isinstance(n, ast.Attribute) and n.attr.isupper()}
                negated = any(isinstance(n, (ast.NotEq, ast.NotIn)) for n in ast.walk(definition))
                result = (member in members) != negated
                return Native(attr, lambda interp, args, kwargs, at, r=result: Known(r))
        return Unknown(f"{cls.name}.{member}.{attr}")

    def _class_value(self, cls: ClassRef, node: ast.expr | None) -> Value:
        if node is None:
            return Unknown("declared without a value")
        self.frames.append(Frame(cls.path, f"{cls.name}.<body>", {}))
        try:
            return self.evaluate(node)
        except PathEnd:
            return Unknown("class attribute")
        finally:
            self.frames.pop()

    # ---- calls

    def _eval_Call(self, node: ast.Call) -> Value:
        target = self._special_call(node)
        if target is not None:
            return target
        function = self.evaluate(node.func)
        args: list[Value] = []
        for arg in node.args:
            value = self.evaluate(arg)
            if isinstance(arg, ast.Starred):
                args += value.items if isinstance(value, Sequence) else [value]
            else:
                args.append(value)
        kwargs: dict[str, Value] = {}
        for keyword in node.keywords:
            value = self.evaluate(keyword.value)
            if keyword.arg is None:
                if isinstance(value, Mapping):
                    kwargs.update(value.items)
            else:
                kwargs[keyword.arg] = value
        return self.call(function, args, kwargs, node)

    def _special_call(self, node: ast.Call) -> Value | None:
        if not isinstance(node.func, ast.Name):
            return None
        name = node.func.id
        if name == "super" and self.frames[-1].owner is not None:
            owner = self.frames[-1].owner
            instance = self.frames[-1].self_value
            order = self.bases(instance.cls) if isinstance(instance, Instance) else self.bases(owner)
            after = [c for i, c in enumerate(order) if any(p.node is owner.node for p in order[:i])]
            return Record("super", {}, missing=lambda attr: self._super_member(after, attr, instance))
        if name == "isinstance" and len(node.args) == 2:
            value = self.evaluate(node.args[0])
            classes = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            names = {ast.unparse(c).split(".")[-1] for c in classes}
            if isinstance(value, Instance):
                return Known(any(self.is_subclass(value.cls, n) for n in names))
            if isinstance(value, Record):
                return Known(value.name in names)
            if isinstance(value, Known):
                return Known(type(value.value).__name__ in names)
            if isinstance(value, Tensor):
                return Known("Tensor" in names)
            return Unknown(ast.unparse(node)[:80])
        if name in ("getattr", "hasattr") and len(node.args) >= 2:
            owner = self.evaluate(node.args[0])
            attr = self.evaluate(node.args[1])
            if not (isinstance(attr, Known) and isinstance(attr.value, str)):
                return Unknown(ast.unparse(node)[:80])
            present: bool | None = None
            if isinstance(owner, Instance):
                present = (owner.ident, attr.value) in self.state.attributes
                present = present or self.class_member(owner.cls, attr.value) is not None
                if not present and self.is_open(owner.cls):
                    present = None
            elif isinstance(owner, Record):
                present = attr.value in owner.attributes
            elif isinstance(owner, Known):
                present = False
            if name == "hasattr":
                return Unknown(ast.unparse(node)[:80]) if present is None else Known(present)
            if present:
                return self.attribute(owner, attr.value, node)
            if present is False and len(node.args) == 3:
                return self.evaluate(node.args[2])
            return self.attribute(owner, attr.value, node)
        if name in ("bool", "float", "int") and len(node.args) == 1:
            value = self.evaluate(node.args[0])
            if name == "bool":
                truth = self.truth(value)
                return Unknown("bool") if truth is None else Known(truth)
            return value if isinstance(value, (Scale, Known)) else Unknown(name)
        if name == "dict":
            return Mapping({k.arg: self.evaluate(k.value) for k in node.keywords if k.arg})
        if name == "type" and len(node.args) == 1:
            value = self.evaluate(node.args[0])
            return value.cls if isinstance(value, Instance) else Unknown("type")
        if name == "callable":
            return Unknown("callable")
        if name in ("len", "max", "min", "str", "print", "repr", "range", "sum", "any", "all", "sorted", "id"):
            for arg in node.args:
                self.evaluate(arg.value if isinstance(arg, ast.Starred) else arg)
            return Unknown(name)
        return None

    def _super_member(self, after: list[ClassRef], attr: str, instance: Value | None) -> Value:
        for cls in after:
            for node in cls.node.body:
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == attr:
                    return FunctionRef(cls.path, node, bound=instance, owner=cls)
        return Native(f"super().{attr}", lambda interp, args, kwargs, at: Unknown("outside the tree"))

    def call(self, function: Value, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        name = getattr(function, "name", "")
        short = name.split(".")[-1] if isinstance(name, str) else ""
        if isinstance(function, (FunctionRef, External)) and short in self.natives:
            return self.natives[short].call(self, args, kwargs, node)
        if isinstance(function, Native):
            return function.call(self, args, kwargs, node)
        if isinstance(function, ClassRef):
            return self.construct(function, args, kwargs, node)
        if isinstance(function, Instance):
            return self.call_module(function, args, kwargs, node)
        if isinstance(function, Record) and isinstance(function.attributes.get("__call__"), Native):
            return self.call(function.attributes["__call__"], args, kwargs, node)
        if isinstance(function, FunctionRef):
            return self.invoke(function, args, kwargs, node)
        return self.opaque(function, args, kwargs, node)

    def construct(self, cls: ClassRef, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        if cls.name in self.natives:
            return self.natives[cls.name].call(self, args, kwargs, node)
        instance = Instance(cls)
        initialiser = self.class_member(cls, "__init__")
        fields = self.record_fields(cls)
        if fields is not None and (initialiser is None or not isinstance(initialiser[1], ast.FunctionDef)):
            for name, value in itertools.chain(zip(fields, args, strict=False), kwargs.items()):
                self.state.attributes[instance.ident, name] = value
            return instance
        if initialiser is not None and isinstance(initialiser[1], ast.FunctionDef):
            where, definition = initialiser
            self.invoke(FunctionRef(where.path, definition, bound=instance, owner=where), args, kwargs, node)
        return instance

    def call_module(self, instance: Instance, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        """`module(...)`: forward, or the platform's forward_<platform>."""
        for name in self.forward_names:
            if self.class_member(instance.cls, name) is not None:
                return self.call(self.attribute(instance, name, node), args, kwargs, node)
        return self.opaque(External(instance.cls.name), args, kwargs, node)

    forward_names: tuple[str, ...] = ("forward", "__call__")
    watch: "Callable[[Interpreter, str, list[tuple[Value, State]]], None] | None" = None
    """Called with each function's name and returned values, for finding where a reading loses its way."""

    def invoke(self, function: FunctionRef, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        recursive = sum(1 for f in self.frames if f.qualname.endswith(function.name)) > 3
        if len(self.frames) > self.max_depth or recursive or self._is_kernel(function):
            return self.opaque(External(function.name), args, kwargs, node, function)
        qualname = f"{function.owner.name}.{function.name}" if function.owner else function.name
        names = dict(function.closure) if function.closure else {}
        if not self._bind(function, args, kwargs, names):
            return self.opaque(External(function.name), args, kwargs, node)
        frame = Frame(function.path, qualname, names, owner=function.owner, self_value=function.bound)
        if isinstance(function.node, ast.Lambda):
            self.frames.append(frame)
            try:
                return self.evaluate(function.node.body)
            finally:
                self.frames.pop()
        if any(isinstance(n, (ast.Yield, ast.YieldFrom)) for n in ast.walk(function.node)):
            return self._generate(function.node, frame)
        self.frames.append(frame)
        refusals_before = len(self.refusals)
        ended = False
        try:
            self.block(function.node.body)
        except _Return:
            ended = True
        except PathEnd:
            if not frame.returns:
                raise
            ended = True
        finally:
            self.frames.pop()
        outcomes = frame.returns if ended else [*frame.returns, (Known(None), self.state)]
        if outcomes and len(self.refusals) > refusals_before:
            # a raise on another path is no refusal of this one
            del self.refusals[refusals_before:]
        if self.watch is not None:
            self.watch(self, qualname, outcomes)
        value, state = outcomes[0]
        self.state = state
        for other, other_state in outcomes[1:]:
            heap_a, heap_b = self.state.heap, other_state.heap
            self.state = self.join_states(self.state, other_state)
            value = self.join_values(value, other, heap_a, heap_b)
        return value

    def _generate(self, node: ast.FunctionDef | ast.AsyncFunctionDef, frame: Frame) -> Value:
        """A generator that yields tensors stands for what it yields (blocks of one result); any other is not known."""
        self.frames.append(frame)
        try:
            self.block(node.body)
        except (_Return, PathEnd):
            pass
        finally:
            self.frames.pop()
        tensors = [value for value in frame.yields if isinstance(value, Tensor)]
        if not tensors:
            return Unknown("a generator")
        value: Value = tensors[0]
        for other in tensors[1:]:
            value = self.join_values(value, other, self.state.heap, self.state.heap)
        return value

    def _eval_Yield(self, node: ast.Yield) -> Value:
        self.frames[-1].yields.append(self.evaluate(node.value) if node.value is not None else Known(None))
        return Unknown("sent to a generator")

    def _is_kernel(self, function: FunctionRef) -> bool:
        decorators = [ast.unparse(d) for d in getattr(function.node, "decorator_list", [])]
        return any(d.startswith(("triton.jit", "tilelang", "cute.", "triton.autotune", "T.prim")) for d in decorators)

    def _bind(self, f: FunctionRef, args: list[Value], kwargs: dict[str, Value], names: dict[str, Value]) -> bool:
        spec = f.node.args
        positional = [a.arg for a in (*spec.posonlyargs, *spec.args)]
        given = ([f.bound] if f.bound is not None else []) + args
        defaults = dict(zip(positional[len(positional) - len(spec.defaults) :], spec.defaults, strict=True))
        defaults |= {a.arg: d for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None}
        for name, value in zip(positional, given, strict=False):
            names[name] = value
        if len(given) > len(positional):
            if spec.vararg is None:
                return False
            names[spec.vararg.arg] = Sequence(given[len(positional) :])
        elif spec.vararg is not None:
            names[spec.vararg.arg] = Sequence([])
        allowed = {*positional, *(a.arg for a in spec.kwonlyargs)}
        extra = {k: v for k, v in kwargs.items() if k not in allowed}
        names.update({k: v for k, v in kwargs.items() if k in allowed})
        if spec.kwarg is not None:
            names[spec.kwarg.arg] = Mapping(extra)
        for name in (*positional, *(a.arg for a in spec.kwonlyargs)):
            if name not in names or (name not in kwargs and name not in positional[: len(given)]):
                default = defaults.get(name)
                if default is None:
                    names[name] = Unknown(f"argument {name}")
                else:
                    self.frames.append(Frame(f.path, f.name, {}))
                    try:
                        names[name] = self.evaluate(default)
                    finally:
                        self.frames.pop()
        return True

    def dict_method(self, owner: Mapping, name: str, args: list[Value], kwargs: dict[str, Value]) -> Value:
        if name == "update":
            for value in args:
                if isinstance(value, Mapping):
                    owner.items.update(value.items)
            owner.items.update(kwargs)
            return Known(None)
        if name in ("get", "pop") and args and isinstance(args[0], Known):
            if str(args[0].value) in owner.items:
                return owner.items[str(args[0].value)]
            return args[1] if len(args) > 1 else Known(None)
        if name == "setdefault" and len(args) == 2 and isinstance(args[0], Known):
            return owner.items.setdefault(str(args[0].value), args[1])
        return Unknown(f"dict.{name}")

    def tensor_method(self, t: Tensor, name: str, args: list[Value], kwargs: dict[str, Value], node: ast.AST) -> Value:
        mine = self.carried(t)
        if name in TENSOR_MAKERS:
            return self.tensor(label="fresh")
        if name in ("mul_", "mul", "div", "div_"):
            scale = args[0] if args else Unknown()
            if isinstance(scale, Scale):
                sign = -1 if name.startswith("div") else 1
                out = self.scale_at(node, mine, frozenset(sign * p for p in scale.powers))
            else:
                out = mine.times(self.carried(scale)) if name.startswith("mul") else mine
            if name.endswith("_"):
                self.write(t, out)
                return t
            return self.tensor(out)
        if name in ("add_", "add", "sub", "sub_"):
            other = args[0] if args else Unknown()
            theirs = self.carried(other)
            alpha = kwargs.get("alpha")
            if isinstance(alpha, Scale):
                theirs = self.scale_at(node, theirs, alpha.powers)
            out = mine.joined(theirs)
            if name.endswith("_"):
                self.write(t, out)
                return t
            return self.tensor(out)
        if name == "copy_":
            if args:
                self.write(t, self.carried(args[0]))
            return t
        if name in STATISTICS:
            # a norm's statistic divides by what it measured: it is no further application of the factor
            if name.endswith("_"):
                self.write(t, NOTHING)
            return self.tensor()
        if name in VIEWS:
            return t
        if name in ("split", "unbind", "chunk", "tensor_split"):
            return t
        if name.endswith("_"):
            out = mine
            for value in (*args, *kwargs.values()):
                out = out.joined(self.carried(value))
            self.write(t, out)
            return t
        return self.tensor(mine)

    def _fresh(self, tensor: Tensor) -> bool:
        """Whether a buffer was made for a kernel to write and has not been written."""
        empty = tensor.label == "fresh" and self.carried(tensor) == NOTHING
        return empty or any(self._fresh(t) for t in tensor.either)

    def _tensors_in(self, value: Value, depth: int = 2) -> list[Tensor]:
        if isinstance(value, Tensor):
            return [value]
        if isinstance(value, Sequence):
            return [t for item in value.items for t in self._tensors_in(item, depth)]
        if isinstance(value, Mapping):
            return [t for item in value.items.values() for t in self._tensors_in(item, depth)]
        if isinstance(value, Instance) and depth:
            found = []
            for (ident, _), attribute in list(self.state.attributes.items()):
                if ident == value.ident and isinstance(attribute, (Tensor, Sequence, Instance)):
                    found += self._tensors_in(attribute, depth - 1)
            return found
        return []

    def opaque(
        self,
        function: Value,
        args: list[Value],
        kwargs: dict[str, Value],
        node: ast.AST,
        body: FunctionRef | None = None,
    ) -> Value:
        """A call whose body is not run: torch, a compiled kernel, a Triton kernel (its body is read for multiplies)."""
        name = getattr(function, "name", "") or (ast.unparse(node.func) if isinstance(node, ast.Call) else "unknown")
        short = str(name).split(".")[-1].split("[")[0]
        if short in TENSOR_MAKERS:
            return self.tensor(label="fresh")
        if short == "ContextVar":
            default = kwargs.get("default", Known(None))
            return Record("ContextVar", {"get": Native("get", lambda i, a, k, n: default)})
        if name in ("os.environ.get", "os.getenv") and args and isinstance(args[0], Known):
            found = self.environment(str(args[0].value))
            return args[1] if isinstance(found, Unknown) and len(args) > 1 else found
        values = [*args, *kwargs.values()]
        tensors = [t for value in values for t in self._tensors_in(value)]
        if short in ("mul", "add", "sub", "div") and args and isinstance(args[0], Tensor):
            out = kwargs.get("out")
            result = self.tensor_method(args[0], short, args[1:], kwargs, node)
            if isinstance(out, Tensor):
                self.write(out, self.carried(result))
            return result
        carried = Carried()
        for ident in dict.fromkeys(t.ident for t in tensors):
            carried = carried.times(self.state.heap.get(ident, Carried()))
        powers, note = self._opaque_powers(args, kwargs, short, body, node)
        if powers is not None:
            carried = Carried(self.scale_at(node, Carried(carried.routed), powers, note).routed, carried.shared)
        elif note:
            self.site(node, False, note)
        if carried != Carried():
            # kernels write into buffers that were made for them, and into arguments called output
            written = [t for t in tensors if self._fresh(t)]
            written += [v for k, v in kwargs.items() if isinstance(v, Tensor) and k.startswith("out")]
            names = [ast.unparse(a) for a in getattr(node, "args", [])]
            written += [v for k, v in zip(names, args, strict=False) if isinstance(v, Tensor) and k.startswith("out")]
            if "sum_reduce" in short or "moe_sum" in short:
                written += [v for v in args[1:2] if isinstance(v, Tensor)]
            for tensor in written:
                self.write(tensor, carried)
        if tensors or powers is not None:
            return self.tensor(carried, label="opaque")
        return Unknown(f"{name}()")

    def _opaque_powers(
        self, args: list[Value], kwargs: dict[str, Value], short: str, body: FunctionRef | None, node: ast.AST
    ) -> tuple[Exponents | None, str]:
        """Exponent a compiled callee adds, from what it is handed, and a remark on why."""
        scales = [v for v in args if isinstance(v, Scale)]
        scales += [v for k, v in kwargs.items() if isinstance(v, Scale)]
        flags = {k: v for k, v in kwargs.items() if _is_flag(k)}
        for position, argument in enumerate(getattr(node, "args", [])):
            text = ast.unparse(argument)
            if position < len(args) and _is_flag(text) and not isinstance(args[position], Scale):
                flags[text] = args[position]
        if scales and body is not None and isinstance(body.node, ast.FunctionDef):
            powers = self.powers_in_body(body, args, kwargs)
            return powers, f"read in the body of {short}"
        if not scales:
            if any(FACTOR in k for k in kwargs):
                return None, f"{short} is given no factor"
            return None, ""
        for key, flag in flags.items():
            truth = self.truth(flag)
            if truth is False:
                return frozenset({0}), f"{short}({key}=False)"
            if truth is None:
                self.note_unresolved(f"{key} of {short} is not known")
                return frozenset({0}) | scales[0].powers, f"{short}({key} unknown)"
            return scales[0].powers, f"{short}({key}=True)"
        model = self.kernel_model(short)
        if model is not None:
            return model, f"read from the source of {short}"
        return scales[0].powers, f"{short} is handed the factor"

    def powers_in_body(self, body: FunctionRef, args: list[Value], kwargs: dict[str, Value]) -> Exponents:
        """Exponent a Triton kernel applies: its multiplies by a factor argument, conditions decided."""
        names: dict[str, Value] = {}
        if not self._bind(body, args, kwargs, names):
            return frozenset({0, 1})
        # by name too: a starred argument of unknown length hides which position the factor landed in
        factors = {name for name, value in names.items() if isinstance(value, Scale) or FACTOR in name.lower()}
        powers: set[int] = set()

        def visit(statements: Iterable[ast.stmt], certain: bool) -> None:
            for statement in statements:
                if isinstance(statement, ast.If):
                    decided = self.truth(self.evaluate(statement.test))
                    if decided is not False:
                        visit(statement.body, certain and decided is True)
                    if decided is not True:
                        visit(statement.orelse, certain and decided is False)
                    continue
                if isinstance(statement, (ast.For, ast.While)):
                    visit(statement.body, certain)
                    continue
                for n in ast.walk(statement):
                    product = isinstance(n, (ast.BinOp, ast.AugAssign)) and isinstance(n.op, ast.Mult)
                    sides = [n.left, n.right] if isinstance(n, ast.BinOp) else [getattr(n, "value", None)]
                    if product and any(isinstance(x, ast.Name) and x.id in factors for x in sides):
                        powers.update({1} if certain else {0, 1})

        self.frames.append(Frame(body.path, body.name, names))
        try:
            visit(body.node.body, True)
        except PathEnd:
            return frozenset({0, 1})
        finally:
            self.frames.pop()
        return frozenset(powers or {0})

    def kernel_model(self, short: str) -> Exponents | None:
        """Hook: exponent a named compiled kernel adds; None: as handed."""
        return None

    def note_unresolved(self, text: str) -> None:
        path, where = self._where()
        self.unresolved.setdefault((path, len(self.unresolved)), f"{path}: {where}: {text}")


_ARITHMETIC: dict[type[ast.operator], Callable[..., object]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
    ast.BitAnd: lambda a, b: a & b,
    ast.BitOr: lambda a, b: a | b,
}


def _is_flag(name: str) -> bool:
    lowered = name.lower()
    return "apply" in lowered and "scal" in lowered


def _as_load(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body


def _mentions_multiply(node: ast.AST) -> bool:
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
