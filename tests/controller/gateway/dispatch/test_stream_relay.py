"""Streams whose worker dies, through a real controller: those with resume markers continue at another worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetstart.runtime.contract.worker_headers import CONTINUE_HEADER, MARK
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import wait_until

COUNTED = "".join(f"data: {number}\n\n" for number in range(10)) + "data: [DONE]\n\n"


def closing(text: str) -> dict[str, Any]:
    """The data of the closing event."""
    head, _, data = text.rpartition("event: fleetstart\ndata: ")
    assert head
    return dict(json.loads(data))


def trace_of(controller: ControllerProcess, call: str) -> dict[str, Any]:
    def told() -> dict[str, Any] | None:
        answer = controller.http.get(f"/api/v1/invocations/{call}")
        return dict(answer.json()) if answer.status_code == 200 else None

    found = wait_until(told)
    assert found is not None
    return found


@pytest.mark.parametrize(("each", "losses"), [(20, 0), (6, 1), (4, 2)])
def test_a_stream_goes_on_at_another_worker(
    controller: ControllerProcess, node: HandNode, each: int, losses: int
) -> None:
    controller.deploy("hello")
    answer = controller.http.post(f"/fn/hello/marked?each={each}", content=b"count", headers={"x-request-id": "call-1"})
    assert answer.status_code == 200
    assert CONTINUE_HEADER not in answer.headers
    assert answer.text.startswith(COUNTED + "event: fleetstart\n")
    bill = closing(answer.text)
    trace = trace_of(controller, "call-1")
    row = trace["row"]
    assert (row["status"], row.get("error", ""), row["attempts"]) == (200, "", 1 + losses)
    assert (bill["billed_ms"], bill["start"]) == (row["billed_ms"], answer.headers["fs-start"])
    assert trace["events"] == 11
    names = [phase["name"] for phase in trace["timeline"]["phases"]]
    assert (names.count("move"), names.count("respond"), names.count("queue")) == (losses, 1 + losses, 1)
    assert ("move;dur=" in bill["server_timing"]) == bool(losses)


def test_a_stream_that_every_worker_dies_of_ends(controller: ControllerProcess, node: HandNode) -> None:
    """At the third, as any call: what came until then is right, and said once."""
    controller.deploy("hello")
    text = controller.http.post("/fn/hello/marked?each=2", content=b"count").text
    assert text.startswith("".join(f"data: {number}\n\n" for number in range(6)))
    assert "nobody has told" not in text
    assert MARK.decode() not in text
    assert "event: error" in text
    assert "worker_lost" in text
    (row,) = wait_until(lambda: controller.rows("hello"))
    assert (row["status"], row["error"], row["attempts"]) == (200, "worker_lost", 3)
    assert row["billed_ms"] == closing(text)["billed_ms"]


def test_a_stream_that_no_other_worker_goes_on_with_ends(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    text = controller.http.post("/fn/hello/marked?each=2&refuses", content=b"count").text
    assert text.startswith("data: 0\n\ndata: 1\n\n")
    assert "worker_lost" in text
    assert "HTTP 400" in text


def test_a_stream_waits_for_a_worker_no_longer_than_its_deadline(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", timeout_s=1.0)

    def once(node: HandNode, order: Any) -> None:
        if len(node.ordered()) == 1:
            node.serve(order)

    node.answer = once
    controller.http.get("/fn/hello")
    (order,) = node.ordered()
    with controller.http.stream("POST", "/fn/hello/marked?each=3", content=b"count") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: 0"
        node.fail(order, "worker_lost", "it was killed")
        text = "\n".join(lines)
    assert "deadline_exceeded" in text
    assert "waited for a worker" in text


def test_a_client_cannot_say_what_a_stream_was(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    echo = controller.http.post("/fn/hello", content=b"0\n1", headers={CONTINUE_HEADER: "3"}).json()
    assert echo["headers"][CONTINUE_HEADER] == "0"
    assert echo["body"] == "0\n1"
    answer = controller.http.post("/fn/hello/marked?each=20", content=b"count", headers={CONTINUE_HEADER: "5"})
    assert answer.text.startswith(COUNTED)
