"""Form parsing: multipart/form-data, urlencoded bodies and query strings, as values by name.

A part is converted to the type of its handler's parameter: `File`, bytes, text, or JSON. `request_args` makes arguments
of the values. python-multipart splits the bytes; it is imported with the first form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec

from ..contract.decoding import UNDECODABLE
from ..contract.errors import InvalidInput, TooLarge
from ..contract.function.signature import is_list, is_struct_like, underlying_type
from ..sdk.files import File
from ..worker_io.asgi import ClientDisconnected, Receive

PARTS_MAX = 1000
VALUES_MAX = 10_000
"""Most values of a query string or a urlencoded body: each takes fifty times the four bytes that it may have."""
HEADER_MAX_BYTES = 8 * 1024
FORM_HINT = "send it as multipart/form-data, as `curl -F name=value -F file=@path` does"
MULTIPART = b"multipart/form-data"
URLENCODED = b"application/x-www-form-urlencoded"
_ENCODED_NAME = re.compile(rb";\s*filename\*=(utf-8|iso-8859-1)'[^';]*'([^;\s]+)", re.IGNORECASE)
"""A file's name as RFC 5987 writes it, which older HTTP libraries send alone if it is not ASCII."""


@dataclass(slots=True)
class FormPart:
    """One part of a multipart body."""

    name: str = ""
    filename: str | None = None
    content_type: str = ""
    body: File = field(default_factory=File)


@dataclass(slots=True)
class Form:
    """The parts of a multipart body, in their order. The caller of `read_form` closes it."""

    parts: list[FormPart] = field(default_factory=list)

    def close(self) -> None:
        for part in self.parts:
            part.body.close()


