"""Context, progress, files, responses and the ends of a handler's life, through a real worker over HTTP."""

from __future__ import annotations

import http.client
import io
import json
from base64 import b64decode
from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.runtime import context
from tests.runtime.workers import Functions, Worker, until

HANDLERS = """
    import asyncio, io, threading, time
    import pydantic
    from fleetstart.runtime import File, Response, batched, context, function, on_exit

    def told():
        return {
            "id": context.id, "function": context.function, "version": context.version, "attempt": context.attempt,
            "header": context.headers["X-Mine"], "secret": "fs-worker-token" in context.headers,
            "left": context.remaining_s is None or 0 < context.remaining_s <= 30, "cancelled": context.cancelled,
        }

    def in_thread(): return told()
    async def on_loop(): return await asyncio.to_thread(told)
    def stream():
        for _ in range(2):
            yield told()

    async def app(scope, receive, send):
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": context.id.encode()})

    def waits_until_left():
        print("began", flush=True)
        for _ in range(3000):
            if context.cancelled:
                print("noticed", flush=True)
                return 1
            time.sleep(0.01)

    def steps(count: int, fail: bool = False):
        for number in range(count):
            context.progress((number + 1) / count, f"step {number}")
        if fail:
            raise ValueError("after all")
        return {"done": count}

    async def steps_async(count: int):
        for number in range(count):
            context.progress((number + 1) / count)
            await asyncio.sleep(0)
        return b"bytes"

    def stream_steps(count: int):
        for number in range(count):
            context.progress(number / count, "before")
            yield number

    class Scalar:
        # As numpy's and torch's: it compares as a number, and has no JSON form.
        def __float__(self): return 0.5
        def __le__(self, other): return 0.5 <= other
        def __ge__(self, other): return 0.5 >= other
        def __format__(self, spec): return format(0.5, spec)
    def scalar():
        context.progress(Scalar(), 7)
        return "end"

    def too_far(): context.progress(1.5)

    def one_file(file: File):
        return [file.name, file.content_type, file.size_bytes, file.content()[:5].decode()]
    def files(files: list[File], title: str, count: int = 1):
        return [[f.name for f in files], title, count, sum(len(f.read()) for f in files)]
    def raw_and_text(data: bytes, scale: float): return [len(data), scale]
    def raw(data: bytes): return len(data)
    def maybe(file: File | None = None): return file is None
    class Options(pydantic.BaseModel):
        top: int
    def options(picture: File, options: Options): return [picture.name, options.top]

    def png(): return Response(b"\\x89PNG", content_type="image/png", headers={"X-Seed": "7"}, status=201)
    def text(): return Response("hello")
    def json(): return Response({"a": 1}, status=202)
    def pieces(count: int):
        def give():
            for number in range(count):
                yield b"%d," % number
        return Response(give(), content_type="audio/wav")
    def steps_pieces():
        context.progress(0.5)
        return pieces(3)
    async def pieces_async():
        async def give():
            yield b"a"
            yield b"b"
        return Response(give())
    def iterator(): return Response(map(str, [1, 2]))
    async def iterator_on_loop(): return Response(iter([b"1", b"2"]))
    class Pieces:
        def __aiter__(self):
            self.left = ["2", "1"]
            return self
        async def __anext__(self):
            if not self.left:
                raise StopAsyncIteration
            return self.left.pop()
    async def iterator_async(): return Response(Pieces())
    def iterator_of_a_thread(): return Response(Pieces())
    def broken_pieces():
        def give():
            yield b"a"
            raise ValueError("dry")
        return Response(give())

    class Open:
        async def load(self, weights):
            self.state = ["loaded"]
        def warm(self):
            self.state.append("warm")
        def __call__(self):
            return self.state
        async def close(self):
            await asyncio.sleep(0)
            print("closed", self.state, flush=True)
            raise RuntimeError("too late to matter")

    @on_exit
    def leaving():
        print("left", flush=True)

    class Hangs:
        def __call__(self): ...
        def close(self):
            print("closing", flush=True)
            threading.Event().wait(60)
"""


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", fields.get("id", "")), msgspec.json.decode(fields["data"])))
    return found


def as_events(worker: Worker, value: Any) -> list[tuple[str, Any]]:
    response = worker.post(value, headers={"accept": "text/event-stream"})
    assert response.headers["content-type"] == "text/event-stream"
    return events(response.text)


def apart(worker: Worker, value: Any) -> tuple[list[tuple[str, Any]], dict[str, Any], bytes]:
    """Progress and the like, the answer's head, its body."""
    response = worker.post(value, headers={"fs-progress": "1"})
    assert response.headers["fs-progress"] == "1"
    told, head, body = [], {}, b""
    for block in response.text.split("\n\n")[:-1]:
        kind, _, data = block.removeprefix("event: ").partition("\ndata: ")
        if kind == "answer":
            head = json.loads(data)
        elif kind == "piece":
            body += b64decode(data)
        else:
            told.append((kind, json.loads(data)))
    return told, head, body


