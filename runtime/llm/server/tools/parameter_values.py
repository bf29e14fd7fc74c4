"""Values of parameters that models write as text: which of them are JSON, by the schema of the function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ....contract.decoding import UNDECODABLE

Schema = Mapping[str, Any]

_DEPTH_MAX = 16
"""References that are followed: a schema may refer to itself."""
_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""What models of code write for JSON's own words."""


def value_types(schema: Any, root: Schema) -> frozenset[str]:
    """JSON types that a value of this schema may have; text without a word about it."""
    return _types(schema, root, 0) or frozenset({"string"})


def json_text(text: str, types: frozenset[str]) -> str:
    """The JSON of a value that was written as text, of one of these types if it can be."""
    if types == {"string"}:
        return _quoted(text)
    written = _PYTHON.get(text.strip(), text.strip())
    try:
        value = msgspec.json.decode(written)
    except UNDECODABLE:
        return _quoted(text)
    if "string" in types and not _type_of(value) & types:
        return _quoted(text)
    return written


def parameters_of(root: Schema) -> Mapping[str, Any]:
    """Schemas of a function's parameters by name."""
    found = root.get("properties")
    return found if isinstance(found, Mapping) else {}


def _types(schema: Any, root: Schema, depth: int) -> frozenset[str]:
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
        return frozenset()
    if given := schema.get("type"):
        return frozenset([given] if isinstance(given, str) else [one for one in given if isinstance(one, str)])
    if "const" in schema:
        return _type_of(schema["const"])
    if isinstance(values := schema.get("enum"), list):
        return frozenset().union(*map(_type_of, values))
    parts = [part for key in ("anyOf", "oneOf", "allOf") for part in schema.get(key) or ()]
    return frozenset().union(*(_types(part, root, depth + 1) for part in parts))


def resolved(schema: Any, root: Schema) -> Any:
    """The schema that a schema refers to; itself if it does not."""
    for _ in range(_DEPTH_MAX):
        if not isinstance(schema, Mapping) or not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = _referred(reference, root)
    return None


def _referred(reference: str, root: Schema) -> Any:
    found: Any = root
    for step in reference.removeprefix("#/").split("/") if reference.startswith("#/") else [reference]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset({"null"})
        case bool():
            return frozenset({"boolean"})
        case int():
            return frozenset({"integer", "number"})
        case float():
            return frozenset({"number"})
        case str():
            return frozenset({"string"})
        case list():
            return frozenset({"array"})
    return frozenset({"object"})


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()
