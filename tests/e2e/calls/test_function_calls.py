"""Functions that call functions, through the whole system: values, streams, errors, deadlines, cancellation, bill."""

from __future__ import annotations

import http.client
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pytest

from fleetstart.controller.schemas.functions import Usage
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace
from tests.e2e.systems import System, running
from tests.servers import wait_until
from tests.stopwatch import Stopwatch

HANDLERS = """
import asyncio, os, time
from fleetstart.runtime import FleetError, Scale, acall, call, context, function

KEEP = Scale(max=1, keep_alive_s=600)

@function(memory="64MiB", scale=KEEP, concurrency=4)
def count(text: str) -> int:
    if text == "raise":
        raise ValueError("no such text")
    if text == "die":
        os._exit(7)
    if text == "slow":
        while not context.cancelled:
            time.sleep(0.02)
        print("count was cancelled", flush=True)
    return len(text) if text != "depth" else int(context.headers["fs-call-depth"])

@function(memory="64MiB", scale=KEEP)
def letters(text: str):
    for letter in text:
        yield {"letter": letter}

@function(memory="64MiB", scale=KEEP, concurrency=4, timeout_s=20, calls=["count", "letters", "absent"])
def ask(text: str, how: str = "value"):
    if how == "value":
        return [call("count", text=text), context.id]
    if how == "letters":
        return [item["letter"] for item in call.stream("letters", text=text)]
    if how == "stream":
        return (item["letter"].upper() for item in call.stream("letters", text=text))
    if how == "left":
        return call.with_options(timeout_s=0.2)("count", text="slow")
    if how == "catch":
        try:
            return call("count", text=text)
        except FleetError as error:
            return [type(error).__name__, error.code, error.status, error.message]
    if how == "headers":
        return [name for name in context.headers if name.startswith("fs-")]
    if how == "undeclared":
        return call("private", text=text)
    if how == "many":
        return [call("count", text=text), call("count", text=text), call("count", text="x")]
    if how == "large":
        try:
            return call("count", text="x" * int(text))
        except FleetError as error:
            return error.code
    if how == "path":
        return call.with_options(path="/a b?c=ä", method="POST")("count", text=text)
    if how == "dead":
        try:
            call("count", text="die")
        except FleetError as error:
            return error.code

@function(memory="64MiB", scale=KEEP, concurrency=4, calls=["count", "letters"])
async def ask_async(text: str):
    found = [item["letter"] async for item in acall.stream("letters", text=text)]
    return [await acall("count", text=text), found]

@function(memory="64MiB", scale=KEEP, concurrency=4, calls=["count", "letters"])
async def impatient(text: str) -> str:
    if text == "letters":
        async for item in acall.stream("letters", text="x" * 100_000):
            return item["letter"]
    try:
        return await asyncio.wait_for(acall("count", text="slow"), 2.0)
    except TimeoutError:
        return "gave up"

@function(memory="64MiB", scale=KEEP, calls=["count"])
async def ask_badly(text: str) -> int:
    return call("count", text=text)

@function(memory="64MiB", scale=KEEP)
def private(text: str) -> str:
    return call("count", text=text)

@function(memory="64MiB", scale=KEEP, calls=["round-b"])
def round_a() -> str:
    return call("round-b")

@function(memory="64MiB", scale=KEEP, calls=["round-a"])
def round_b() -> str:
    return call("round-a")
"""


MAX_BODY = 1 << 20


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python", "FS_MAX_BODY": str(MAX_BODY)}) as system:
        path = system.source(HANDLERS, folder="callers")
        system.deployed = system.fs("deploy", str(path), "--no-probe")  # type: ignore[attr-defined]
        yield system


def ask(system: System, how: str, text: str = "four", **options: Any) -> Any:
    return system.http.post("/fn/ask", json={"text": text, "how": how}, **options)


def rows(system: System, parent: str) -> list[InvocationRow]:
    return [row for row in system.invocations() if row.parent == parent]


def trace(system: System, request: str) -> InvocationTrace:
    """The trace, which is written a moment after the answer."""

    def read() -> bytes:
        answer = system.http.get(f"/api/v1/invocations/{request}")
        return answer.content if answer.status_code == 200 else b""

    return msgspec.json.decode(wait_until(read, 10, what=f"the trace of {request}"), type=InvocationTrace)


def test_a_function_calls_another_by_name_with_its_trace_and_its_bill(system: System) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = ask(system, "value", headers={"traceparent": parent})
    assert answer.status_code == 200, answer.text
    value, request = answer.json()
    assert (value, request) == (4, answer.headers["x-request-id"])
    assert re.search(r"call;dur=\d", answer.headers["server-timing"])
    [row] = wait_until(lambda: rows(system, request), 10, what="the callee's row")
    assert (row.function, row.caller, row.status) == ("count", "ask", 200)
    assert row.cost_nusd > 0
    above, below = trace(system, request), trace(system, row.id)
    assert [(one.id, one.function, one.status) for one in above.called] == [(row.id, "count", 200)]
    assert below.context.trace_id == above.context.trace_id == "0af7651916cd43dd8448eb211c80319c"
    assert below.context.parent_id == above.context.span_id
    shown = system.fs("trace", request).out
    assert "other functions" in shown
    assert f"billed by itself: {row.id}" in shown
    assert f"called by ask: {request}" in system.fs("trace", row.id).out


