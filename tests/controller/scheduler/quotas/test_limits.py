"""Quotas of what a project may run: how a quota is shared, and that no change of traffic passes it."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.scheduler.quotas.limits import used_up
from fleetstart.controller.scheduler.quotas.shares import VersionDemand, share_quota
from fleetstart.controller.state.access_records import ProjectRecord, Quotas
from fleetstart.controller.state.access_table import AccessTable
from fleetstart.controller.state.records import FunctionRecord, Rollout, VersionKey, VersionRecord
from fleetstart.runtime.contract.function.spec import Scale
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from fleetstart.runtime.contract.node.orders import FINAL, WorkerOrder
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.conftest import ControllerProcess, HandNode
from tests.controller.scheduler.cluster import Cluster, F
from tests.controller.scheduler.test_autoscaler import spec

MEMORY = 64 * MIB


def demand(number: int, running: int, needed: int, desired: int) -> VersionDemand:
    key = VersionKey(FunctionName("ml.f"), Version(number))
    return VersionDemand(key=key, running=running, needed=needed, desired=desired, memory_bytes=MEMORY)


def shared(quotas: Quotas, *demands: tuple[int, int, int]) -> list[int]:
    return list(share_quota([demand(number, *one) for number, one in enumerate(demands)], quotas).values())


@pytest.mark.parametrize(
    ("workers", "demands", "granted"),
    [
        (4, [(0, 2, 2), (0, 1, 1)], [2, 1]),
        (1, [(1, 0, 1), (0, 1, 1)], [0, 1]),  # an idle worker makes room for a call
        (1, [(0, 1, 1), (1, 1, 1)], [0, 1]),  # a busy one does not
        (2, [(2, 2, 2), (0, 1, 1)], [1, 1]),  # but a first worker goes before a second
        (3, [(2, 3, 3), (0, 1, 1)], [2, 1]),
        (2, [(0, 0, 2), (1, 0, 1)], [1, 1]),  # what is kept stays before what would be started to be kept
        (1, [(3, 3, 3)], [1]),  # a quota that was lowered
        (0, [(1, 1, 1)], [0]),
    ],
)
def test_who_gets_the_workers_of_a_quota(workers: int, demands: list[tuple[int, int, int]], granted: list[int]) -> None:
    assert shared(Quotas(workers=workers), *demands) == granted
    assert shared(Quotas(memory_bytes=workers * MEMORY + 1), *demands) == granted
    assert shared(Quotas(), *demands) == [desired for _, _, desired in demands]


counts = st.integers(0, 6)


@given(
    workers=st.integers(0, 12),
    wanted=st.lists(
        st.tuples(counts, counts, counts).map(lambda one: (one[0], min(one[1:]), max(one[1:]))), max_size=6
    ),
)
def test_a_quota_is_neither_passed_nor_wasted(workers: int, wanted: list[tuple[int, int, int]]) -> None:
    granted = shared(Quotas(workers=workers), *wanted)
    desired = [one[2] for one in wanted]
    assert sum(granted) == min(workers, sum(desired))
    assert all(has <= wants for has, wants in zip(granted, desired, strict=True))
    for has, (_, needed, _) in zip(granted, wanted, strict=True):
        kept_idle = any(more > need for more, (_, need, _) in zip(granted, wanted, strict=True))
        assert has >= needed or not kept_idle, "no idle worker is kept while calls wait"


class Limited(Cluster):
    """A cluster whose only project may run so many workers, with versions 1 to 4 of one function."""

    def __init__(self, **quotas: int) -> None:
        super().__init__()
        limits = ProjectRecord(name="default", quotas=Quotas(**quotas), created_unix_ms=0, created_by="local")
        self.view.access = AccessTable(projects={"default": limits})
        self.calls: dict[str, FunctionLoad] = {}
        for number in range(1, 5):
            self.view.versions[VersionKey(F, Version(number))] = VersionRecord(
                version=Version(number), digest="", segment_bytes=0, created_unix_ms=0,
                spec=spec(scale=Scale(max=4, keep_alive_s=60), memory_bytes=MEMORY),
            )  # fmt: skip

    def traffic(self, **fields: object) -> None:
        self.view.functions[F] = FunctionRecord(name=F, live=Version(1), deployed_unix_ms=0, **fields)  # type: ignore[arg-type]

    def called(self, version: int, queued: int, running: int = 0) -> None:
        self.calls[f"f@{version}"] = FunctionLoad(queued, running, oldest_unix_ms=version if queued else 0)
        self.view.put_gateway(GatewayReport(gateway="g", loads=self.calls), self.clock.monotonic_ns())

    def running(self) -> list[int]:
        """Versions of all workers that have not ended, also those that drain."""
        ended = {worker for worker, status in self.view.statuses.items() if status.state in FINAL}
        return sorted(order.version for order in self.view.orders.values() if order.worker not in ended)


@pytest.mark.parametrize(
    "traffic",
    [
        {},
        {"aliases": {"a": Version(2), "b": Version(3), "c": Version(4)}},
        {"split": {Version(1): 25, Version(2): 25, Version(3): 25, Version(4): 25}},
        {"rollout": Rollout(version=Version(2), begun_unix_ms=0), "past": [Version(3)]},
    ],
)
@pytest.mark.parametrize("quotas", [{"workers": 2}, {"memory_bytes": 2 * MEMORY}])
def test_all_versions_together_hold_to_the_quota(traffic: dict[str, object], quotas: dict[str, int]) -> None:
    cluster = Limited(**quotas)
    cluster.traffic(**traffic)
    for version in range(1, 5):
        cluster.called(version, queued=5)
    served = set()
    for round_ in range(12):
        cluster.step()
        assert len(cluster.running()) <= 2, f"round {round_}"
        served |= set(cluster.running())
        cluster.obey()
        for version in set(cluster.running()):
            cluster.called(version, queued=0)
        cluster.clock.advance(1)
    assert served == {1, 2, 3, 4}, "each has its turn"


def test_a_draining_worker_counts_until_it_has_ended() -> None:
    cluster = Limited(workers=1)
    cluster.traffic()
    cluster.called(1, queued=1)
    cluster.step()
    cluster.obey()
    cluster.called(1, queued=0)
    cluster.called(2, queued=1)
    (drained,) = cluster.step().orders
    assert (drained.version, drained.wanted) == (1, "drain")
    assert not cluster.step().orders
    cluster.obey()
    (started,) = cluster.step().orders
    assert (started.version, started.wanted) == (2, "run")


def test_a_version_that_is_kept_out_by_busy_ones_hears_of_the_quota() -> None:
    cluster = Limited(workers=1)
    cluster.traffic(rollout=Rollout(version=Version(2), begun_unix_ms=0))
    cluster.called(1, queued=0, running=1)
    cluster.step()
    cluster.obey()
    told = cluster.step().unplaced[VersionKey(F, Version(2))]
    assert told.code == "quota_exceeded"
    assert used_up(cluster.view, "default", MEMORY) == "project default runs all that its quota of workers allows"
    assert used_up(cluster.view, "other", MEMORY) == ""
    assert "f@2 gets no worker: project default may run 1 workers" in told.message
    cluster.called(1, queued=0)
    assert not cluster.step().unplaced


def test_other_projects_have_nothing_to_do_with_it() -> None:
    cluster = Limited(workers=1)
    name = FunctionName("ml.g")
    cluster.traffic()
    cluster.view.functions[name] = FunctionRecord(name=name, live=Version(1), deployed_unix_ms=0)
    cluster.view.versions[VersionKey(name, Version(1))] = VersionRecord(
        version=Version(1), digest="", segment_bytes=0, created_unix_ms=0,
        spec=spec(name=name, project="ml", scale=Scale(max=4), memory_bytes=MEMORY),
    )  # fmt: skip
    cluster.calls["ml.g@1"] = FunctionLoad(4, 0, oldest_unix_ms=1)
    cluster.called(1, queued=4)
    assert sorted(order.spec.name for order in cluster.step().orders) == ["f", *["ml.g"] * 4]


def test_four_versions_called_at_once_run_one_after_the_other(controller: ControllerProcess, node: HandNode) -> None:
    quota = {"quotas": {"workers": 1}}
    assert controller.http.put("/api/v1/projects/ml", json=quota).status_code == 200
    alive: set[WorkerId] = set()
    most, lock = 0, threading.Lock()

    def counted(one: HandNode, order: WorkerOrder) -> None:
        nonlocal most
        with lock:
            (alive.discard if order.wanted == "drain" else alive.add)(order.worker)
            most = max(most, len(alive))
        HandNode.serve(one, order)

    node.answer = counted
    for number in range(1, 5):
        controller.deploy("tool", project="ml", env={"N": str(number)}, scale={"max": 1})
    controller.http.put("/api/v1/functions/ml.tool/aliases/old", json={"version": 2}).raise_for_status()
    split = [{"version": 3, "percent": 50}, {"version": 4, "percent": 50}]
    controller.http.put("/api/v1/functions/ml.tool/split", json=split).raise_for_status()
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        paths = [f"/fn/ml.tool{at}" for at in ("@1", "@2", "@3", "@4", "@old", "", "", "")]
        assert list(pool.map(lambda path: controller.http.get(path).status_code, paths)) == [200] * 8
    assert most == 1
