"""JSON schemas of what is plain, and how they are put together to larger ones."""

from __future__ import annotations

import ast
from contextlib import suppress
from typing import Any

from .declarations import API
from .module_scope import Module, constant

Schema = dict[str, Any]

PLAIN: dict[str, Schema] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "str": {"type": "string"},
    "bool": {"type": "boolean"},
    "bytes": {"type": "string", "contentEncoding": "base64"},
    "bytearray": {"type": "string", "contentEncoding": "base64"},
    "None": {"type": "null"},
    "datetime.datetime": {"type": "string"},  # RFC 3339 with a zone or without, so no "date-time"
    "datetime.date": {"type": "string", "format": "date"},
    "datetime.time": {"type": "string"},
    "datetime.timedelta": {"type": "string", "format": "duration"},
    "uuid.UUID": {"type": "string", "format": "uuid"},
    "decimal.Decimal": {"type": "string", "format": "decimal"},
    f"{API}.File": {"type": "string", "format": "binary"},
}
_BOUNDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
    "pattern": "pattern",
    "title": "title",
    "description": "description",
    "examples": "examples",
}
_LENGTHS = {"string": "Length", "array": "Items", "object": "Properties"}
_SAY = frozenset(["Meta", "Field", "Interval", "Ge", "Gt", "Le", "Lt", "MultipleOf", "MinLen", "MaxLen", "Len"])


def any_of(options: list[Schema]) -> Schema:
    flat: list[Schema] = []
    for option in options:
        for one in option["anyOf"] if set(option) == {"anyOf"} else [option]:
            if one not in flat:
                flat.append(one)
    if {} in flat:
        return {}
    return flat[0] if len(flat) == 1 else {"anyOf": flat}


def array(item: Schema, *, unique: bool = False) -> Schema:
    schema: Schema = {"type": "array", "items": item} if item else {"type": "array"}
    return schema | {"uniqueItems": True} if unique else schema


def object_of(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value} if value else {"type": "object"}


def tuple_of(items: list[Schema]) -> Schema:
    return {"type": "array", "minItems": len(items), "maxItems": len(items), "prefixItems": items, "items": False}


def literal(items: list[ast.expr]) -> Schema:
    values = [item.value for item in items if isinstance(item, ast.Constant)]
    rest = [value for value in values if value is not None]
    with suppress(TypeError):
        rest.sort(key=lambda one: (isinstance(one, str), one))
    schema: Schema = {"enum": rest}
    return any_of([schema, dict(PLAIN["None"])]) if None in values else schema


def constrained(schema: Schema, said: list[ast.expr], module: Module) -> Schema:
    """With what `Meta(ge=1)` and the like say."""
    for one in said:
        if not isinstance(one, ast.Call) or module.full(one.func).rpartition(".")[2] not in _SAY:
            continue
        for keyword in one.keywords:
            said_value, known = constant(keyword.value, module)
            if not known or keyword.arg is None:
                continue
            if keyword.arg in _BOUNDS:
                schema = schema | {_BOUNDS[keyword.arg]: said_value}
            elif keyword.arg in ("min_length", "max_length"):
                of = _LENGTHS.get(str(schema.get("type", "string")), "Length")
                schema = schema | {keyword.arg.removesuffix("_length") + of: said_value}
    return schema
