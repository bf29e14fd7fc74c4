"""Derives the form of requests and responses (JSON, form, bytes, stream) from a handler's signature.

The worker applies these rules to the types of the handler that it runs. A deploy applies them to stand-ins for these
types, which it makes from the source's syntax tree without running it. So the schema that a deploy publishes describes
what the worker will accept.
"""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

STREAMS = (Iterator, Generator, Iterable, AsyncIterator, AsyncGenerator, AsyncIterable)
"""Return annotations of handlers that stream; their first argument is the type of an event."""
BUFFERS = (bytes, bytearray, memoryview)

LIMITS = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")
"""Constraints on a value; pydantic, annotated_types and `msgspec.Meta` give them the same names."""
_SIZES = tuple(name for name in LIMITS if name != "pattern")
UNCHECKED = "a constraint of pydantic or annotated_types, which is checked in signatures and in pydantic models only"
CHECKED_HINT = "write Annotated[..., msgspec.Meta(...)] there, or make its class a pydantic model"
STREAM_HINT = "write list[...]: a request has all its items"
UNREADABLE = "a union of a tuple of fixed length and a type with a limit, which cannot be read"
UNREADABLE_HINT = "write tuple[T, ...], or make the tuple a class; or leave the limit out, and check it in the handler"
PRIVATE = "a name that Python keeps to a class, as it begins with two underscores"
JSON_HINT = "take bytes, a File, or what JSON can say"
_FOREIGN = ("pydantic", "annotated_types")

