"""`fs explain` on a real system: a cold call, a hot one, and those of which nothing is known."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fleetstart.controller.planner.estimates import VersionMeasures
from fleetstart.controller.state.records import VersionKey, read_measures
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from tests.e2e.systems import System
from tests.servers import wait_until

HANDLER = """
from fleetstart.runtime import function

@function(memory="64MiB")
def explained():
    return 1
"""


def call(system: System, name: str) -> InvocationId:
    """The id of a call whose trace is written."""
    id = InvocationId(system.call(name).headers["x-request-id"])
    with system.redis() as client:
        wait_until(lambda: client.exists(keys.trace(id)), what=f"the trace of {id}")
    return id


def test_cold_and_hot_calls_are_explained(system: System) -> None:
    name = system.deploy(HANDLER, name="explained")
    cold, hot = call(system, name), call(system, name)

    said = system.fs("explain", cold).out
    assert f"{cold}   explained@1, warm start, HTTP 200, worker w" in said
    assert "a single worker" in said
    assert "the caller waited" in said
    assert not any(word in said for word in ("TTFT", "TPOT", "layers")), "it has neither tokens nor weights"
    assert "taken" in said
    found: dict[str, Any] = json.loads(system.fs("explain", cold, "--json").out)
    ttft = found["explanation"]["compared"][0]
    assert 0 < ttft["observed"] <= found["ttft_s"]
    assert ttft["error"] == pytest.approx(abs(ttft["observed"] - ttft["predicted"]) / ttft["observed"])

    assert "its worker was ready when it arrived" in system.fs("explain", hot).out
    latest = json.loads(system.fs("explain", name, "--json").out)
    assert latest["row"]["id"] == hot
    assert latest["explanation"]["plan"] == found["explanation"]["plan"]

    def learned() -> bool:
        status = json.loads(system.fs("status", "--json").out)
        (info,) = [info for info in status["functions"] if info["name"] == name]
        return bool(info["prediction"] and info["prediction"]["starts"] == 1)

    wait_until(learned, what="the prediction's error in fs status")
    assert "not calibrated yet: 1 start compared" in system.fs("explain", cold).out
    wait_until(lambda: measures(system, name).call_s.count > 0, what="what its calls take, in the measures")
    wait_until(
        lambda: any(f"{name}@1" in node.speeds for node in system.status().nodes), what="the node's report of it"
    )
    system.fs("rm", name, "--yes")


def measures(system: System, name: str) -> VersionMeasures:
    with system.redis() as client:
        raw: Any = client.hgetall(keys.MEASURES)
    return read_measures(raw)[1][VersionKey(FunctionName(name), Version(1))]


def test_what_cannot_be_explained_says_why(system: System) -> None:
    assert system.fs("explain", "inv-nobody", "--json", code=3).error.code == "not_found"
    assert "did you mean" in system.fs("explain", "wel", code=3).err
    id = call(system, "well")
    with system.redis() as client:
        worker = json.loads(client.get(keys.trace(id)))["row"]["worker"]
        kept: Any = client.get(keys.plan(worker))
        client.delete(keys.plan(worker))
        error = system.fs("explain", id, "--json", code=3).error
        client.set(keys.plan(worker), kept, ex=3600)
    assert "is not kept any more" in error.message
    assert "a day" in error.hint
