"""The predicted wait from a gateway's backend and view: queues, pending starts, plans."""

from __future__ import annotations

import msgspec
import pytest

from fleetstart.controller.gateway.admission.feasibility import FeasibilityCheck
from fleetstart.controller.gateway.admission.rejections import rejection
from fleetstart.controller.gateway.admission.wait_predictor import WaitPrediction, WaitPredictor
from fleetstart.controller.gateway.dispatch.version_backend import VersionBackend
from fleetstart.controller.planner.estimates import VersionMeasures
from fleetstart.controller.state.view import NodeSeen
from fleetstart.runtime.contract.errors import Overloaded, QueueFull
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.reports import FunctionLoad, GatewayReport, SegmentReport
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.gateway.admission.test_feasibility import CHAT, KEY, deployed
from tests.controller.gateway.dispatch.test_version_backend import call, queued, status
from tests.controller.scheduler.cluster import Cluster

TEST_MEASURES = VersionMeasures(
    library_s=MovingAverage(0.5, 3), rest_s=MovingAverage(0.1, 3), call_s=MovingAverage(2.0, 3)
)


def waits_of(cluster: Cluster) -> WaitPredictor:
    return WaitPredictor("g", cluster.view, FeasibilityCheck(cluster.view))


def predicted(wait_predictor: WaitPredictor, cluster: Cluster, backend: VersionBackend) -> WaitPrediction:
    return wait_predictor.predict(backend, cluster.clock.monotonic_ns(), cluster.clock.unix_ns())


def fill(cluster: Cluster, ready_mib: int) -> None:
    """The node tells how much of the checkpoint it has now."""
    seen = cluster.view.nodes[NodeId("n0")]
    part = SegmentReport(CHAT, "filling", 800 * MIB, ready_mib * MIB, [], cluster.clock.unix_ns())
    cluster.view.nodes[NodeId("n0")] = NodeSeen(msgspec.structs.replace(seen.report, segments=[part]))


def starting(layer_mib: int = 0) -> tuple[Cluster, VersionBackend]:
    """A cluster in which a version that has been measured starts a worker."""
    cluster = Cluster()
    backend = deployed(cluster, layer_mib=layer_mib)
    cluster.view.version_measures[KEY] = TEST_MEASURES
    cluster.load(1)
    cluster.step()
    return cluster, backend


def test_a_line_is_as_long_as_measured_calls_say() -> None:
    cluster = Cluster()
    backend, wait_predictor = deployed(cluster, concurrency=2), waits_of(cluster)
    backend.on_status(status("a"), 0)
    now_ns = cluster.clock.monotonic_ns()
    backend.service_time.observe(3.0)
    for name in ("1", "2"):
        assert backend.try_acquire(call(name), now_ns)
    cluster.clock.advance(1)
    for name in ("3", "4"):
        backend.queue.offer(queued(name))
    found = predicted(wait_predictor, cluster, backend)
    assert found.sure
    assert (found.wait.queued, found.wait.slots, found.wait.running, found.wait.call_s) == (2, 2, 2, 3.0)
    assert found.wait.seconds == pytest.approx(4.25, abs=0.01)
    error = rejection(KEY.name, found.wait, allowed_s=1.0, at_most=False)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == found.wait.seconds
    assert "2 wait for 2 slots, each taken for 3 s a call" in error.message


def test_other_gateways_calls_are_in_the_line() -> None:
    cluster = Cluster()
    backend, wait_predictor = deployed(cluster), waits_of(cluster)
    backend.on_status(status("a"), 0)
    backend.service_time.observe(1.0)
    assert backend.try_acquire(call("1"), cluster.clock.monotonic_ns())
    alone_s = predicted(wait_predictor, cluster, backend).wait.seconds
    for name in ("g", "h"):
        report = GatewayReport(gateway=name, loads={str(KEY): FunctionLoad(4, 0)})
        cluster.view.put_gateway(report, cluster.clock.monotonic_ns())
    assert predicted(wait_predictor, cluster, backend).wait.seconds == pytest.approx(alone_s + 4)


