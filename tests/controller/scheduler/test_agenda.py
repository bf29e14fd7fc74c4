"""The agenda: a step by what has changed decides as a step over everything, and idle versions cost nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.scheduler.agenda import MOVING_NS, STEADY_NS, STEP_VERSIONS, Agenda
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.view import NodeSeen, View
from fleetstart.runtime.contract.function.spec import Scale
from fleetstart.runtime.contract.ids import FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerState, WorkerStatus
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport, NodeReport
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.scheduler.cluster import Cluster
from tests.controller.scheduler.test_autoscaler import spec

SECOND = 1_000_000_000


class World(Cluster):
    """Some functions, whose scheduler looks at what its agenda names, or at everything."""

    def __init__(self, functions: int, *, everything: bool = False) -> None:
        super().__init__(nodes=3)
        self.names = [FunctionName(f"f{index}") for index in range(functions)]
        self.loads: dict[FunctionName, tuple[int, int]] = {}
        for index, name in enumerate(self.names):
            self.put(name, Scale(min=int(index == 0), max=2, keep_alive_s=5))
        self.agenda = None if everything else Agenda(self.view)
        self.looked_at = 0

    def put(self, name: FunctionName, scale: Scale) -> None:
        self.view.functions[name] = FunctionRecord(name=name, live=Version(1), deployed_unix_ms=0)
        self.view.versions[VersionKey(name, Version(1))] = VersionRecord(
            version=Version(1), digest="", spec=spec(name=name, scale=scale), segment_bytes=0, created_unix_ms=0
        )

    def called(self, name: FunctionName, queued: int, running: int) -> None:
        self.loads = {**self.loads, name: (queued, running)}
        loads = {
            f"{one}@1": FunctionLoad(queued, running, oldest_unix_ms=1 if queued else 0)
            for one, (queued, running) in self.loads.items()
            if queued or running
        }
        self.view.put_gateway(GatewayReport(gateway="g", loads=loads), self.clock.monotonic_ns())

    def turn(self) -> None:
        """As the scheduler's loop: steps until there is nothing left to do now."""
        for _ in range(20):
            now_ns = self.clock.monotonic_ns()
            keys = self.agenda.take(now_ns) if self.agenda is not None else None
            if keys is not None and not keys:
                return
            step = self.step(keys)
            self.looked_at += len(step.rests)
            if self.agenda is not None:
                self.agenda.done(step.rests, step.unplaced.keys(), now_ns)

    def answer(self, state: WorkerState) -> None:
        for order in list(self.view.orders.values()):
            said: WorkerState = state if order.wanted == "run" else "gone"
            known = self.view.statuses.get(order.worker)
            if known is None or known.state != said:
                self.view.put_status(
                    WorkerStatus(
                        worker=order.worker, node=order.node, function=order.spec.name, version=order.version,
                        state=said, changed_unix_ns=self.clock.unix_ns(), endpoint="h:1",
                    )
                )  # fmt: skip

    def shape(self) -> list[tuple[str, str]]:
        """What is ordered of each function, whoever the workers are."""
        return sorted((order.spec.name, order.wanted) for order in self.view.orders.values())


def test_an_old_version_that_still_serves_is_looked_at_when_its_function_is_removed() -> None:
    """No record names it any more: a call keeps its worker, and calls without a number go to the next version."""
    world = World(1)
    name = world.names[0]
    world.turn()
    world.answer("ready")
    world.called(name, 0, 1)
    world.turn()
    world.view.functions[name] = FunctionRecord(name=name, live=Version(2), deployed_unix_ms=0)
    world.turn()
    assert ("f0", "run") in world.shape()
    assert world.agenda is not None
    del world.view.functions[name]
    assert VersionKey(name, Version(1)) in world.agenda.take(world.clock.monotonic_ns())


MOVES = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 3), st.integers(0, 3), st.integers(0, 2)),
    st.tuples(st.just("ready"), st.just(0), st.just(0), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 12), st.just(0), st.just(0)),
    st.tuples(st.just("node"), st.integers(0, 2), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("scale"), st.integers(0, 3), st.integers(0, 2), st.just(0)),
)


