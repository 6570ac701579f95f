"""Calls whose bodies are not run: methods of tensors and mappings, torch, compiled and Triton kernels."""

import ast
from collections.abc import Iterable

from longrecall.kernels.contract.statements import Statements
from longrecall.kernels.contract.values import (
    FACTOR,
    NOTHING,
    Carried,
    Exponents,
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
    Tensor,
    Unknown,
    Value,
)

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


class Opaque(Statements):
    """Follows the factor through calls by what they are handed."""

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


def _is_flag(name: str) -> bool:
    lowered = name.lower()
    return "apply" in lowered and "scal" in lowered
