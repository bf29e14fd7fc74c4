"""The record that a node keeps of its join for the next `fs node join`, and the drain that this ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fleetstart.controller.cli.home import HomeLayout
from fleetstart.controller.cli.local.join import JoinRecord, end_drain, join_file, read_join, write_join
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.reports import NodeReport
from tests.servers import RedisServer

NODE = NodeId("vm2")
ADDRESS = "10.0.0.2"


def joined(redis_url: str = "redis://x") -> JoinRecord:
    return JoinRecord(url="https://fleet:7443", redis_url=redis_url, store="s3://b/p", node=NODE, address=ADDRESS)


def test_a_node_that_joins_again_is_drained_no_longer_and_controllers_hear_of_it(redis_server: RedisServer) -> None:
    with redis_server.client() as client, client.pubsub() as heard:
        heard.subscribe(keys.EVENTS_FUNCTIONS)
        assert heard.get_message(timeout=5)
        client.hset(keys.NODES_DRAINING, mapping={NODE: "1", "vm3": "1"})
        end_drain(joined(redis_server.url))
        assert client.hkeys(keys.NODES_DRAINING) == [b"vm3"]
        message = heard.get_message(timeout=5)
        assert message is not None
        assert message["data"] == b"node:vm2"


@pytest.mark.parametrize(("address", "left"), [(ADDRESS, 0), ("10.0.0.3", 1)])
def test_a_living_node_of_its_name_on_another_machine_stays_drained(
    redis_server: RedisServer, address: str, left: int
) -> None:
    report = NodeReport(node=NODE, epoch="e", address=address, cpus=1, memory_bytes=1, memory_used_bytes=0)
    with redis_server.client() as client:
        client.hset(keys.NODES_DRAINING, NODE, "1")
        client.set(keys.node(NODE), msgspec.json.encode(report), px=60_000)
        end_drain(joined(redis_server.url))
        assert client.hlen(keys.NODES_DRAINING) == left


def test_a_report_of_another_release_does_not_keep_its_node_drained(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        client.hset(keys.NODES_DRAINING, NODE, "1")
        client.set(keys.node(NODE), b'{"node": 7}', px=60_000)
        end_drain(joined(redis_server.url))
        assert not client.hlen(keys.NODES_DRAINING)


def test_a_redis_that_fails_ends_the_join_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="vm2 may still be drained") as caught:
        end_drain(joined(f"unix://{tmp_path / 'no.sock'}"))
    assert caught.value.hint


def test_region_and_memory_are_remembered_and_what_is_given_goes_before(tmp_path: Path) -> None:
    layout = HomeLayout(tmp_path)
    known = msgspec.structs.replace(joined(), region="eu", node_memory="8GiB")
    write_join(layout, known)
    assert read_join(layout) == known
    assert known.again() == known
    assert known.again(region="us", address="10.0.0.9") == msgspec.structs.replace(
        known, region="us", address="10.0.0.9"
    )
    assert known.again(node_memory="4GiB").node_memory == "4GiB"
    local = msgspec.structs.replace(known, url="http://127.0.0.1:7433")
    cleared = local.again(region="", node_memory="", address="")
    assert (cleared.region, cleared.node_memory) == ("", ""), "what is given as empty is taken away"
    assert cleared.address == "127.0.0.1", "as seen from the controller that it joined by"


def test_a_record_of_an_earlier_release_is_read(tmp_path: Path) -> None:
    layout = HomeLayout(tmp_path)
    older = {"url": "http://x:7433", "redis_url": "redis://x", "store": "/mnt/s", "node": "vm2", "address": ADDRESS}
    join_file(layout).write_bytes(msgspec.json.encode(older))
    known = read_join(layout)
    assert known is not None
    assert (known.region, known.node_memory) == ("", "")
