"""What a declared function takes and gives, read from its source: the `Interface` that travels with its version.

The rules are those by which the runtime feeds a handler (`runtime/inputs.py`): one parameter that stands for an object,
or has no annotation, takes the whole body, several are its fields, `bytes` is the raw body.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, Literal

import msgspec

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.interface import INTERFACE_MAX_BYTES, Interface

from .constants import NotConstant, dotted, evaluate
from .declarations import API, Declaration
from .json_schema import Schema
from .module_scope import Module
from .name_resolution import short_name
from .parse import parse
from .type_schemas import TypeSchemas

Function = ast.FunctionDef | ast.AsyncFunctionDef
Gives = Literal["json", "bytes", "events", "response"]
FILE = {"type": "string", "format": "binary"}
_STREAMS = frozenset(["Iterator", "Generator", "Iterable", "AsyncIterator", "AsyncGenerator", "AsyncIterable"])
_WRAPPED = frozenset(["Awaitable", "Coroutine"])
_UNKNOWN = Interface(takes="unknown")


def interface_of(path: Path, declaration: Declaration) -> Interface:
    """Errors: HandlerSyntax. What the source does not tell is left open."""
    if declaration.kind == "llm":
        return Interface(takes="llm", gives="response")
    module = Module(parse(path.read_bytes(), str(path)), path.parent)
    try:
        return _small(_Reader(module).read(declaration))
    except RecursionError:
        return _UNKNOWN


def batch_size(path: Path, declaration: Declaration) -> int:
    """Of its `@batched(max_size=...)`; 0 if it is not batched. Errors: InvalidSpec for a size that is computed."""
    if declaration.kind != "function":
        return 0
    module = Module(parse(path.read_bytes(), str(path)), path.parent)
    function = _Reader(module).function(declaration.attribute, "__call__")
    decorator = _batched(function, module) if function is not None else None
    if decorator is None:
        return 0
    for keyword in decorator.keywords:
        if keyword.arg == "max_size":
            names = {name: value.value for name, value in module.values.items() if isinstance(value, ast.Constant)}
            try:
                size = evaluate(keyword.value, names, {})
            except NotConstant as error:
                raise InvalidSpec(
                    f"{path}:{keyword.value.lineno}: batched(max_size=...): {error.reason}",
                    hint="write a number, or give the function its concurrency: @function(concurrency=32)",
                ) from error
            return size if isinstance(size, int) and not isinstance(size, bool) else 0
    return 0


def _small(interface: Interface) -> Interface:
    size = len(msgspec.json.encode(interface))
    if size <= INTERFACE_MAX_BYTES:
        return interface
    text = f"Its schemas have {size} bytes, {INTERFACE_MAX_BYTES} at most, and were left out."
    return msgspec.structs.replace(interface, input={}, output={}, schemas={}, description=text)


def _batched(function: Function, module: Module) -> ast.Call | None:
    for decorator in function.decorator_list:
        if isinstance(decorator, ast.Call) and module.full(decorator.func) == f"{API}.batched":
            return decorator
    return None


class _Reader:
    def __init__(self, module: Module) -> None:
        self._module = module
        self._types = TypeSchemas(module)

    def read(self, declaration: Declaration) -> Interface:
        name = declaration.attribute
        called, answering = ("before", "after") if declaration.kind == "layered" else ("__call__", "__call__")
        function, answer = self.function(name, called), self.function(name, answering)
        if function is None:
            # What is declared by assignment and is no function of the file is an app of some framework.
            return Interface(takes="asgi", gives="response") if name in self._module.values else _UNKNOWN
        parameters = self._parameters(function, method=name not in self._module.functions)
        if [one.arg for one in parameters[:3]] == ["scope", "receive", "send"]:
            return Interface(takes="asgi", gives="response")
        if function.args.vararg or function.args.kwarg:
            return _UNKNOWN
        batched = _batched(function, self._module) is not None
        takes, body, files = self._input(parameters, self._defaults(function), batched)
        gives, output = self._output(answer, batched) if answer is not None else ("json", {})
        return Interface(
            takes=takes,
            gives=gives,
            input=body,
            output=output,
            files=files,
            schemas=self._types.schemas,
            description=self._described(name, function),
        )

    def function(self, name: str, method: str) -> Function | None:
        """What is called: the function itself, or the method of its class or of a base of that in the file."""
        for _ in range(10):
            value = self._module.values.get(name)
            if name in self._module.functions or name in self._module.classes or not isinstance(value, ast.Call):
                break
            argument = value.args[0] if value.args else value.func  # function(...)(target), or Class()
            name = dotted(argument)
        if name in self._module.functions:
            return self._module.functions[name]
        node = self._module.classes.get(name)
        for _ in range(10):
            if node is None:
                return None
            for statement in node.body:
                if isinstance(statement, Function) and statement.name == method:
                    return statement
            node = next(
                (self._module.classes[base] for base in map(dotted, node.bases) if base in self._module.classes), None
            )
        return None

    def _described(self, name: str, function: Function) -> str:
        node = self._module.classes.get(name)
        return ast.get_docstring(function) or (ast.get_docstring(node) if node is not None else None) or ""

    # ── input ──────────────────────────────────────────────────────────────────────────────────────

    def _parameters(self, function: Function, *, method: bool) -> list[ast.arg]:
        arguments = function.args
        return [*arguments.posonlyargs, *arguments.args][int(method) :] + arguments.kwonlyargs

    def _defaults(self, function: Function) -> dict[str, ast.expr]:
        arguments = function.args
        positional = [*arguments.posonlyargs, *arguments.args]
        with_default = positional[len(positional) - len(arguments.defaults) :]
        found = {one.arg: default for one, default in zip(with_default, arguments.defaults, strict=True)}
        pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        return found | {one.arg: default for one, default in pairs if default is not None}

    def _input(
        self, parameters: list[ast.arg], defaults: dict[str, ast.expr], batched: bool
    ) -> tuple[Literal["fields", "whole", "bytes"], Schema, bool]:
        kinds = {one.arg: self._item(one.annotation) if batched else one.annotation for one in parameters}
        if len(parameters) == 1:
            (kind,) = kinds.values()
            full = self._module.full(kind) if kind is not None else ""
            if full in ("bytes", f"{API}.File"):
                return "bytes", dict(FILE), True
            if self._is_object(kind):
                return "whole", self._types.schema(kind), False
        properties, required = {}, []
        for name, kind in kinds.items():
            properties[name] = self._types.schema(kind)
            default = defaults.get(name)
            if default is None:
                required.append(name)
            elif isinstance(default, ast.Constant) and isinstance(default.value, bool | int | float | str | None):
                properties[name] = properties[name] | {"default": default.value}
        body: Schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        return "fields", body, any(_holds_bytes(schema) for schema in properties.values())

    def _item(self, kind: ast.expr | None) -> ast.expr | None:
        """Of a batched handler's list."""
        if isinstance(kind, ast.Subscript):
            return kind.slice.elts[0] if isinstance(kind.slice, ast.Tuple) else kind.slice
        return None

    def _is_object(self, kind: ast.expr | None) -> bool:
        """Whether the whole body stands for it; the static side of `is_struct_like`."""
        if kind is None or self._module.full(kind) in ("typing.Any",):
            return True
        head = kind.value if isinstance(kind, ast.Subscript) else kind
        if short_name(head, self._module) in ("dict", "Dict", "Mapping"):
            return True
        found = self._types.resolver.find(self._module.full(head), self._module)
        if found is None or found[1] not in found[0].classes:
            return False
        kind_of = self._types.resolver.kind_of(found[0].classes[found[1]], found[0])
        return kind_of in ("struct", "dataclass", "typeddict", "model")

    # ── output ─────────────────────────────────────────────────────────────────────────────────────

    def _output(self, function: Function, batched: bool) -> tuple[Gives, Schema]:
        kind = function.returns
        name, arguments = self._opened(kind)
        if name in _WRAPPED and arguments:
            kind = arguments[-1]
            name, arguments = self._opened(kind)
        if name in _STREAMS or _yields(function):
            return "events", self._types.schema(arguments[0]) if name in _STREAMS and arguments else {}
        if batched:
            kind = self._item(kind)
        options = [one for one in _options(kind) if not self._is_exception(one)]
        if any(self._module.full(one) == f"{API}.Response" for one in options):
            return "response", {}
        if len(options) == 1 and self._module.full(options[0]) == "bytes":
            return "bytes", dict(FILE)
        if len(options) < len(_options(kind)):
            return "json", self._types.schema(options[0]) if len(options) == 1 else {}
        return "json", self._types.schema(kind)

    def _is_exception(self, kind: ast.expr) -> bool:
        return self._module.full(kind).rpartition(".")[2] in ("Exception", "InvalidInput") or self._module.full(
            kind
        ).endswith("Error")

    def _opened(self, kind: ast.expr | None) -> tuple[str, list[ast.expr]]:
        if isinstance(kind, ast.Constant) and isinstance(kind.value, str):
            return "", []
        if not isinstance(kind, ast.Subscript):
            return (short_name(kind, self._module) if kind is not None else ""), []
        items: list[Any] = kind.slice.elts if isinstance(kind.slice, ast.Tuple) else [kind.slice]
        return short_name(kind.value, self._module), items


def _options(kind: ast.expr | None) -> list[ast.expr]:
    match kind:
        case None:
            return []
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*_options(left), *_options(right)]
        case ast.Subscript(value=value, slice=ast.Tuple(elts=items)) if dotted(value).rpartition(".")[2] == "Union":
            return items
    return [kind]


def _yields(function: Function) -> bool:
    """Whether it is a generator; functions inside it are not it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False


def _holds_bytes(schema: Schema) -> bool:
    if schema.get("format") == "binary" or schema.get("contentEncoding") == "base64":
        return True
    inner = [schema.get("items"), *schema.get("anyOf", [])]
    return any(isinstance(one, dict) and _holds_bytes(one) for one in inner)