def form(worker: Worker, **parts: Any) -> httpx.Response:
    with worker.client() as client:
        return client.post("", **parts)


# ── context ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("entry", ["in_thread", "on_loop", "stream"])
def test_the_context_tells_of_the_call(functions: Functions, entry: str) -> None:
    worker = functions.ready(HANDLERS, entry, concurrency=2)
    response = worker.post(
        headers={"x-mine": "here", "x-request-id": "inv-7", "fs-attempt": "2", "fs-deadline-ms": "30000"}
    )
    told = events(response.text)[1][1] if entry == "stream" else response.json()
    assert told == {
        "id": "inv-7", "function": "f", "version": 1, "attempt": 2, "header": "here", "secret": False, "left": True,
        "cancelled": False,
    }  # fmt: skip


def test_an_asgi_app_has_it_too(functions: Functions) -> None:
    assert functions.ready(HANDLERS, "app").post(headers={"x-request-id": "inv-8"}).text == "inv-8"


def test_there_is_none_outside_a_call() -> None:
    with pytest.raises(RuntimeError, match="no current call"):
        _ = context.id


@pytest.mark.parametrize("how", ["client", "deadline"])
def test_a_thread_can_see_that_nobody_waits(functions: Functions, how: str) -> None:
    worker = functions.ready(HANDLERS, "waits_until_left")
    headers = {"fs-deadline-ms": "1000"} if how == "deadline" else {}
    with worker.client(headers) as client:
        if how == "deadline":
            assert client.post("").status_code == 504
        else:
            leaving = http.client.HTTPConnection(client.base_url.host, client.base_url.port, timeout=20)
            leaving.request("POST", "/", headers=dict(client.headers))
            until(lambda: "began" in worker.log(), "the handler's begin")
            leaving.close()
    until(lambda: "noticed" in worker.log(), "the handler's notice")


# ── progress ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("entry", "answer"), [("steps", {"done": 200}), ("steps_async", "Ynl0ZXM=")])
def test_progress_comes_as_events_and_the_answer_last(functions: Functions, entry: str, answer: Any) -> None:
    worker = functions.ready(HANDLERS, entry)
    found = as_events(worker, {"count": 200})
    assert found[-1] == ("1", answer)
    assert {kind for kind, _ in found[:-1]} == {"progress"}
    fractions = [data["fraction"] for _, data in found[:-1]]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0, "the last report is never left out"
    assert "progress 100%" in worker.log()


def test_who_asks_for_no_events_gets_the_answer_alone(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "steps")
    assert worker.post({"count": 3}).json() == {"done": 3}
    response = worker.post({"count": 0}, headers={"accept": "text/event-stream"})
    assert response.json() == {"done": 0}, "nothing was told"


def test_a_failure_after_progress_is_an_event(functions: Functions) -> None:
    found = as_events(functions.ready(HANDLERS, "steps"), {"count": 1, "fail": True})
    assert [kind for kind, _ in found] == ["progress", "error"]
    assert "after all" in found[1][1]["error"]["message"]


def test_progress_apart_leaves_the_answer_as_it_would_be_without(functions: Functions) -> None:
    found, head, body = apart(functions.ready(HANDLERS, "steps"), {"count": 200})
    assert (found[-1][1]["fraction"], head["status"], body) == (1.0, 200, b'{"done":200}')
    assert head["headers"] == [["content-type", "application/json"]]
    found, head, body = apart(functions.ready(HANDLERS, "steps_async"), {"count": 2})
    assert (head["headers"], body) == ([["content-type", "application/octet-stream"]], b"bytes")
    found, head, body = apart(functions.ready(HANDLERS, "steps_pieces"), {})
    assert (head["headers"], body) == ([["content-type", "audio/wav"]], b"0,1,2,")
    found, head, _ = apart(functions.ready(HANDLERS, "steps"), {"count": 1, "fail": True})
    assert [kind for kind, _ in found] == ["progress", "error"]
    assert head == {}
    plain = functions.ready(HANDLERS, "steps").post({"count": 0}, headers={"fs-progress": "1"})
    assert plain.json() == {"done": 0}, "nothing was told"


def test_a_stream_has_progress_between_its_items(functions: Functions) -> None:
    found = as_events(functions.ready(HANDLERS, "stream_steps"), {"count": 3})
    assert [data for kind, data in found if kind != "progress"] == [0, 1, 2]
    assert found[0][0] == "progress"
    assert found[0][1]["message"] == "before"


def test_progress_of_any_number_is_reported(functions: Functions) -> None:
    found = as_events(functions.ready(HANDLERS, "scalar"), {})
    assert found == [("progress", {"fraction": 0.5, "message": "7"}), ("1", "end")]


def test_progress_beyond_its_end_is_refused(functions: Functions) -> None:
    assert "0 to 1" in functions.ready(HANDLERS, "too_far").post().json()["error"]["message"]


# ── files ──────────────────────────────────────────────────────────────────────────────────────────