def media_type(headers: list[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """The request's content type: lower case without parameters, and as it was sent."""
    for name, value in headers:
        if name == b"content-type":
            return value.partition(b";")[0].strip().lower(), value
    return b"", b""


# ── multipart ──────────────────────────────────────────────────────────────────────────────────────


async def read_form(receive: Receive, content_type: bytes) -> Form:
    """Reads a multipart body part by part, as it arrives. Errors: InvalidInput, TooLarge, ClientDisconnected."""
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser, parse_options_header

    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary or len(boundary) > 70:
        raise InvalidInput("the multipart body's content type names no boundary", hint=FORM_HINT)
    reading, preamble = _FormBuilder(parse_options_header), _Preamble(boundary)
    try:
        parser = MultipartParser(boundary, reading.callbacks())
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            parser.write(preamble.without(message.get("body", b"")))
            more = message.get("more_body", False)
        parser.finalize()
        if not preamble.over:
            raise InvalidInput("the multipart body has no boundary as its content type names it", hint=FORM_HINT)
        if not reading.ended:
            raise InvalidInput("the multipart body ends in the middle of a part", hint=FORM_HINT)
        return reading.form
    except BaseException as error:
        reading.form.close()
        if isinstance(error, FormParserError):
            raise InvalidInput(f"the multipart body is broken: {error}", hint=FORM_HINT) from None
        if isinstance(error, OSError):
            raise _without_room(error) from None
        raise


def form_of_body(body: bytes, content_type: bytes) -> Form:
    """A raw body as the one part of a form. Errors: TooLarge."""
    file = File("", content_type.decode("latin-1") or "application/octet-stream")
    try:
        file.write(body)
    except OSError as error:
        file.close()
        raise _without_room(error) from None
    return Form([FormPart(content_type=file.content_type, body=file)])


def _without_room(error: OSError) -> TooLarge:
    return TooLarge(
        f"the request's files do not fit into the worker's temporary folder: {error.strerror}",
        hint="send a smaller file, or give the function more memory: half of it is for files",
    )


class _Preamble:
    """The text that may stand before the first boundary of a multipart body (RFC 2046), and says nothing."""

    def __init__(self, boundary: bytes) -> None:
        self._delimiter = b"--" + boundary
        self._held = b"\r\n"  # a body that begins with its boundary has no line before it
        self.over = False

    def without(self, data: bytes) -> bytes:
        """What of the data comes after the preamble. Keeps no more of it than a delimiter may begin in."""
        if self.over:
            return data
        self._held += data
        at = self._held.find(b"\r\n" + self._delimiter)
        if at < 0:
            self._held = self._held[-len(self._delimiter) - 1 :]
            return b""
        self.over = True
        return self._held[at + 2 :]


class _FormBuilder:
    """Builds a `Form` from the parser's callbacks."""

    def __init__(self, options: Callable[[bytes], tuple[bytes, dict[bytes, bytes]]]) -> None:
        self.form = Form()
        self.ended = False
        self._options = options
        self._part: FormPart
        self._name = b""
        self._value = b""
        self._header_bytes = 0

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_part_data": self._data,
            "on_end": self._end,
        }

    def _begin(self) -> None:
        if len(self.form.parts) >= PARTS_MAX:
            raise TooLarge(f"the multipart body has more than {PARTS_MAX} parts")
        self._part = FormPart()
        self._header_bytes = 0
        self.form.parts.append(self._part)

    def _counted(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > HEADER_MAX_BYTES:
            raise TooLarge(f"a part of the multipart body has more than {HEADER_MAX_BYTES} bytes of headers")

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._counted(end - start)
        self._name += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._counted(end - start)
        self._value += data[start:end]

    def _header_end(self) -> None:
        name, value = self._name.lower(), self._value
        self._name, self._value = b"", b""
        if name == b"content-disposition":
            _, options = self._options(value)
            self._part.name = options.get(b"name", b"").decode(errors="replace")
            if b"filename" in options or _ENCODED_NAME.search(value):
                self._part.filename = _file_name(options, value)
                unnamed = self._part.body
                self._part.body = File(self._part.filename, unnamed.content_type)
                unnamed.close()
        elif name == b"content-type":
            self._part.content_type = value.decode("latin-1").strip()
            self._part.body.content_type = self._part.content_type

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._part.body.write(data[start:end])

    def _end(self) -> None:
        self.ended = True


def _file_name(options: Mapping[bytes, bytes], disposition: bytes) -> str:
    """The plain name of a file is the one that counts (RFC 7578)."""
    encoded = _ENCODED_NAME.search(disposition)
    if b"filename" in options or encoded is None:
        return options[b"filename"].decode(errors="replace")
    return unquote_to_bytes(encoded[2]).decode(encoded[1].decode(), errors="replace")


# ── values ─────────────────────────────────────────────────────────────────────────────────────────


def form_values(form: Form, types: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a multipart body by name, each converted to its type. Errors: InvalidInput."""
    pairs = [(part.name, _value(part, types.get(part.name, Any))) for part in form.parts]
    return _grouped(pairs, types)


def query_values(text: bytes, types: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a query string or a urlencoded body by name. Errors: InvalidInput, TooLarge."""
    if text.count(b"&") >= VALUES_MAX:
        raise TooLarge(f"the form has more than {VALUES_MAX} values", hint="send a JSON document as the body")
    # As browsers and the URL standard do with bytes that are no UTF-8, escaped or not: U+FFFD, and no error.
    decoded = text.decode(errors="replace")
    try:
        return _grouped(parse_qsl(decoded, keep_blank_values=True), types)
    except ValueError as error:
        raise InvalidInput(f"the form cannot be parsed: {error}", hint=FORM_HINT) from None


def _grouped(pairs: list[tuple[str, Any]], types: Mapping[str, Any]) -> dict[str, Any]:
    """Groups values by name: a list for a name that occurs twice or has a list type."""
    found: dict[str, list[Any]] = {}
    for name, value in pairs:
        found.setdefault(name, []).append(value)
    return {
        name: values if len(values) > 1 or is_list(types.get(name)) else values[0] for name, values in found.items()
    }


def _value(part: FormPart, kind: Any) -> Any:
    kind = underlying_type(kind)
    if is_list(kind):
        kind = underlying_type((*getattr(kind, "__args__", ()), Any)[0])
    part.body.seek(0)
    if kind is File:
        return part.body
    data = part.body.content()
    if kind is bytes:
        return data
    if part.content_type.partition(";")[0] == "application/json" or is_struct_like(kind):
        try:
            return msgspec.json.decode(data)
        except UNDECODABLE as error:
            raise InvalidInput(
                f"part {part.name!r} of the form is not JSON: {error}",
                field=part.name,
                expected="JSON",
                got="other text",
            ) from None
    if part.filename is not None and kind is Any:
        return part.body
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidInput(
            f"part {part.name!r} of the form is not text in UTF-8", field=part.name, expected="text", got="other bytes"
        ) from None
