"""Execution pipelines of a multicast in layers: which receivers serve together, and since when.

Algorithm 2 names the members of each pipeline; here is which layers each of them serves, so that the pipeline is ready
soonest by the predicted arrivals. A layer has arrived with the last of its chunks, the first one with both ends of the
model: they are the first stage's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetstart.runtime.contract.ids import NodeId

from ..checkpoint_layout import CheckpointLayout
from .execution_pipelines import Stage, divided
from .plan import MulticastPlan, ReceiverPlan

SOONER = 0.85
"""Greatest time until a pipeline is ready, relative to that until its first member is whole, for which it is formed:
for less, whole workers are worth the wait."""


class LayerPipeline(NamedTuple):
    """Receivers that serve together."""

    stages: tuple[Stage, ...]
    """In the order of layers, each a node by its place among the receivers; all have layers."""
    ready_s: float


def layer_pipelines(found: MulticastPlan, layout: CheckpointLayout) -> list[LayerPipeline]:
    """The pipelines that can serve well before any of their members is whole."""
    chunks = layout.layer_chunks
    if not chunks:
        return []
    places: dict[NodeId, int] = {receiver.node: place for place, receiver in enumerate(found.receivers)}
    arrivals = [layer_arrivals(receiver, chunks) for receiver in found.receivers]
    formed = []
    for plan in found.pipelines:
        members = [places[stage.node] for stage in plan.stages]
        if len(members) < 2:
            continue
        pipeline = divided(members, arrivals, len(chunks))
        serving = tuple(stage for stage in pipeline.stages if stage.first < stage.end)
        whole_s = min(found.receivers[member].last_s for member in members)
        if len(serving) > 1 and pipeline.ready_s <= SOONER * whole_s:
            formed.append(LayerPipeline(serving, pipeline.ready_s))
    return formed


def layer_arrivals(receiver: ReceiverPlan, layer_chunks: Sequence[Sequence[tuple[int, int]]]) -> Mapping[int, float]:
    """When each layer has arrived; at once what the node is not sent."""
    times = dict[int, float]()
    for pull, arrives_s in zip(receiver.pulls, receiver.arrivals_s, strict=True):
        times.update(dict.fromkeys(range(pull.first, pull.end), arrives_s))
    return {
        layer: max((times.get(chunk, 0.0) for begin, end in ranges for chunk in range(begin, end)), default=0.0)
        for layer, ranges in enumerate(layer_chunks)
    }
