"""Validation errors with the field, the expected type and the actual value.

msgspec reports one sentence with a path; this parses the sentence, follows the path through the value and through the
type, and lists the values that an enum or a Literal allows.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from msgspec import inspect

from ..contract.function.signature import is_pydantic_model, is_union, underlying_type
from .annotations import ConversionError, object_fields, preview

_SENTENCE = re.compile(r"(?P<what>.*?)(?: - at `(?P<key>key` in `)?\$(?P<path>.*)`)?", re.DOTALL)
_EXPECTED = re.compile(r"Expected (?P<expected>.*?)(?:, got (?P<got>.*))?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_INVALID = re.compile(r"Invalid (?P<form>(?:RFC3339|ISO8601|UUID|base64|decimal|epoch).*)")
_TAG = re.compile(r"Invalid value .*", re.DOTALL)
_OUT_OF_RANGE = re.compile(r"(?P<kind>Integer|Number|Duration|Timestamp)(?: value)?(?: is)? out of range ?")
_STEP = re.compile(r"\.(?P<name>[^.\[]+)|\[(?P<index>\d+|\.\.\.)\]")
LOST: Any = object()
"""Result of a path that leads to no value, and a value that cannot be shown."""
CHOICES_MAX = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldError:
    """One validation error. `field` is a path like `items[2].price`; empty for the whole value."""

    field: str
    expected: str
    got: str
    unknown: str = ""
    """Advice, where the type has no such field."""

    def sentence(self) -> str:
        if self.unknown:
            return f"there is no field `{self.field}` ({self.unknown})"
        where = f" at `{self.field}`" if self.field else ""
        return f"expected {self.expected}{where}, got {self.got}"


def field_error(error: Exception, value: Any, kind: Any) -> FieldError:
    """The field error in msgspec's error for a value that should have been of type `kind`."""
    match = _SENTENCE.fullmatch(str(error))
    what, path = (match["what"], match["path"] or "") if match else (str(error), "")
    cause = error.__cause__
    if isinstance(cause, ConversionError):
        return FieldError(field=_field(path + cause.path), expected=cause.expected, got=cause.got)
    if found := _MISSING.fullmatch(what):
        name = found["name"]
        return FieldError(field=_field(f"{path}.{name}"), expected=_named(_field_kind(kind, path, name)), got="nothing")
    if found := _UNKNOWN.fullmatch(what):
        return _unknown(found["name"], path, value, kind)
    came = _follow(value, path)
    found = _EXPECTED.fullmatch(what)
    expected = found["expected"].replace("`", "") if found else _expected_instead(what, path, kind)
    got = found["got"].replace("`", "") if found and found["got"] else "another value"
    if match and match["key"]:
        return FieldError(field=_field(path), expected=f"{expected} as each key", got=got)
    return FieldError(field=_field(path), expected=expected, got=got if came is LOST else preview(came))


def _expected_instead(what: str, path: str, kind: Any) -> str:
    """The expected kind of value, where msgspec says only what is wrong with the one that came."""
    if what.startswith("Invalid enum value") and (choices := _choices(_kind_at(kind, path))):
        return f"one of {choices}"
    if found := _INVALID.fullmatch(what):
        return f"a valid {found['form']}"
    if found := _OUT_OF_RANGE.fullmatch(what):
        return f"{_lower(found['kind'])} within range"
    if _TAG.fullmatch(what) and (tags := _tags(_kind_at(kind, path.rpartition(".")[0]))):
        return f"one of {tags}"
    return _lower(what)


def _unknown(name: str, path: str, value: Any, kind: Any) -> FieldError:
    names = list(_names(_kind_at(kind, path)))
    near = difflib.get_close_matches(name, names, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}" if names else "it takes none"
    came = _follow(value, f"{path}.{name}")
    return FieldError(
        field=_field(f"{path}.{name}"),
        expected=f"none of that name ({advice})",
        got=preview(came) if came is not LOST else "one",
        unknown=advice,
    )


