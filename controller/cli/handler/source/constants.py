"""Values that a source file states, read from its syntax tree without running anything.

Literals, names of module-level constants, simple arithmetic on them, and calls of a few known structs
(`Scale(max=8)`). Whatever is computed in another way has no value here, and the reader says on which line.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

TEXT_MAX = 64 * 1024
NUMBER_MAX = 1 << 128
"""Largest integer: no setting needs a larger one, and computing with it would take long."""
POWER_MAX = 128

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


class NotConstant(Exception):
    """The expression at `node` has no value that can be read; the text says why."""

    def __init__(self, node: ast.AST, reason: str) -> None:
        super().__init__(reason)
        self.line: int = getattr(node, "lineno", 0)
        self.reason = reason


class Computed:
    """Value of a name that is bound to an expression that cannot be read."""

    def __init__(self, line: int) -> None:
        self.line = line


def evaluate(node: ast.expr, names: Mapping[str, object], calls: Mapping[str, Callable[..., Any]]) -> Any:
    """The value of an expression. `calls` maps the dotted names that may be called to what they build.

    Errors: NotConstant; whatever a function of `calls` raises for its arguments.
    """
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | float | str):
            return value
        case ast.Name(id=name):
            return _constant(node, name, names)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [evaluate(item, names, calls) for item in items]
        case ast.Dict(keys=keys, values=values):
            if any(key is None for key in keys):
                raise NotConstant(node, "** inside a dict is not read")
            return {
                _key(key, names, calls): evaluate(value, names, calls)
                for key, value in zip(keys, values, strict=True)
                if key is not None
            }
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_number(operand, names, calls))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _arithmetic(node, type(op), evaluate(left, names, calls), evaluate(right, names, calls))
        case ast.Call(func=func) if (name := dotted(func)) in calls:
            if node.args or any(keyword.arg is None for keyword in node.keywords):
                raise NotConstant(node, f"{name}(...) takes arguments by name only")
            arguments = {str(keyword.arg): evaluate(keyword.value, names, calls) for keyword in node.keywords}
            return calls[name](**arguments)
    raise NotConstant(node, f"`{_shown(node)}` would have to be run")


def dotted(node: ast.expr) -> str:
    """ "a.b.c" of a chain of names, "" of anything else."""
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attribute) if base := dotted(value):
            return f"{base}.{attribute}"
    return ""


def _constant(node: ast.expr, name: str, names: Mapping[str, object]) -> object:
    value = names.get(name, node)
    if isinstance(value, Computed):
        raise NotConstant(node, f"`{name}` is computed at line {value.line}")
    if value is node:
        raise NotConstant(node, f"`{name}` is not a constant of this file")
    return value


def _key(node: ast.expr, names: Mapping[str, object], calls: Mapping[str, Callable[..., Any]]) -> str:
    key = evaluate(node, names, calls)
    if not isinstance(key, str):
        raise NotConstant(node, f"key {key!r} is not text")
    return key


def _number(node: ast.expr, names: Mapping[str, object], calls: Mapping[str, Callable[..., Any]]) -> int | float:
    value = evaluate(node, names, calls)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NotConstant(node, f"{value!r} is not a number")
    return value


def _arithmetic(node: ast.expr, op: type[ast.operator], left: Any, right: Any) -> Any:
    """Result of a binary operation, bounded before it is computed: `9 ** 9 ** 9` must not be tried."""
    if op is ast.Add and isinstance(left, str) and isinstance(right, str):
        if len(left) + len(right) > TEXT_MAX:
            raise NotConstant(node, f"text of more than {TEXT_MAX} characters")
        return left + right
    for value in (left, right):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise NotConstant(node, f"`{_shown(node)}` is not arithmetic on numbers")
        if abs(value) > NUMBER_MAX:
            raise NotConstant(node, "a number beyond 2**128")
    if op is ast.Pow and (abs(right) > POWER_MAX or (left == 0 and right < 0)):
        raise NotConstant(node, f"a power beyond {POWER_MAX}")
    try:
        result = _BINARY[op](left, right)
    except (ArithmeticError, ValueError) as error:
        raise NotConstant(node, f"`{_shown(node)}`: {error}") from error
    if isinstance(result, complex) or abs(result) > NUMBER_MAX:
        raise NotConstant(node, f"`{_shown(node)}` is not a number that a setting can have")
    return result


def _shown(node: ast.AST) -> str:
    try:
        text = " ".join(ast.unparse(node).split())
    except (RecursionError, ValueError):
        return "an expression"
    return text if len(text) <= 60 else text[:57] + "..."
