"""From what a handler gives to the bytes of its answer, by the return annotation of its signature.

An annotated answer is converted by its type, so that a dict becomes the declared dataclass with its defaults, an int a
float, and an answer that is something else an error that names the field. Without an annotation it is sent as it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Union, get_args, get_origin

import msgspec

from ..contract.errors import InvalidOutput
from ..sdk.responses import Response
from .annotations import STREAMS, checkable, hints_of, is_union, json_type, made, plain
from .validation_errors import field_error, type_name

Buffer = bytes | bytearray | memoryview
_encoder = msgspec.json.Encoder(enc_hook=plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueEncoder:
    """One type of answer. `decoder` is None where nothing is checked."""

    kind: Any
    decoder: msgspec.json.Decoder[Any] | None = None

    @property
    def is_bytes(self) -> bool:
        return self.kind is bytes

    def encode(self, value: Any) -> bytes:
        """JSON. Errors: InvalidOutput; TypeError for what has no JSON form."""
        if self.is_bytes or (self.decoder is not None and isinstance(value, Buffer)):
            raise self._wrong("", type_name(self.kind), "bytes" if isinstance(value, Buffer) else json_type(value))
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
            f"the handler's answer is not what its signature says: expected {expected}{where}, got {got}",
            hint=f"it is declared to return {type_name(self.kind)}: mend the handler or its annotation",
            field=field,
            expected=expected,
            got=got,
        )


UNCHECKED = ValueEncoder(kind=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultEncoding:
    value: ValueEncoder = UNCHECKED
    """Of an answer that is one value."""
    item: ValueEncoder = UNCHECKED
    """Of each event of a stream."""


def result_encoding_of(handler: Callable[..., Any], *, batched: bool = False) -> ResultEncoding:
    """Reads the return annotation once; of a batched handler, as each caller sees it.

    Errors: TypeError for a batched handler that is not declared to return a list; NameError as of `inputs_of`.
    """
    kind = hints_of(handler).get("return", Any)
    if get_origin(kind) in (Awaitable, Coroutine):
        kind = get_args(kind)[-1]
    if get_origin(kind) in STREAMS:
        item = (*get_args(kind), Any)[0]
        # What is declared to be iterated over may as well be a list.
        whole = list[item] if item is not Any else Any  # type: ignore[valid-type]
        return ResultEncoding(value=_shape(whole), item=_shape(item))
    if batched and kind is not Any:
        if get_origin(kind) not in (list, tuple) and kind not in (list, tuple):
            raise TypeError(f"a batched handler returns a list, one answer for each item, and not {type_name(kind)}")
        kind = (*get_args(kind), Any)[0]
    return ResultEncoding(value=_shape(kind))


def _shape(kind: Any) -> ValueEncoder:
    if is_union(kind):
        others = tuple(one for one in get_args(kind) if one is not Response and not _is_exception(one))
        kind = Union[others] if others else Any  # noqa: UP007
    if kind is Any or kind in STREAMS or kind is Response:
        return UNCHECKED
    if kind in (bytes, bytearray, memoryview):
        return ValueEncoder(kind=bytes)
    try:
        kind = checkable(kind)
        return ValueEncoder(kind=kind, decoder=msgspec.json.Decoder(kind, dec_hook=made))
    except TypeError:
        return UNCHECKED  # an array, a class of the user's own: whatever JSON it has is what is sent


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)
