"""Execution pipelines: groups of receiving nodes that together hold the model, and since when (λScale, Algorithm 2).

While more than one sub-group has nodes that are in no pipeline, a pipeline takes one node of each: the groups began
with different parts of the model. The nodes of the last group form one pipeline. Each node is in one pipeline. Which
blocks a node serves as its stage follows from the predicted arrivals: the division with which the pipeline is ready
soonest, and among these one with stages as equal as can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

EXACT_MEMBERS = 6
"""Members up to which all divisions are compared: their number doubles with each member."""


class Stage(NamedTuple):
    """A node's part of an execution pipeline."""

    node: int
    first: int
    end: int
    """The block after its last; as `first` for a node that serves only once it is whole."""


class ExecutionPipeline(NamedTuple):
    """Nodes that serve together before any of them has the whole model."""

    stages: tuple[Stage, ...]
    """In the order of blocks; nodes without blocks come last."""
    ready_s: float
    """When each node has the blocks of its stage."""

    @property
    def nodes(self) -> set[int]:
        return {stage.node for stage in self.stages}


def pipeline_members(groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Algorithm 2: members of each pipeline. `groups`: the receivers of each sub-group, in order."""
    left = [list(group) for group in groups if group]
    pipelines: list[tuple[int, ...]] = []
    while left:
        if len(left) == 1:
            pipelines.append(tuple(left[0]))
            break
        for turn in range(min(len(group) for group in left)):
            pipelines.append(tuple(group[turn] for group in left))
        taken = min(len(group) for group in left)
        left = [group[taken:] for group in left if len(group) > taken]
    return pipelines


def execution_pipelines(
    groups: Sequence[Sequence[int]], arrivals: Sequence[Mapping[int, float]], blocks: int
) -> list[ExecutionPipeline]:
    """All pipelines, with their stages. `arrivals`: for each node, block → when it has it."""
    return [divided(members, arrivals, blocks) for members in pipeline_members(groups)]


def divided(members: Sequence[int], arrivals: Sequence[Mapping[int, float]], blocks: int) -> ExecutionPipeline:
    """The earliest division of the blocks among the members: adjacent blocks for each. Exact for up to `EXACT_MEMBERS`;
    above that, each stage goes to the member that can take the most blocks from there on, which is not always best."""
    times = sorted({time for member in members for time in arrivals[member].values()})

    def stages_by(time_index: int, most: int) -> list[Stage] | None:
        ends = [_ends(arrivals[member], blocks, times[time_index]) for member in members]
        divide = _divide if len(members) <= EXACT_MEMBERS else _divide_greedily
        order = divide(ends, blocks, most)
        if order is None:
            return None
        bounds = [0, *(end for _, end in order)]
        return [Stage(members[place], first, end) for first, (place, end) in zip(bounds, order, strict=False)]

    whole = [max(arrivals[member].values()) for member in members if len(arrivals[member]) == blocks]
    last = times.index(min(whole)) if whole else len(times) - 1
    ready = _least(0, last, lambda index: stages_by(index, blocks) is not None)
    stages = stages_by(ready, blocks) if times else None
    if stages is None:
        return ExecutionPipeline(tuple(Stage(member, blocks, blocks) for member in members), float("inf"))
    most = _least(-(-blocks // len(members)), blocks, lambda most: stages_by(ready, most) is not None)
    stages = stages_by(ready, most) or stages
    serving = {stage.node for stage in stages}
    rest = [Stage(member, blocks, blocks) for member in members if member not in serving]
    return ExecutionPipeline((*stages, *rest), times[ready])


def _least(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The least number from which on it holds; `high` if it holds nowhere below."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _ends(arrived: Mapping[int, float], blocks: int, by_s: float) -> list[int]:
    """For each block, the first one from there on that has not arrived by then."""
    ends = [blocks] * (blocks + 1)
    for block in reversed(range(blocks)):
        ends[block] = ends[block + 1] if arrived.get(block, float("inf")) <= by_s else block
    return ends


def _divide(ends: Sequence[Sequence[int]], blocks: int, most: int) -> list[tuple[int, int]] | None:
    """Members by place, in the order of their stages, with the ends of these; None if no order covers the model.

    For each set of members, the most blocks from the first on that they cover: whoever comes last, going on from what
    the others cover at most.
    """
    covers = {0: (0, 0, 0)}
    """Set of members → blocks that it covers, its last member, the set without that one."""
    for members in range(1, 1 << len(ends)):
        best = (0, 0, 0)
        for place in range(len(ends)):
            if members >> place & 1:
                before = members & ~(1 << place)
                first = covers[before][0]
                best = max(best, (min(ends[place][first], first + most), place, before))
        covers[members] = best
        if best[0] >= blocks:
            return _order(covers, members)
    return None


def _order(covers: Mapping[int, tuple[int, int, int]], members: int) -> list[tuple[int, int]]:
    """Members and ends as they led to that set's cover, without members that added nothing."""
    order = []
    while members:
        end, place, before = covers[members]
        if end > covers[before][0]:
            order.append((place, end))
        members = before
    return order[::-1]


def _divide_greedily(ends: Sequence[Sequence[int]], blocks: int, most: int) -> list[tuple[int, int]] | None:
    unused, order, first = list(range(len(ends))), list[tuple[int, int]](), 0
    while first < blocks:
        end, place = max([(min(ends[place][first], first + most), -place) for place in unused], default=(first, 0))
        if end == first:
            return None
        unused.remove(-place)
        order.append((-place, end))
        first = end
    return order
