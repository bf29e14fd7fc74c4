"""The interface of a declared function, read from its source: the `Interface` that travels with its version.

The rules are the worker's own (`contract/function/signature.py`), and the library that checks requests there writes the
schemas here. Only the types differ: they are made from the syntax tree (`annotation_types.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.function.interface import INTERFACE_MAX_BYTES, Interface, Schema
from fleetstart.runtime.contract.function.signature import (
    CHECKED_HINT,
    PRIVATE,
    STREAM_HINT,
    UNCHECKED,
    UNREADABLE,
    UNREADABLE_HINT,
    BodyMode,
    Parameter,
    answer_of,
    body_mode,
    fields_struct,
    has_stream,
    has_unreadable_union,
    holds,
    is_union,
    one_of_batch,
    private_names,
)
from fleetstart.runtime.contract.function.tasks import check_task

from .annotation_types import UNKNOWN, AnnotationTypes, File, Response, stands_for
from .constants import NotConstant, dotted, evaluate
from .declarations import API, Declaration
from .module_scope import Module

Function = ast.FunctionDef | ast.AsyncFunctionDef
FILE = {"type": "string", "format": "binary"}
_TAKES: dict[BodyMode, Literal["bytes", "whole", "fields"]] = {"raw": "bytes", "whole": "whole", "fields": "fields"}
_REFERENCE = "#/components/schemas/{name}"
_FILES = (File, bytes)
_PLAIN = bool | int | float | str | None
NO_DEFAULT = object()
_UNION_HINT = "make its classes msgspec.Struct with tag=True, which says in JSON what each is, or take one type"
_UNKNOWN = Interface(takes="unknown")


def interface_of(path: Path, declaration: Declaration) -> Interface:
    """The interface of one declaration. What the source does not tell is left open. Errors: HandlerSyntax; InvalidSpec
    for parameters that no request can fill, and for constraints that no worker would check."""
    if declaration.kind == "llm":
        return Interface(takes="llm", gives="response")
    if declaration.kind == "transformers":
        task = check_task(dict(declaration.settings))
        path, declaration = task.path, replace(declaration, attribute=task.handler, kind="function")
    try:
        return _small(_Reader(Module.read(path)).read(declaration))
    except RecursionError:
        return _UNKNOWN


def batch_size(path: Path, declaration: Declaration) -> int:
    """`max_size` of its `@batched(...)`; 0 if it is not batched. Errors: InvalidSpec for a size that is computed."""
    if declaration.kind != "function":
        return 0
    module = Module.read(path)
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
        self._types = AnnotationTypes(module)

    def read(self, declaration: Declaration) -> Interface:
        name = declaration.attribute
        called, answering = ("before", "after") if declaration.kind == "layered" else ("__call__", "__call__")
        function, answer = self.function(name, called), self.function(name, answering)
        if function is None:
            # What is declared by assignment and is no function of the file is an app of some framework.
            return Interface(takes="asgi", gives="response") if name in self._module.values else _UNKNOWN
        is_method = all(function is not one for one in self._module.functions.values())
        arguments = _arguments(function)[int(is_method) :]
        if [one.arg for one in arguments[:3]] == ["scope", "receive", "send"]:
            return Interface(takes="asgi", gives="response")
        if function.args.vararg or function.args.kwarg:
            return _UNKNOWN
        parameters = self._parameters(function, arguments)
        self._require_servable(function, parameters)
        try:
            return self._interface(name, function, answer or function, parameters)
        except TypeError:  # no worker of it will start, and that one says why
            return _UNKNOWN

    def _require_servable(self, function: Function, parameters: list[Parameter]) -> None:
        """Refuses types that no worker serves.

        Errors: InvalidSpec for a type with which the worker will not start, or will warn in its log.
        """
        where = self._types.unchecked
        if where:
            raise InvalidSpec(f"{where}: {UNCHECKED}", hint=CHECKED_HINT)
        for one in parameters:
            refused = f"{self._module.path}:{function.lineno}: parameter {one.name!r}"
            if has_unreadable_union(one.type, _read_fields):
                raise InvalidSpec(f"{refused} has {UNREADABLE}", hint=UNREADABLE_HINT)
            if has_stream(one.type):
                raise InvalidSpec(f"{refused} is to be iterated over, which JSON is not", hint=STREAM_HINT)
            if reason := _mixed_union(one.type):
                raise InvalidSpec(f"{refused}: {reason}", hint=_UNION_HINT)

    def _interface(self, name: str, function: Function, answering: Function, parameters: list[Parameter]) -> Interface:
        batched = _batched(function, self._module) is not None
        if batched:
            parameters = [one_of_batch(parameter) for parameter in parameters]
        returns = self._types.type_of(answering.returns)
        if has_unreadable_union(returns, _read_fields):
            where = f"{self._module.path}:{answering.lineno}"
            raise InvalidSpec(f"{where}: the answer has {UNREADABLE}", hint=UNREADABLE_HINT)
        answer = answer_of(returns, response=Response, batched=batched, yields=_yields(answering))
        mode = body_mode(parameters, file=File)
        for hidden in private_names(parameters) if mode == "fields" else ():
            raise InvalidSpec(
                f"{self._module.path}:{function.lineno}: parameter {hidden!r} has {PRIVATE}", hint="write another name"
            )
        parameters = [replace(parameter, type=_describable(parameter.type)) for parameter in parameters]
        taken: Any = fields_struct(parameters) if mode == "fields" else parameters[0].type
        given = _describable({"events": answer.item, "json": answer.value}.get(answer.form, UNKNOWN))
        (body, output), schemas = msgspec.json.schema_components(
            (taken, given), schema_hook=_file_schema, ref_template=_REFERENCE
        )
        if mode == "fields":
            body = schemas.pop(body["$ref"].rpartition("/")[2])
            del body["title"]
            for parameter in parameters:
                if parameter.default is not NO_DEFAULT:
                    body["properties"][parameter.name]["default"] = parameter.default
        return Interface(
            takes=_TAKES[mode],
            gives=answer.form,
            input=dict(FILE) if mode == "raw" else body,
            output=dict(FILE) if answer.form == "bytes" else output,
            files=mode == "raw" or (mode == "fields" and any(holds(one.type, _FILES) for one in parameters)),
            schemas=schemas,
            description=self._described(name, function),
        )

    def function(self, name: str, method: str) -> Function | None:
        """The function that is called: itself, or a method of its class or of a base of that in the file."""
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
            bases = (self._module.classes.get(dotted(base)) for base in node.bases)
            node = next((base for base in bases if base is not None), None)
        return None

    def _described(self, name: str, function: Function) -> str:
        node = self._module.classes.get(name)
        return ast.get_docstring(function) or (ast.get_docstring(node) if node is not None else None) or ""

    def _parameters(self, function: Function, arguments: list[ast.arg]) -> list[Parameter]:
        stated = function.args
        positional = [*stated.posonlyargs, *stated.args]
        defaults = dict(zip(positional[len(positional) - len(stated.defaults) :], stated.defaults, strict=True))
        defaults |= {
            one: default for one, default in zip(stated.kwonlyargs, stated.kw_defaults, strict=True) if default
        }
        return [
            Parameter(
                name=one.arg,
                type=self._types.type_of(one.annotation),
                positional_only=one in stated.posonlyargs,
                required=one not in defaults,
                default=_plain(defaults.get(one)),
            )
            for one in arguments
        ]


def _arguments(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _plain(default: ast.expr | None) -> Any:
    """A default that a schema can show."""
    return default.value if isinstance(default, ast.Constant) and isinstance(default.value, _PLAIN) else NO_DEFAULT


def _describable(kind: Any) -> Any:
    """The type if msgspec takes it; otherwise anything, as the worker does with answers."""
    if has_unreadable_union(kind, _all_fields):
        return UNKNOWN
    try:
        msgspec.json.schema(kind, schema_hook=_file_schema)
    except (TypeError, ValueError, NameError):
        return UNKNOWN
    return kind


def _all_fields(kind: type) -> Iterable[Any]:
    """Types of the fields of a class that represents one of the handler's."""
    return getattr(kind, "__annotations__", {}).values()


