"""The node that these tests share: it is started once, and between two tests it has its spare alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import FunctionName
from tests.prefetcher.nodes import Node, Store
from tests.prefetcher.worker_nodes import has_a_spare_alone
from tests.servers import RedisServer, wait_until

ENDS_S = 30


@pytest.fixture(scope="package")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("kept") / "buckets" / "weights")


@pytest.fixture(scope="package")
def kept_node(store: Store, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    server = RedisServer(tmp_path_factory.mktemp("kept") / "redis")
    try:
        server.start()
        node = Node(server, str(store.folder), tmp_path_factory.mktemp("kept") / "home")
        try:
            yield node
        finally:
            node.close()
    finally:
        server.close()


@pytest.fixture
def node(kept_node: Node) -> Iterator[Node]:
    """The shared node, with a spare and without workers, logs and rows. One that a test stopped, or did not get rid of
    its workers, is started anew."""
    if kept_node.process is None or kept_node.process.poll() is not None:
        kept_node.start()
        wait_until(lambda: has_a_spare_alone(kept_node), ENDS_S, what="the spare alone")
    yield kept_node
    kept_node.client.delete(keys.desired(kept_node.id))
    if kept_node.process is not None and kept_node.process.poll() is None:
        try:
            wait_until(
                lambda: not kept_node.client.hlen(keys.observed(kept_node.id)), ENDS_S, what="forgotten statuses"
            )
            wait_until(lambda: has_a_spare_alone(kept_node), ENDS_S, what="the spare alone")
        except BaseException:
            kept_node.kill()
            raise
    kept_node.client.delete(keys.LEDGER, *map(keys.logs, map(FunctionName, ("hello", "say"))))
