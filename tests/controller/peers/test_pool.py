"""The parameter pool over a view: sources of new orders and of fetches under way, copies, keys; no Redis."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fleetstart.controller.peers.grants import GRANT_MS
from fleetstart.controller.peers.pool import MadePeerKey, ParameterPool, PoolChanges
from fleetstart.controller.state.access_records import SecretRecord
from fleetstart.controller.state.identity_records import PeerKeyRecord
from fleetstart.controller.state.records import FunctionRecord, VersionKey, VersionRecord
from fleetstart.controller.state.view import NodeSeen, View
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, NodeId, Version, WorkerId
from fleetstart.runtime.contract.node.orders import WorkerOrder, WorkerState, WorkerStatus
from fleetstart.runtime.contract.node.peers import CopyOrder, Pull, SealedPeerKey, grant_secret
from fleetstart.runtime.contract.node.reports import NodeReport, SegmentReport
from fleetstart.runtime.contract.node.sealed_secrets import Sealed
from fleetstart.runtime.contract.sizes import MIB
from tests.controller.scheduler.test_autoscaler import spec

CHECKPOINT = CheckpointId("c" * 64)
CHUNKS = 16
ALL = ((0, CHUNKS),)
SIZE_BYTES = 64 * MIB
KEY = b"k" * 32


@dataclass
class Keys:
    """Peer keys that are all the same."""

    known: dict[NodeId, str] = field(default_factory=dict)

    def key(self, node: NodeId, epoch: str) -> bytes | None:
        return KEY if self.known.get(node) == epoch else None

    def make(self, report: NodeReport) -> MadePeerKey | None:
        secret = SecretRecord(
            name="k", project="", box="", master="", size_bytes=0, created_unix_ms=0, updated_unix_ms=0, updated_by=""
        )
        record = PeerKeyRecord(node=report.node, epoch=report.epoch, key=secret)
        return MadePeerKey(record, SealedPeerKey(epoch=report.epoch, sealed=Sealed()))


class World:
    """Nodes with peer servers, and a function with weights on them."""

    def __init__(self, nodes: int = 3, *, keep: str = "") -> None:
        self.view, self.keys = View(), Keys()
        self.view.synced = True
        self.now_ns = 10**9
        self.spec = spec(weights=CHECKPOINT, keep=keep)
        self.pool = ParameterPool(self.view, self.keys)
        for number in range(nodes):
            self.node(f"n{number}")
        name, version = self.spec.name, Version(1)
        self.view.versions[VersionKey(name, version)] = VersionRecord(
            version=version, digest="", spec=self.spec, segment_bytes=SIZE_BYTES, created_unix_ms=0, chunks=CHUNKS
        )
        self.view.functions[name] = FunctionRecord(name=name, live=version, deployed_unix_ms=0)

    def unix_ns(self) -> int:
        return 1_800_000_000 * 10**9 + self.now_ns

    def node(self, name: str, *, epoch: str = "e1", used_bytes: int = 0, **fields: object) -> None:
        report = NodeReport(
            node=NodeId(name), epoch=epoch, address=name, memory_bytes=1024 * MIB, memory_used_bytes=used_bytes, cpus=2,
            public_key="p", peer_address=f"{name}:7000", **fields,  # type: ignore[arg-type]
        )  # fmt: skip
        self.view.nodes[NodeId(name)] = NodeSeen(report)

    def holds(self, name: str, end: int = CHUNKS, *, epoch: str = "e1") -> None:
        state = "ready" if end == CHUNKS else "filling"
        ready_bytes = SIZE_BYTES * end // CHUNKS
        segment = SegmentReport(CHECKPOINT, state, SIZE_BYTES, ready_bytes, [(0, end)])  # type: ignore[arg-type]
        self.node(name, epoch=epoch, segments=[segment], used_bytes=ready_bytes)

    def dies(self, name: str) -> None:
        self.view.nodes[NodeId(name)].absent_since_ns = self.now_ns
        self.view.node_came_or_went(NodeId(name))

    def new_order(self, name: str, worker: str = "") -> WorkerOrder:
        return WorkerOrder(
            worker=WorkerId(worker or f"w-{name}"), node=NodeId(name), epoch="e1", version=Version(1), spec=self.spec,
            ordered_unix_ns=self.unix_ns(), decided_unix_ns=self.unix_ns(),
        )  # fmt: skip

    def ordered(self, *orders: WorkerOrder) -> list[WorkerOrder]:
        """The orders with their sources, as the scheduler writes them."""
        found = self.pool.with_sources(orders, self.unix_ns())
        for order in found:
            self.view.put_order(order)
        return found

    def says(self, order: WorkerOrder, state: WorkerState) -> None:
        self.view.put_status(
            WorkerStatus(
                worker=order.worker, node=order.node, function=order.spec.name, version=order.version, state=state
            )
        )

    def step(self, seconds: float = 0.0) -> PoolChanges:
        """A step of the pool that is carried out."""
        self.now_ns += round(seconds * 1e9)
        self.view.synced_ns = self.now_ns  # it was read a moment ago
        changes = self.pool.step(self.now_ns, self.unix_ns())
        for order in changes.orders:
            self.view.put_order(order)
        for copy in changes.deleted_copies:
            self.view.copies.pop((copy.node, copy.checkpoint))
        for copy in changes.copies:
            self.view.copies[copy.node, copy.checkpoint] = copy
        for made in changes.peer_keys:
            self.keys.known[NodeId(made.record.node)] = made.record.epoch
        return changes

    def copies(self) -> list[str]:
        return sorted(node for node, _ in self.view.copies)


def named(order: WorkerOrder | CopyOrder) -> list[str]:
    return [peer.node for peer in (order.sources if isinstance(order, WorkerOrder) else order.peers)]


def test_nodes_get_a_key_for_each_start_and_one_alone_needs_none() -> None:
    assert World(1).step().peer_keys == []
    world = World(2)
    assert [made.record.node for made in world.step().peer_keys] == ["n0", "n1"]
    assert world.step(1).peer_keys == []
    world.node("n1", epoch="e2")
    assert [made.record.epoch for made in world.step().peer_keys] == ["e2"]


def test_a_new_order_names_the_holders_with_grants_for_its_node() -> None:
    world = World()
    world.step()
    world.holds("n0")
    [order] = world.ordered(world.new_order("n2"))
    [peer] = order.sources
    assert (peer.node, peer.address, peer.ranges) == ("n0", "n0:7000", ALL)
    assert (peer.grant.reader, peer.grant.holder, peer.grant.epoch) == ("n2", "n0", "e1")
    assert peer.secret == grant_secret(peer.grant, KEY)


def test_the_peers_of_the_plan_come_first() -> None:
    world = World(4)
    world.step()
    for name in ("n0", "n1", "n2"):
        world.holds(name)
    for planned in ("n0", "n1", "n2"):
        order = world.new_order("n3", f"w-{planned}")
        [found] = world.pool.with_sources([order], world.unix_ns(), {order.worker: [NodeId(planned)]})
        assert named(found)[0] == planned
        assert sorted(named(found)) == ["n0", "n1", "n2"], "the others stand in for it"


def test_the_pulls_of_a_multicast_stay_while_all_its_peers_live() -> None:
    """Receivers read from each other, whichever was ordered first."""
    world = World(4)
    world.step()
    world.holds("n0")
    planned = {"n1": ["n0", "n2"], "n2": ["n1"], "n3": ["n2", "n1"]}
    orders = [
        msgspec.structs.replace(world.new_order(name), pulls=(Pull(0, 0, 8), Pull(len(peers) - 1, 8, CHUNKS)))
        for name, peers in planned.items()
    ]
    by_worker = {order.worker: [NodeId(peer) for peer in planned[order.node]] for order in orders}
    for order in world.pool.with_sources(orders, world.unix_ns(), by_worker):
        world.view.put_order(order)
        assert named(order) == planned[order.node]
        assert all(peer.ranges == ALL for peer in order.sources), "it waits for what is on its way"
        assert len(order.pulls) == 2
    assert world.step(1).orders == []
    renewed = world.step(GRANT_MS / 1000 - 60).orders
    assert {order.node: len(order.pulls) for order in renewed} == {"n1": 2, "n2": 2, "n3": 2}
    world.dies("n2")
    world.step(1)
    lost = msgspec.structs.replace(orders[2], worker=WorkerId("late"))
    [late] = world.pool.with_sources([lost], world.unix_ns(), {lost.worker: [NodeId("n2"), NodeId("n1")]})
    assert late.pulls == ()


def test_a_multicast_that_loses_a_node_is_planned_anew_from_what_the_others_have_by_then() -> None:
    world = World(5)
    world.step()
    world.holds("n0")
    chain = {"n1": ["n0"], "n2": ["n1"], "n3": ["n2"], "n4": ["n3"]}
    orders = [msgspec.structs.replace(world.new_order(name), pulls=(Pull(0, 0, CHUNKS),)) for name in chain]
    by_worker = {order.worker: [NodeId(peer) for peer in chain[order.node]] for order in orders}
    for order in world.pool.with_sources(orders, world.unix_ns(), by_worker):
        world.view.put_order(order)
        world.says(order, "starting")
    has = {"n1": 12, "n3": 6, "n4": 4}
    for name, end in has.items():
        world.holds(name, end)
    assert world.step(1).orders == []
    world.dies("n2")
    changed = {str(order.node): order for order in world.step(1).orders}
    assert set(changed) == set(has)
    gets = {
        name: [chunk for pull in order.pulls for chunk in range(pull.first, pull.end)]
        for name, order in changed.items()
    }
    assert {name: sorted(chunks) for name, chunks in gets.items()} == {
        name: list(range(end, CHUNKS)) for name, end in has.items()
    }, "each gets what it lacks, and once"
    assert all(peer in ("n0", *has) and peer != name for name, order in changed.items() for peer in named(order))
    assert world.step(1).orders == [], "the new plan stays"


def test_without_a_copy_the_others_give_what_they_have_and_the_rest_is_in_no_pull() -> None:
    world = World(4)
    world.step()
    world.holds("n0")
    orders = [msgspec.structs.replace(world.new_order(name), pulls=(Pull(0, 0, CHUNKS),)) for name in ("n1", "n2")]
    for order in world.pool.with_sources(orders, world.unix_ns(), {one.worker: [NodeId("n0")] for one in orders}):
        world.view.put_order(order)
        world.says(order, "starting")
    world.holds("n1", 10)
    world.holds("n2", 4)
    world.dies("n0")
    changed = {str(order.node): order for order in world.step(1).orders}
    assert named(changed["n2"]) == ["n1"]
    assert [chunk for pull in changed["n2"].pulls for chunk in range(pull.first, pull.end)] == list(range(4, 10))
    assert changed["n1"].pulls == ()
    assert world.step(1).orders == []


def test_an_order_for_a_node_that_has_all_names_nobody() -> None:
    world = World()
    world.step()
    world.holds("n0")
    world.holds("n1")
    assert [named(order) for order in world.ordered(world.new_order("n1"))] == [[]]


def test_of_orders_that_are_written_together_one_reads_the_store() -> None:
    world = World(10)
    world.step()
    orders = world.ordered(*(world.new_order(f"n{number}") for number in range(10)))
    assert [order.node for order in orders if not order.sources] == ["n0"]
    assert all(peer.ranges == ALL for order in orders for peer in order.sources)
    assert not world.step().orders, "what was chosen stays"
    assert not world.step(1).orders


def test_a_draining_or_lapsed_node_and_one_of_an_earlier_start_are_not_named() -> None:
    world = World(4)
    world.step()
    for name in ("n0", "n1"):
        world.holds(name)
    world.holds("n2", epoch="e2")  # its key is of the start before
    world.view.draining = frozenset({NodeId("n0")})
    world.dies("n1")
    assert [named(order) for order in world.ordered(world.new_order("n3"))] == [[]]


def test_a_holder_that_dies_leaves_the_orders_under_way() -> None:
    world = World(3)
    world.step()
    world.holds("n0")
    world.holds("n1")
    [order] = world.ordered(world.new_order("n2"))
    assert set(named(order)) == {"n0", "n1"}
    world.says(order, "starting")
    world.dies("n0")
    [changed] = world.step().orders
    assert named(changed) == ["n1"]
    assert changed.ordered_unix_ns > order.ordered_unix_ns


def test_a_node_that_comes_with_the_weights_joins_the_fetches_under_way() -> None:
    world = World(2)
    world.step()
    [order] = world.ordered(world.new_order("n1"))
    assert order.sources == ()
    world.says(order, "starting")
    world.holds("n0")
    assert [named(changed) for changed in world.step().orders] == [["n0"]]
    world.says(order, "ready")
    world.holds("n1")
    world.dies("n0")
    assert world.step().orders == [], "it has fetched all"


def test_grants_are_renewed_while_the_fetch_goes_on() -> None:
    world = World(2)
    world.step()
    world.holds("n0")
    [order] = world.ordered(world.new_order("n1"))
    assert world.step(60).orders == []
    [renewed] = world.step(GRANT_MS / 1000 / 2 + 40).orders
    assert named(renewed) == named(order)
    assert renewed.sources[0].grant.expires_unix_ms > order.sources[0].grant.expires_unix_ms


def test_a_new_scheduler_goes_on_where_the_old_one_ended() -> None:
    world = World(3, keep="host")
    world.step()
    world.holds("n0")
    world.ordered(world.new_order("n1"))
    world.step(1)
    world.pool = ParameterPool(world.view, world.keys)
    assert not world.step(1)


def test_a_kept_checkpoint_has_one_copy_and_it_follows_its_function() -> None:
    world = World(3, keep="host")
    [copy] = world.step().copies
    assert (copy.checkpoint, copy.peers) == (CHECKPOINT, ())
    world.holds(copy.node)
    assert not world.step(1).copies
    del world.view.functions[FunctionName("f")]
    assert [one.node for one in world.step(1).deleted_copies] == [copy.node]
    assert world.copies() == []


def test_a_lost_copy_is_fetched_again_from_a_peer_that_has_it() -> None:
    world = World(3, keep="host")
    world.step()
    [first] = world.copies()
    world.holds(first)
    holder, other = sorted({"n0", "n1", "n2"} - {first})
    world.holds(holder)
    world.says(world.ordered(world.new_order(holder))[0], "ready")  # a worker has it too
    world.step(1)
    assert world.copies() == [first], "one copy, though two nodes have it"
    world.dies(first)
    world.step(1)
    assert world.copies() == [first], "its lease may only be late"
    changes = world.step(2)
    assert world.copies() == [holder], "where it is already"
    assert [one.node for one in changes.deleted_copies] == [first]
    world.view.draining = frozenset({NodeId(holder)})
    [moved] = world.step(1).copies
    assert (moved.node, named(moved)) == (other, []), "a node that drains serves nobody"
    assert world.copies() == sorted([holder, other])
    world.holds(other)
    world.step(1)
    assert world.copies() == [other]


def test_the_order_of_a_copy_names_peers_and_changes_with_them() -> None:
    world = World(3, keep="host")
    world.step()
    [where] = world.copies()
    other = min({"n0", "n1", "n2"} - {where})
    world.holds(other)
    [changed] = world.step(1).copies
    assert (changed.node, named(changed)) == (where, [other])
    assert changed.decided_unix_ns < changed.ordered_unix_ns


def test_a_copy_that_gets_nowhere_is_tried_on_another_node() -> None:
    world = World(2, keep="host")
    world.step()
    [first] = world.copies()
    for _ in range(58):
        assert not world.step(1).copies
    for _ in range(5):
        world.step(1)
    assert len(world.copies()) == 2
    [second] = set(world.copies()) - {first}
    world.holds(second)
    world.step(1)
    assert world.copies() == [second]


def test_room_that_idle_weights_take_is_room_for_a_copy() -> None:
    world = World(1, keep="host")
    idle = SegmentReport(CheckpointId("d" * 64), "ready", 1000 * MIB, 1000 * MIB, [(0, 250)])
    world.node("n0", segments=[idle], used_bytes=1000 * MIB)
    assert [copy.node for copy in world.step().copies] == ["n0"]
    world = World(1, keep="host")
    world.node("n0", used_bytes=1000 * MIB)  # of workers
    world.step()
    assert world.pool.unplaced == (CHECKPOINT,)
    world.node("n0")
    world.step(1)
    assert not world.pool.unplaced
    assert world.copies() == ["n0"]


def test_orders_survive_the_wire() -> None:
    world = World()
    world.step()
    world.holds("n0")
    [order] = world.ordered(world.new_order("n1"))
    assert msgspec.json.decode(msgspec.json.encode(order), type=WorkerOrder) == order