def test_a_file_comes_in_a_form_or_as_the_body(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "one_file")
    sent = form(worker, files={"whatever": ("a/b.txt", io.BytesIO(b"hello"), "text/plain")})
    assert sent.json() == ["b.txt", "text/plain", 5, "hello"]
    sent = worker.post(body=b"hello" * 400_000, headers={"content-type": "text/x-y"})
    assert sent.json() == ["", "text/x-y", 2_000_000, "hello"]


def test_files_and_fields_of_one_form(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "files")
    two = [("files", ("a.txt", b"abc")), ("files", ("b.txt", b"de" * 1_000_000))]
    assert form(worker, files=two, data={"title": "T", "count": "2"}).json() == [["a.txt", "b.txt"], "T", 2, 2_000_003]
    one = form(worker, files=two[:1], data={"title": "T"})
    assert one.json() == [["a.txt"], "T", 1, 3]
    wrong = form(worker, files=two, data={"title": "T", "count": "two"}).json()["error"]
    assert (wrong["code"], wrong["field"], wrong["expected"]) == ("invalid_input", "count", "int")
    missing = worker.post({"title": "T"}).json()["error"]
    assert (missing["field"], missing["got"]) == ("files", "nothing")
    as_json = worker.post({"title": "T", "files": ["a"]}).json()["error"]
    assert "multipart/form-data" in as_json["expected"]


def test_bytes_and_models_in_a_form(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "raw_and_text")
    assert form(worker, files={"data": ("x", b"\xff\x00")}, data={"scale": "1.5"}).json() == [2, 1.5]
    assert worker.post({"data": "AAAA", "scale": 2}).json() == [3, 2.0], "base64 in JSON"
    assert form(functions.ready(HANDLERS, "raw"), files={"data": ("x", b"\xff\x00")}).json() == 2
    assert functions.ready(HANDLERS, "maybe").post().json() is True
    worker = functions.ready(HANDLERS, "options")
    picture = {"picture": ("p.png", b"x")}
    assert form(worker, files=picture, data={"options": '{"top": 3}'}).json() == ["p.png", 3]
    wrong = form(worker, files=picture, data={"options": '{"top": "x"}'}).json()["error"]
    assert wrong["field"] == "options.top"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\n",
        b'--b\r\nContent-Disposition: form-data; name="title"\r\n\r\nabc',
        b"--b\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n\r\n--b--\r\n",
        b"".join(b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n' for _ in range(2000)) + b"--b--\r\n",
        b"\x00" * 1000,
    ],
)
def test_a_hostile_form_is_refused(functions: Functions, body: bytes) -> None:
    worker = functions.ready(HANDLERS, "files")
    response = worker.post(body=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert response.status_code in (400, 413)
    assert response.json()["error"]["code"] in ("invalid_input", "too_large")
    assert worker.post(body=body, headers={"content-type": "multipart/form-data"}).status_code == 400
    assert form(worker, files={"files": ("a", b"b")}, data={"title": "T"}).status_code == 200


# ── responses ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("entry", "value", "status", "kind", "body"),
    [
        ("png", {}, 201, "image/png", b"\x89PNG"),
        ("text", {}, 200, "text/plain; charset=utf-8", b"hello"),
        ("json", {}, 202, "application/json", b'{"a":1}'),
        ("pieces", {"count": 3}, 200, "audio/wav", b"0,1,2,"),
        ("pieces", {"count": 0}, 200, "audio/wav", b""),
        ("pieces_async", {}, 200, "application/octet-stream", b"ab"),
        ("iterator", {}, 200, "application/octet-stream", b"12"),
        ("iterator_on_loop", {}, 200, "application/octet-stream", b"12"),
        ("iterator_async", {}, 200, "application/octet-stream", b"12"),
        ("iterator_of_a_thread", {}, 200, "application/octet-stream", b"12"),
    ],
)
def test_a_response_says_all_of_itself(
    functions: Functions, entry: str, value: Any, status: int, kind: str, body: bytes
) -> None:
    response = functions.ready(HANDLERS, entry).post(value)
    assert (response.status_code, response.headers["content-type"], response.content) == (status, kind, body)
    assert response.headers.get("x-seed") == ("7" if entry == "png" else None)


def test_a_body_that_breaks_off_is_seen_to_break_off(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "broken_pieces")
    with pytest.raises(httpx.RemoteProtocolError):
        worker.post({})
    assert "ValueError: dry" in worker.log()


# ── the ends of a handler's life ───────────────────────────────────────────────────────────────────


def test_a_worker_warms_up_and_closes(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "Open")
    assert worker.post().json() == ["loaded", "warm"]
    worker.drain()
    worker.exit_status()
    log = worker.log()
    assert "closed ['loaded', 'warm']" in log
    assert "too late to matter" in log
    assert "left" in log


def test_closing_has_its_time_and_no_more(functions: Functions) -> None:
    worker = functions.ready(HANDLERS, "Hangs")
    worker.drain(0.1)
    worker.exit_status()
    assert "closing took longer than the 2 s" in worker.log()