def _read_fields(kind: type) -> Iterable[Any]:
    """Types of the fields of a class that the worker reads by msgspec; a model of pydantic reads its own."""
    return () if issubclass(kind, msgspec.Struct) and stands_for(kind) == "model" else _all_fields(kind)


def _mixed_union(kind: Any) -> str:
    """Why JSON cannot tell the options of a union apart; empty if it can. Unions in fields of classes are not looked
    at: some of these classes check them by rules of their own."""
    options = get_args(kind)
    if is_union(kind) and Exception not in options:  # what is called an error may be another class
        each = [_outermost(one) for one in dict.fromkeys(map(_without_constraints, options))]
        if len(set(each)) < len(each):
            return "a union cannot hold two types that are the same but for what is in them"
        try:
            msgspec.json.Decoder(Union[tuple(each)])  # noqa: UP007
        except TypeError as error:
            return str(error).partition(" - ")[0]
    return next(filter(None, map(_mixed_union, options)), "")


def _without_constraints(kind: Any) -> Any:
    return _without_constraints(get_args(kind)[0]) if get_origin(kind) is Annotated else kind


def _outermost(kind: Any) -> Any:
    """The type without what is inside it."""
    origin = get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        if stands_for(kind) == "model":
            return type(kind.__name__, (), {})  # msgspec takes a class that it does not know beside None alone
        if stands_for(kind) != "struct":
            return make_dataclass(kind.__name__, ())
        said = kind.__struct_config__
        return msgspec.defstruct(kind.__name__, [], tag=said.tag, tag_field=said.tag_field, array_like=said.array_like)
    if isinstance(kind, type) and issubclass(kind, tuple):
        return tuple
    return kind if origin in (None, Literal) else origin


def _file_schema(kind: type) -> Schema:
    if kind is File:
        return dict(FILE)
    raise NotImplementedError


def _yields(function: Function) -> bool:
    """Checks whether it is a generator; functions inside it are not it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Yield | ast.YieldFrom):
            return True
        if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(node)
    return False