BodyMode = Literal["raw", "whole", "fields"]
"""The body's bytes for the only parameter, one JSON value for it, or a JSON object with a field for each parameter."""
AnswerForm = Literal["json", "bytes", "events", "response"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a handler; `type` is Any without an annotation."""

    name: str
    type: Any
    positional_only: bool
    required: bool
    default: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Types of a handler's answer. Any: not checked; bytes: sent as they are."""

    form: AnswerForm
    value: Any = Any
    """Type of an answer that is one value."""
    item: Any = Any
    """Type of each event of a stream."""


def is_unchecked(maker: str, said: Mapping[str, object]) -> bool:
    """Checks whether what a field's `Annotated` says limits its value by pydantic or annotated_types. msgspec knows
    neither. `maker`: dotted name of its class or function, or of the module of that; `said`: its LIMITS by name, None
    for one that is not set or not known."""
    return maker.partition(".")[0] in _FOREIGN and any(said.get(name) is not None for name in LIMITS)


# ── requests ───────────────────────────────────────────────────────────────────────────────────────


def body_mode(parameters: Sequence[Parameter], *, file: type) -> BodyMode:
    """How a request's body fills the parameters. `file` is the type of an uploaded file."""
    if len(parameters) == 1:
        (kind,) = (parameter.type for parameter in parameters)
        if kind in (bytes, file):
            return "raw"
        if kind is Any or is_struct_like(kind):
            return "whole"
    return "fields"


def fields_struct(parameters: Sequence[Parameter]) -> type[msgspec.Struct]:
    """The JSON object of the mode "fields". A parameter with a default is UNSET if the request lacks it, so that the
    function's own default object is what it gets. Errors: TypeError."""
    for name in private_names(parameters):
        raise TypeError(f"parameter {name!r} has {PRIVATE}: write another one")
    specs: list[Any] = [
        (one.name, one.type) if one.required else (one.name, Union[one.type, msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007
        for one in parameters
    ]
    return msgspec.defstruct("_Input", specs, kw_only=True, forbid_unknown_fields=True)


def private_names(parameters: Sequence[Parameter]) -> list[str]:
    """Names of parameters that cannot be fields of a JSON object: a class changes or refuses them."""
    return [one.name for one in parameters if one.name.startswith("__") and one.name.strip("_")]


def one_of_batch(parameter: Parameter) -> Parameter:
    """The parameter of a batched handler as one of its callers fills it. Errors: TypeError."""
    if not parameter.required:
        raise TypeError(f"parameter {parameter.name!r} of a batched handler has a default: give each item its own")
    kind = underlying_type(parameter.type)
    if kind is not Any and not is_list(kind):
        raise TypeError(f"parameter {parameter.name!r} of a batched handler must be a list of what each caller sends")
    item = (*get_args(kind), Any)[0]
    return dataclasses.replace(parameter, type=item)


# ── answers ────────────────────────────────────────────────────────────────────────────────────────


def answer_of(returns: Any, *, response: type, batched: bool = False, yields: bool = False) -> Answer:
    """The answer of a handler with this return annotation. `response` is the type of an answer that says all of itself;
    `yields`: the handler is a generator. Exceptions in a union are errors, and no answers.

    Errors: TypeError for a batched handler that is not declared to return a list.
    """
    if get_origin(returns) in (Awaitable, Coroutine):
        returns = get_args(returns)[-1]
    if get_origin(returns) in STREAMS:
        item = (*get_args(returns), Any)[0]
        # What is declared to be iterated over may as well be a list.
        whole = list[item] if item is not Any else Any  # type: ignore[valid-type]
        return Answer(form="events", value=_checked(whole, response), item=_checked(item, response))
    if batched and returns is not Any:
        if get_origin(returns) not in (list, tuple) and returns not in (list, tuple):
            raise TypeError(f"a batched handler returns a list, one answer for each item, and not {returns}")
        returns = (*get_args(returns), Any)[0]
    value = _checked(returns, response)
    form: AnswerForm = "bytes" if value is bytes else "json"
    if yields or returns in STREAMS:
        form = "events"
    elif returns is response or (is_union(returns) and response in get_args(returns)):
        form = "response"
    return Answer(form=form, value=value)


def _checked(kind: Any, response: type) -> Any:
    if is_union(kind):
        others = tuple(one for one in get_args(kind) if one is not response and not _is_exception(one))
        kind = Union[others] if others else Any  # noqa: UP007
    if kind is response or kind in STREAMS:
        return Any
    return bytes if kind in BUFFERS else kind


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


# ── types ──────────────────────────────────────────────────────────────────────────────────────────


def is_pydantic_model(kind: Any) -> bool:
    """Checks whether the type is a pydantic model. pydantic is not imported: it is there if the user's code has it."""
    pydantic = sys.modules.get("pydantic")
    return pydantic is not None and isinstance(kind, type) and issubclass(kind, pydantic.BaseModel)


def is_struct_like(kind: Any) -> bool:
    """Checks whether the type stands for a whole JSON object."""
    origin = get_origin(kind) or kind
    if not isinstance(origin, type):
        return False
    return (
        issubclass(origin, msgspec.Struct | dict)
        or origin in (Mapping, typing.Mapping)
        or dataclasses.is_dataclass(origin)
        or typing.is_typeddict(origin)
        or is_pydantic_model(origin)
    )


def underlying_type(kind: Any) -> Any:
    """The type without Annotated and without None."""
    if get_origin(kind) is Annotated:
        return underlying_type(get_args(kind)[0])
    if is_union(kind):
        others = [one for one in get_args(kind) if one is not type(None)]
        return underlying_type(others[0]) if len(others) == 1 else kind
    return kind


def is_union(kind: Any) -> bool:
    """Checks whether the type is `A | B` or `Union[A, B]`."""
    return get_origin(kind) in (Union, types.UnionType)


def is_list(kind: Any) -> bool:
    """Checks whether the type is a list, tuple or set of values."""
    kind = underlying_type(kind)
    return (get_origin(kind) or kind) in (list, tuple, set, frozenset)


def has_stream(kind: Any) -> bool:
    """Checks whether the type, or one inside it, is an `Iterable[...]` or another that a request's JSON cannot fill."""
    return get_origin(kind) in STREAMS or any(map(has_stream, get_args(kind)))


def holds(kind: Any, wanted: Sequence[type]) -> bool:
    """Checks whether the type is one of the wanted types, a list of one, or a union with one."""
    kind = underlying_type(kind)
    if is_union(kind):
        return any(holds(one, wanted) for one in get_args(kind))
    return kind in wanted or (is_list(kind) and any(underlying_type(one) in wanted for one in get_args(kind)))


def constrained(kind: Any, metas: Sequence[msgspec.Meta]) -> Any:
    """The type with constraints. Those of an optional type are its value's: msgspec allows none beside None."""
    if not metas:
        return kind
    others = [one for one in get_args(kind) if one is not type(None)] if is_union(kind) else []
    if len(others) == 1:
        return Union[Annotated[(others[0], *metas)], None]  # noqa: UP007
    return Annotated[(kind, *metas)]


def has_unreadable_union(kind: Any, fields_of: Callable[[type], Iterable[Any]]) -> bool:
    """Checks whether the type has inside it, or in the fields of its classes, a union of a tuple of fixed length and a
    type with a limit. msgspec 0.22 ends the process with a segmentation fault when it reads one.

    `fields_of`: types of the fields of a class, none for those that msgspec does not read.
    """
    seen: set[type] = set()
    waiting = [kind]
    while waiting:
        options = _options(waiting.pop())
        if len(options) > 1 and any(limited for _, limited in options) and any(_is_fixed(one) for one, _ in options):
            return True
        for one, _ in options:
            waiting += get_args(one) if get_origin(one) is not Literal else ()
            made = get_origin(one) or one
            if isinstance(made, type) and made not in seen:
                seen.add(made)
                waiting += fields_of(made)
    return False


def _options(kind: Any, *, limited: bool = False) -> list[tuple[Any, bool]]:
    """The options of a union, or the type itself; each with whether a limit stands on it."""
    if get_origin(kind) is Annotated:
        base, *said = get_args(kind)
        return _options(base, limited=limited or any(map(_limits, said)))
    if hasattr(kind, "__supertype__"):
        return _options(kind.__supertype__, limited=limited)
    if is_union(kind):
        return [option for one in get_args(kind) for option in _options(one, limited=limited)]
    return [(kind, limited)]


def _limits(said: Any) -> bool:
    parts = (said, *(getattr(said, "metadata", None) or ()))  # a Field of pydantic says its limits there
    return any(getattr(part, name, None) is not None for part in parts for name in _SIZES)


def _is_fixed(kind: Any) -> bool:
    return get_origin(kind) is tuple and Ellipsis not in get_args(kind)
