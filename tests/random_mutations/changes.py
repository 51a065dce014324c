"""Every simple change of one place in a function."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
}
_OPERATORS = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "//",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.Div: "*",
    ast.BitOr: "&",
    ast.BitAnd: "|",
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "iter"}
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
"""Messages, and what type checkers notice."""


class _Edit(NamedTuple):
    """What takes the place of the source from the beginning of one node to the end of another."""

    first: ast.expr | ast.stmt
    last: ast.expr | ast.stmt
    text: str


@dataclass(frozen=True)
class Change:
    """One place of a file, and what stands there instead."""

    file: str
    """Under src/colonnade."""
    function: str
    """As `Class.method`."""
    line: int
    start: int
    """Bytes from the beginning of the file, as `end`."""
    end: int
    text: str

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]

    def shown(self, source: bytes) -> str:
        """The lines before and after, as a diff shows them."""
        first = source.rfind(b"\n", 0, self.start) + 1
        last = source.find(b"\n", self.end)
        old, new = source[first:last], source[first : self.start] + self.text.encode() + source[self.end : last]
        lines = [f"- {line}" for line in old.decode().split("\n")] + [f"+ {line}" for line in new.decode().split("\n")]
        return "\n".join([f"{self.file}:{self.line} {self.function}", *lines])


def drawn(path: Path, root: Path, draw: Random) -> Iterator[Change]:
    """One change of each function that has any, of a file below `root`."""
    source = _Source(path.read_bytes())
    tree = ast.parse(source.content)
    meaning = ast.dump(tree)
    for name, function in functions(tree):
        edits = list(_Edits(source).of(function))
        draw.shuffle(edits)
        for first, last, text in edits:
            where = source.begin(first), source.end(last)
            change = Change(str(path.relative_to(root)), name, first.lineno, *where, text)
            if _means_something_else(change.applied(source.content), meaning):
                yield change
                break


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions of a module and methods of its classes; what is defined within them is a part of them."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef(name=name):
                yield prefix + name, child
            case ast.ClassDef(name=name):
                yield from functions(child, f"{prefix}{name}.")


def _means_something_else(source: bytes, meaning: str) -> bool:
    try:
        return ast.dump(ast.parse(source)) != meaning
    except SyntaxError:
        return False


class _Source:
    """The bytes of a file, and where nodes begin and end in them."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self._lines = [0, *(match.end() for match in re.finditer(b"\n", content))]

    def begin(self, node: ast.expr | ast.stmt) -> int:
        return self._lines[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None, "ast.parse fills them in"
        return self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr) -> str:
        return self.content[self.begin(node) : self.end(node)].decode()


class _Edits:
    def __init__(self, source: _Source) -> None:
        self._ = source.text

    def of(self, function: ast.FunctionDef) -> Iterator[_Edit]:
        body = function.body if ast.get_docstring(function) is None else function.body[1:]
        for node in (*function.args.defaults, *filter(None, function.args.kw_defaults), *body):
            yield from self._below(node)

    def _below(self, node: ast.AST) -> Iterator[_Edit]:
        match node:
            case _ if isinstance(node, _LEFT_ALONE):
                return
            case ast.FunctionDef():
                yield from self.of(node)
                return
            case ast.AnnAssign(value=value):
                yield from () if value is None else self._below(value)
                return
            case ast.stmt():
                yield from self._of_statement(node)
            case ast.expr():
                yield from self._of_expression(node)
            case ast.comprehension(ifs=conditions):
                yield from (_Edit(condition, condition, "True") for condition in conditions)
        for child in ast.iter_child_nodes(node):
            yield from self._below(child)

    def _of_statement(self, node: ast.stmt) -> Iterator[_Edit]:
        match node:
            case ast.If(test=test):
                yield from (_Edit(test, test, text) for text in ("True", "False", f"(not ({self._(test)}))"))
            case ast.While(test=test):
                yield _Edit(test, test, f"(not ({self._(test)}))")
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
                yield _Edit(node, node, "pass")
            case ast.Assign(targets=targets) if all(isinstance(t, ast.Attribute | ast.Subscript) for t in targets):
                yield _Edit(node, node, "pass")

    def _of_expression(self, node: ast.expr) -> Iterator[_Edit]:
        match node:
            case ast.Compare(left=left, ops=[operator], comparators=[right]):
                yield _Edit(node, node, f"({self._(left)} {_COMPARISONS[type(operator)]} {self._(right)})")
            case ast.BoolOp(op=operator, values=values):
                word, other = (" and ", " or ")[:: 1 if isinstance(operator, ast.And) else -1]
                parts = [f"({self._(value)})" for value in values]
                yield _Edit(node, node, f"({other.join(parts)})")
                for i in range(len(parts)):
                    yield _Edit(node, node, f"({word.join(parts[:i] + parts[i + 1 :])})")
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield _Edit(node, node, f"({self._(operand)})")
            case ast.BinOp(left=left, op=operator, right=right) if type(operator) in _OPERATORS:
                if not (_is_text(left) or _is_text(right)):
                    yield _Edit(node, node, f"({self._(left)} {_OPERATORS[type(operator)]} {self._(right)})")
                    yield _Edit(node, node, f"({self._(left)})")
            case ast.Constant(value=bool(value)):
                yield _Edit(node, node, str(not value))
            case ast.Constant(value=int(value) | float(value)):
                yield _Edit(node, node, repr(value + 1))
            case ast.IfExp(body=body, orelse=other):
                yield from (_Edit(node, node, f"({self._(each)})") for each in (body, other))
            case ast.Subscript(value=value, slice=ast.Slice()):
                yield _Edit(node, node, f"{self._(value)}[:]")
            case ast.Call():
                yield from self._of_call(node)

    def _of_call(self, node: ast.Call) -> Iterator[_Edit]:
        match node.func:
            case ast.Name(id=name) if name in _FUNCTIONS:
                yield _Edit(node.func, node.func, _FUNCTIONS[name])
        given = [self._(each) for each in node.args]
        named = [
            f"{each.arg}={self._(each.value)}" if each.arg else f"**{self._(each.value)}" for each in node.keywords
        ]
        for i in range(len(named)):
            yield _Edit(node, node, f"{self._(node.func)}({', '.join(given + named[:i] + named[i + 1 :])})")
        for first, second in zip(node.args, node.args[1:], strict=False):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                yield _Edit(first, second, f"{self._(second)}, {self._(first)}")


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
