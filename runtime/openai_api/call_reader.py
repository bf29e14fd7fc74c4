"""Call reader: decodes and checks the JSON bodies of one route by the table of request fields."""

from __future__ import annotations

import re
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ..contract.decoding import UNDECODABLE
from .invalid_parameter import InvalidParameter
from .request_fields import Route, of_route

_PATH = re.compile(r" (?:at|in) `\$\.?([A-Za-z_]\w*)?")
_UNKNOWN = re.compile(r"unknown field `([^`]*)`")
_MISSING = re.compile(r"required field `([^`]*)`")


class CheckedCall(Protocol):
    """A decoded body that can check itself."""

    def check(self) -> None:
        """Errors: InvalidParameter for a value out of range or an unsupported feature."""
        ...


Call = TypeVar("Call", bound=CheckedCall)


class CallReader(Generic[Call]):
    """Decodes and checks the bodies of one route.

    A struct declares the fields that are honoured. Those without effect and the refused ones come from the table.
    """

    def __init__(self, kind: type[Call], route: Route) -> None:
        self._refused = list(of_route(route, "refused"))
        others = [(field.name, Any, None) for field in of_route(route, "no effect", "refused")]
        read = msgspec.defstruct(
            kind.__name__, others, bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=True
        )
        self._decoder: msgspec.json.Decoder[Call] = msgspec.json.Decoder(read)

    def read(self, body: bytes) -> Call:
        """The call in a body. Errors: InvalidParameter, with the field if it is known."""
        try:
            call: Call = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _invalid_parameter(str(error)) from error
        except UNDECODABLE as error:
            raise InvalidParameter(f"the body is not JSON: {error}") from error
        for field in self._refused:
            value = getattr(call, field.name)
            if value and value not in field.off:
                raise InvalidParameter(f"{field.name} is not supported: {field.note}", field.name)
        call.check()
        return call


def _invalid_parameter(text: str) -> InvalidParameter:
    path = _PATH.search(text)
    name = path[1] if path else None
    inside = f" in {name}" if name else ""
    if unknown := _UNKNOWN.search(text):
        return InvalidParameter(f"unknown parameter {unknown[1]!r}{inside}", name or unknown[1])
    if missing := _MISSING.search(text):
        return InvalidParameter(f"parameter {missing[1]!r} is missing{inside}", name or missing[1])
    return InvalidParameter(f"{name}: {text}" if name else text, name)
