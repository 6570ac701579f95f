"""What a name stands for: module globals, imports, classes with their bases, attributes, arguments."""

import ast
from collections.abc import Iterable

from longrecall.kernels.contract.machine import Machine
from longrecall.kernels.contract.values import (
    ClassRef,
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
    Sequence,
    Tensor,
    Unknown,
    Value,
)


class Names(Machine):
    """Looks names up in frames, modules and classes of the tree."""

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
                self.statement(node)
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
