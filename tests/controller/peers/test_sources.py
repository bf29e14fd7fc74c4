"""Sources of a fetch: nobody waits for one that waits for it, links are shared, choices stay while holders live."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.peers.chunk_ranges import union
from fleetstart.controller.peers.holdings import Holding
from fleetstart.controller.peers.sources import SOURCES_MAX, ChosenHolder, PeerNode, Reader, sources_for
from fleetstart.runtime.contract.ids import NodeId

ALL = ((0, 64),)


def peer(
    name: str, *, address: str = "10.0.0.1:7000", region: str = "", gbps: float = 1.0, machine: str = ""
) -> PeerNode:
    return PeerNode(
        node=NodeId(name), epoch="e1", address=address, region=region, bytes_per_s=gbps * 125e6, machine=machine
    )


def coming(since_unix_ns: int) -> Holding:
    return Holding(coming=ALL, since_unix_ns=since_unix_ns)


COMPLETE = Holding(host=ALL, complete=True)


def reader(name: str = "r", since: int = 1_000, region: str = "", machine: str = "") -> Reader:
    return Reader(node=NodeId(name), since_unix_ns=since, needs=ALL, region=region, machine=machine)


def named(sources: tuple[ChosenHolder, ...]) -> list[str]:
    return [source.node for source in sources]


def of(*peers: PeerNode) -> dict[NodeId, PeerNode]:
    return {one.node: one for one in peers}


def test_a_node_that_has_all_is_read_whenever_it_began() -> None:
    found = sources_for(reader(), {NodeId("a"): COMPLETE}, of(peer("a")), {})
    assert found == (ChosenHolder(NodeId("a"), ALL),)


def test_nodes_that_fetch_serve_those_that_began_after_them() -> None:
    holdings = {NodeId("a"): coming(10), NodeId("z"): coming(2_000)}
    assert named(sources_for(reader(since=1_000), holdings, of(peer("a"), peer("z")), {})) == ["a"]
    assert sources_for(reader("first", since=1), holdings, of(peer("a"), peer("z")), {}) == ()


def test_the_quicker_and_the_less_loaded_link_comes_first() -> None:
    holdings = {NodeId(name): COMPLETE for name in "abc"}
    peers = of(peer("a", gbps=10), peer("b", gbps=4), peer("c", gbps=1))
    assert named(sources_for(reader(), holdings, peers, {})) == ["a", "b", "c"]
    assert named(sources_for(reader(), holdings, peers, {NodeId("a"): 4})) == ["b", "a", "c"]


def test_a_holder_in_the_readers_region_comes_before_a_quicker_one_elsewhere() -> None:
    holdings = {NodeId("far"): COMPLETE, NodeId("near"): COMPLETE}
    peers = of(peer("far", region="us", gbps=100), peer("near", region="eu"))
    assert named(sources_for(reader(region="eu"), holdings, peers, {})) == ["near", "far"]


def test_stages_that_have_the_model_together_are_all_named() -> None:
    """The slow holder of the second half comes before a second quick holder of the first."""
    holdings = {
        NodeId("a"): Holding(host=((0, 32),)),
        NodeId("b"): Holding(host=((0, 32),)),
        NodeId("c"): Holding(host=((32, 64),)),
    }
    found = sources_for(reader(), holdings, of(peer("a", gbps=9), peer("b", gbps=8), peer("c")), {}, limit=2)
    assert named(found) == ["a", "c"]
    assert union(*(source.ranges for source in found)) == ALL


def test_an_address_on_loopback_is_for_readers_of_its_machine() -> None:
    holdings = {NodeId("a"): COMPLETE}
    peers = of(peer("a", address="127.0.0.1:7000", machine="m1"))
    assert named(sources_for(reader(machine="m1"), holdings, peers, {})) == ["a"]
    assert sources_for(reader(machine="m2"), holdings, peers, {}) == ()


def test_nodes_that_start_together_read_one_after_the_other() -> None:
    """Ten nodes: the first reads the store, and no node's link has to feed more than a few others."""
    names = [NodeId(f"n{number}") for number in range(10)]
    holdings = {name: coming(1_000) for name in names}
    peers = of(*(peer(name) for name in names))
    load: dict[NodeId, int] = {}
    first: dict[NodeId, list[str]] = {}
    for name in names:
        found = sources_for(reader(name, 1_000), holdings, peers, load)
        first[name] = named(found)
        for source in found:
            load[source.node] = load.get(source.node, 0) + 1
    assert [name for name in names if not first[name]] == ["n0"], "one reads from the store"
    assert all(first[name] for name in names[1:])
    assert max(load.values()) <= 6


def test_what_is_kept_stays_until_it_cannot_serve() -> None:
    holdings = {NodeId("a"): coming(10), NodeId("b"): coming(20)}
    peers = of(peer("a"), peer("b", gbps=10))
    assert named(sources_for(reader(), holdings, peers, {}, kept=[NodeId("a")])) == ["a"]
    del holdings[NodeId("a")]
    assert named(sources_for(reader(), holdings, peers, {}, kept=[NodeId("a")])) == ["b"]


def test_a_new_node_that_has_all_is_added_to_what_is_kept() -> None:
    holdings = {NodeId("a"): coming(10), NodeId("b"): COMPLETE}
    assert named(sources_for(reader(), holdings, of(peer("a"), peer("b")), {}, kept=[NodeId("a")])) == ["a", "b"]


ranges = st.lists(st.tuples(st.integers(0, 63), st.integers(1, 64)), max_size=3).map(lambda some: union(some))
holding = st.builds(
    lambda host, ahead, since: Holding(
        host=host, coming=ahead if since else (), since_unix_ns=since, complete=host == ALL
    ),
    ranges, ranges, st.integers(0, 5),
)  # fmt: skip


@given(
    st.dictionaries(st.sampled_from([NodeId(c) for c in "abcdefgh"]), holding), st.lists(st.sampled_from("abcdefgh"))
)
def test_no_node_waits_for_one_that_waits_for_it(holdings: dict[NodeId, Holding], kept: list[str]) -> None:
    """Chunks that are not there yet are named to later readers only; nobody reads from itself, or from too many."""
    peers = of(*(peer(name) for name in "abcdefgh"))
    waits: dict[NodeId, set[NodeId]] = {}
    for name, own in holdings.items():
        since = own.since_unix_ns or 9
        found = sources_for(reader(name, since), holdings, peers, {}, kept=[NodeId(one) for one in dict.fromkeys(kept)])
        assert len(found) <= SOURCES_MAX
        assert len({source.node for source in found}) == len(found)
        for source in found:
            assert source.ranges == holdings[source.node].serves
            assert source.node != name
            if holdings[source.node].coming and not holdings[source.node].complete:
                assert (holdings[source.node].since_unix_ns, source.node) < (since, name)
                waits.setdefault(name, set()).add(source.node)
    for name, others in waits.items():
        assert all(name not in waits.get(other, set()) for other in others)


def test_of_a_thousand_holders_the_best_are_found() -> None:
    """Not all of them are compared one by one."""
    holdings = {NodeId(f"n{number}"): COMPLETE for number in range(1_000)}
    peers = of(*(peer(name, gbps=1 + number / 1_000) for number, name in enumerate(holdings)))
    load = {NodeId(f"n{number}"): 3 for number in range(990, 1_000)}
    assert named(sources_for(reader(), holdings, peers, load)) == ["n989", "n988", "n987", "n986"]
    assert named(sources_for(reader(), holdings, peers, load, kept=[NodeId("n0")]))[0] == "n0"