def play(world: World, move: tuple[str, int, int, int]) -> None:
    what, first, second, third = move
    if what == "call":
        world.called(world.names[first], second, third)
    elif what == "ready":
        world.answer("ready")
    elif what == "wait":
        for _ in range(first):
            world.clock.advance(1)
            world.turn()
    elif what == "scale":
        world.put(world.names[first], Scale(min=second, max=2, keep_alive_s=5))
    else:
        name = NodeId(f"n{first}")
        seen = world.view.nodes[name]
        if second:
            seen.absent_since_ns = -10 * SECOND  # lost long ago
            world.view.node_came_or_went(name)
        else:
            world.view.nodes[name] = NodeSeen(seen.report)
    world.turn()


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.lists(MOVES, max_size=12))
def test_a_step_by_changes_orders_what_a_step_over_everything_orders(moves: list[tuple[str, int, int, int]]) -> None:
    some, every = World(4), World(4, everything=True)
    for world in (some, every):
        world.turn()
        for move in moves:
            play(world, move)
        for _ in range(12):  # both have had the time that nothing more is expected to take
            world.answer("ready")
            world.clock.advance(1)
            world.turn()
    assert some.shape() == every.shape()


def test_idle_versions_are_looked_at_once_and_then_not_at_all() -> None:
    world = World(300)
    world.turn()
    assert world.looked_at >= 300
    world.answer("ready")
    world.turn()
    world.looked_at = 0
    for _ in range(60):
        world.clock.advance(1)
        world.turn()
    assert 0 < world.looked_at <= 60 * SECOND // (STEADY_NS // 2) + 1, "the one that is kept, once in a while"
    world.looked_at = 0
    world.called(world.names[7], 1, 0)
    world.turn()
    assert 1 <= world.looked_at <= 3, "what has changed"


def test_a_step_takes_some_versions_and_those_with_waiting_calls_first() -> None:
    world = World(3 * STEP_VERSIONS)
    last = world.names[-1]
    world.called(last, 1, 0)
    assert world.agenda is not None
    taken = world.agenda.take(0)
    assert len(taken) == STEP_VERSIONS
    assert taken[0] == VersionKey(last, Version(1))
    assert world.agenda.wait_ns(0) == 0
    rest = world.agenda.take(0)
    world.agenda.again(taken)
    assert world.agenda.take(0)[: STEP_VERSIONS // 2] != taken[: STEP_VERSIONS // 2], "those that came first are first"
    assert not set(taken) & set(rest)


def test_versions_are_due_again_by_what_is_expected_of_them() -> None:
    view = View()
    agenda = Agenda(view)
    a, b, c, d = (VersionKey(FunctionName(name), Version(1)) for name in "abcd")
    agenda.done(
        {a: ("moving", None), b: ("steady", None), c: ("inert", None), d: ("inert", 3 * SECOND)}, (), now_ns=SECOND
    )
    assert agenda.take(SECOND) == []
    assert agenda.take(SECOND + MOVING_NS) == [a]
    assert agenda.take(3 * SECOND) == [d]
    assert b in agenda.take(SECOND + STEADY_NS)


def test_what_found_no_room_is_tried_again_when_a_node_changes() -> None:
    cluster = Cluster()
    agenda = Agenda(cluster.view)
    agenda.take(0)
    key = VersionKey(FunctionName("f"), Version(1))
    agenda.done({key: ("moving", None)}, [key], 0)
    assert agenda.take(1) == []
    report = NodeReport(
        node=NodeId("new"), epoch="e", address="", memory_bytes=64 * MIB, memory_used_bytes=0, cpus=1
    )  # fmt: skip
    cluster.view.nodes[report.node] = NodeSeen(report)
    assert agenda.take(2) == [key]


def test_a_reader_that_is_gone_follows_no_more() -> None:
    view = View()
    agenda = Agenda(view)
    del agenda
    view.put_status(
        WorkerStatus(
            worker=WorkerId("w"), node=NodeId("n"), function=FunctionName("f"), version=Version(1), state="ready"
        )
    )
    assert len(view._followers) == 0
