"""Every form of handler, through a real worker over HTTP."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.runtime.contract.worker_headers import ERROR_HEADER
from tests.runtime.workers import Functions, Worker, until

FORMS = """
    import asyncio, dataclasses, functools, os, sys
    from typing import TypedDict, Optional
    import msgspec
    from fleetstart.runtime import function, Scale

    @function
    def plain(name: str = "world", times: int = 1):
        return {"hello": [name] * times}

    @function(scale=Scale(max=2))
    async def asynchronous(name: str, /, *, loud: bool = False):
        await asyncio.sleep(0)
        return name.upper() if loud else name

    @function(weights="./nothing")
    class Counter:
        def __init__(self):
            self.calls = 0
            self.loaded = None
        def load(self, weights):
            self.loaded = len(weights)
        def __call__(self, request):
            self.calls += 1
            return [request, self.calls, self.loaded]

    @function
    class AsyncLoad:
        async def load(self):
            await asyncio.sleep(0)
            self.word = "loaded"
        async def __call__(self):
            return self.word

    @dataclasses.dataclass
    class Point:
        x: int
        y: int = 0

    class Shape(TypedDict):
        points: list[Point]

    class Person(msgspec.Struct):
        name: str
        age: int

    def point(point: Point): return dataclasses.asdict(point) | {"type": type(point).__name__}
    def shape(shape: Shape): return len(shape["points"])
    def person(person: Person): return person
    def mapping(values: dict[str, int]): return sum(values.values())
    def several(a: list[int], b: Optional[Person] = None): return [sum(a), b]
    def raw(data: bytes): return data[::-1]
    def text(data: str): return "\\u00e4" + data
    def nothing(): return None
    def whole(anything): return anything

    def numbers():
        class Array:
            def tolist(self): return [1.5, 2]
        return {"array": Array()}

    def unfit(): return object()
    def raising(request): return {}[request]
    def leaving(): sys.exit(3)
    def ending(): os._exit(7)
    async def leaving_async(): sys.exit(3)
    async def leaving_app(scope, receive, send): sys.exit(3)
    async def awaits_cancelled():
        task = asyncio.ensure_future(asyncio.sleep(9))
        task.cancel()
        await task
    async def cancels_itself():
        asyncio.current_task().cancel()
        await asyncio.sleep(9)
    async def stops():
        class End(BaseException): ...
        raise End
    def odd_name(): open("/none/h\\udce9me")

    def stream(count: int):
        for number in range(count):
            yield {"number": number}

    async def async_stream(count: int):
        for number in range(count):
            await asyncio.sleep(0)
            yield number

    def stream_by_call(count: int):
        return (number for number in range(count))

    def timed(called):
        @functools.wraps(called)
        def wrapper(*arguments, **named):
            return called(*arguments, **named)
        return wrapper

    @timed
    async def decorated(count: int):
        await asyncio.sleep(0)
        return count

    @timed
    async def decorated_hang():
        try:
            await asyncio.sleep(60)
        finally:
            print("cancelled", flush=True)

    def async_stream_by_call(count: int):
        return async_stream(count)

    def broken_stream(after: int):
        for number in range(after):
            yield number
        raise ValueError("the well is dry")

    async def broken_async_stream(after: int):
        for number in range(after):
            yield number
        raise ValueError("the well is dry")

    async def asgi(scope, receive, send):
        assert scope["type"] == "http", scope
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-path", scope["path"].encode())]})
        await send({"type": "http.response.body", "body": scope["method"].encode() + body})

    app = function(memory="64MiB")(asgi)

    async def with_lifespan(scope, receive, send):
        if scope["type"] == "lifespan":
            message = await receive()
            with_lifespan.began = message["type"]
            await send({"type": "lifespan.startup.complete"})
            await receive()
            print("the app closed")
            await send({"type": "lifespan.shutdown.complete"})
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": with_lifespan.began.encode()})
"""


def entry(functions: Functions, name: str, **settings: Any) -> Worker:
    return functions.ready(FORMS, name, **settings)


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    """(kind or id, data) of each server-sent event."""
    assert response.headers["content-type"] == "text/event-stream"
    found = []
    for block in response.text.split("\n\n")[:-1]:
        (kind, first), (field, data) = (line.split(": ", 1) for line in block.split("\n"))
        assert field == "data"
        found.append((first if kind == "id" else f"{kind} {first}", msgspec.json.decode(data)))
    return found


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("plain", {}, {"hello": ["world"]}),
        ("plain", {"name": "you", "times": 2}, {"hello": ["you", "you"]}),
        ("asynchronous", {"name": "a", "loud": True}, "A"),
        ("Counter", {"any": 1}, [{"any": 1}, 1, 0]),
        ("AsyncLoad", {}, "loaded"),
        ("point", {"x": 1}, {"x": 1, "y": 0, "type": "Point"}),
        ("shape", {"points": [{"x": 1}, {"x": 2}]}, 2),
        ("person", {"name": "Ada", "age": 36}, {"name": "Ada", "age": 36}),
        ("mapping", {"a": 1, "b": 2}, 3),
        ("several", {"a": [1, 2]}, [3, None]),
        ("several", {"a": [], "b": {"name": "Ada", "age": 1}}, [0, {"name": "Ada", "age": 1}]),
        ("text", {"data": "x"}, "äx"),
        ("nothing", {}, None),
        ("whole", [1, "two", None], [1, "two", None]),
        ("numbers", {}, {"array": [1.5, 2]}),
    ],
)
def test_json_in_json_out(functions: Functions, name: str, value: Any, expected: Any) -> None:
    response = entry(functions, name).post(value)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.json() == expected
    assert ERROR_HEADER not in response.headers


def test_bytes_in_bytes_out(functions: Functions) -> None:
    response = entry(functions, "raw").post(body=b"\x00\xffabc")
    assert response.content == b"cba\xff\x00"
    assert response.headers["content-type"] == "application/octet-stream"


def test_query_parameters_are_the_input_of_a_call_without_a_body(functions: Functions) -> None:
    worker = entry(functions, "plain")
    assert worker.get("?name=you&times=2").json() == {"hello": ["you", "you"]}
    assert worker.get().json() == {"hello": ["world"]}
    assert worker.get("?times=often").status_code == 400
    assert entry(functions, "several").get("?a=1&a=2").json() == [3, None]
    assert entry(functions, "several").get("?a=1").json() == [1, None]
    assert entry(functions, "point").get("?x=4").json()["x"] == 4
    assert entry(functions, "whole").get("?x=4").json() == {"x": "4"}


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("plain", b'{"times": "x"}', "`times`"),
        ("plain", b'{"nmae": "x"}', "nmae"),
        ("plain", b"[]", "got []"),
        ("plain", b'{"name": ', "truncated"),
        ("plain", b"\xff\xfe", "JSON"),
        ("shape", b'{"points": [{"x": 1}, {"y": 1}]}', "points[1].x"),
        ("person", b'{"name": "Ada"}', "age"),
        ("several", b"{}", "`a`"),
        ("nothing", b'{"a": 1}', "`a`"),
    ],
)
def test_input_that_does_not_fit_is_refused_with_its_place(
    functions: Functions, name: str, body: bytes, said: str
) -> None:
    worker = entry(functions, name)
    response = worker.post(body=body)
    assert response.status_code == 400
    assert response.headers[ERROR_HEADER] == "invalid_input"
    error = response.json()["error"]
    assert error["code"] == "invalid_input"
    assert said in error["message"]
    assert error["hint"]
    assert response.json()["request_id"] == "inv-test"
    assert worker.log() == ""


def test_an_object_is_made_and_loaded_once(functions: Functions) -> None:
    worker = entry(functions, "Counter")
    assert [worker.post(None).json()[1] for _ in range(3)] == [1, 2, 3]


def test_an_exception_names_its_type_message_and_line(functions: Functions) -> None:
    worker = entry(functions, "raising")
    response = worker.post("missing")
    assert response.status_code == 500
    assert response.headers[ERROR_HEADER] == "handler_error"
    line = next(n for n, text in enumerate(FORMS.splitlines(), 1) if "def raising" in text)
    assert response.json()["error"]["message"] == f"KeyError: 'missing' (handler.py:{line}, in raising)"
    assert "Traceback" in worker.log()
    assert "inv-test" in worker.log()
    assert worker.post("missing").status_code == 500


def test_a_result_without_a_json_form_is_the_handlers_error(functions: Functions) -> None:
    response = entry(functions, "unfit").post()
    assert response.status_code == 500
    assert "returned a object" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("leaving", "SystemExit"),
        ("leaving_async", "SystemExit"),
        ("leaving_app", "SystemExit"),
        ("awaits_cancelled", "CancelledError"),
        ("cancels_itself", "CancelledError"),
        ("stops", "raised End"),
        ("odd_name", "h\\udce9me"),
    ],
)
def test_whatever_a_handler_raises_ends_the_call_and_not_the_worker(functions: Functions, name: str, said: str) -> None:
    worker = entry(functions, name)
    for _ in range(2):
        response = worker.post()
        assert response.status_code == 500
        assert response.headers[ERROR_HEADER] == "handler_error"
        assert said in response.json()["error"]["message"]
    assert "inv-test failed:" in worker.log()


def test_os_exit_ends_the_worker_and_its_code_is_told(functions: Functions) -> None:
    worker = entry(functions, "ending")
    with pytest.raises(httpx.RemoteProtocolError):
        worker.post()
    assert worker.exit_status() == 7


@pytest.mark.parametrize("name", ["stream", "async_stream", "stream_by_call", "async_stream_by_call"])
def test_a_generator_is_a_stream_of_numbered_events(functions: Functions, name: str) -> None:
    worker = entry(functions, name)
    found = events(worker.post({"count": 100}))
    numbers = [data["number"] if name == "stream" else data for _, data in found]
    assert numbers == list(range(100))
    assert [number for number, _ in found] == [str(n) for n in range(1, 101)]
    assert events(worker.post({"count": 0})) == []


def test_an_asynchronous_function_may_have_a_decorator(functions: Functions) -> None:
    assert entry(functions, "decorated").post({"count": 3}).json() == 3
    worker = entry(functions, "decorated_hang")
    with worker.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("", timeout=httpx.Timeout(30, read=0.2))
    until(lambda: "cancelled" in worker.log(), "the end of the call whose client has left")


@pytest.mark.parametrize("name", ["broken_stream", "broken_async_stream"])
def test_a_stream_that_breaks_ends_with_an_error_event(functions: Functions, name: str) -> None:
    worker = entry(functions, name)
    *before, (kind, body) = events(worker.post({"after": 2}))
    assert [data for _, data in before] == [0, 1]
    assert kind == "event error"
    assert body["error"]["code"] == "handler_error"
    assert "ValueError: the well is dry (handler.py:" in body["error"]["message"]
    assert "Traceback" in worker.log()


@pytest.mark.parametrize("name", ["broken_stream", "broken_async_stream"])
def test_a_stream_that_breaks_before_its_first_item_is_a_plain_error(functions: Functions, name: str) -> None:
    response = entry(functions, name).post({"after": 0})
    assert response.status_code == 500
    assert "the well is dry" in response.json()["error"]["message"]


def test_an_asgi_app_is_served_as_it_is(functions: Functions) -> None:
    response = entry(functions, "app").post(body=b"xyz", path="some/where")
    assert response.status_code == 201
    assert response.headers["x-path"] == "/some/where"
    assert response.content == b"POSTxyz"


def test_an_apps_lifespan_is_run(functions: Functions) -> None:
    worker = entry(functions, "with_lifespan")
    assert worker.get().text == "lifespan.startup"
    worker.drain()
    assert worker.exit_status() == 0
    assert worker.log() == "the app closed\n"


ENDLESS = """
    import asyncio, threading, time
    ended = threading.Event()

    def f(request):
        if request == "ask":
            return ended.is_set()
        return numbers()

    def numbers():
        try:
            while True:
                yield "x" * 1000
                time.sleep(0.001)
        finally:
            ended.set()

    class Async:
        async def __call__(self, request):
            if request == "ask":
                return ended.is_set()
            try:
                print("waiting")
                await asyncio.Event().wait()
            finally:
                ended.set()

    async def async_stream(request):
        if request == "ask":
            yield ended.is_set()
            return
        try:
            while True:
                yield "x" * 1000
                await asyncio.sleep(0.001)
        finally:
            ended.set()
"""


def wait_until_left(worker: Worker) -> None:
    until(lambda: "true" in worker.post("ask").text, "the handler's finally clause")


@pytest.mark.parametrize("name", ["f", "async_stream"])
def test_a_client_that_leaves_a_stream_closes_its_generator(functions: Functions, name: str) -> None:
    worker = functions.ready(ENDLESS, name, concurrency=2)
    with worker.client() as client, client.stream("POST", "", content=b'"go"') as response:
        assert next(response.iter_bytes())
    wait_until_left(worker)


def test_a_client_that_leaves_cancels_an_async_handler(functions: Functions) -> None:
    worker = functions.ready(ENDLESS, "Async", concurrency=2)
    with worker.client() as client, pytest.raises(httpx.ReadTimeout):
        client.post("", content=b'"go"', timeout=httpx.Timeout(30, read=0.2))
    wait_until_left(worker)
