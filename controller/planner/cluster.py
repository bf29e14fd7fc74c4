"""The nodes of the cluster, sorted by preference for a start, so that a decision examines a few of a thousand.

Two lists, of nodes whose device is free and of the others, each sorted by 1/b + 1/p (HydraServe section 4.1; b is the
bandwidth that one more fetch would get), and the nodes that hold any of a checkpoint, or have certain packages or
volumes. A node is moved when its state changes; the progress of its fetches changes its rank little, and figures are
computed anew at each decision.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from fleetstart.runtime.contract.ids import CheckpointId, LayerId, NodeId, WorkerId

from .checkpoint_layout import EVERY_LAYER
from .constraints import NO_CONSTRAINTS, PlacementConstraints, admits
from .links.contention import Link
from .node_state import HeldLayers, NodeState, with_stage, with_upload
from .peers import PEERS_MOST, PeerSource, peer_sources
from .plan import FileTree, StagePlan

HOLDERS = 16
"""Holders of a checkpoint that a decision examines: twice the stages of the largest group."""
PEERS_SEEN = 2 * PEERS_MOST
"""Peers that a decision examines, to take those whose uplinks are the least busy."""

Rank = tuple[float, NodeId]
"""Lower is better."""


class NodeSnapshot(NamedTuple):
    """A node's state, and its link at the time of the decision."""

    state: NodeState
    link: Link


