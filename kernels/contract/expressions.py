"""What an expression is worth."""

import ast
from collections.abc import Callable

from longrecall.kernels.contract.names import Names
from longrecall.kernels.contract.values import (
    Carried,
    External,
    FunctionRef,
    Instance,
    Known,
    Mapping,
    Record,
    Scale,
    Sequence,
    Tensor,
    Unknown,
    Value,
)

SCALE_BINARY = (ast.Mult, ast.Div)

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


class Expressions(Names):
    """One method for each kind of expression; calls are in `abstract.py`."""

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
