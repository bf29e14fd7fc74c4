"""Type annotations of a handler, converted to types that msgspec validates, with hooks for types it does not know.

msgspec reads dataclasses, TypedDict, NamedTuple, enums, Literal and its own Struct by itself. Added here: pydantic
models and `File` (by hooks; pydantic is never imported, only recognised once the user's code has done so), and
constraints that are written for other libraries (`Annotated[int, Field(ge=1)]`).
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import msgspec

from ..contract.function.signature import (
    LIMITS,
    constrained,
    has_unreadable_union,
    is_pydantic_model,
    is_struct_like,
    is_unchecked,
    is_union,
)
from ..sdk.files import File

ELEMENTS_MAX = 1_000_000
"""Largest array that is encoded as JSON: a larger one was meant to be sent in another form."""
_ARRAY_HINT = 'return bytes: Response(array.tobytes(), content_type="application/octet-stream")'
_PICTURE_HINT = (
    'save it to bytes: picture.save(buffer, "PNG"), then return Response(buffer.getvalue(), content_type="image/png")'
)


class ConversionError(ValueError):
    """A value that a hook could not convert. `path` is relative to that value; `field_error` prefixes the rest."""

    def __init__(self, path: str, expected: str, got: str) -> None:
        super().__init__(f"{expected}, got {got}")
        self.path = path
        self.expected = expected
        self.got = got


# ── annotations ────────────────────────────────────────────────────────────────────────────────────


def resolve_hints(handler: Any) -> dict[str, Any]:
    """Resolved annotations of the callable. Errors: NameError for an annotation with an undefined name."""
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    return typing.get_type_hints(called, include_extras=True)


def object_fields(kind: Any) -> dict[str, Any]:
    """Field types of an object type by name; empty where they are unknown."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type) or (issubclass(origin, dict) and not typing.is_typeddict(origin)):
        return {}
    try:
        return typing.get_type_hints(origin, include_extras=True)
    except Exception:  # text of an annotation is code, which may raise anything
        return {}


def unchecked_field(kind: Any) -> str:
    """A field of a class with a constraint that nothing checks, as `Item.price`; empty if there is none. msgspec reads
    the fields of dataclasses, TypedDict, NamedTuple and Struct by itself, and knows its own constraints only."""
    seen: set[type] = set()
    waiting = [("", kind)]
    while waiting:
        where, one = waiting.pop()
        origin, arguments = get_origin(one), get_args(one)
        if origin is ClassVar:
            continue
        if where and origin is Annotated and any(map(_is_unchecked, one.__metadata__)):
            return where
        waiting += [(where, argument) for argument in arguments]
        made = origin or one
        if isinstance(made, type) and made not in seen and _is_read_by_msgspec(made):
            seen.add(made)
            waiting += [(f"{made.__qualname__}.{name}", field) for name, field in _fields_of(made)]
    return ""


def _is_unchecked(said: Any) -> bool:
    parts = [said]
    if type(said).__module__.partition(".")[0] == "pydantic":
        parts += getattr(said, "metadata", None) or ()  # a Field says its constraints there
    return any(
        is_unchecked(type(part).__module__, {name: getattr(part, name, None) for name in LIMITS}) for part in parts
    )


def _fields_of(kind: type) -> list[tuple[str, Any]]:
    """Fields of a class with their types; where a dataclass has `count: int = pydantic.Field(ge=1)`, with that."""
    fields = list(object_fields(kind).items())
    for one in dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ():
        if type(one.default).__module__.partition(".")[0] == "pydantic":
            fields.append((one.name, Annotated[Any, one.default]))
    return fields


def is_unreadable(kind: Any) -> bool:
    """Checks whether msgspec would end the process when it reads the type."""
    return has_unreadable_union(kind, lambda one: object_fields(one).values() if _is_read_by_msgspec(one) else ())


def _is_read_by_msgspec(kind: type) -> bool:
    return (is_struct_like(kind) or hasattr(kind, "_fields")) and not is_pydantic_model(kind)


