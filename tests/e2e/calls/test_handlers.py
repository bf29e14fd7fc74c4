"""Inputs and outputs of handlers through the whole system; and the management API against its own description."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.systems import System, running
from tests.servers import wait_until

HANDLERS = """
import dataclasses
import time
from fleetstart.runtime import File, Response, Scale, batched, context, function

KEEP = Scale(max=1, keep_alive_s=600)

@dataclasses.dataclass
class Item:
    name: str
    price: float

@dataclasses.dataclass
class Order:
    items: list[Item]
    note: str = ""

@function(memory="64MiB", scale=KEEP)
def total(order: Order) -> float:
    "Sums an order."
    return "dear" if order.note == "lie" else sum(item.price for item in order.items)

@function(memory="64MiB", scale=KEEP)
@batched(max_size=4, max_wait_ms=2000)
def squares(n: list[int]) -> list[int]:
    time.sleep(0.2)
    return [ValueError("not nine") if one == 9 else one * one for one in n]

@function(memory="64MiB", scale=KEEP, concurrency=2)
def steps(count: int) -> list[str]:
    for number in range(count):
        context.progress((number + 1) / count, f"step {number}")
    return [context.id, context.function, str(context.version), str(context.attempt)]

@function(memory="64MiB", scale=KEEP)
class Sizes:
    def load(self):
        self.seen = 0
    def __call__(self, picture: File, scale: float = 1.0) -> Response:
        self.seen += 1
        body = picture.content()
        return Response(body[:4], content_type="image/png", headers={"x-size": str(len(body) * scale)}, status=201)
    def close(self):
        print("closed after", self.seen, flush=True)
"""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy_file(system.source(HANDLERS, folder="typed"), "--no-probe")
        yield system


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", ""), json.loads(fields["data"])))
    return found


def test_a_function_that_sleeps_describes_its_calls(system: System) -> None:
    document = system.http.get("/api/v1/functions/total/openapi.json").json()
    assert document["servers"] == [{"url": f"{system.url}/fn/total"}]
    post = document["paths"]["/"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Order"}
    assert post["responses"]["200"]["content"]["application/json"]["schema"] == {"type": "number"}
    shown = post["requestBody"]["content"]["application/json"]["example"]
    assert not system.info("total").workers, "nothing was woken"
    assert system.ok("total", shown) == 1.5
    assert system.http.get("/api/v1/functions/total/openapi.json?version=9").status_code == 404


def test_input_and_output_that_do_not_fit_name_their_field(system: System) -> None:
    status, error = system.failed("total", {"items": [{"name": "a", "price": 1}, {"name": "b", "price": "2"}]})
    assert (status, error.code, error.field, error.got) == (400, "invalid_input", "items[1].price", '"2"')
    status, error = system.failed("total", {"items": [], "note": "lie"})
    assert (status, error.code, error.expected) == (500, "invalid_output", "float")


def test_a_batch_is_computed_once_and_its_callers_share_the_bill(system: System) -> None:
    assert system.info("squares").spec.concurrency == 8, "room for one batch while another is computed"
    assert system.ok("squares", {"n": 0}) == 0  # awake from here on
    began_ms = time.monotonic() * 1e3
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: system.call("squares", {"n": n}), range(3, 11)))
    took_ms = time.monotonic() * 1e3 - began_ms
    assert [answer.json() if answer.status_code == 200 else 0 for answer in answers] == [9, 16, 25, 36, 49, 64, 0, 100]
    assert sum(int(answer.headers["fs-billed-ms"]) for answer in answers) <= took_ms + len(answers)


def test_progress_reaches_the_caller_and_the_log(system: System) -> None:
    response = system.call("steps", {"count": 50}, accept="text/event-stream")
    found = events(response.text)
    assert [kind for kind, _ in found][-2:] == ["", "fleetstart"]
    assert found[-3] == ("progress", {"fraction": 1.0, "message": "step 49"})
    assert found[-2][1] == [response.headers["x-request-id"], "steps", "1", "1"]
    assert system.ok("steps", {"count": 1}, **{"fs-attempt": "7"})[3] == "1", "no caller says which attempt it is"
    wait_until(lambda: any("progress 100%: step 49" in line.text for line in system.logs("steps")), 10)


def test_progress_of_an_async_call_is_kept_and_its_answer_is_the_same(system: System) -> None:
    accepted = system.call("steps", {"count": 50}, prefer="respond-async")
    invocation = accepted.json()["id"]
    text = system.http.get(f"/api/v1/invocations/{invocation}/events").text
    told = [json.loads(block.split("data: ")[1]) for block in text.split("\n\n") if "event: progress" in block]
    assert told[-1] == {"fraction": 1.0, "message": "step 49"}
    ended = system.http.get(f"/api/v1/invocations/{invocation}").json()
    assert (ended["status"], ended["content_type"]) == ("succeeded", "application/json")
    assert ended["result"] == [invocation, "steps", "1", "1"]
    assert (ended["progress"]["fraction"], ended["progress"]["message"]) == (1.0, "step 49")
    assert "100%: step 49" in system.fs("invocations", "get", invocation).out


def test_a_file_goes_in_and_a_response_comes_out(system: System) -> None:
    files = {"picture": ("a.png", b"\x89PNG" + b"x" * 96, "image/png")}
    response = system.http.post("/fn/sizes", files=files, data={"scale": "2"})
    assert (response.status_code, response.headers["content-type"], response.content) == (201, "image/png", b"\x89PNG")
    assert response.headers["x-size"] == "200.0"
    error = system.http.post("/fn/sizes", json={"scale": 2}).json()["error"]
    assert (error["code"], error["field"], error["got"]) == ("invalid_input", "picture", "nothing")


def test_a_worker_that_is_drained_closes_its_handler(system: System) -> None:
    system.deploy_file(system.source(HANDLERS, folder="typed"), "--no-probe", "--env", "AGAIN=1")
    wait_until(lambda: any("closed after 1" in line.text for line in system.logs("sizes")), 20)


# ── the management API ─────────────────────────────────────────────────────────────────────────────

EXAMPLES = 7
"""Of each operation: as many as fit into some twelve seconds for all of them."""


def test_the_management_api_is_what_it_says_of_itself(system: System) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.core.result import Ok
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    schema = schemathesis.openapi.from_url(f"{system.url}/openapi.json")
    real = {"name": "total", "function": "total", "alias": "live", "month": "2026-11"}
    failures: list[str] = []
    tried = 0

    def run(operation: Any) -> None:
        cases = st.one_of([operation.as_strategy(generation_mode=mode) for mode in GenerationMode])

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases, known=st.booleans())
        def check(case: Any, known: bool) -> None:
            nonlocal tried
            tried += 1
            case.query.pop("follow", None)  # it would not end
            if known:
                case.path_parameters.update({key: real[key] for key in case.path_parameters if key in real})
            case.call_and_validate(checks=checks, timeout=20)

        check()

    for result in schema.get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        try:
            run(operation)
        except Exception as error:
            failures.append(f"{operation.label}: {error}")
    assert tried > EXAMPLES * 20
    assert failures == [], "\n\n".join(failures)
    assert system.http.get("/healthz").json() == {"ok": True}
    assert not any(system.deaths().values())
