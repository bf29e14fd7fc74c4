"""Nodes, versions and requests of a size that can be checked by hand."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

from fleetstart.controller.planner.checkpoint_layout import CheckpointLayout
from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.error_margins import Margins
from fleetstart.controller.planner.estimates import VersionMeasures
from fleetstart.controller.planner.links.contention import ROUNDING, Link
from fleetstart.controller.planner.node_state import HeldLayers, NodeState
from fleetstart.controller.planner.plan import Plan, PlanRequest
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, WorkerId
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.weights.stage import LayerLayout

MB = 1_000_000
CHAT = CheckpointId("c" * 64)
EXACT = Margins(1.0, 1.0, 1.0)
"""Predictions that never err."""


def measured(**seconds: float) -> VersionMeasures:
    """No library, no rest, no hops, unless it is said."""
    values = {"library_s": 0.0, "prefill_s": 0.1, "decode_s": 0.05, "hop_s": 0.0, "rest_s": 0.0, **seconds}
    estimates: dict[str, Any] = {name: MovingAverage(value, 1) for name, value in values.items()}
    return VersionMeasures(**estimates)


def node(name: str, **fields: Any) -> NodeState:
    """1 GB of memory, 100 MB/s from the store, nothing there, no time to start. `up`: rate of its uplink, if it serves
    chunks."""
    link = Link(bytes_per_s=fields.pop("bytes_per_s", 100.0 * MB))
    if "up" in fields:
        fields["up"] = Link(bytes_per_s=fields["up"])
    held = {CHAT: fields.pop("holds")} if "holds" in fields else {}
    values: dict[str, Any] = {
        "epoch": "e", "memory_bytes": 1000 * MB, "free_bytes": 1000 * MB, "workers": 0, "link": link,
        "disk_bytes_per_s": 1000.0 * MB, "device_bytes_per_s": 1e15, "start_s": 0.0, "held": held, **fields,
    }  # fmt: skip
    return NodeState(node=NodeId(name), **values)


def request(layers: int = 8, layer_bytes: int = 50 * MB, **fields: Any) -> PlanRequest:
    """400 MB in 8 layers, with 100 MB of own memory."""
    values: dict[str, Any] = {
        "function": FunctionName("chat"), "memory_bytes": 100 * MB,
        "layout": CheckpointLayout(LayerLayout(0, [layer_bytes] * layers)),
        "checkpoint": CHAT, "measures": measured(), "margins": EXACT, **fields,
    }  # fmt: skip
    return PlanRequest(**values)


def taken(plan: Plan, cluster: Cluster, wanted: PlanRequest, now_s: float, name: str = "w") -> None:
    """Orders the plan."""
    for index, stage in enumerate(plan.stages):
        cluster.order(stage, WorkerId(f"{name}{index}"), wanted.checkpoint, now_s, wanted.trees)


def late_ones(link: Link, now_s: float) -> tuple[WorkerId, ...]:
    """The workers whose deadlines will be missed if nothing changes."""
    at = link.at(now_s)
    ends = zip(at.fetches, at.ends_s(now_s), strict=True)
    return tuple(fetch.worker for fetch, end_s in ends if end_s - now_s > (fetch.deadline_s - now_s) * ROUNDING)


def names(plan: Plan) -> list[str]:
    return [stage.node for stage in plan.stages]


def clusters(least: int = 1, most: int = 7, *, holding: bool = True) -> st.SearchStrategy[Cluster]:
    def build(rows: Iterable[tuple[int, int, int, HeldLayers | None]]) -> Cluster:
        return Cluster(
            node(
                f"n{index}",
                bytes_per_s=rate * 25.0 * MB,
                free_bytes=free * 50 * MB,
                workers=workers,
                **({"holds": held} if held is not None else {}),
            )
            for index, (rate, free, workers, held) in enumerate(rows)
        )

    layers = st.integers(0, 255)
    held = st.none() | st.builds(lambda host, disk: HeldLayers(host=host, disk=disk), layers, layers)
    row = st.tuples(st.integers(1, 8), st.integers(0, 20), st.integers(0, 2), held if holding else st.none())
    return st.lists(row, min_size=least, max_size=most).map(build)
