"""Choice of the peers that a node reads a checkpoint's chunks from. Pure.

The best few holders: of the reader's region first, then by the measured rate of their links and by how many read from
them already. Nodes that are still fetching serve those that began after them. So nodes that start together stand in a
chain or a small tree behind the first one, and cost the object store one read; and none waits for one that waits for
it. A choice stays while its holders live: a change of order costs a message, and a reader its connections.
"""

from __future__ import annotations

import heapq
import ipaddress
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import Transport
from fleetstart.runtime.contract.node.reports import NodeReport

from .chunk_ranges import Ranges, count, union, without
from .holdings import EMPTY, Holding

SOURCES_MAX = 4
"""Peers of one order. The stages of a pipeline are at most four, and together they have the whole model."""
CANDIDATES = 32
"""Holders that are compared, the promising ones: a thousand nodes may have a checkpoint, and orders are written in the
loop that serves calls."""
DEFAULT_BYTES_PER_S = 125e6
"""Link of a node that has measured nothing: a gigabit."""
COMING_SHARE = 0.9
"""Worth of a holder that is still fetching, against one that has all: equal but for the latency of one more hop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerNode:
    """A living node that serves its chunks to others."""

    node: NodeId
    epoch: str
    address: str
    host: str = ""
    transports: tuple[Transport, ...] = ("tcp",)
    region: str = ""
    machine: str = ""
    bytes_per_s: float = DEFAULT_BYTES_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A node that fetches chunks of a checkpoint."""

    node: NodeId
    region: str = ""
    machine: str = ""
    since_unix_ns: int
    """Time of the order for which it fetches."""
    needs: Ranges = ()
    """Chunks that it lacks; empty: all that there are."""


@dataclass(frozen=True, slots=True)
class ChosenHolder:
    """A holder that a reader is to use, and what of it."""

    node: NodeId
    ranges: Ranges


def peer_node(report: NodeReport) -> PeerNode | None:
    """The node as a peer; None if it serves none."""
    if not report.peer_address:
        return None
    return PeerNode(
        node=report.node,
        epoch=report.epoch,
        address=report.peer_address,
        host=report.peer_host,
        transports=report.peer_transports or ("tcp",),
        region=report.region,
        machine=report.machine,
        bytes_per_s=peer_bytes_per_s(report),
    )


def peer_bytes_per_s(report: NodeReport) -> float:
    """The rate of the node's link, by what it has measured."""
    return measured_bytes_per_s(report) or DEFAULT_BYTES_PER_S


def measured_bytes_per_s(report: NodeReport) -> float:
    """The rate that the node has measured of its link; 0 if it has not."""
    rates = (report.bytes_per_s.get("peer"), report.measured.get("store"), report.bytes_per_s.get("store"))
    return max((rate for rate in rates if rate), default=0.0)


def sources_for(
    reader: Reader,
    holdings: Mapping[NodeId, Holding],
    peers: Mapping[NodeId, PeerNode],
    load: Mapping[NodeId, int],
    *,
    kept: Sequence[NodeId] = (),
    limit: int = SOURCES_MAX,
) -> tuple[ChosenHolder, ...]:
    """The peers that the reader is to read from, the best first; those of `kept` that can still serve it come before
    others. `load`: readers of each node's memory, this one not counted."""
    usable = {
        node: ranges
        for node in dict.fromkeys((*kept, *_promising(reader, holdings, peers, load)))
        if node in holdings and node in peers and (ranges := _offered(reader, holdings[node], peers[node]))
    }
    chosen = [node for node in kept if node in usable][:limit]
    uncovered = without(reader.needs or union(*usable.values()), union(*(usable[node] for node in chosen)))
    while len(chosen) < limit:
        left = [node for node in usable if node not in chosen]
        if not left:
            break
        best = max(left, key=lambda node: _worth(node, reader, usable, holdings, peers, load, uncovered))
        if kept and not holdings[best].complete and not count(uncovered):
            break  # what is kept has all that this one will have
        chosen.append(best)
        uncovered = without(uncovered, usable[best])
    return tuple(ChosenHolder(node, usable[node]) for node in chosen)


def _promising(
    reader: Reader, holdings: Mapping[NodeId, Holding], peers: Mapping[NodeId, PeerNode], load: Mapping[NodeId, int]
) -> Iterable[NodeId]:
    """The holders that are worth a closer look, which is one at all of them where they are few."""
    if len(holdings) <= CANDIDATES:
        return holdings

    def rank(node: NodeId) -> tuple[bool, bool, bool, float, str]:
        peer, holding = peers[node], holdings[node]
        serves = holding.complete or (holding.since_unix_ns, node) < (reader.since_unix_ns, reader.node)
        share = peer.bytes_per_s / (1 + load.get(node, 0))
        return (serves, peer.region == reader.region, holding.complete, share, node)

    return heapq.nlargest(CANDIDATES, (node for node in holdings if node in peers), key=rank)


def _offered(reader: Reader, holding: Holding, peer: PeerNode) -> Ranges:
    """The chunks that the holder can give this reader."""
    if peer.node == reader.node or not reaches(reader, peer):
        return ()
    before = (holding.since_unix_ns, peer.node) < (reader.since_unix_ns, reader.node)
    return holding.serves if holding.complete or before else ()


def reaches(reader: Reader, peer: PeerNode) -> bool:
    """True if the reader's machine can reach the peer's address: one on loopback is another on every machine."""
    host = peer.address.rpartition(":")[0].strip("[]")
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return not loopback or peer.machine == reader.machine


def _worth(
    node: NodeId,
    reader: Reader,
    usable: Mapping[NodeId, Ranges],
    holdings: Mapping[NodeId, Holding],
    peers: Mapping[NodeId, PeerNode],
    load: Mapping[NodeId, int],
    uncovered: Ranges,
) -> tuple[bool, bool, float, str]:
    """Sort key of a holder: whether it adds anything, whether it is near, and its share of its link."""
    peer, holding = peers[node], holdings.get(node, EMPTY)
    adds = count(usable[node]) - count(without(usable[node], uncovered))
    share = adds / max(1, count(uncovered)) if uncovered else 1.0
    rate = peer.bytes_per_s / (1 + load.get(node, 0)) * share
    return (
        bool(adds) or not uncovered,
        peer.region == reader.region,
        rate if holding.complete else rate * COMING_SHARE,
        node,
    )


def readers_of(sources: Collection[Collection[NodeId]]) -> dict[NodeId, int]:
    """How many readers each node has. `sources`: the nodes that each reader reads from."""
    found: dict[NodeId, int] = {}
    for nodes in sources:
        for node in nodes:
            found[node] = found.get(node, 0) + 1
    return found
