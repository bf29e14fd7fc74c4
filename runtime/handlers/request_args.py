"""Decodes a request into the arguments of a handler, by the handler's signature.

One parameter that has no annotation, or one of a struct-like type (dataclass, TypedDict, msgspec.Struct, a pydantic
model, dict), takes the whole JSON body. Otherwise the parameters are the fields of a JSON object. A single parameter
annotated `bytes` or `File` takes the raw body. A form (multipart or urlencoded) gives its parts as that object, and a
request without a body its query parameters; there "3" may stand for 3. msgspec checks the types; an error names the
field, what was expected, and what came.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ..contract.decoding import UNDECODABLE
from ..contract.errors import InvalidInput
from ..contract.function.signature import (
    CHECKED_HINT,
    JSON_HINT,
    STREAM_HINT,
    UNCHECKED,
    UNREADABLE,
    UNREADABLE_HINT,
    BodyMode,
    Parameter,
    body_mode,
    fields_struct,
    has_stream,
    holds,
    one_of_batch,
)
from ..sdk.files import File
from .annotations import (
    decode_hook,
    is_unreadable,
    msgspec_type,
    object_fields,
    resolve_hints,
    unchecked_field,
    unfillable_type,
)
from .forms import URLENCODED, Form, form_values, query_values
from .validation_errors import LOST, field_error, type_name

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_NOTHING: Arguments = ((), {})
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentDecoder:
    """Decodes requests for one handler. `fields`: a Struct of its parameters, None unless `mode` is "fields"."""

    mode: BodyMode
    parameters: tuple[Parameter, ...]
    decoder: msgspec.json.Decoder[Any] | None
    fields: type[msgspec.Struct] | None = None
    field_types: Mapping[str, Any] = field(default_factory=dict)
    """Types of form and query fields by name."""

    def read(self, body: bytes, query: bytes, media: bytes = b"") -> Arguments:
        """Arguments from a complete body that is not for a `File`; `media` is its content type without parameters.

        Errors: InvalidInput, which names the field.
        """
        if self.mode == "raw":
            return self._give(body)
        if not body:
            return self._convert(query_values(query, self.field_types))
        if self.decoder is None:
            raise AssertionError("a raw form has no decoder")
        try:
            return self._arrange(self.decoder.decode(body))
        except msgspec.ValidationError as error:
            raise self._refusal(error, _parsed(body)) from None
        except UNDECODABLE as error:
            # curl sends JSON with the content type of a form by default, so JSON is tried first.
            if media == URLENCODED and not body.lstrip().startswith((b"{", b"[", b'"')):
                return self._convert(query_values(body, self.field_types))
            if self._files():
                raise InvalidInput(f"the body is neither a form nor JSON: {error}", hint=self.hint()) from None
            raise InvalidInput(f"the body is not JSON: {error}", hint="send a JSON document as the body") from None

    def read_form(self, form: Form) -> Arguments:
        """Arguments from a multipart body, or from one that is a file. Errors: InvalidInput."""
        if self.mode != "raw":
            return self._convert(form_values(form, self.field_types))
        if len(form.parts) != 1:
            text = f"the handler takes one file, and the form has {len(form.parts)} parts"
            raise InvalidInput(text, hint=self.hint(), expected="one part", got=f"{len(form.parts)} parts")
        (part,) = form.parts
        part.body.seek(0)
        return self._give(part.body if self.takes_file else part.body.content())

    @property
    def takes_file(self) -> bool:
        """True if the whole body is a `File`: `read_form` takes it, and the caller closes it."""
        return self.mode == "raw" and self.parameters[0].type is File

    def _convert(self, values: dict[str, Any]) -> Arguments:
        kind = self.fields
        if kind is None:
            (parameter,) = self.parameters
            if not values and not parameter.required:
                return _NOTHING
            kind = parameter.type
        try:
            return self._arrange(msgspec.convert(values, kind, strict=False, dec_hook=decode_hook))
        except msgspec.ValidationError as error:
            raise self._refusal(error, values) from None

    def _refusal(self, error: msgspec.ValidationError, value: Any) -> InvalidInput:
        found = field_error(error, value, self.fields if self.fields is not None else self.parameters[0].type)
        return InvalidInput(
            f"the input does not fit: {found.sentence()}",
            hint=self.hint(),
            field=found.field,
            expected=found.expected,
            got=found.got,
        )

    def _arrange(self, value: Any) -> Arguments:
        if self.mode == "whole":
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

    def hint(self) -> str:
        """One line that describes the input the handler takes."""
        if self.mode == "raw":
            return "the body is the bytes themselves, or a form with one file in it"
        if self.mode == "whole":
            return f"the body is one JSON value: {type_name(self.parameters[0].type)}"
        if not self.parameters:
            return "the handler takes no input: send no body, or {}"
        names = [f"{p.name}: {type_name(p.type)}" + ("" if p.required else " (optional)") for p in self.parameters]
        if not (files := self._files()):
            return f"the body is a JSON object with {', '.join(names)}"
        shown = [parameter for parameter in self.parameters if parameter.required] or files
        parts = " ".join(f"-F {one.name}={'@FILE' if one in files else 'VALUE'}" for one in shown)
        return f"send a form with {', '.join(names)}: curl {parts} URL, or fs invoke NAME with the same -F"

    def _files(self) -> list[Parameter]:
        """The parameters that are parts of a form alone."""
        return [parameter for parameter in self.parameters if holds(parameter.type, (File,))]


def argument_decoder(handler: Callable[..., Any], *, batched: bool = False) -> ArgumentDecoder:
    """Builds the decoder from the signature, once at worker start; for a batched handler, from the view of one caller.
    What a deploy refuses and a worker can serve is one warning in the function's log: it may have been deployed before
    deploys refused it.

    Errors: TypeError for a signature that no request can fill; NameError for an annotation with an undefined name.
    """
    parameters = tuple(_parameters(handler))
    if doubts := [doubt for parameter in parameters for doubt in _doubts(parameter)]:
        logger.warning("%s", "; ".join(doubts))
    if batched:
        parameters = tuple(one_of_batch(parameter) for parameter in parameters)
    mode = body_mode(parameters, file=File)
    if mode == "raw":
        return ArgumentDecoder(mode=mode, parameters=parameters, decoder=None)
    if mode == "whole":
        kind = parameters[0].type
        return ArgumentDecoder(
            mode=mode, parameters=parameters, decoder=_decoder(kind), field_types=object_fields(kind)
        )
    fields = fields_struct(parameters)
    field_types = {parameter.name: parameter.type for parameter in parameters}
    return ArgumentDecoder(
        mode=mode, parameters=parameters, decoder=_decoder(fields), fields=fields, field_types=field_types
    )


def _parsed(body: bytes) -> Any:
    """The JSON value that failed validation; LOST if its rest, after the first error, is not JSON."""
    try:
        return msgspec.json.decode(body)
    except UNDECODABLE:
        return LOST


def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=decode_hook)


def _parameters(handler: Callable[..., Any]) -> list[Parameter]:
    hints = resolve_hints(handler)
    found = []
    for parameter in inspect.signature(handler).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TypeError(
                f"the handler takes {parameter}, which a JSON body cannot fill: name its parameters, "
                "or take the whole body as one"
            )
        required = parameter.default is parameter.empty
        stated = hints.get(parameter.name, Any)
        if is_unreadable(stated):
            raise TypeError(f"parameter {parameter.name!r} has {UNREADABLE}: {UNREADABLE_HINT}")
        try:
            kind = msgspec_type(stated)
        except TypeError as error:
            raise TypeError(f"parameter {parameter.name!r}: {error}; {JSON_HINT}") from None
        found.append(
            Parameter(
                name=parameter.name,
                type=kind,
                positional_only=parameter.kind is parameter.POSITIONAL_ONLY,
                required=required,
                default=None if required else parameter.default,
            )
        )
    return found


def _doubts(parameter: Parameter) -> list[str]:
    """What the type of a parameter promises and no call keeps, each with what to write."""
    found = []
    if kind := unfillable_type(parameter.type):
        way_out = STREAM_HINT if has_stream(parameter.type) else JSON_HINT
        found.append(f"parameter {parameter.name!r}: no request can fill {kind}: {way_out}")
    if where := unchecked_field(parameter.type):
        found.append(f"parameter {parameter.name!r}: {where} has {UNCHECKED}: {CHECKED_HINT}")
    return found