def _field(path: str) -> str:
    return path.removeprefix(".")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _steps(path: str) -> list[str | int | None]:
    """The steps of a path; None stands for any key of an object."""
    found: list[str | int | None] = []
    for step in _STEP.finditer(path):
        index = step["index"]
        found.append(step["name"] if index is None else None if index == "..." else int(index))
    return found


def _follow(value: Any, path: str) -> Any:
    for step in _steps(path):
        try:
            value = value[step] if step is not None else LOST
        except (KeyError, IndexError, TypeError):
            return LOST
    return value


# ── along the type ─────────────────────────────────────────────────────────────────────────────────


def _info(kind: Any) -> Any:
    try:
        return inspect.type_info(kind)
    except (TypeError, NameError):
        return None


def _kind_at(kind: Any, path: str) -> Any:
    """msgspec's description of the type at a path; None if it is unknown."""
    info = _info(kind)
    for step in _steps(path):
        info = _within(info, step)
    return info


def _within(info: Any, step: str | int | None) -> Any:
    options = info.types if isinstance(info, inspect.UnionType) else (info,)
    for one in options:
        if isinstance(step, str) and (fields := getattr(one, "fields", None)):
            return next((field.type for field in fields if step in (field.name, field.encode_name)), None)
        if isinstance(one, inspect.DictType):
            return one.value_type
        if isinstance(step, int) and isinstance(one, inspect.TupleType):
            return one.item_types[step] if step < len(one.item_types) else None
        if item := getattr(one, "item_type", None):
            return item
    return None


def _field_kind(kind: Any, path: str, name: str) -> Any:
    return _within(_kind_at(kind, path), name)


def _names(info: Any) -> list[str]:
    return [field.encode_name for field in getattr(info, "fields", ())]


def _choices(info: Any) -> str:
    options = info.types if isinstance(info, inspect.UnionType) else (info,)
    values: list[Any] = []
    for one in options:
        if isinstance(one, inspect.EnumType):
            values += [member.value for member in one.cls]
        elif isinstance(one, inspect.LiteralType):
            values += list(one.values)
    text = ", ".join(preview(value) for value in values[:CHOICES_MAX])
    return text + (", ..." if len(values) > CHOICES_MAX else "")


def _tags(info: Any) -> str:
    """The tags that tell the structs of a union apart."""
    options = info.types if isinstance(info, inspect.UnionType) else (info,)
    return ", ".join(preview(one.tag) for one in options if isinstance(one, inspect.StructType) and one.tag is not None)


_WORDS = {"NoneType": "null", "BytesType": "bytes (base64)", "DictType": "object"}


def _named(info: Any) -> str:
    if isinstance(info, inspect.UnionType):
        return " | ".join(_named(one) for one in info.types)
    if info is None or isinstance(info, inspect.AnyType):
        return "a value"
    cls = getattr(info, "cls", None)
    if isinstance(info, inspect.EnumType | inspect.LiteralType):
        return f"one of {_choices(info)}"
    if cls is not None:
        return str(cls.__name__)
    if hasattr(info, "item_type") or hasattr(info, "item_types"):
        return "array"
    return _WORDS.get(type(info).__name__, type(info).__name__.removesuffix("Type").lower())


def type_name(kind: Any) -> str:
    """A type's name for error messages."""
    if kind is Any:
        return "anything"
    if is_union(kind) or not isinstance(kind, type) or get_args(kind):
        return _written(kind)
    if is_pydantic_model(underlying_type(kind)) or object_fields(kind):
        return f"{kind.__name__} ({', '.join(object_fields(kind))})"
    return kind.__name__


def _written(kind: Any) -> str:
    """A type as it is written, without its modules."""
    origin, within = get_origin(kind), get_args(kind)
    if is_union(kind):
        return " | ".join(_written(one) for one in within)
    if origin is Annotated:
        return f"Annotated[{_written(within[0])}, {', '.join(map(repr, within[1:]))}]"
    if isinstance(origin, type):
        return f"{origin.__name__}[{', '.join(_written(one) for one in within)}]"
    if kind is type(None):
        return "None"
    if kind is ...:
        return "..."
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
