"""Output formats: OpenAI's `response_format` as a grammar.

Whitespace between the parts of a JSON text is limited, since a small model may otherwise go on with it for ever.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...openai_api.invalid_parameter import InvalidParameter

WHITESPACE = r"[ \n]{1,24}"
"""What may stand between two parts of a JSON text: enough for an indented one of a few levels."""
COMPILE_OPTIONS = {"whitespace_pattern": WHITESPACE}


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format.json_schema`; a schema is followed whether `strict` is set or not."""

    name: str
    schema: dict[str, Any] | bool = {}
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def schema(self) -> dict[str, Any] | bool | None:
        """Schema of the answer; None for any text. Errors: InvalidParameter."""
        if (self.json_schema is not None) is not (self.type == "json_schema"):
            raise InvalidParameter("response_format: json_schema goes with type 'json_schema'", "response_format")
        if self.type == "text":
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema


def json_grammar(schema: dict[str, Any] | bool) -> str:
    """Grammar of the JSON texts that a schema allows."""
    return msgspec.json.encode({"grammars": [{"json_schema": with_options(schema)}]}).decode()


def with_options(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """A schema with the compiler's options."""
    return schema | {"x-guidance": COMPILE_OPTIONS} if isinstance(schema, dict) else schema
