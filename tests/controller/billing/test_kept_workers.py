"""Whose idle time is billed: as many workers as were asked for, the ones that are ready for longest."""

from __future__ import annotations

import msgspec

from fleetstart.controller.billing.budget_watch import kept_by_version, kept_workers
from fleetstart.controller.state.records import FunctionRecord, ScaleOverride, VersionKey, VersionRecord
from fleetstart.controller.state.view import View
from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId, PipelineId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerState, WorkerStatus
from fleetstart.runtime.contract.weights.stage import Stage

F = FunctionName("f")
READY: WorkerState = "ready"


def view(least: int, *workers: tuple[str, int, WorkerState, int], live: int = 1) -> View:
    """Workers as (name, version, state, ready since)."""
    found = View()
    spec = FunctionSpec(name=F, bundle=BundleId("b"), entry="handler:run", scale=Scale(min=least, max=9))
    found.functions[F] = FunctionRecord(name=F, live=Version(live), deployed_unix_ms=0)
    found.versions[VersionKey(F, Version(live))] = VersionRecord(
        version=Version(live), digest="", spec=spec, segment_bytes=0, created_unix_ms=0
    )
    for name, version, state, since in workers:
        found.put_order(
            WorkerOrder(
                worker=WorkerId(name),
                node=NodeId("n"),
                epoch="e",
                version=Version(version),
                spec=spec,
                wanted="drain" if state == "draining" else "run",
                ordered_unix_ns=1,
            )
        )
        found.put_status(
            WorkerStatus(
                worker=WorkerId(name),
                node=NodeId("n"),
                function=F,
                version=Version(version),
                state=state,
                changed_unix_ns=since,
            )
        )
    return found


def test_as_many_as_were_asked_for_the_oldest_first() -> None:
    workers: list[tuple[str, int, WorkerState, int]] = [
        ("c", 1, "ready", 3),
        ("a", 1, "ready", 2),
        ("b", 1, "ready", 9),
    ]
    assert kept_workers(view(0, *workers), frozenset()) == frozenset()
    assert kept_workers(view(2, *workers), frozenset()) == {"a", "c"}
    assert kept_workers(view(9, *workers), frozenset()) == {"a", "b", "c"}


def test_only_those_that_can_serve_the_live_version() -> None:
    it = view(
        5,
        ("old", 1, "ready", 1),
        ("starting", 2, "starting", 1),
        ("draining", 2, "draining", 1),
        ("ok", 2, "ready", 1),
        live=2,
    )
    assert kept_workers(it, frozenset()) == {"ok"}


def test_those_of_an_alias_and_of_a_canary_are_kept_by_their_own_versions_settings() -> None:
    it = view(1, ("live", 1, "ready", 1), ("canary", 2, "ready", 1), ("alias", 3, "ready", 1), ("old", 4, "ready", 1))
    of_live = it.versions[VersionKey(F, Version(1))]
    for number in (2, 3, 4):
        it.versions[VersionKey(F, Version(number))] = msgspec.structs.replace(of_live, version=Version(number))
    it.functions[F] = msgspec.structs.replace(
        it.functions[F], split={Version(1): 90, Version(2): 10}, aliases={"beta": Version(3)}
    )
    assert kept_workers(it, frozenset()) == {"live", "canary", "alias"}


def test_none_of_a_function_whose_budget_is_spent() -> None:
    assert kept_workers(view(1, ("a", 1, "ready", 1)), frozenset({F})) == frozenset()


def test_no_stage_that_only_helps_another_worker() -> None:
    it = view(5, ("a", 1, "ready", 1))
    [order] = it.orders.values()
    helper = Stage(pipeline=PipelineId("p"), index=1, cuts=((0, 1), (1, 2)))
    it.put_order(msgspec.structs.replace(order, stage=helper))
    it.statuses[order.worker] = msgspec.structs.replace(it.statuses[order.worker], whole=False)
    assert kept_workers(it, frozenset()) == frozenset()


def test_versions_that_have_changed_are_enough() -> None:
    """What has changed is looked at, and with the rest as it was gives what a look at all would."""
    it = view(2, *((name, 1, "ready", since) for since, name in enumerate("abc", 1)))
    changes, key = it.follow(), VersionKey(F, Version(1))
    known = kept_by_version(it, frozenset(), it.ordered_versions())
    assert known == {key: ["a", "b"]}
    it.put_status(msgspec.structs.replace(it.statuses[WorkerId("a")], state="draining"))
    assert changes.take_versions() == {key}
    assert kept_by_version(it, frozenset(), {key}) == {key: ["b", "c"]}
    it.functions[F] = msgspec.structs.replace(it.functions[F], scaled=ScaleOverride(min=1))
    assert changes.take_versions() == {key}
    assert kept_by_version(it, frozenset(), {key}) == {key: ["b"]}
    for worker in list(it.orders):
        del it.orders[worker]
    assert changes.take_versions() == {key}
    assert kept_by_version(it, frozenset(), {key}) == {}
