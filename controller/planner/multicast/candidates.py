"""Candidates of a multicast: a schedule for each useful way to send, with its predicted arrivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .binomial import binomial_pipeline
from .groups import SubGroup, by_speed, sub_groups
from .prediction import NEVER, Links, predict_arrivals
from .rarest_first import rarest_first
from .request import MulticastRequest, block_ranges, held_blocks
from .schedule import STORE, Schedule, steps
from .topologies import chain, from_store, read_once, striped_chains

RAREST_FIRST_NODES = 64
"""Up to so many nodes rarest first is considered where another way is possible, too: for more it takes long to plan,
and gains nothing."""
ASKED_AHEAD = 1
"""Blocks that a node asks for while one arrives, so that no round trip lies between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """A request in numbers: nodes and blocks by their place."""

    request: MulticastRequest
    blocks: Sequence[tuple[int, int]]
    block_bytes: Sequence[float]
    held: Sequence[int]
    """Bit mask of each node's blocks."""
    sources: Sequence[int]
    """Nodes that have all blocks and send, without those that are pruned."""
    receivers: Sequence[int]
    """Nodes that lack blocks."""
    senders: Sequence[int]
    """Nodes that may be read from, once they have something."""
    pruned: Sequence[int]
    links: Links

    @property
    def has_store(self) -> bool:
        return self.request.store_bytes_per_s > 0

    @property
    def store_readers(self) -> int:
        """How many nodes take all that the store gives: more at once would only slow each other."""
        if not self.has_store or not self.receivers:
            return 0
        rates = sorted(self.links.down[receiver] for receiver in self.receivers)
        return max(1, round(self.request.store_bytes_per_s / rates[len(rates) // 2]))

    @property
    def receive_faster(self) -> bool:
        """True if some receiver takes in more than some source sends, and so gains by reading from several at once."""
        return max(self.links.down[one] for one in self.receivers) > min(self.links.up[one] for one in self.sources)

    @property
    def first_blocks(self) -> set[int]:
        """The blocks with the chunks that come first."""
        early = self.request.first_chunks
        overlaps = [any(first < stop and begin < end for first, end in early) for begin, stop in self.blocks]
        return {number for number, comes_first in enumerate(overlaps) if comes_first}

    @property
    def held_by_senders(self) -> int:
        """Bit mask of the blocks that some sender has."""
        found = 0
        for sender in self.senders:
            found |= self.held[sender]
        return found

    @property
    def lost(self) -> int:
        """Bit mask of the blocks that no sender has."""
        return (1 << len(self.blocks)) - 1 & ~self.held_by_senders


@dataclass(frozen=True, slots=True, kw_only=True)
class MulticastWay:
    """A schedule, as it is predicted to be executed."""

    name: str
    schedule: Schedule
    arrivals: Sequence[dict[int, float]]
    groups: Sequence[Sequence[int]]
    """Receivers of each sub-group, of which execution pipelines are formed."""
    seconds: float
    mean_s: float

    @property
    def steps(self) -> int:
        return steps(self.schedule)


def situation(request: MulticastRequest, blocks: int) -> Situation:
    """The request with so many blocks. Sources that are busy sending are left out where another one is there."""
    nodes = request.nodes
    ranges = block_ranges(request.chunks, blocks, [*(node.held for node in nodes), request.first_chunks])
    chunk_bytes = request.size_bytes / max(1, request.chunks)
    held = [held_blocks(node.held, ranges) for node in nodes]
    everything = (1 << len(ranges)) - 1
    whole = [number for number, node in enumerate(nodes) if node.sends and held[number] == everything]
    free = [number for number in whole if not nodes[number].busy_sending]
    pruned = [number for number in whole if nodes[number].busy_sending] if free else []
    return Situation(
        request=request,
        blocks=ranges,
        block_bytes=[(end - first) * chunk_bytes for first, end in ranges],
        held=held,
        sources=free or whole,
        receivers=[n for n, node in enumerate(nodes) if node.receives and held[n] != everything],
        senders=[n for n, node in enumerate(nodes) if node.sends and n not in pruned],
        pruned=pruned,
        links=Links(
            up=[node.up_bytes_per_s for node in nodes],
            down=[node.down_bytes_per_s for node in nodes],
            overhead_s=request.block_overhead_s,
            at_once=request.at_once,
            ahead=ASKED_AHEAD if request.at_once else 0,
            store=request.store_bytes_per_s or NEVER,
            leaf=[node.leaf for node in nodes] if request.leaf_bytes_per_s else (),
            leaf_rates=dict(request.leaf_bytes_per_s),
        ),
    )


def candidates(found: Situation) -> Iterator[MulticastWay]:
    """All useful ways. Sub-groups take empty receivers, from sources that have everything; rarest first takes any."""
    nodes, receivers = found.request.nodes, found.receivers
    can_forward = all(nodes[receiver].sends for receiver in receivers)
    fresh = all(found.held[receiver] == 0 for receiver in receivers)
    grouped = bool(found.sources) and fresh
    if grouped and can_forward:
        groups = sub_groups(nodes, found.sources, receivers, len(found.blocks), found.first_blocks)
        several = f" from {len(groups)} sources" if len(groups) > 1 else ""
        if max(len(group.receivers) for group in groups) == 1:
            yield from_groups("direct" + several, found, groups, chain)
        else:
            yield from_groups("binomial pipeline" + several, found, groups, binomial_pipeline)
            yield from_groups(f"{len(groups)} chains" if several else "chain", found, groups, chain)
        if len(found.sources) > 1 and found.receive_faster:
            striped = striped_chains(found.sources, by_speed(nodes, receivers), range(len(found.blocks)))
            yield _candidate(f"striped chains from {len(found.sources)} sources", found, striped, [list(receivers)])
    elif fresh and can_forward and found.has_store and not found.held_by_senders:
        group = SubGroup(STORE, tuple(by_speed(nodes, receivers)), tuple(range(len(found.blocks))))
        yield from_groups("binomial pipeline from the store", found, [group], read_once)
        yield from_groups("chain from the store", found, [group], chain)
    if not grouped or not can_forward or len(nodes) <= RAREST_FIRST_NODES:
        readers = found.store_readers
        schedule = rarest_first(found.held, receivers, found.senders, len(found.blocks), store_readers=readers)
        yield _candidate("rarest block first", found, schedule, [list(receivers)])
    if found.has_store and fresh:
        yield _candidate("each from the store", found, from_store(receivers, len(found.blocks)), [list(receivers)])


def from_groups(
    name: str,
    found: Situation,
    groups: Sequence[SubGroup],
    topology: Callable[[Sequence[int], Sequence[int]], Schedule],
) -> MulticastWay:
    """A topology within each of the sub-groups, all at once."""
    schedule = [transfer for group in groups for transfer in topology(group.nodes, group.order)]
    return _candidate(name, found, schedule, [group.receivers for group in groups])


def _candidate(name: str, found: Situation, schedule: Schedule, groups: Sequence[Sequence[int]]) -> MulticastWay:
    arrivals = predict_arrivals(schedule, found.held, found.block_bytes, found.links)
    ends = [max(arrivals[receiver].values(), default=0.0) for receiver in found.receivers]
    return MulticastWay(
        name=name,
        schedule=sorted(schedule),
        arrivals=arrivals,
        groups=groups,
        seconds=max(ends, default=0.0),
        mean_s=sum(ends) / len(ends) if ends else 0.0,
    )
