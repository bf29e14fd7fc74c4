"""What becomes of a version that is being tried: the decision alone, then a real controller with a node by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fleetstart.controller.registry.rollouts import SLACK_MS, decide, probe_path
from fleetstart.controller.scheduler.worker_pool import FAILURES_TO_BREAK
from fleetstart.controller.state.records import Failure, Rollout
from fleetstart.runtime.contract.errors import ErrorInfo
from fleetstart.runtime.contract.function.spec import FunctionSpec, LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId, Version
from fleetstart.runtime.contract.node.orders import WorkerOrder
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.scheduler.test_autoscaler import spec
from tests.servers import wait_until

BEGUN_MS = 1_000_000
TRIAL = Rollout(version=Version(2), begun_unix_ms=BEGUN_MS)
NO_ROOM = ErrorInfo(code="unavailable", message="no node has room")
RAISED = ErrorInfo(code="handler_failed", message="load() raised")


def decided(
    fields: dict[str, Any],
    *,
    ready: bool = False,
    problem: str | None = None,
    failures: int = 0,
    unplaced: ErrorInfo | None = None,
    after_s: float = 1.0,
) -> tuple[str, str]:
    tried: FunctionSpec = spec(**fields)
    now_unix_ms = BEGUN_MS + round(after_s * 1000)
    failure = Failure(count=failures, last_unix_ms=now_unix_ms - 1, error=RAISED) if failures else None
    found = decide(
        TRIAL, tried, ready=ready, problem=problem, failure=failure, unplaced=unplaced, now_unix_ms=now_unix_ms
    )
    return found.action, found.error.message if found.error is not None else ""


def test_a_version_without_a_probe_is_good_once_it_has_a_worker() -> None:
    assert decided({}) == ("wait", "")
    assert decided({}, ready=True) == ("promote", "")


def test_one_with_a_probe_is_asked_until_it_answers_well() -> None:
    fields = {"probe": "/healthz"}
    assert decided(fields, ready=True) == ("probe", "")
    assert decided(fields, ready=True, problem="answered 503: warming up") == ("probe", "")
    assert decided(fields, ready=True, problem="") == ("promote", "")
    late_s = spec().start_timeout_s + SLACK_MS / 1000
    action, error = decided(fields, ready=True, problem="answered 503: warming up", after_s=late_s)
    assert action == "reject"
    assert "GET /healthz answered 503: warming up" in error


def test_a_version_that_cannot_start_is_rejected_with_the_error_of_its_start() -> None:
    assert decided({}, failures=1) == ("wait", ""), "once may be the machine's fault"
    assert decided({}, failures=FAILURES_TO_BREAK) == ("reject", "load() raised")
    assert decided({}, unplaced=NO_ROOM) == ("reject", "no node has room")
    late_s = spec().start_timeout_s + SLACK_MS / 1000
    assert decided({}, after_s=late_s - 0.1) == ("wait", "")
    assert decided({}, failures=1, after_s=late_s) == ("reject", "load() raised")
    action, error = decided({}, after_s=late_s)
    assert action == "reject"
    assert "no worker was ready within start_timeout" in error


def test_a_worker_that_is_ready_counts_more_than_others_that_failed() -> None:
    assert decided({}, ready=True, failures=FAILURES_TO_BREAK) == ("promote", "")


def test_a_language_model_is_asked_for_its_name() -> None:
    llm = spec(llm=LLMSettings(), weights=CheckpointId("c" * 64))
    assert probe_path(llm) == "/v1/models"
    assert probe_path(spec(llm=LLMSettings(), weights=CheckpointId("c" * 64), probe="/me")) == "/me"
    assert probe_path(spec()) == ""


# ── a real controller ──────────────────────────────────────────────────────────────────────────────


def deploy(controller: ControllerProcess, concurrency: int, query: str = "probe=1", **fields: Any) -> dict[str, Any]:
    controller.deploy("helper")  # its bundle is everybody's
    bundle = controller.http.get("/api/v1/functions/helper").json()["spec"]["bundle"]
    body = {"name": "f", "bundle": bundle, "entry": "handler:run", "concurrency": concurrency, **fields}
    answer = controller.http.post(f"/api/v1/functions?{query}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def traffic(controller: ControllerProcess) -> dict[str, Any]:
    return dict(controller.http.get("/api/v1/functions/f/traffic").json())


def version_of(controller: ControllerProcess, path: str = "/fn/f") -> int:
    answer = controller.http.post(path, json={})
    assert answer.status_code == 200, answer.text
    return int(answer.headers["fs-version"])


def change(controller: ControllerProcess, method: str, path: str, body: Any = None) -> dict[str, Any]:
    answer = controller.http.request(method, f"/api/v1/functions/f/{path}", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_calls_stay_with_the_old_version_until_the_new_one_has_a_worker(
    controller: ControllerProcess, node: HandNode
) -> None:
    deploy(controller, 1)
    assert version_of(controller) == 1
    held: list[WorkerOrder] = []

    def keep_waiting(node: HandNode, order: WorkerOrder) -> None:
        if order.version == 2 and order.wanted == "run":
            node.say(order, "starting")
            held.append(order)
        else:
            node.serve(order)

    node.answer = keep_waiting
    answer = deploy(controller, 2)
    assert (answer["version"], answer["created"], answer["trying"]) == (2, True, True)
    wait_until(lambda: bool(held), what="the order of a worker to be tried")
    assert version_of(controller) == 1
    node.ready(held[0])
    wait_until(lambda: traffic(controller)["live"] == 2, what="the switch")
    assert version_of(controller) == 2
    assert controller.http.post("/fn/f", json={}).headers["fs-start"] == "hot"
    wait_until(lambda: any(order.version == 1 for order in node.ordered("drain")), what="the old one's drain")
    assert len(held) == 1


def test_a_version_that_cannot_start_leaves_the_old_one_alone(controller: ControllerProcess, node: HandNode) -> None:
    deploy(controller, 1)
    assert version_of(controller) == 1

    def fail_the_second(node: HandNode, order: WorkerOrder) -> None:
        if order.version == 2 and order.wanted == "run":
            node.fail(order, "handler_failed", "load() raised: no such thing")
        else:
            node.serve(order)

    node.answer = fail_the_second
    deploy(controller, 2)
    wait_until(lambda: traffic(controller)["rejected"] == 2, 20, what="its rejection")
    assert "no such thing" in traffic(controller)["error"]["message"]
    assert version_of(controller) == 1
    listed = controller.http.get("/api/v1/functions/f/versions").json()
    assert [(one["version"], one["roles"]) for one in listed] == [(2, ["rejected"]), (1, ["live"])]
    assert "no such thing" in listed[0]["error"]
    node.answer = HandNode.serve
    assert deploy(controller, 3)["version"] == 3
    wait_until(lambda: traffic(controller)["live"] == 3, what="the mended one")
    assert traffic(controller)["rejected"] is None


def test_a_worker_that_is_ready_but_not_well_gets_no_calls(controller: ControllerProcess, node: HandNode) -> None:
    """The worker of these tests answers any path well, and /drop not at all or with a 500."""
    deploy(controller, 1)
    assert version_of(controller) == 1
    deploy(controller, 2, probe="/drop", start_timeout_s=1.0)
    wait_until(lambda: traffic(controller)["rejected"] == 2, 20, what="its rejection")
    assert "its worker started, but GET /drop" in traffic(controller)["error"]["message"]
    assert version_of(controller) == 1
    deploy(controller, 3, probe="/healthz")
    wait_until(lambda: traffic(controller)["live"] == 3, what="one that answers")


def test_a_first_version_is_tried_and_its_worker_then_serves(controller: ControllerProcess, node: HandNode) -> None:
    assert deploy(controller, 1, query="probe=1&alias=prod")["trying"]
    wait_until(lambda: traffic(controller)["trying"] is None, what="its promotion")
    assert (traffic(controller)["live"], traffic(controller)["aliases"]) == (1, {"prod": 1})
    assert controller.http.post("/fn/f@prod", json={}).headers["fs-start"] == "hot"
    assert len(node.ordered()) == 1
    deploy(controller, 1, query="probe=1&percent=10", name="g")
    assert controller.http.get("/api/v1/functions/g/traffic").json()["split"] == []


def test_a_first_version_that_is_not_tried_is_live_at_once(controller: ControllerProcess, node: HandNode) -> None:
    assert not deploy(controller, 1, query="alias=prod")["trying"]
    assert (traffic(controller)["live"], traffic(controller)["aliases"]) == (1, {"prod": 1})
    assert not node.ordered()


def test_a_first_version_that_cannot_start_is_told_and_tried_again_by_the_next_deploy(
    controller: ControllerProcess, node: HandNode
) -> None:
    node.answer = lambda node, order: node.fail(order, "handler_failed", "load() raised: no such thing")
    assert deploy(controller, 1)["trying"]
    wait_until(lambda: traffic(controller)["rejected"] == 1, 20, what="its rejection")
    assert "no such thing" in traffic(controller)["error"]["message"]
    again = deploy(controller, 1)
    assert (again["version"], again["created"], again["trying"]) == (1, False, True)
    wait_until(lambda: traffic(controller)["rejected"] == 1, 20, what="its second rejection")
    node.answer = HandNode.serve
    assert deploy(controller, 1)["trying"]
    wait_until(lambda: traffic(controller)["trying"] is None, what="its promotion")
    assert traffic(controller)["rejected"] is None
    assert not deploy(controller, 1)["trying"], "it has been seen to start"


def test_a_rejection_is_forgotten_once_the_version_has_started_for_a_call(
    controller: ControllerProcess, node: HandNode
) -> None:
    held: list[WorkerOrder] = []

    def fail_all_but_one(node: HandNode, order: WorkerOrder) -> None:
        if order.spec.name == "f" and order.wanted == "run" and len(node.ordered()) == 1:
            node.say(order, "starting")
            held.append(order)
        else:
            node.fail(order, "syntax_error", "line 3")

    node.answer = fail_all_but_one
    deploy(controller, 1, scale={"min": 2})
    wait_until(lambda: traffic(controller)["rejected"] == 1, 20, what="its rejection")
    node.ready(held[0])
    wait_until(lambda: traffic(controller)["rejected"] is None, what="its recovery")
    assert version_of(controller) == 1


def test_a_first_version_that_starts_and_is_not_well_stays_rejected(
    controller: ControllerProcess, node: HandNode
) -> None:
    deploy(controller, 1, probe="/drop", start_timeout_s=1.0)
    wait_until(lambda: traffic(controller)["rejected"] == 1, 20, what="its rejection")
    assert "its worker started, but GET /drop" in traffic(controller)["error"]["message"]
    controller.deploy("helper")
    assert traffic(controller)["rejected"] == 1


def test_a_trial_outlives_the_controller_that_began_it(controller: ControllerProcess, node: HandNode) -> None:
    deploy(controller, 1)
    assert version_of(controller) == 1
    held: list[WorkerOrder] = []
    node.answer = lambda node, order: held.append(order) if order.version == 2 else node.serve(order)
    deploy(controller, 2)
    wait_until(lambda: bool(held), what="the order")
    controller.kill()
    node.ready(held[0])
    controller.start()
    wait_until(lambda: traffic(controller)["live"] == 2, 20, what="the switch")


def test_a_canary_that_is_made_live_while_it_is_tried_ends_with_its_worker(
    controller: ControllerProcess, node: HandNode
) -> None:
    deploy(controller, 1)
    assert version_of(controller) == 1
    held: list[WorkerOrder] = []
    node.answer = lambda node, order: held.append(order) if order.version == 2 else node.serve(order)
    deploy(controller, 2, query="probe=1&percent=10")
    wait_until(lambda: bool(held), what="the order")
    change(controller, "PUT", "aliases/live", {"version": 2})
    assert traffic(controller)["trying"] == 2
    node.ready(held[0])
    wait_until(lambda: traffic(controller)["trying"] is None, what="the rollout's end")
    ended = traffic(controller)
    assert (ended["live"], ended["split"], ended["rejected"]) == (2, [], None)


def test_aliases_splits_and_rollbacks_move_calls(controller: ControllerProcess, node: HandNode) -> None:
    for concurrency in (1, 2):
        deploy(controller, concurrency, query="")
    assert version_of(controller) == 2
    assert deploy(controller, 3, query="alias=staging")["version"] == 3
    assert (version_of(controller), version_of(controller, "/fn/f@staging/x")) == (2, 3)
    assert deploy(controller, 3, query="alias=staging")["created"] is False
    assert change(controller, "PUT", "aliases/prod", {"version": "staging"})["aliases"] == {"staging": 3, "prod": 3}
    assert change(controller, "DELETE", "aliases/staging")["aliases"] == {"prod": 3}
    answer = controller.http.post("/fn/f@staging", json={})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "live, prod" in answer.json()["error"]["hint"]
    split = [{"version": 2, "percent": 60}, {"version": "prod", "percent": 40}]
    assert change(controller, "PUT", "split", split)["live"] == 2
    got = {version_of(controller) for _ in range(40)}
    assert got == {2, 3}
    assert change(controller, "POST", "rollback")["split"] == []
    assert {version_of(controller) for _ in range(5)} == {2}
    assert change(controller, "POST", "rollback")["live"] == 1
    assert version_of(controller) == 1
    assert change(controller, "POST", "rollback", {"version": "prod"})["live"] == 3
    assert version_of(controller, "/fn/f@2") == 2


def test_a_function_is_scaled_without_a_deploy(controller: ControllerProcess, node: HandNode) -> None:
    deploy(controller, 1, query="")
    assert change(controller, "PUT", "scale", {"min": 2})["scaled"]["min"] == 2
    wait_until(lambda: len(node.statuses) == 2, what="two workers that nobody called")
    assert change(controller, "PUT", "scale", {"min": 0, "keep_alive_s": 0})["scaled"]["min"] == 0
    wait_until(lambda: len(node.ordered("drain")) == 2, what="their end")
    assert change(controller, "PUT", "scale", None)["scaled"] is None


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "aliases/prod", {"version": 9}, 404),
        ("PUT", "aliases/prod", {"version": "nope"}, 404),
        ("PUT", "aliases/Prod", {"version": 1}, 400),
        ("PUT", "aliases/7", {"version": 1}, 400),
        ("PUT", "aliases/prod", {"version": -1}, 404),
        ("PUT", "aliases/prod", {"version": 10**30}, 404),
        ("PUT", "aliases/prod", {"version": True}, 400),
        ("PUT", "aliases/prod", {}, 400),
        ("PUT", "aliases/prod", None, 400),
        ("DELETE", "aliases/live", None, 400),
        ("DELETE", "aliases/prod", None, 404),
        ("PUT", "split", [], 400),
        ("PUT", "split", [{"version": 1, "percent": 50}, {"version": "live", "percent": 50}], 400),
        ("PUT", "split", [{"version": 1, "percent": 1.5}], 400),
        ("PUT", "split", {"1": 100}, 400),
        ("POST", "rollback", None, 400),
        ("POST", "rollback", {"version": 3}, 404),
        ("PUT", "scale", {"min": 5, "max": 1}, 400),
        ("PUT", "scale", {"min": -1}, 400),
        ("PUT", "scale", {"most": 1}, 400),
        ("PUT", "scale", "x" * 100_000, 413),
    ],
)
def test_changes_that_make_no_sense_are_refused_and_change_nothing(
    controller: ControllerProcess, method: str, path: str, body: Any, status: int
) -> None:
    deploy(controller, 1, query="")
    before = traffic(controller)
    answer = controller.http.request(method, f"/api/v1/functions/f/{path}", json=body)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert traffic(controller) == before
