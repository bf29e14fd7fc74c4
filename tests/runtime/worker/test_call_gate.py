"""Call gate: slots, busy time and overruns over simulated time; secrets in errors are redacted."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import HandlerFailed
from fleetstart.runtime.contract.node.messages import Usage
from fleetstart.runtime.contract.node.speed import Speed
from fleetstart.runtime.contract.process.redaction import Redactor
from fleetstart.runtime.worker.call_gate import CallGate, Meter, redact_errors
from fleetstart.runtime.worker.kept_answers import KeptAnswers
from fleetstart.runtime.worker_io.asgi import Message, Receive, ResponseAborted, Scope, Send, respond, respond_error


async def no_more() -> Message:
    """Receives nothing: the app is not to ask."""
    raise AssertionError("the app asked for more of its request")


def test_slots_are_taken_and_given_back() -> None:
    meter = Meter(2)
    first, second = meter.begin("a", 0, None), meter.begin("b", 0, None)
    assert isinstance(first, int)
    assert isinstance(second, int)
    assert meter.begin("c", 0, None) == "busy"
    meter.end(first, 5)
    assert isinstance(meter.begin("c", 5, None), int)


def test_a_draining_worker_takes_no_call() -> None:
    meter = Meter(2)
    meter.draining = True
    assert meter.begin("a", 0, None) == "draining"
    assert meter.usage(0) == Usage(0, 0, 0)


def test_an_overrun_is_the_call_that_is_late_the_longest() -> None:
    meter = Meter(3)
    meter.begin("without a deadline", 0, None)
    meter.begin("second", 0, 20)
    first = meter.begin("first", 5, 10)
    assert meter.overrun(15 + 100, 100) is None
    assert meter.overrun(16 + 100, 100).request == "first"  # type: ignore[union-attr]
    assert meter.overrun(1000, 100).request == "first"  # type: ignore[union-attr]
    assert isinstance(first, int)
    meter.end(first, 1000)
    assert meter.overrun(1000, 100).request == "second"  # type: ignore[union-attr]


def test_a_call_is_recorded_before_the_app_sees_it_and_its_response_says_how_many_were() -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["headers"])
        await respond(send, 200, b"", b"text/plain")

    gate = CallGate(
        app, token="t", meter=Meter(1), bundle_dir="/", changed=lambda: None, entering=lambda *call: seen.append(call)
    )

    def headers_of(token: bytes) -> list[tuple[bytes, bytes]]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "headers": [(b"fs-worker-token", token), (b"x-request-id", b"inv-1")]}
        asyncio.run(gate(scope, no_more, send))
        return list(sent[0]["headers"])

    assert headers_of(b"t")[0] == (b"fs-entered", b"1")
    assert headers_of(b"t")[0] == (b"fs-entered", b"2")
    assert b"fs-entered" not in dict(headers_of(b"guessed"))
    without_token = [(b"x-request-id", b"inv-1")]
    assert seen == [(1, "inv-1"), without_token, (2, "inv-1"), without_token]


def test_an_app_that_only_sends_leaves_the_loop_to_others_and_is_ended_in_its_time() -> None:
    async def floods(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": b"more", "more_body": True})

    async def send(message: Any) -> None:
        """Takes all, as a server whose client does, or has left."""

    gate = CallGate(floods, token="t", meter=Meter(1), bundle_dir="/", changed=lambda: None)
    scope = {"type": "http", "headers": [(b"fs-worker-token", b"t"), (b"fs-deadline-ms", b"20")]}
    with pytest.raises(ResponseAborted):
        asyncio.run(gate(scope, no_more, send))


def test_the_end_of_a_call_is_told_to_a_gateway_that_asks_for_it() -> None:
    """A client that has left is not heard by all: until then the call has its slot."""
    heard: list[str] = []

    async def stays() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def scenario() -> None:
        goes_on = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            heard.append("begun")
            await goes_on.wait()
            await respond(send, 200, b"", b"text/plain")
            heard.append("ended")

        meter = Meter(1)
        gate = CallGate(app, token="t", meter=meter, bundle_dir="/", changed=lambda: None)
        answers = KeptAnswers(gate, token="t")

        def request(*more: tuple[bytes, bytes], token: bytes = b"t") -> asyncio.Task[None]:
            async def send(message: Message) -> None:
                if "status" in message:
                    heard.append(f"{message['status']} to {dict(more).get(b'fs-stream', b'call').decode()}")

            headers = [(b"fs-worker-token", token), (b"x-request-id", b"inv-1"), *more]
            return asyncio.create_task(answers({"type": "http", "headers": headers}, stays, send))

        end = ((b"fs-stream", b"attach"), (b"fs-call-end", b"1"))
        await request(*end)
        call = request()
        await asyncio.sleep(0)
        assert meter.running == 1
        asked, forged = request(*end), request(*end, token=b"guessed")
        await forged
        assert heard == ["200 to attach", "begun", "401 to attach"]
        goes_on.set()
        await asyncio.gather(call, asked)
        assert heard[3:] == ["200 to call", "ended", "200 to attach"]

    asyncio.run(scenario())


intervals = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 200)), max_size=30)


@given(intervals, st.integers(0, 1300))
def test_busy_time_is_the_length_of_the_union_of_the_calls(spans: list[tuple[int, int]], asked_at: int) -> None:
    meter = Meter(1000)
    events = [(begin, 0, at) for at, (begin, _) in enumerate(spans)]
    events += [(begin + length, 1, at) for at, (begin, length) in enumerate(spans)]
    numbers: dict[int, int] = {}
    for now, ends, at in sorted(events):
        if now > asked_at:
            break
        if ends:
            meter.end(numbers.pop(at), now)
        else:
            number = meter.begin(str(at), now, None)
            assert isinstance(number, int)
            numbers[at] = number
    covered = {tick for begin, length in spans for tick in range(begin, min(begin + length, asked_at))}
    usage = meter.usage(asked_at)
    assert usage.busy_ns == len(covered)
    assert usage.calls == sum(begin <= asked_at for begin, _ in spans)
    assert usage.running == sum(begin <= asked_at < begin + length for begin, length in spans)


def test_ended_calls_tell_how_long_they_took() -> None:
    meter = Meter(2)
    number = meter.begin("a", 0, None)
    assert isinstance(number, int)
    assert meter.usage(10).speed is None
    meter.end(number, 500_000_000)
    assert meter.usage(0).speed == Speed(calls=1, call_s=0.5, prefill_s=0.5)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_a_mean_lies_among_what_it_was_made_of(calls_s: list[float]) -> None:
    mean = None
    for call_s in calls_s:
        mean = Speed(calls=1, call_s=call_s, prefill_s=call_s, decode_s=call_s).folded_into(mean)
    assert mean is not None
    assert mean.calls == len(calls_s)
    assert mean.decode_s is not None
    assert min(calls_s) - 1e-9 <= mean.decode_s <= max(calls_s) + 1e-9


SECRET = 'hf_"quoted" ✓'


def answered(app: Any) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    async def call() -> None:
        await redact_errors(app, Redactor([SECRET]))({"type": "http"}, receive, send)

    asyncio.run(call())
    return sent


def test_an_error_of_the_platform() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond_error(send, HandlerFailed(f"ValueError: bad token {SECRET}"), "id-1")

    start, body = answered(app)
    error = b'{"code":"handler_error","type":"server_error","message":"ValueError: bad token ***"}'
    assert body["body"] == b'{"error":%b,"request_id":"id-1"}' % error
    assert dict(start["headers"])[b"content-length"] == b"%d" % len(body["body"])
    assert start["status"] == 500


def test_an_error_that_ends_a_stream() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": f"data: {SECRET}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": f"event: error\ndata: {SECRET}\n\n".encode()})

    _, first, last = answered(app)
    assert SECRET.encode() in first["body"], "what the handler sends is its own affair"
    assert last["body"] == b"event: error\ndata: ***\n\n"


def test_an_answer_of_the_handler() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, 500, SECRET.encode(), b"text/plain")

    assert answered(app)[1]["body"] == SECRET.encode()


def test_without_secrets_the_app_is_served_as_it_is() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None: ...

    assert redact_errors(app, Redactor()) is app
