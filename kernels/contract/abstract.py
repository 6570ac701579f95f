"""An abstract interpreter for Python source that follows one quantity: the exponent n of `routed_scaling_factor`**n.

It runs functions of a `SourceTree` on abstract values. A tensor carries the exponents its routed and its shared part
may have; the factor itself is a `Scale`. A condition that cannot be decided takes both ways and joins them. Anything
it does not know is an `Unknown`, which never decides a branch. External calls (torch, compiled kernels) are opaque:
they multiply when the factor is handed to them and no flag of the call says otherwise, and that is recorded as a site.

This is a reading aid for one contract, not a Python implementation: loops run once, exceptions end a path. One class in
layers on shared state: `machine.py` (values, joins, sites), `names.py`, `expressions.py`, `statements.py`, `opaque.py`
(calls that are not run), and calls that are run, here.
"""

import ast
import itertools
from collections.abc import Callable

from longrecall.kernels.contract.opaque import Opaque
from longrecall.kernels.contract.statements import Returned
from longrecall.kernels.contract.values import (
    ClassRef,
    External,
    Frame,
    FunctionRef,
    Instance,
    Known,
    Mapping,
    Native,
    PathEnd,
    Record,
    Scale,
    Sequence,
    State,
    Tensor,
    Unknown,
    Value,
)


class Interpreter(Opaque):
    """Runs functions of a tree abstractly."""

    forward_names: tuple[str, ...] = ("forward", "__call__")

    watch: "Callable[[Interpreter, str, list[tuple[Value, State]]], None] | None" = None
    """Called with each function's name and returned values, for finding where a reading loses its way."""

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
        except Returned:
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
        except (Returned, PathEnd):
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
