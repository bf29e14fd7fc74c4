"""Encodes a handler's result into response bytes, by the return annotation of its signature.

An annotated result is converted to its type: a dict becomes the declared dataclass with its defaults, an int becomes a
float, and any other mismatch an error that names the field. A result without an annotation is sent as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..contract.errors import InvalidOutput
from ..contract.function.signature import answer_of
from ..sdk.responses import Response
from .annotations import (
    decode_hook,
    encode_hook,
    is_unreadable,
    json_type_name,
    msgspec_type,
    resolve_hints,
    unfillable_type,
)
from .validation_errors import field_error, type_name

Buffer = bytes | bytearray | memoryview
_encoder = msgspec.json.Encoder(enc_hook=encode_hook)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEncoder:
    """Encodes and validates values of one type. `decoder` is None where nothing is validated."""

    kind: Any
    decoder: msgspec.json.Decoder[Any] | None = None

    @property
    def is_bytes(self) -> bool:
        return self.kind is bytes

    def encode(self, value: Any) -> bytes:
        """The value as JSON. Errors: InvalidOutput; TypeError for a value without a JSON form."""
        if self.is_bytes or (self.decoder is not None and isinstance(value, Buffer)):
            raise self._wrong("", type_name(self.kind), "bytes" if isinstance(value, Buffer) else json_type_name(value))
        data = _encoder.encode(value)
        if self.decoder is None:
            return data
        try:
            return _encoder.encode(self.decoder.decode(data))
        except msgspec.ValidationError as error:
            found = field_error(error, msgspec.json.decode(data), self.kind)
            raise self._wrong(found.field, found.expected, found.got) from None

    def _wrong(self, field: str, expected: str, got: str) -> InvalidOutput:
        where = f" at `{field}`" if field else ""
        return InvalidOutput(
            f"the handler's result does not match its return annotation: expected {expected}{where}, got {got}",
            hint=f"it is declared to return {type_name(self.kind)}: fix the handler or its annotation",
            field=field,
            expected=expected,
            got=got,
        )


UNCHECKED = ValueEncoder(kind=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultEncoding:
    """Encoders of one handler's results."""

    value: ValueEncoder = UNCHECKED
    """For a result that is one value."""
    item: ValueEncoder = UNCHECKED
    """For each item of a stream."""


def result_encoding_of(handler: Callable[..., Any], *, batched: bool = False) -> ResultEncoding:
    """Builds the encoders from the return annotation; for a batched handler, from the view of one caller.

    Errors: TypeError for a batched handler that is not declared to return a list; NameError as in `argument_decoder`.
    """
    answer = answer_of(resolve_hints(handler).get("return", Any), response=Response, batched=batched)
    return ResultEncoding(value=_value_encoder(answer.value), item=_value_encoder(answer.item))


def _value_encoder(kind: Any) -> ValueEncoder:
    if kind is Any or is_unreadable(kind):
        return UNCHECKED
    if kind is bytes:
        return ValueEncoder(kind=bytes)
    try:
        kind = msgspec_type(kind)
        if unfillable_type(kind):
            return UNCHECKED
        return ValueEncoder(kind=kind, decoder=msgspec.json.Decoder(kind, dec_hook=decode_hook))
    except TypeError:
        return UNCHECKED  # an array or a class of the user's own: encoded by `encode_hook`, without validation
