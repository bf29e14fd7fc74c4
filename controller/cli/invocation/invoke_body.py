"""The body that `fs invoke` sends with a call: JSON, a file's bytes, or a form."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import NotFound

Content = tuple[bytes | None, dict[str, str]]
"""A body, None for none, and its content type as a header."""


def body_content(text: str | None, fields: Sequence[str], *, ask_for_stream: bool) -> Content:
    """The body of a command line. `fields`: those of a form, which excludes `text`. Errors: UsageError, NotFound."""
    if not fields:
        return _body(text, ask_for_stream=ask_for_stream)
    if text is not None:
        raise click.UsageError("a call has a body or the fields of a form (-F), not both")
    return _form(fields)


def _body(text: str | None, *, ask_for_stream: bool) -> Content:
    """The body of an argument: what is typed must be JSON, what comes from a file may be anything."""
    if text is None:
        return None, {}
    if text == "-":
        content = sys.stdin.buffer.read()
    elif text.startswith("@"):
        content = _file(text[1:], "@FILE").read_bytes()
    else:
        content = text.encode()
    try:
        value = msgspec.json.decode(content)
    except UNDECODABLE as error:
        if text != "-" and not text.startswith("@"):
            raise click.UsageError(f"the body is not JSON: {error}; text needs its quotes: '\"like this\"'") from error
        return content, {"content-type": "application/octet-stream"}
    if ask_for_stream and isinstance(value, dict):
        content = msgspec.json.encode({**value, "stream": True})
    return content, {"content-type": "application/json"}


def _form(fields: Sequence[str]) -> Content:
    """The fields as multipart/form-data, in their order."""
    import httpx

    parts: list[tuple[str, tuple[str | None, bytes]]] = []
    for field in fields:
        name, equals, value = field.partition("=")
        if not equals or not name:
            raise click.UsageError(f"-F {field!r} is neither NAME=VALUE nor NAME=@FILE")
        if value.startswith("@"):
            file = _file(value[1:], "-F NAME=@FILE")
            parts.append((name, (file.name, file.read_bytes())))
        else:
            parts.append((name, (None, value.encode(errors="surrogateescape"))))
    try:
        request = httpx.Request("POST", "http://form", files=parts)
    except UnicodeEncodeError as error:
        raise click.UsageError(f"the form cannot be sent: a name has bytes that are no UTF-8: {error}") from error
    return request.read(), {"content-type": request.headers["content-type"]}


def _file(path: str, syntax: str) -> Path:
    file = Path(path)
    if not file.is_file():
        raise NotFound(f"there is no file {file}", hint=f"{syntax} sends what is in a file")
    return file
