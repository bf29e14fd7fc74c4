"""Files as whole bodies and in forms: closed with their call, refused without room, and what to send instead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
from collections.abc import Iterator
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import InvalidInput, TooLarge
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.handlers.app import handler_app
from fleetstart.runtime.handlers.forms import read_form
from fleetstart.runtime.sdk.files import File
from fleetstart.runtime.worker_io.asgi import Message

FORM = b"--B\r\ncontent-disposition: form-data; name=picture; filename=a\r\n\r\n%s\r\n--B--\r\n"
REQUESTS = [(b"image/png", b"%s"), (b"multipart/form-data; boundary=B", FORM)]


def post(handler: Any, content_type: bytes, body: bytes) -> bytes:
    """The body of the answer to one request."""
    sent: list[Message] = []
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop()

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", content_type)]
    scope = {"type": "http", "headers": headers, "query_string": b"", "state": {}}

    async def scenario() -> None:
        await handler_app(handler, slots=1, bundle_dir="/")(scope, receive, send)

    asyncio.run(scenario())
    return b"".join(message.get("body", b"") for message in sent)


@contextlib.contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Limits files to this size, as where the folder for temporary files is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("content_type", "body"), REQUESTS, ids=["body", "form"])
def test_a_file_is_closed_with_its_call(content_type: bytes, body: bytes) -> None:
    files: list[File] = []

    def size(picture: File) -> int:
        files.append(picture)
        return picture.size_bytes

    assert post(size, content_type, body % b"1234") == b"4"
    assert [file.closed for file in files] == [True]


@pytest.mark.parametrize(("content_type", "body"), REQUESTS, ids=["body", "form"])
def test_a_file_without_room_in_the_temporary_folder_is_too_large(content_type: bytes, body: bytes) -> None:
    def size(picture: File) -> int:
        return picture.size_bytes

    with largest_file(2 * MIB), pytest.raises(TooLarge, match="do not fit into the worker's temporary") as caught:
        post(size, content_type, body % bytes(4 * MIB))
    assert "more memory" in caught.value.hint


@pytest.mark.parametrize(
    ("content_type", "body", "says"),
    [
        (b"application/octet-stream", b"\xff\xd8", "the body is neither a form nor JSON"),
        (b"application/json", b"{}", "at `files`, got nothing"),
    ],
)
def test_a_handler_of_several_files_names_the_form_that_it_takes(content_type: bytes, body: bytes, says: str) -> None:
    def pack(files: list[File], size: int, title: str | None = None) -> int:
        return len(files)

    with pytest.raises(InvalidInput, match=says) as caught:
        post(pack, content_type, body)
    assert caught.value.hint == (
        "send a form with files: list[File], size: int, title: str | None (optional): "
        "curl -F files=@FILE -F size=VALUE URL, or fs invoke NAME with the same -F"
    )


def test_a_file_that_may_be_missing_is_shown_too() -> None:
    def look(picture: File | None = None, size: int = 3) -> int:
        return size

    with pytest.raises(InvalidInput) as caught:
        post(look, b"image/png", b"\xff\xd8")
    assert "curl -F picture=@FILE URL" in caught.value.hint


@pytest.mark.parametrize(
    ("disposition", "name"),
    [
        ('filename="na\u00efve.txt"', "na\u00efve.txt"),
        ("filename*=utf-8''na%C3%AFve%20f.txt", "na\u00efve f.txt"),
        ("filename*=ISO-8859-1'en'%A3.txt", "\u00a3.txt"),
        ("filename=\"plain.txt\"; filename*=UTF-8''other.txt", "plain.txt"),
    ],
)
def test_a_files_name_may_be_written_in_each_way_that_clients_have(disposition: str, name: str) -> None:
    def name_of(picture: File) -> str:
        return picture.name

    body = (FORM % b"1234").replace(b"filename=a", disposition.encode())
    assert json.loads(post(name_of, b"multipart/form-data; boundary=B", body)) == name


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("preamble", [b"", b"\r\n", b"A message in several parts.\r\n", b"--A\r\n-\r\n"])
def test_text_before_the_first_boundary_says_nothing(preamble: bytes, size: int) -> None:
    body = preamble + FORM % b"1234"
    pieces = [body[at : at + size] for at in range(0, len(body), size)]

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    form = asyncio.run(read_form(receive, b"multipart/form-data; boundary=B"))
    assert [part.body.content() for part in form.parts] == [b"1234"]
    form.close()


def test_a_form_without_the_boundary_that_it_names_says_so() -> None:
    def size(picture: File) -> int:
        return picture.size_bytes

    with pytest.raises(InvalidInput, match="has no boundary as its content type names it"):
        post(size, b"multipart/form-data; boundary=other", FORM % b"1234")
