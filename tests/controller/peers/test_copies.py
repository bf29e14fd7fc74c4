"""Copies in host memory: one a checkpoint, even by bytes, repaired when lost, and no move without an end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.peers.copies import (
    ANYWHERE,
    COPIES_MAX,
    Copy,
    CopyDecision,
    CopyNode,
    KeptCheckpoint,
    decide_copies,
)
from fleetstart.runtime.contract.ids import CheckpointId, NodeId

GIB = 1 << 30


def kept(**sizes: int) -> dict[CheckpointId, KeptCheckpoint]:
    return {CheckpointId(name): KeptCheckpoint(size_bytes=size * GIB) for name, size in sizes.items()}


def node(name: str, room: int = 100, **fields: object) -> CopyNode:
    return replace(CopyNode(node=NodeId(name), room_bytes=room * GIB), **fields)  # type: ignore[arg-type]


def copy(where: str, what: str, at: int = 1, **fields: object) -> Copy:
    one = Copy(node=NodeId(where), checkpoint=CheckpointId(what), ordered_unix_ns=at)
    return replace(one, **fields)  # type: ignore[arg-type]


def test_a_checkpoint_gets_one_copy_where_least_is() -> None:
    copies = [copy("a", "big", complete=True)]
    decision = decide_copies(kept(big=10, small=1), copies, [node("a"), node("b")])
    assert decision == CopyDecision(order=[(NodeId("b"), CheckpointId("small"))])


def test_a_node_that_has_it_already_is_preferred_within_the_balance() -> None:
    warm = {CheckpointId("m"): 1.0}
    assert decide_copies(kept(m=4), [], [node("a"), node("b", held=warm)]).order == [("b", "m")]
    copies = [copy("b", name, complete=True) for name in ("x", "y")]
    decision = decide_copies(kept(m=4, x=4, y=4), copies, [node("a"), node("b", held=warm)])
    assert decision.order == [("a", "m")], "b has two already"


def test_the_copy_of_a_lost_node_is_ordered_elsewhere_at_once() -> None:
    decision = decide_copies(kept(m=4), [copy("a", "m", living=False, stays=False)], [node("b")])
    assert (decision.order, decision.take_back) == ([("b", "m")], [("a", "m")])


def test_the_copy_of_a_draining_node_stays_until_another_is_complete() -> None:
    old = copy("a", "m", 1, complete=True, stays=False)
    assert decide_copies(kept(m=4), [old], [node("b")]) == CopyDecision(order=[(NodeId("b"), CheckpointId("m"))])
    assert decide_copies(kept(m=4), [old, copy("b", "m", 2)], [node("b")]) == CopyDecision()
    done = decide_copies(kept(m=4), [old, copy("b", "m", 2, complete=True)], [node("b")])
    assert done == CopyDecision(take_back=[(NodeId("a"), CheckpointId("m"))])


def test_what_nobody_asks_for_any_more_is_taken_back() -> None:
    assert decide_copies({}, [copy("a", "m", complete=True)], [node("a")]).take_back == [("a", "m")]


def test_a_checkpoint_without_room_is_told() -> None:
    assert decide_copies(kept(m=8), [], [node("a", room=4)]) == CopyDecision(unplaced=[CheckpointId("m")])


def asked_in(*regions: str) -> dict[CheckpointId, KeptCheckpoint]:
    """A checkpoint that functions keep in these regions, each a space-separated list; an empty one is anywhere."""
    asked = frozenset(frozenset(some.split()) for some in regions)
    return {CheckpointId("m"): KeptCheckpoint(size_bytes=GIB, regions=asked)}


def test_functions_in_regions_apart_have_a_copy_each() -> None:
    nodes = [node("a", region="us"), node("b", region="eu"), node("c", region="eu")]
    assert decide_copies(asked_in("eu", "us"), [], nodes).order == [("b", "m"), ("a", "m")]
    copies = [copy("a", "m", 1, region="us", complete=True), copy("b", "m", 2, region="eu", complete=True)]
    assert decide_copies(asked_in("eu", "us"), copies, nodes) == CopyDecision()
    assert decide_copies(asked_in("eu", "us"), copies[:1], nodes).order == [("b", "m")]
    assert decide_copies(asked_in("us"), copies, nodes).take_back == [("b", "m")]


def test_a_copy_in_the_regions_of_several_functions_serves_them_all() -> None:
    nodes = [node("a", region="us"), node("b", region="eu")]
    for regions in (("", "eu"), ("eu us", "eu"), ("", "eu us", "eu")):
        assert decide_copies(asked_in(*regions), [], nodes).order == [("b", "m")]
        copies = [copy("a", "m", 2, region="us", complete=True), copy("b", "m", 1, region="eu", complete=True)]
        assert decide_copies(asked_in(*regions), copies, nodes).take_back == [("a", "m")]


def test_a_region_without_a_node_keeps_no_other_function_waiting() -> None:
    decision = decide_copies(asked_in("", "eu"), [], [node("a", region="us")])
    assert (decision.order, decision.unplaced) == ([("a", "m")], ["m"])


def test_a_copy_of_a_node_that_drains_stays_until_there_is_another_one_in_its_region() -> None:
    nodes = [node("a", region="us"), node("c", region="eu")]
    copies = [
        copy("a", "m", 1, region="us", complete=True),
        copy("b", "m", 2, region="eu", complete=True, stays=False),
    ]
    assert decide_copies(asked_in("eu", "us"), copies, nodes) == CopyDecision(order=[(NodeId("c"), CheckpointId("m"))])
    copies.append(copy("c", "m", 3, region="eu", complete=True))
    assert decide_copies(asked_in("eu", "us"), copies, nodes).take_back == [("b", "m")]


def test_a_copy_stays_in_its_functions_regions() -> None:
    one = asked_in("eu")
    nodes = [node("a", region="us"), node("b", region="eu")]
    assert decide_copies(one, [], nodes).order == [("b", "m")]
    assert decide_copies(one, [], nodes[:1]).unplaced == ["m"]


def test_a_copy_moves_once_its_function_may_run_elsewhere_alone() -> None:
    """A function that was deployed again, with another region and the same weights."""
    one = asked_in("eu")
    nodes = [node("a", region="us"), node("b", region="eu")]
    old = copy("a", "m", 1, region="us", complete=True)
    assert decide_copies(one, [old], nodes) == CopyDecision(order=[(NodeId("b"), CheckpointId("m"))])
    assert decide_copies(one, [old, copy("b", "m", 2, region="eu")], nodes) == CopyDecision()
    done = decide_copies(one, [old, copy("b", "m", 2, region="eu", complete=True)], nodes)
    assert done == CopyDecision(take_back=[(NodeId("a"), CheckpointId("m"))])
    assert decide_copies(one, [old], nodes[:1]).unplaced == [CheckpointId("m")]


def test_a_node_that_did_not_fetch_it_is_not_asked_again() -> None:
    refuses = frozenset({CheckpointId("m")})
    stalled = copy("a", "m", stays=False)
    assert decide_copies(kept(m=1), [stalled], [node("a", refuses=refuses), node("b")]).order == [("b", "m")]


def test_a_new_node_gets_its_part_one_copy_at_a_time() -> None:
    copies = [copy("a", name, complete=True) for name in ("w", "x", "y", "z")]
    decision = decide_copies(kept(w=2, x=2, y=2, z=2), copies, [node("a"), node("b")])
    assert len(decision.order) == 1
    assert decision.take_back == []


@dataclass
class Fleet:
    """Nodes that fetch what they are ordered to, in an order that the test draws."""

    rooms: dict[NodeId, int]
    kept: dict[CheckpointId, KeptCheckpoint]
    copies: dict[tuple[NodeId, CheckpointId], Copy] = field(default_factory=dict)
    living: set[NodeId] = field(default_factory=set)
    draining: set[NodeId] = field(default_factory=set)
    clock: int = 0
    orders: int = 0

    def decide(self) -> bool:
        """A decision, carried out; whether it changed anything."""
        nodes = [
            CopyNode(
                node=name,
                region=REGION[name],
                room_bytes=room,
                held={key[1]: 1.0 for key, one in self.copies.items() if key[0] == name and one.complete},
            )
            for name, room in self.rooms.items()
            if name in self.living - self.draining
        ]
        seen = [
            replace(one, living=one.node in self.living, stays=one.node not in self.draining,
                    complete=one.complete and one.node in self.living)
            for one in self.copies.values()
        ]  # fmt: skip
        decision = decide_copies(self.kept, seen, nodes)
        for key in decision.take_back:
            del self.copies[key]
        for key in decision.order:
            self.clock += 1
            assert key not in self.copies
            self.copies[key] = Copy(node=key[0], checkpoint=key[1], ordered_unix_ns=self.clock, region=REGION[key[0]])
            self.orders += 1
        self.check(decision)
        return bool(decision.order or decision.take_back)

    def check(self, decision: CopyDecision) -> None:
        """The laws that hold after each decision."""
        for checkpoint, asked in self.kept.items():
            assert len([one for one in self.copies.values() if one.checkpoint == checkpoint]) <= COPIES_MAX * len(
                asked.regions
            )
            for regions in asked.regions:
                assert checkpoint in decision.unplaced or any(
                    one.node in self.living for one in self.there(checkpoint, regions)
                )
        assert all(one.checkpoint in self.kept for one in self.copies.values())

    def there(self, checkpoint: CheckpointId, regions: frozenset[str]) -> list[Copy]:
        """The copies of a checkpoint that serve these regions."""
        some = [one for one in self.copies.values() if one.checkpoint == checkpoint]
        return [one for one in some if not regions or one.region in regions]

    def settle(self) -> None:
        """Fetches complete and decisions follow until nothing changes."""
        for _ in range(100):
            for key, one in self.copies.items():
                self.copies[key] = replace(one, complete=True)
            if not self.decide():
                return
        raise AssertionError(f"copies move without an end: {self.copies}")


NODES = [NodeId(name) for name in "abcde"]
REGION = dict(zip(NODES, ("eu", "eu", "us", "us", ""), strict=True))
sizes = st.dictionaries(st.sampled_from([CheckpointId(f"m{n}") for n in range(8)]), st.integers(1, 20), max_size=8)
events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["die", "come", "drain", "undrain"]), st.sampled_from(NODES)),
        st.tuples(st.just("keep"), sizes),
        st.just(("settle", None)),
        st.tuples(st.just("complete"), st.integers(0, 7)),
    ),
    max_size=12,
)


asked_regions = st.dictionaries(
    st.sampled_from([CheckpointId(f"m{n}") for n in range(8)]),
    st.frozensets(st.frozensets(st.sampled_from(["eu", "us"])), min_size=1, max_size=4),
    max_size=4,
)


@settings(deadline=None)
@given(sizes, events, st.one_of(st.just({}), asked_regions))
def test_every_kept_checkpoint_has_a_copy_or_an_order_and_copies_become_even(
    first: dict[CheckpointId, int],
    happens: list[tuple[str, object]],
    regions: dict[CheckpointId, frozenset[frozenset[str]]],
) -> None:
    def asked(some: dict[CheckpointId, int]) -> dict[CheckpointId, KeptCheckpoint]:
        return {
            checkpoint: KeptCheckpoint(size_bytes=size, regions=regions.get(checkpoint, frozenset({ANYWHERE})))
            for checkpoint, size in some.items()
        }

    fleet = Fleet(rooms=dict.fromkeys(NODES, 1_000), kept=asked(first), living={NODES[0], NODES[1]})
    for what, of in happens:
        if what == "die":
            fleet.living.discard(of)
        elif what == "come":
            fleet.living.add(of)  # type: ignore[arg-type]
        elif what == "drain":
            fleet.draining.add(of)  # type: ignore[arg-type]
        elif what == "undrain":
            fleet.draining.discard(of)
        elif what == "keep":
            fleet.kept = asked(of)  # type: ignore[arg-type]
        elif what == "complete":
            for number, (key, one) in enumerate(fleet.copies.items()):
                fleet.copies[key] = replace(one, complete=one.complete or number == of)
        else:
            fleet.settle()
        fleet.decide()
    fleet.settle()
    usable = fleet.living - fleet.draining
    if not usable:
        return
    for checkpoint, wanted in fleet.kept.items():
        copies = [key for key in fleet.copies if key[1] == checkpoint]
        assert len(copies) <= max(1, len(wanted.regions - {ANYWHERE})), "one copy for the same regions"
        for asked_for in wanted.regions:
            has_node = not asked_for or any(REGION[name] in asked_for for name in usable)
            assert fleet.there(checkpoint, asked_for) or not has_node
    before = fleet.orders
    fleet.settle()
    assert fleet.orders == before, "nothing moves once all is settled"
    if regions:
        return
    held = dict.fromkeys(usable, 0)
    for name, checkpoint in fleet.copies:
        held[name] += fleet.kept[checkpoint].size_bytes
    if fleet.kept:
        largest = max(one.size_bytes for one in fleet.kept.values())
        assert max(held.values()) - min(held.values()) <= largest
