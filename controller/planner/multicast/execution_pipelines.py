"""Execution pipelines: groups of receiving nodes that together hold the model, and since when (λScale, Algorithm 2).

While more than one sub-group has nodes that are in no pipeline, a pipeline takes one node of each: the groups began
with different parts of the model. The nodes of the last group form one pipeline. Each node is in one pipeline. Which
blocks a node serves as its stage follows from the predicted arrivals: the division with which the pipeline is ready
soonest, and among these one with stages as equal as can be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


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
    """The earliest division of the blocks among the members: adjacent blocks for each, found by trying the times at
    which blocks arrive. Each stage goes to the member that can take the most blocks from there on."""
    times = sorted({time for member in members for time in arrivals[member].values()})
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if _stages(members, arrivals, blocks, times[middle], blocks) is None:
            low = middle + 1
        else:
            high = middle
    ready_s = times[low] if times else 0.0
    most = -(-blocks // len(members))
    found = None
    while found is None and most <= blocks:
        found = _stages(members, arrivals, blocks, ready_s, most)
        most += 1
    stages = found or []
    serving = {stage.node for stage in stages}
    rest = [Stage(member, blocks, blocks) for member in members if member not in serving]
    return ExecutionPipeline((*stages, *rest), ready_s if found else float("inf"))


def _stages(
    members: Sequence[int], arrivals: Sequence[Mapping[int, float]], blocks: int, by_s: float, most: int
) -> list[Stage] | None:
    """Stages of at most so many blocks, of what has arrived by then; None if they do not cover the model."""
    unused, stages, first = list(members), list[Stage](), 0
    while first < blocks:
        ends = [(_reach(arrivals[member], first, min(blocks, first + most), by_s), member) for member in unused]
        end = max((end for end, _ in ends), default=first)
        if end == first:
            return None
        member = next(member for reached, member in ends if reached == end)
        unused.remove(member)
        stages.append(Stage(member, first, end))
        first = end
    return stages


def _reach(arrived: Mapping[int, float], first: int, end: int, by_s: float) -> int:
    while first < end and arrived.get(first, float("inf")) <= by_s:
        first += 1
    return first
