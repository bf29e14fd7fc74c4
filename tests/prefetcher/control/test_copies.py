"""Copies that orders name: begun, changed and ended as they say, and held without a worker."""

from __future__ import annotations

import time

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.control.copies import CopyChanges, changes
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.peers import CopyOrder
from tests.prefetcher.nodes import Node
from tests.prefetcher.stages import Model
from tests.servers import wait_until

CHECKPOINTS = [CheckpointId(letter * 64) for letter in "abcd"]
ORDERS = st.dictionaries(st.sampled_from(CHECKPOINTS), st.tuples(st.sampled_from(["old", "now"]), st.integers(1, 3)))


def order_of(checkpoint: CheckpointId, epoch: str, ordered_unix_ns: int) -> CopyOrder:
    return CopyOrder(node=NodeId("node-1"), epoch=epoch, checkpoint=checkpoint, ordered_unix_ns=ordered_unix_ns)


@given(ORDERS, ORDERS)
def test_what_is_held_follows_the_orders_of_this_epoch(
    ordered: dict[CheckpointId, tuple[str, int]], held: dict[CheckpointId, tuple[str, int]]
) -> None:
    orders = {checkpoint: order_of(checkpoint, *fields) for checkpoint, fields in ordered.items()}
    before = {checkpoint: order_of(checkpoint, "now", number) for checkpoint, (_, number) in held.items()}
    found = changes(orders, before, "now")
    after = {**before, **{order.checkpoint: order for order in (*found.begin, *found.update)}}
    for checkpoint in found.end:
        del after[checkpoint]
    assert set(after) == {checkpoint for checkpoint, order in orders.items() if order.epoch == "now"}
    assert not {order.checkpoint for order in found.begin} & set(before)
    assert all(order.ordered_unix_ns > before[order.checkpoint].ordered_unix_ns for order in found.update)
    assert changes(orders, after, "now") == CopyChanges()


def test_a_copy_lies_in_memory_until_its_order_is_taken_back(node: Node, model: Model) -> None:
    """Without a worker; a node whose memory is needed otherwise cannot evict it (`segments`)."""
    order = order_of(model.checkpoint, node.epoch, time.time_ns())
    data = msgspec.json.encode(order)
    node.client.hset(keys.copies(node.id), model.checkpoint, data)
    node.client.publish(keys.events_copies(node.id), data)

    def state() -> str:
        return next((one.state for one in node.lease().segments if one.checkpoint == model.checkpoint), "")

    wait_until(lambda: state() == "ready", what="the copy")
    node.client.hdel(keys.copies(node.id), model.checkpoint)
    node.client.publish(keys.events_copies(node.id), b"")
    wait_until(lambda: "copy given back" in node.log(), what="the end of the copy")
    assert state() == "ready", "it stays until its memory is needed"
