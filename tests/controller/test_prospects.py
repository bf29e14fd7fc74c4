"""Who may wait on, and who is told at once that nothing will come."""

from __future__ import annotations

from fleetstart.controller.prospects import UNPLACED_NS, hopeless, start_failure
from fleetstart.controller.records import Failure, VersionKey, VersionRecord
from fleetstart.controller.routes import Route
from fleetstart.runtime.contract.errors import ErrorInfo, NotFound
from fleetstart.runtime.contract.function import MIB
from fleetstart.runtime.contract.ids import Version
from tests.controller.test_reconcile import Cluster, F
from tests.controller.test_routes import status

KEY = VersionKey(F, Version(1))
BAD = Failure(count=3, last_unix_ms=0, error=ErrorInfo(code="start_failed", message="OSError: bad day"))
DAY = 24 * 3600 * 1_000_000_000


def deployed(cluster: Cluster, memory_mib: int = 64) -> Route:
    spec = cluster.deploy(memory_bytes=memory_mib * MIB)
    record = VersionRecord(version=KEY.version, digest="", spec=spec, segment_bytes=0, created_unix_ms=0)
    cluster.view.redis = "ok"
    return Route(KEY, record, elsewhere=lambda _: 0, later=lambda *_: None)


def test_calls_wait_while_a_node_has_room_or_a_worker_is_on_its_way() -> None:
    cluster = Cluster()
    route = deployed(cluster)
    assert hopeless(cluster.view, route, 0, 0) is None
    cluster.load(1)
    cluster.step()
    cluster.view.nodes.clear()
    cluster.view.synced = False  # nobody knows yet that the node is lost
    assert hopeless(cluster.view, route, DAY, 0) is None


def test_a_deleted_function_ends_the_wait() -> None:
    cluster = Cluster()
    route = deployed(cluster)
    cluster.view.functions.clear()
    ended = hopeless(cluster.view, route, 5, 0)
    assert ended is not None
    assert isinstance(ended[0], NotFound)
    assert ended[1] == 5, "all who wait now"


def test_a_function_too_large_for_every_node_ends_it_at_once() -> None:
    cluster = Cluster(memory_mib=1024)
    route = deployed(cluster, memory_mib=4096)
    ended = hopeless(cluster.view, route, 5, 0)
    assert ended is not None
    assert "4096 MiB" in ended[0].message


def test_without_a_node_calls_wait_for_its_return_but_not_for_ever() -> None:
    cluster = Cluster(nodes=0)
    route = deployed(cluster)
    assert hopeless(cluster.view, route, 0, 0) is None
    assert hopeless(cluster.view, route, UNPLACED_NS, 0) is None
    ended = hopeless(cluster.view, route, UNPLACED_NS + 1, 0)
    assert ended is not None
    assert ended[1] == 1, "those who came later have not waited as long"
    cluster.view.redis = "away"
    assert hopeless(cluster.view, route, DAY, 0) is None, "nothing is known of nodes while Redis is away"
    assert hopeless(cluster.view, route, DAY + UNPLACED_NS, 0) is None, "and the wait begins anew"


def test_given_up_starts_are_told_unless_a_worker_from_before_still_serves() -> None:
    cluster = Cluster()
    route = deployed(cluster)
    cluster.view.failures[KEY] = BAD
    error = start_failure(cluster.view, route, 1000)
    assert error is not None
    assert error.message == "OSError: bad day"
    assert "fs logs f" in error.hint
    assert hopeless(cluster.view, route, 7, 1000) is not None
    assert start_failure(cluster.view, route, 61_000) is None, "tried again after a minute"
    route.heard(status("a"), 0)
    assert start_failure(cluster.view, route, 1000) is None
