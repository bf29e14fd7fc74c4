from __future__ import annotations

from fleetstart.prefetcher.control.lease_keeper import LeaseKeeper
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import NodeId
from tests.servers import RedisServer, wait_until
from tests.stopwatch import Stopwatch

NODE = NodeId("n")


def test_a_lease_outlives_a_stall_of_the_loop_but_not_for_ever(redis_server: RedisServer) -> None:
    keeper = LeaseKeeper(redis_server.url, NODE, lease_ms=300, stall_s=1.2)
    with redis_server.client() as client:
        keeper.start()
        client.set(keys.node(NODE), b"mine", px=300)
        keeper.wrote(b"mine")
        watch = Stopwatch()
        wait_until(lambda: not client.exists(keys.node(NODE)))
        assert watch.elapsed_s > 1.0
        assert watch.unhindered_s < 3.0
        keeper.close()


def test_a_lease_that_another_daemon_wrote_is_left_alone(redis_server: RedisServer) -> None:
    keeper = LeaseKeeper(redis_server.url, NODE, lease_ms=300)
    with redis_server.client() as client:
        keeper.start()
        keeper.wrote(b"mine")
        client.set(keys.node(NODE), b"another's", px=400)
        wait_until(lambda: not client.exists(keys.node(NODE)), 3)
        keeper.close()
