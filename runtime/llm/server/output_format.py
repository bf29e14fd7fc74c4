"""Output formats: OpenAI's `response_format` as a grammar, and how closely schemas are followed.

Whitespace between the parts of a JSON text is limited, since a small model may otherwise go on with it for ever. A
strict schema is followed to the letter, or refused. Of another one what cannot be followed has no effect. What the
compiler would fail at in the middle of an answer, or end its process for, it does not get.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Literal

import msgspec

from ...contract.errors import InvalidInput
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
_NOTES = frozenset(("default", "examples"))
_VALUES = _NOTES | {"const", "enum"}
"""Keywords whose value is no schema."""
_BOUNDS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"))
EXACT_MOST = 1 << 53
"""Largest number in a schema. The compiler reads numbers as floats, which are exact up to it, and ends its process for
some negative ones beyond."""
REMAINDERS_MOST = 1 << 17
"""Most remainders that all `multipleOf` of a schema have together. The compiler makes a state for each: a second
for these, and all of a worker's time and memory for a billion, with every other call waiting."""
DEPTH_MOST = 128
"""Most levels of a schema, so that reading one ends."""


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
        try:
            return self._schema()
        except InvalidInput as error:
            if isinstance(error, InvalidParameter):
                raise
            raise InvalidParameter(f"response_format: {error.message}", "response_format") from error

    def _schema(self) -> dict[str, Any] | bool | None:
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
    """A schema with the compiler's options. Errors: as of `followable`."""
    if not isinstance(schema, dict):
        return schema
    options: dict[str, Any] = {"whitespace_pattern": WHITESPACE} | ({} if strict else LOOSE)
    return followable(schema, strict=strict) | {"x-guidance": options}


def followable(schema: dict[str, Any], *, strict: bool) -> dict[str, Any]:
    """A schema without formats that the compiler does not know, and without bounds that it cannot hold.

    Errors: InvalidInput for such a bound of a strict schema, for such a number as a value, for a $ref that leads back
    to itself, for `multipleOf` with too many remainders, and for too many levels.
    """
    known: dict[str, Any] = _known("", schema, 0, strict)
    if looping := looping_reference(known):
        raise InvalidInput(f"no text follows the $ref {looping!r}, which leads back to itself")
    multiples = [one["multipleOf"] for one in _subschemas(known) if isinstance(one.get("multipleOf"), int | float)]
    if math.lcm(*map(_digits, multiples)) > REMAINDERS_MOST:
        shown = ", ".join(map(str, sorted(set(multiples))))
        raise InvalidInput(f"'multipleOf' is {shown}: its digits, or their common multiple, exceed {REMAINDERS_MOST}")
    return known


def _digits(number: float) -> int:
    """The digits of a number as an integer, without zeros at the end."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))


def looping_reference(schema: dict[str, Any]) -> str:
    """The first $ref that leads back to itself by references alone, so that no text follows it; empty without one."""
    ended: set[str] = set()
    for found in _subschemas(schema):
        for reference in _references(found):
            if looping := _loop_from(reference, schema, ended):
                return looping
    return ""


def _loop_from(reference: str, root: dict[str, Any], ended: set[str]) -> str:
    """A reference that this one leads to and that leads back to itself. `ended`: those that are known not to."""
    path: list[tuple[str, list[str]]] = [(reference, [])]
    open_ones: set[str] = set()
    while path:
        current, left = path[-1]
        if current not in open_ones and current not in ended:
            open_ones.add(current)
            left += _references(_target(current, root))
        if not left or current in ended:
            ended.add(current)
            open_ones.discard(current)
            path.pop()
        elif (following := left.pop()) in open_ones:
            return following
        else:
            path.append((following, []))
    return ""


def _references(schema: Any) -> list[str]:
    """References that a value of this schema has to follow, all of them."""
    if not isinstance(schema, dict):
        return []
    own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
    parts = schema.get("allOf")
    return own + [one for part in (parts if isinstance(parts, list) else ()) for one in _references(part)]


def _target(reference: str, root: dict[str, Any]) -> Any:
    """The part of a schema that a reference names; None if there is none."""
    found: Any = root if reference.startswith("#") else None
    for step in reference.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            found = found[int(name)] if name.isdecimal() and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _subschemas(part: Any) -> Iterator[dict[str, Any]]:
    """All objects of a schema that can be schemas, the outermost first."""
    if isinstance(part, dict):
        yield part
        part = [value for key, value in part.items() if key not in _VALUES]
    if isinstance(part, list):
        for one in part:
            yield from _subschemas(one)


def _known(key: str, value: Any, depth: int, strict: bool) -> Any:
    if depth > DEPTH_MOST:
        raise InvalidInput(f"it has more than {DEPTH_MOST} levels")
    if key in _VALUES:
        return value if key in _NOTES else _held(key, value, depth)
    if isinstance(value, list):
        return [_known("", one, depth + 1, strict) for one in value]
    if not isinstance(value, dict):
        return value
    if key in _MAPS:
        return {name: _known("", schema, depth + 1, strict) for name, schema in value.items()}
    return {
        name: _known(name, part, depth + 1, strict)
        for name, part in value.items()
        if not _has_no_effect(name, part, strict)
    }


def _held(key: str, value: Any, depth: int) -> Any:
    """A value that the answer may have to have. Errors: as of `followable`."""
    if depth > DEPTH_MOST:
        raise InvalidInput(f"it has more than {DEPTH_MOST} levels")
    if isinstance(value, int | float) and abs(value) > EXACT_MOST:
        raise InvalidInput(f"{key!r} has the number {value}, and numbers are exact up to {EXACT_MOST}")
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            _held(key, one, depth + 1)
    return value


def _has_no_effect(key: str, value: Any, strict: bool) -> bool:
    """Checks whether a keyword has no effect. Errors: InvalidInput for one that a strict schema cannot have."""
    if key == "format":
        return isinstance(value, str) and value not in FORMATS
    if key not in _BOUNDS or not isinstance(value, int | float) or abs(value) <= EXACT_MOST:
        return False
    if strict:
        raise InvalidInput(f"{key!r} is {value}, and numbers are exact up to {EXACT_MOST}: leave it out")
    return True
