"""Output formats: OpenAI's `response_format` as a grammar, and how closely schemas are followed.

Whitespace between the parts of a JSON text is limited, since a small model may otherwise go on with it for ever. A
strict schema is followed to the letter, or refused. Of another one what cannot be followed has no effect.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...openai_api.invalid_parameter import InvalidParameter

WHITESPACE = r"[ \n]{1,24}"
"""What may stand between two parts of a JSON text: enough for an indented one of a few levels."""
LOOSE = {"lenient": True, "coerce_one_of": True}
"""Options of the compiler that leave out keywords and formats that it does not know, and take `oneOf` as `anyOf`."""
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
"""Formats of texts that the compiler knows. Any other one is a note, as JSON Schema has it."""
_MAPS = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
"""Keywords whose value has schemas by names of the user's."""
_VALUES = frozenset(("const", "enum", "default", "examples"))
"""Keywords whose value is no schema."""
_DEPTH_MAX = 64
"""Levels of a schema at which formats are looked at."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format.json_schema`."""

    name: str
    schema: dict[str, Any] | bool = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def schema(self) -> dict[str, Any] | bool | None:
        """Schema of the answer with the compiler's options; None for any text. Errors: InvalidParameter."""
        if (self.json_schema is not None) is not (self.type == "json_schema"):
            raise InvalidParameter("response_format: json_schema goes with type 'json_schema'", "response_format")
        if self.type == "text":
            return None
        if self.json_schema is None:
            return with_options({"type": "object"}, strict=False)
        return with_options(self.json_schema.schema, strict=bool(self.json_schema.strict))


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """Grammar of the JSON texts that a schema with options allows."""
    return msgspec.json.encode({"grammars": [{"json_schema": schema}]}).decode()


def with_options(schema: dict[str, Any] | bool, *, strict: bool) -> dict[str, Any] | bool:
    """A schema with the compiler's options; a strict one without formats that the compiler does not know."""
    if not isinstance(schema, dict):
        return schema
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE} | ({} if strict else LOOSE)
    return with_known_formats(schema) | {"x-guidance": options}


def with_known_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without the formats that the compiler does not know."""
    return {key: _known(key, value, 0) for key, value in schema.items() if not _is_note(key, value)}


def _known(key: str, value: Any, depth: int) -> Any:
    if key in _VALUES or depth > _DEPTH_MAX:
        return value
    if isinstance(value, list):
        return [_known("", one, depth + 1) for one in value]
    if not isinstance(value, dict):
        return value
    if key in _MAPS:
        return {name: _known("", schema, depth + 1) for name, schema in value.items()}
    return {name: _known(name, part, depth + 1) for name, part in value.items() if not _is_note(name, part)}


def _is_note(key: str, value: Any) -> bool:
    return key == "format" and isinstance(value, str) and value not in FORMATS
