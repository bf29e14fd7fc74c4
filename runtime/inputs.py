"""From a request's body or query to the arguments of a handler, by the handler's signature.

One parameter that has no annotation, or one of a struct-like type (dataclass, TypedDict, msgspec.Struct,
dict), takes the whole JSON body. Otherwise the parameters are the fields of a JSON object. A single
parameter annotated `bytes` takes the raw body. A request without a body gives its query parameters as
that object, and there "3" may stand for 3. msgspec checks the types; an error names the field.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import parse_qsl

import msgspec

from fleetstart.runtime.contract.errors import InvalidInput

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NOTHING: Arguments = ((), {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    name: str
    type: Any
    positional_only: bool
    required: bool
    default: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """How one handler is fed. `fields` is a Struct made from the parameters, None unless `form` is "fields"."""

    form: Literal["raw", "whole", "fields"]
    parameters: tuple[Parameter, ...]
    decoder: msgspec.json.Decoder[Any] | None
    fields: type[msgspec.Struct] | None = None

    def read(self, body: bytes, query: bytes) -> Arguments:
        """Errors: InvalidInput, which names the field."""
        if self.form == "raw":
            return self._give(body)
        try:
            value = self._decode(body) if body else self._convert(_query_object(query, self._is_list))
        except msgspec.ValidationError as error:
            raise InvalidInput(f"the input does not fit: {error}", hint=self.hint()) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"the body is not JSON: {error}", hint="send a JSON document as the body") from None
        return value

    def _decode(self, body: bytes) -> Arguments:
        if self.decoder is None:
            raise AssertionError("a raw form has no decoder")
        return self._arrange(self.decoder.decode(body))

    def _convert(self, query: dict[str, Any]) -> Arguments:
        if self.form == "fields":
            return self._arrange(msgspec.convert(query, self.fields, strict=False))
        (parameter,) = self.parameters
        if not query and not parameter.required:
            return _NOTHING
        return self._give(msgspec.convert(query, parameter.type, strict=False))

    def _arrange(self, value: Any) -> Arguments:
        if self.form == "whole":
            return self._give(value)
        positional: list[Any] = []
        named: dict[str, Any] = {}
        for parameter in self.parameters:
            given = getattr(value, parameter.name)
            if given is msgspec.UNSET:
                given = parameter.default
            if parameter.positional_only:
                positional.append(given)
            else:
                named[parameter.name] = given
        return tuple(positional), named

    def _give(self, value: Any) -> Arguments:
        return (value,), {}

    def _is_list(self, name: str) -> bool:
        kinds = {parameter.name: parameter.type for parameter in self.parameters}
        return self.form == "fields" and typing.get_origin(kinds.get(name)) in (list, tuple, set, frozenset)

    def hint(self) -> str:
        """What the handler takes, in one line."""
        if self.form != "fields":
            return f"the body is one JSON value: {_type_name(self.parameters[0].type)}"
        if not self.parameters:
            return "the handler takes no input: send no body, or {}"
        names = [f"{p.name}: {_type_name(p.type)}" + ("" if p.required else " (optional)") for p in self.parameters]
        return f"the body is a JSON object with {', '.join(names)}"


def inputs_of(handler: Callable[..., Any]) -> Inputs:
    """Reads the signature once, when the worker starts.

    Errors: TypeError for a signature that no JSON body can fill; NameError for an annotation that names nothing.
    """
    parameters = tuple(_parameters(handler))
    if len(parameters) == 1 and parameters[0].type is bytes:
        return Inputs(form="raw", parameters=parameters, decoder=None)
    if len(parameters) == 1 and (parameters[0].type is Any or _is_struct_like(parameters[0].type)):
        return Inputs(form="whole", parameters=parameters, decoder=msgspec.json.Decoder(parameters[0].type))
    specs: list[Any] = [
        (parameter.name, parameter.type) if parameter.required else _optional_field(parameter)
        for parameter in parameters
    ]
    fields = msgspec.defstruct("Input", specs, kw_only=True, forbid_unknown_fields=True)
    return Inputs(form="fields", parameters=parameters, decoder=msgspec.json.Decoder(fields), fields=fields)


def _optional_field(parameter: Parameter) -> tuple[str, Any, Any]:
    # UNSET stands for "not sent", so that the function's own default object is what it gets.
    return (parameter.name, typing.Union[parameter.type, msgspec.UnsetType], msgspec.UNSET)  # noqa: UP007


def _parameters(handler: Callable[..., Any]) -> list[Parameter]:
    called = handler if inspect.isroutine(handler) else type(handler).__call__
    hints = typing.get_type_hints(called, include_extras=True)
    found = []
    for parameter in inspect.signature(handler).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"the handler takes {parameter}, which a JSON body cannot fill: name its parameters, "
                "or take the whole body as one"
            )
        required = parameter.default is parameter.empty
        found.append(
            Parameter(
                name=parameter.name,
                type=hints.get(parameter.name, Any),
                positional_only=parameter.kind is parameter.POSITIONAL_ONLY,
                required=required,
                default=None if required else parameter.default,
            )
        )
    return found


def _is_struct_like(kind: Any) -> bool:
    origin = typing.get_origin(kind) or kind
    if not isinstance(origin, type):
        return False
    return (
        issubclass(origin, msgspec.Struct | dict)
        or origin in (Mapping, typing.Mapping)
        or dataclasses.is_dataclass(origin)
        or typing.is_typeddict(origin)
    )


def _query_object(query: bytes, is_list: Callable[[str], bool]) -> dict[str, Any]:
    """Query parameters as an object; a name that stands twice, or is a list by its type, gives a list."""
    gathered: dict[str, list[str]] = {}
    for name, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True):
        gathered.setdefault(name, []).append(value)
    return {name: values if len(values) > 1 or is_list(name) else values[0] for name, values in gathered.items()}


def _type_name(kind: Any) -> str:
    if kind is Any:
        return "anything"
    return kind.__name__ if isinstance(kind, type) and typing.get_origin(kind) is None else str(kind)