class Cluster:
    """The nodes that starts are planned on. Not thread-safe."""

    def __init__(self, states: Iterable[NodeState] = ()) -> None:
        self._states: dict[NodeId, NodeState] = {}
        self._ranks: dict[NodeId, Rank] = {}
        self._free: list[Rank] = []
        self._shared: list[Rank] = []
        self._holders: defaultdict[CheckpointId, list[Rank]] = defaultdict(list)
        self._with_tree: defaultdict[LayerId, list[Rank]] = defaultdict(list)
        self.gpus = 0
        """Number of nodes with a GPU."""
        for state in states:
            self.put(state)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[NodeState]:
        return iter(self._states.values())

    def __getitem__(self, node: NodeId) -> NodeState:
        return self._states[node]

    def get(self, node: NodeId) -> NodeState | None:
        return self._states.get(node)

    def put(self, state: NodeState) -> None:
        self.drop(state.node)
        link = state.link
        rank = ((len(link.fetches) + 1) / link.bytes_per_s + 1 / state.device_bytes_per_s, state.node)
        self._states[state.node], self._ranks[state.node] = state, rank
        insort(self._shared if state.workers else self._free, rank)
        self.gpus += state.gpus > 0
        for checkpoint, held in state.held.items():
            insort(self._holders[checkpoint], _holder_rank(held, rank))
        for layer in state.trees:
            insort(self._with_tree[layer], rank)

    def drop(self, node: NodeId) -> None:
        state = self._states.pop(node, None)
        if state is None:
            return
        ranks = self._shared if state.workers else self._free
        rank = self._ranks.pop(node)
        del ranks[bisect_left(ranks, rank)]
        self.gpus -= state.gpus > 0
        for checkpoint, held in state.held.items():
            holders = self._holders[checkpoint]
            del holders[bisect_left(holders, _holder_rank(held, rank))]
            if not holders:
                del self._holders[checkpoint]
        for layer in state.trees:
            ranks = self._with_tree[layer]
            del ranks[bisect_left(ranks, rank)]
            if not ranks:
                del self._with_tree[layer]

    def order(
        self,
        stage: StagePlan,
        worker: WorkerId,
        checkpoint: CheckpointId | None,
        now_s: float,
        trees: Iterable[FileTree] = (),
    ) -> None:
        """Enters a stage that was ordered, for the next decision of the same step: on its node, and on the uplinks of
        the peers that it fetches from."""
        self.put(with_stage(self._states[stage.node], stage, worker, checkpoint, now_s, trees))
        for share in stage.peers:
            holder = self._states.get(share.node)
            if holder is not None and checkpoint is not None:
                self.put(with_upload(holder, share.size_bytes, stage, worker, checkpoint, now_s))

    def holders(
        self,
        checkpoint: CheckpointId | None,
        least_bytes: int,
        now_s: float,
        wanted: PlacementConstraints = NO_CONSTRAINTS,
    ) -> list[NodeSnapshot]:
        """The best nodes that hold any of the checkpoint, in memory, being fetched or on disk, and have that much
        room."""
        if checkpoint is None or checkpoint not in self._holders:
            return []
        return self._roomy(self._holders[checkpoint], least_bytes, now_s, wanted)

    def peers(self, checkpoint: CheckpointId | None, now_s: float) -> list[PeerSource]:
        """What nodes have of the checkpoint in host memory, or receive, for others to fetch."""
        ranks = self._holders.get(checkpoint) if checkpoint is not None else None
        if ranks is None or checkpoint is None:
            return []
        states = (self._states[node] for rank, node in ranks if rank < ON_DISK)
        serving = islice((state for state in states if state.up is not None), PEERS_SEEN)
        return peer_sources(serving, checkpoint, now_s)

    def with_trees(
        self,
        trees: Iterable[FileTree],
        least_bytes: int,
        now_s: float,
        wanted: PlacementConstraints = NO_CONSTRAINTS,
    ) -> list[NodeSnapshot]:
        """The best nodes that have any of these packages or volumes on their disk and that much room."""
        return [
            snapshot
            for tree in trees
            if tree.id in self._with_tree
            for snapshot in self._roomy(self._with_tree[tree.id], least_bytes, now_s, wanted)
        ]

    def _roomy(
        self, ranks: Iterable[Rank], least_bytes: int, now_s: float, wanted: PlacementConstraints
    ) -> list[NodeSnapshot]:
        states = (self._states[node] for _, node in ranks)
        roomy = (
            NodeSnapshot(state, state.link.at(now_s))
            for state in states
            if state.free_bytes >= least_bytes and admits(wanted, state)
        )
        return list(islice(roomy, HOLDERS))

    def quickest(
        self,
        needs_bytes: Sequence[int],
        fetch_bytes: tuple[int, int],
        enough: int,
        now_s: float,
        wanted: PlacementConstraints = NO_CONSTRAINTS,
        fits: Callable[[NodeState, int], bool] | None = None,
    ) -> tuple[list[NodeSnapshot], list[NodeSnapshot]]:
        """The fastest nodes of each list: the first `enough` that have room for each of these needs and accept the
        fetches.

        `needs_bytes` falls from left to right: room for one is room for all that follow. `fetch_bytes` are the least
        and the most to be fetched: a link that accepts the most accepts all. Nodes that accept only less are returned
        too, but not counted. The second list has nodes with room whose link accepts not even the least. `fits`: further
        condition on a node, by the need's index.
        """
        usable: list[NodeSnapshot] = []
        refused: list[NodeSnapshot] = []
        least_fetch, most_fetch = fetch_bytes
        states, least_bytes, constrained = self._states, needs_bytes[-1], wanted != NO_CONSTRAINTS
        for ranks in (self._free, self._shared):
            counts, partial = [0] * len(needs_bytes), 0
            for _, node in ranks:
                state = states[node]
                if state.free_bytes < least_bytes or (
                    (constrained or state.confines != "namespaces") and not admits(wanted, state)
                ):
                    continue
                kind = next(
                    (
                        index
                        for index, need in enumerate(needs_bytes)
                        if state.free_bytes >= need and (fits is None or fits(state, index))
                    ),
                    None,
                )
                if kind is None or counts[kind] >= enough:
                    continue
                link = state.link.at(now_s)
                if link.fetches and not link.accepts(most_fetch, now_s):
                    if not link.accepts(least_fetch, now_s):
                        refused.append(NodeSnapshot(state, link))
                    elif partial < enough:
                        partial += 1
                        usable.append(NodeSnapshot(state, link))
                    continue
                usable.append(NodeSnapshot(state, link))
                for index in range(kind, len(counts)):
                    counts[index] += 1
                if counts[0] >= enough:
                    break
        return usable, refused


ON_DISK = 2
"""Rank of the first node that has a checkpoint on its disk alone."""


def _holder_rank(held: HeldLayers, rank: Rank) -> Rank:
    """Rank of a holder: all in memory, part in memory or being fetched, on disk; then by speed, far below 1 s a
    byte."""
    kind = 0 if held.host == EVERY_LAYER else 1 if held.host or held.coming else ON_DISK
    return (kind + rank[0], rank[1])
