"""What a statement does; a condition that cannot be decided takes both ways and joins them."""

import ast
import functools
from collections.abc import Callable, Iterable

from longrecall.kernels.contract.expressions import Expressions
from longrecall.kernels.contract.machine import mentions_multiply
from longrecall.kernels.contract.values import (
    Budget,
    FunctionRef,
    Instance,
    Known,
    Mapping,
    PathEnd,
    Record,
    Sequence,
    State,
    Tensor,
    Unknown,
    Value,
)


class Returned(Exception):
    pass


class Statements(Expressions):
    """One method for each kind of statement."""

    def block(self, body: Iterable[ast.stmt]) -> None:
        for statement in body:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
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
        raise Returned

    def _do_Raise(self, node: ast.Raise) -> None:
        self.refuse(node, ast.unparse(node.exc) if node.exc else "raise")

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
        except Returned:
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
            relevant = any(mentions_multiply(n) for s in taken for n in ast.walk(s))
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
            except (PathEnd, Returned) as end:
                ended.append(end)
            finally:
                self.conditions.pop()
        if not outcomes:
            raise next((e for e in ended if isinstance(e, Returned)), ended[0])
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


def _as_load(node: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(node), mode="eval").body