def test_usage_tells_whose_calls_they_were(system: System) -> None:
    request = ask(system, "value").headers["x-request-id"]
    wait_until(lambda: rows(system, request), 10, what="the callee's row")
    usage = msgspec.json.decode(system.fs("usage", "count", "--by", "caller,parent", "--json").out, type=Usage)
    assert ("ask", request, 1) in [(line.caller, line.parent, line.rows) for line in usage.lines]


def test_streams_pass_through_both_functions(system: System) -> None:
    assert ask(system, "letters", "abc").json() == ["a", "b", "c"]
    text = ask(system, "stream", "abc").text
    assert re.findall(r'^data: ("\w")$', text, re.MULTILINE) == ['"A"', '"B"', '"C"']


def test_asynchronous_handlers_call_with_acall(system: System) -> None:
    answer = system.http.post("/fn/ask-async", json={"text": "abc"})
    assert answer.json() == [3, ["a", "b", "c"]]
    blocking = system.http.post("/fn/ask-badly", json={"text": "abc"})
    assert "await acall" in blocking.json()["error"]["message"]


def test_the_callees_error_is_an_exception_and_outside_the_callers_own(system: System) -> None:
    kind, code, status, message = ask(system, "catch", "raise").json()
    assert (kind, code, status) == ("HandlerFailed", "handler_error", 500)
    assert "no such text" in message
    answer = ask(system, "value", "raise")
    assert (answer.status_code, answer.headers["fs-error"]) == (500, "handler_error")
    assert "its call of function count failed with handler_error" in answer.json()["error"]["message"]


def test_a_function_calls_only_what_it_declares(system: System) -> None:
    error = ask(system, "undeclared").json()["error"]
    assert "call_not_declared" in error["message"]
    assert "@function(calls=['count', 'letters', 'absent', 'private'])" in error["hint"]
    none = system.http.post("/fn/private", json={"text": "x"}).json()["error"]
    assert "declares no functions that it calls" in none["message"]
    assert "calls=['count']" in none["hint"]


def test_a_callee_that_is_not_there_is_a_warning_at_deploy_and_an_error_at_the_call(system: System) -> None:
    deployed = system.deployed.err  # type: ignore[attr-defined]
    assert "function ask calls absent, which project default does not have yet" in deployed
    path = system.source(HANDLERS.replace('call("private"', 'call("absent"'), folder="absent")
    system.fs("deploy", f"{path}:ask", "--no-probe", "--name", "ask-absent")
    answer = system.http.post("/fn/ask-absent", json={"text": "x", "how": "undeclared"})
    assert "failed with not_found: function absent does not exist" in answer.json()["error"]["message"]


OF_A_PROJECT = """
from fleetstart.runtime import call, context, function

@function(memory="64MiB")
def count() -> str:
    return context.function

@function(memory="64MiB", calls=["count"])
def ask(which: str = "count") -> list[str]:
    return [context.function, call(which)]
"""


def test_a_function_of_a_project_calls_those_of_its_project(system: System) -> None:
    system.fs("project", "create", "ml")
    path = system.source(OF_A_PROJECT, folder="ml")
    system.fs("deploy", str(path), "--no-probe", "--project", "ml")
    for which in ("count", "ml.count"):
        assert system.http.post("/fn/ml.ask", json={"which": which}).json() == ["ml.ask", "ml.count"]
    told = system.http.post("/fn/ml.ask", json={"which": "default.count"}).json()["error"]["message"]
    assert "ml.ask calls count, which its setting `calls` does not name" in told


def test_a_callee_sees_how_deep_it_is(system: System) -> None:
    assert ask(system, "value", "depth").json()[0] == 1
    assert not {"fs-call-grant", "fs-worker-token", "fs-call-link"} & set(ask(system, "headers").json())


def test_a_circle_is_rejected(system: System) -> None:
    error = system.http.post("/fn/round-a", json={}).json()["error"]
    assert "call_loop" in error["message"]
    assert "round-a → round-b → round-a" in error["message"]


def test_a_callee_has_no_more_time_than_its_caller(system: System) -> None:
    watch = Stopwatch()
    error = ask(system, "left").json()["error"]
    assert "failed with deadline_exceeded" in error["message"]
    assert watch.unhindered_s < 10
    late = system.http.post("/fn/ask", json={"text": "slow"}, headers={"fs-timeout-s": "2"})
    assert (late.status_code, late.headers["fs-error"]) == (504, "deadline_exceeded")
    [row] = wait_until(lambda: rows(system, late.headers["x-request-id"]), 10, what="the callee's row")
    assert row.status in (499, 504)