def msgspec_type(kind: Any) -> Any:
    """The same type with every constraint as `msgspec.Meta`.

    Errors: TypeError for a class that cannot be decoded from a request.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal or not arguments:
        _require_supported(kind)
        return kind
    if origin is Annotated:
        base, *said = arguments
        metas = [one for one in said if isinstance(one, msgspec.Meta)]
        found = _constraints(said)
        if found:
            metas.append(msgspec.Meta(**found))
        return constrained(msgspec_type(base), metas)
    checked = tuple(msgspec_type(one) if _is_type(one) else one for one in arguments)
    if checked == arguments:
        return kind
    if is_union(kind):
        return Union[checked]  # noqa: UP007
    return kind.copy_with(checked) if hasattr(kind, "copy_with") else types.GenericAlias(origin, checked)


def _is_type(argument: Any) -> bool:
    return argument is not Ellipsis and not isinstance(argument, list)


def _require_supported(kind: Any) -> None:
    if not isinstance(kind, type) or kind is File or is_pydantic_model(kind):
        return
    if _is_custom(kind):
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} is not a type that a request or a response can have")


def _is_custom(kind: Any) -> bool:
    """Checks whether msgspec leaves values of the type to a hook."""
    try:
        return isinstance(msgspec.inspect.type_info(kind), msgspec.inspect.CustomType)
    except (TypeError, NameError):
        return False  # the decoder reports it


def unfillable_type(kind: Any) -> str:
    """The first type inside that JSON cannot fill although its class has parameters, as `Iterable[int]`; empty if there
    is none. A request that leaves such an argument out is served, so a worker starts with it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal or not arguments:
        return ""
    if origin is not Annotated and not is_union(kind) and _is_custom(kind):
        return str(kind)
    return next(filter(None, map(unfillable_type, filter(_is_type, arguments))), "")


def _constraints(said: list[Any]) -> dict[str, Any]:
    """Constraints of annotated_types and of pydantic's Field: attributes of these names mean the same in both."""
    found: dict[str, Any] = {}
    for one in said:
        if isinstance(one, msgspec.Meta):
            continue
        for part in (one, *(getattr(one, "metadata", None) or ())):
            for name in LIMITS:
                value = getattr(part, name, None)
                if isinstance(value, int | float | str) and not isinstance(value, bool):
                    found[name] = value
    return found


# ── values ─────────────────────────────────────────────────────────────────────────────────────────


def decode_hook(kind: type, value: Any) -> Any:
    """Decoding hook for types that msgspec does not know. Errors: ConversionError."""
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    if kind is File:
        raise ConversionError("", "a file, sent as multipart/form-data", json_type_name(value))
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        raise ConversionError("", kind.__name__, json_type_name(value))
    try:
        return validate(value)
    except ValueError as error:
        raise _model_error(error, kind) from error


def _model_error(error: ValueError, kind: type) -> ConversionError:
    errors = getattr(error, "errors", None)
    if errors is None:
        return ConversionError("", f"{kind.__name__}: {error}", "another value")
    first = errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    got = "nothing" if first["type"] == "missing" else preview(first["input"])
    message = str(first["msg"])
    return ConversionError(path, message[:1].lower() + message[1:], got)


def encode_hook(value: Any) -> Any:
    """Encoding hook for values that msgspec does not know. Errors: TypeError with a way out."""
    kind = type(value)
    # numpy and torch arrays and scalars: one rule, and neither has to be imported for it.
    if hasattr(value, "tolist"):
        count = _element_count(value)
        if count > ELEMENTS_MAX:
            what = f"the handler returned a {kind.__name__} of {count:,} elements"
            raise TypeError(f"{what}, {ELEMENTS_MAX:,} at most as JSON: {_ARRAY_HINT}")
        return value.tolist()
    if is_pydantic_model(kind):
        return value.model_dump(mode="json", by_alias=True)
    text = f"the handler returned a {kind.__name__}, which has no JSON form"
    if kind.__module__.partition(".")[0] == "PIL":
        raise TypeError(f"{text}: {_PICTURE_HINT}")
    raise TypeError(text)


def _element_count(array: Any) -> int:
    count = getattr(array, "size", 1)
    if callable(count):  # torch: a shape
        count = array.numel()
    return count if isinstance(count, int) else 1


def json_type_name(value: Any) -> str:
    """JSON type of a value, as msgspec names it."""
    names = {dict: "object", list: "array", str: "str", int: "int", float: "float", bool: "bool", type(None): "null"}
    return names.get(type(value), type(value).__name__)


PREVIEW_MAX = 80


def preview(value: Any) -> str:
    """A value as JSON, shortened to PREVIEW_MAX characters."""
    try:
        text = msgspec.json.encode(value, enc_hook=str).decode(errors="replace")
    except (TypeError, ValueError, RecursionError):
        text = json_type_name(value)
    return text if len(text) <= PREVIEW_MAX else f"{text[: PREVIEW_MAX - 3]}..."
