"""The latency model, HydraServe's formulas: time to first token without overlap (eq. 1) and with it (eq. 5), and per
token (eq. 2).

Generalised in two ways that give the paper's values back for equal stages: a stage has bytes of its own (M_i, not
M / s), and a worker with a device's time costs its own share of the layers (not 1 / s). Departures: one worker alone
passes nothing on and pays no t_n; a low-memory worker is slow only where it shares its device. Everything is in seconds
and bytes; nothing is looked up here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fleetstart.runtime.contract.sizes import GIB


class StageTimes(NamedTuple):
    """The parts of one stage's start on its node."""

    start_s: float
    """t_cc + t_cu."""
    library_s: float
    """t_l."""
    fetch_s: float
    """M_i / b."""
    load_s: float
    """M_i / p."""


def ready_sequential_s(stages: Sequence[StageTimes]) -> float:
    """Eq. 1, first two terms: start, then fetch, then load; the slowest stage counts."""
    return max([stage.start_s + stage.library_s + stage.fetch_s + stage.load_s for stage in stages])


def ready_overlapped_s(stages: Sequence[StageTimes]) -> float:
    """Eq. 5, first term: fetching beside everything else, loading beside the libraries."""
    return max([max(stage.start_s + max(stage.load_s, stage.library_s), stage.fetch_s) for stage in stages])


class StageWork(NamedTuple):
    """What a token costs in one stage."""

    share: float
    """Its part of the layers."""
    own: bool
    """True if it has a device's time for itself."""
    slowness: float = 1.0
    """Factor of the model's times on its device; 1: as where they were measured."""


def work(stages: Sequence[StageWork]) -> float:
    """s - w + w/s for equal stages and devices: what one token costs, in units of the model where it was measured.

    A stage without a device's time for itself, a low-memory worker among others' workers, gets no more of the device
    than its part of the memory, and takes as long as the whole model would. Departures: the paper counts every
    low-memory worker so, also on a device of its own; and its devices are equal.
    """
    return sum([(stage.share if stage.own else 1.0) * stage.slowness for stage in stages])


def hops_s(stages: int, hop_s: float) -> float:
    return stages * hop_s if stages > 1 else 0.0


def ttft_s(ready_s: float, *, prefill_s: float, hop_s: float, stages: int, work: float) -> float:
    return ready_s + prefill_s * work + hops_s(stages, hop_s)


def tpot_s(*, decode_s: float, hop_s: float, stages: int, work: float) -> float:
    """Eq. 2: the worst case, while the pipeline is one."""
    return decode_s * work + hops_s(stages, hop_s)


def cost_gib_s(reserved_bytes: float, ttft_s: float, whole_s: float) -> float:
    """Memory held from the order until the pipeline is one worker again, `whole_s` after its first token."""
    return reserved_bytes * (ttft_s + whole_s) / GIB
