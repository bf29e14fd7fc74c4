"""Example values made from JSON schemas: the schema's own example, else the simplest valid value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]
DEPTH_MAX = 6
"""Maximum nesting: a schema may be recursive."""
REQUIRED_ITEMS_MAX = 100
"""Longest array that is made for a schema that demands one."""

_TEXTS = {
    "date": "2026-01-02",
    "duration": "PT1S",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "decimal": "1.5",
    "binary": "",
}


def example(schema: Schema, schemas: Mapping[str, Schema], depth: int = 0) -> Any:
    """Fits the schema as far as it is one of ours: a pattern is not looked at."""
    if "$ref" in schema:
        schema = schemas.get(str(schema["$ref"]).rpartition("/")[2], {})
    given = schema.get("examples")
    if isinstance(given, list) and given:
        return given[0]
    for name in ("default", "const"):
        if name in schema:
            return schema[name]
    if schema.get("enum"):
        return schema["enum"][0]
    if depth >= DEPTH_MAX:
        return None
    if schema.get("anyOf"):
        return example(schema["anyOf"][0], schemas, depth)
    kind = schema.get("type", "object" if not schema else None)  # what has no type may be anything
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: example(value, schemas, depth + 1) for name, value in properties.items()}
    if kind == "array":
        return _array(schema, schemas, depth)
    if kind == "string":
        return _text(schema)
    if kind in ("integer", "number"):
        return _number(schema, whole=kind == "integer")
    return {"boolean": True, "null": None}.get(str(kind))


def _array(schema: Schema, schemas: Mapping[str, Schema], depth: int) -> list[Any]:
    if "prefixItems" in schema:
        return [example(item, schemas, depth + 1) for item in schema["prefixItems"]]
    least, most = int(schema.get("minItems", 0)), int(schema.get("maxItems", 1))
    count = min(REQUIRED_ITEMS_MAX, max(least, min(1, most)))
    return [example(schema.get("items") or {}, schemas, depth + 1)] * count


def has_file(schema: Schema) -> bool:
    """Checks whether a value of the schema is a file, or bytes, which a form sends as they are."""
    if schema.get("format") == "binary" or schema.get("contentEncoding") == "base64":
        return True
    inner = [schema.get("items"), *schema.get("anyOf", [])]
    return any(isinstance(one, dict) and has_file(one) for one in inner)


def _text(schema: Schema) -> str:
    if schema.get("contentEncoding") == "base64":
        return "AAAA"
    text = _TEXTS.get(str(schema.get("format")), "text")
    least, most = int(schema.get("minLength", 0)), int(schema.get("maxLength", 1000))
    return (text + "." * min(1000, max(0, least - len(text))))[:most]


def _number(schema: Schema, *, whole: bool) -> int | float:
    least, most = schema.get("minimum"), schema.get("maximum")
    value: int | float = 1 if whole else 1.5
    step = schema.get("multipleOf", 0)
    if "exclusiveMinimum" in schema:
        value = max(value, schema["exclusiveMinimum"] + (1 if whole else 0.5))
    if "exclusiveMaximum" in schema:
        value = min(value, schema["exclusiveMaximum"] - (1 if whole else 0.5))
    if least is not None:
        value = max(value, least)
    if most is not None:
        value = min(value, most)
    return -(-value // step) * step if step else value
