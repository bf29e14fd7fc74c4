"""The paper's formulas, by hand."""

from __future__ import annotations

import pytest

from fleetstart.controller.planner.latency_model import (
    StageTimes,
    StageWork,
    cost_gib_s,
    ready_overlapped_s,
    ready_sequential_s,
    tpot_s,
    ttft_s,
    work,
)
from fleetstart.runtime.contract.sizes import GIB

LLAMA_7B_BYTES, NETWORK, PCIE = 12.5e9, 2e9, 12.5e9
"""Llama2-7B on 16 Gbit/s and PCIe (HydraServe, table 2 and section 8.1)."""
CONTAINER_S, CONTEXT_S, LIBRARY_S, PREFILL_S, DECODE_S, HOP_S = 3.0, 1.0, 4.0, 1.5, 0.042, 0.001


def parts(own: int) -> list[StageWork]:
    """Four equal stages, so many of which have a device's time."""
    return [StageWork(1 / 4, stage < own) for stage in range(4)]


def stages(count: int) -> list[StageTimes]:
    size = LLAMA_7B_BYTES / count
    return [StageTimes(CONTAINER_S + CONTEXT_S, LIBRARY_S, size / NETWORK, size / PCIE)] * count


def test_eq_1_adds_up_start_fetch_and_load() -> None:
    ready_s = ready_sequential_s(stages(4))
    assert ready_s == pytest.approx(8.0 + 12.5e9 / 4 * (1 / 2e9 + 1 / 12.5e9))  # 8 + 1.5625 + 0.25
    with_two_full = ttft_s(ready_s, prefill_s=PREFILL_S, hop_s=HOP_S, stages=4, work=work(parts(2)))
    assert with_two_full == pytest.approx(9.8125 + 1.5 * 2.5 + 0.004)


def test_eq_5_hides_the_shorter_of_what_runs_side_by_side() -> None:
    assert ready_overlapped_s(stages(1)) == pytest.approx(8.0), "the fetch, 6.25 s, hides behind start and libraries"
    slow = [stage._replace(fetch_s=20.0) for stage in stages(1)]
    assert ready_overlapped_s(slow) == pytest.approx(20.0), "and they behind a slow fetch"
    big = [stage._replace(load_s=9.0) for stage in stages(1)]
    assert ready_overlapped_s(big) == pytest.approx(13.0), "libraries hide behind loading"


def test_the_slowest_stage_counts() -> None:
    quick, slow = StageTimes(1, 1, 1, 1), StageTimes(1, 1, 7, 1)
    assert ready_overlapped_s([quick, slow]) == 7
    assert ready_sequential_s([quick, slow]) == 10


@pytest.mark.parametrize(("full", "expected"), [(0, 4.0), (1, 3.25), (2, 2.5), (4, 1.0)])
def test_work_is_the_papers_for_equal_stages_on_shared_devices(full: int, expected: float) -> None:
    assert work(parts(full)) == pytest.approx(expected)


def test_a_slower_device_takes_its_part_of_the_layers_longer() -> None:
    layers = [StageWork(0.25, True, 4.0), StageWork(0.75, True, 1.0)]
    assert work(layers) == pytest.approx(0.25 * 4 + 0.75)
    assert work([StageWork(1.0, True, 0.5)]) == 0.5
    assert work([StageWork(0.25, False, 4.0)]) == 4.0, "it shares the device, and takes as long as the whole model"


def test_eq_2() -> None:
    assert tpot_s(decode_s=DECODE_S, hop_s=HOP_S, stages=4, work=work(parts(0))) == pytest.approx(0.172)
    assert tpot_s(decode_s=DECODE_S, hop_s=HOP_S, stages=4, work=work(parts(4))) == pytest.approx(0.046)
    assert tpot_s(decode_s=DECODE_S, hop_s=HOP_S, stages=1, work=1) == DECODE_S, "one worker passes nothing on"


def test_cost_is_memory_times_time() -> None:
    assert cost_gib_s(3 * GIB, 2.0, 0.5) == pytest.approx(7.5)