def test_a_load_under_way_tells_from_its_own_rate_when_it_will_be_there() -> None:
    cluster = Cluster()
    backend, wait_predictor = deployed(cluster, layer_mib=100), waits_of(cluster)
    cluster.load(1)
    cluster.step()
    fill(cluster, 100)
    assert not predicted(wait_predictor, cluster, backend).sure, "one report and priors"
    for ready_mib in (150, 200, 250):
        cluster.clock.advance(1)
        fill(cluster, ready_mib)
        found = predicted(wait_predictor, cluster, backend)
    (worker,) = found.wait.coming
    assert worker.weight_bytes == 800 * MIB
    assert worker.fetched_bytes == 250 * MIB
    assert worker.bytes_per_s == pytest.approx(50 * MIB)
    assert found.wait.seconds == pytest.approx(11, rel=0.01)
    cluster.clock.advance(4)
    assert predicted(wait_predictor, cluster, backend).wait.seconds == pytest.approx(7, rel=0.02), (
        "without a newer report"
    )
    error = rejection(KEY.name, found.wait, allowed_s=2.0, at_most=False)
    assert "250 of 800 MiB of its weights here and more at 50 MiB/s" in error.message
    assert error.retry_after_s == pytest.approx(11, rel=0.01)


@pytest.mark.parametrize("off_s", [5000, -5000])
def test_a_clock_that_is_off_makes_no_start_late(off_s: int) -> None:
    """A gateway whose clock was an hour ahead refused calls for a start that it expected in 500 s."""
    cluster, backend = starting()
    now_ns, now_unix_ns = cluster.clock.monotonic_ns(), cluster.clock.unix_ns()
    right_s = waits_of(cluster).predict(backend, now_ns, now_unix_ns).wait.seconds
    found_s = waits_of(cluster).predict(backend, now_ns, now_unix_ns + off_s * 10**9).wait.seconds
    assert found_s == pytest.approx(right_s, abs=5)


def test_no_call_is_refused_for_the_rate_of_a_store_that_stalled_and_came_back() -> None:
    """Else a call that comes right after it is told to wait a minute for a worker that is ready in seconds."""
    cluster, backend = starting(layer_mib=100)
    wait_predictor = waits_of(cluster)

    def told(*ready_mib: int, after_s: float = 1.0) -> WaitPrediction:
        for mib in ready_mib:
            cluster.clock.advance(after_s)
            fill(cluster, mib)
            found = predicted(wait_predictor, cluster, backend)
        return found

    assert told(20, 40, 60, 80, 100).sure
    stalled = told(*[100] * 6)
    assert stalled.wait.seconds > 100
    assert not stalled.sure
    assert not told(120).sure, "most of what is seen is of the stall"
    again = told(*range(140, 501, 20))
    assert again.sure
    assert again.wait.seconds == pytest.approx(15, rel=0.1)
    rare = told(501, after_s=57)
    assert rare.wait.seconds < 20, "a stall between two calls is no rate either"


def test_calls_that_wait_for_the_same_start_come_first() -> None:
    cluster, backend = starting(layer_mib=100)
    wait_predictor = waits_of(cluster)
    for ready_mib in (100, 200):
        cluster.clock.advance(1)
        fill(cluster, ready_mib)
        ahead_s = predicted(wait_predictor, cluster, backend).wait.seconds
    for name in ("1", "2", "3"):
        backend.queue.offer(queued(name))
    cluster.clock.advance(0.2)
    found = predicted(wait_predictor, cluster, backend)
    assert found.sure
    assert found.wait.seconds == pytest.approx(ahead_s - 0.2 + 3 * 2.0 - 1.0, rel=0.02)


def test_a_start_that_nobody_has_ordered_yet_is_predicted_by_the_planner() -> None:
    cluster = Cluster()
    backend, wait_predictor = deployed(cluster, layer_mib=100), waits_of(cluster)
    found = predicted(wait_predictor, cluster, backend)
    assert not found.sure, "priors only: nobody is refused for them"
    assert found.workers == 0
    assert found.wait.seconds == pytest.approx(800 * MIB / 125e6, rel=0.1)
    cluster.view.version_measures[KEY] = TEST_MEASURES
    cluster.clock.advance(1)
    assert predicted(wait_predictor, cluster, backend).sure


def test_without_a_node_nobody_knows() -> None:
    cluster = Cluster(nodes=0)
    backend = deployed(cluster)
    found = predicted(waits_of(cluster), cluster, backend)
    assert not found.sure
    error = rejection(KEY.name, found.wait, allowed_s=0.0, at_most=True)
    assert isinstance(error, QueueFull)
    assert error.retry_after_s == 5.0
    assert error.wait is None


def test_a_worker_that_is_ready_is_no_start_any_more() -> None:
    cluster = Cluster()
    backend, wait_predictor = deployed(cluster), waits_of(cluster)
    cluster.load(1)
    cluster.step()
    assert len(predicted(wait_predictor, cluster, backend).wait.coming) == 1
    (order,) = cluster.view.orders.values()
    backend.on_status(msgspec.structs.replace(status("a"), worker=order.worker), 0)
    cluster.obey()
    cluster.clock.advance(1)
    assert not predicted(wait_predictor, cluster, backend).wait.coming
    assert backend.try_acquire(call("1"), 0)