def test_a_caller_that_goes_away_takes_its_callees_along(system: System) -> None:
    host, _, port = system.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    headers = {"content-type": "application/json", "x-request-id": "goes-away"}
    wait_until(lambda: not system.info("count").running, 10, what="the end of others' calls: gateways tell it later")
    connection.request("POST", "/fn/ask", '{"text": "slow", "how": "value"}', headers)
    wait_until(lambda: system.info("count").running, what="the callee")
    connection.close()
    [left] = wait_until(lambda: [row for row in system.invocations() if row.request_id == "goes-away"], 10, what="row")
    [row] = wait_until(lambda: rows(system, left.id), 10, what="the callee's row")
    assert (row.status, row.error) == (499, "client_gone")
    wait_until(lambda: "count was cancelled" in system.fs("logs", "count").out, 10, what="the callee's end")


def test_a_call_that_its_handler_gives_up_is_cancelled(system: System) -> None:
    for text, answer in (("slow", "gave up"), ("letters", "x")):
        response = system.http.post("/fn/impatient", json={"text": text})
        assert response.json() == answer
        request = str(response.headers["x-request-id"])
        [row] = wait_until(partial(rows, system, request), 10, what="the callee's row")
        assert (row.status, row.error) in ((499, "client_gone"), (200, "client_gone"))


def test_a_callee_whose_worker_dies_is_an_error_of_its_type(system: System) -> None:
    assert ask(system, "dead").json() == "worker_lost"
    assert ask(system, "value").json()[0] == 4


def test_repeating_a_caller_with_its_key_does_not_repeat_its_callees(system: System) -> None:
    def call_many(key: str) -> str:
        answer = ask(system, "many", headers={"idempotency-key": key})
        assert answer.json() == [4, 4, 1]
        return str(answer.headers["x-request-id"])

    first = call_many("twice")
    wait_until(lambda: len(rows(system, first)) == 3, 10, what="three rows")
    # As after a gateway that died before it had stored the answer: the key is free, and the handler runs again.
    with system.redis() as client:
        answers = {key: client.get(key) for key in client.scan_iter(keys.idempotency("*"))}
        own = [key for key, claim in answers.items() if first.encode() in claim]
        assert len(own) == 2, "its claim, and at which worker it is"
        client.delete(*own)
    second = call_many("twice")
    assert second != first
    above = trace(system, second)
    assert {one.id for one in above.called} <= {row.id for row in rows(system, first)}
    assert rows(system, second) == []


def test_many_calls_at_a_time_each_get_their_own_answer(system: System) -> None:
    texts = ["x" * size for size in range(1, 25)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda text: ask(system, "value", text).json()[0], texts))
    assert answers == [len(text) for text in texts]


def test_a_client_cannot_pose_as_a_gateway_or_a_grant(system: System) -> None:
    forged = {"fs-call-link": "gw-forged", "fs-call-grant": "gw-x:secret", "fs-call-depth": "3"}
    request = ask(system, "value", headers=forged).headers["x-request-id"]
    assert len(wait_until(lambda: rows(system, request), 10, what="the callee's row")) == 1
    upgrade = {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
               "sec-websocket-key": "dGhlIHNhbXBsZSBub25jZQ=="}  # fmt: skip
    assert system.http.get("/fn/ask", headers={**forged, **upgrade}).status_code == 400


def test_an_input_above_the_gateways_limit_is_too_large(system: System) -> None:
    for size in (MAX_BODY + 1000, 4 * MAX_BODY):  # refused by admission, and by the worker before it sends
        assert ask(system, "large", str(size)).json() == "too_large"
    assert ask(system, "large", str(MAX_BODY // 2)).json() == MAX_BODY // 2
    assert ask(system, "path").json() == 4


def test_a_callee_is_charged_to_the_key_of_the_callers_client(system: System) -> None:
    """The last test: from now on, the system wants keys."""

    def made(*arguments: str) -> str:
        found = re.search(r"fs_\w+", system.fs("key", "create", *arguments).out)
        assert found is not None
        return found[0]

    system.env["FS_KEY"] = made("admin", "--scope", "admin")
    key = {"authorization": f"Bearer {made('shop', '--scope', 'invoke', '--function', 'ask')}"}
    answer = ask(system, "value", headers=key)
    assert answer.json()[0] == 4
    [row] = wait_until(lambda: rows(system, answer.json()[1]), 10, what="the callee's row")
    assert (row.function, row.key) == ("count", "shop")
    itself = system.http.post("/fn/count", json={"text": "x"}, headers=key)
    assert itself.status_code == 404  # the key is for `ask` alone: only the function may call further
