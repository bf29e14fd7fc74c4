"""What a person and a program read of a decision."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from fleetstart.controller.planner.accuracy_report import Explanation, ObservedStart, explain, format_explanation
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.constraints import PlacementConstraints
from fleetstart.controller.planner.devices import DeviceNeed
from fleetstart.controller.planner.error_margins import Margins
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO
from fleetstart.runtime.contract.node.devices import DeviceId, DeviceReport, DeviceRequest
from tests.controller.planner.worlds import measured, node, request


def test_prediction_and_outcome_stand_side_by_side() -> None:
    wanted = request(slo=SLO(ttft_s=2.5), measures=measured(prefill_s=0.0))
    found = make_plan(wanted, Cluster(node(f"n{index}") for index in range(3)), 0.0)
    explanation = explain(found, ObservedStart(ttft_s=2.5, tpot_s=0.1))
    assert [one.error for one in explanation.compared] == [pytest.approx(0.2), pytest.approx(0.5), None]
    said = format_explanation(explanation)
    assert said.startswith("a pipeline of 2: the cheapest of")
    assert "TTFT, s      2.000      2.500     20%" in said
    assert "TTFT 4.00 s is above 2.5 s" in said
    assert "taken" in said
    careful = explain(
        make_plan(replace(wanted, margins=Margins(1.0, 1.0, 1.2)), Cluster([node("a"), node("b")]), 0.0),
        ObservedStart(),
    )
    assert "× 1.20" in format_explanation(careful)
    assert msgspec.json.decode(msgspec.json.encode(explanation), type=Explanation) == explanation


def test_what_was_not_started_says_why() -> None:
    said = format_explanation(explain(make_plan(request(), Cluster([node("a", free_bytes=1)]), 0.0), ObservedStart()))
    assert "nothing was started: function chat: a worker needs 476 MiB" in said
    assert "0 nodes have room" in said


def test_a_worker_stands_with_its_devices() -> None:
    gpu = DeviceReport(id=DeviceId("cuda:1"), kind="cuda", type="H100", memory_bytes=10**9)
    wanted = request(wanted=PlacementConstraints(devices=DeviceNeed(DeviceRequest())))
    said = format_explanation(explain(make_plan(wanted, Cluster([node("a", devices=(gpu,))]), 0.0), ObservedStart()))
    assert "a on cuda:1" in said
