"""Tests of the schedule of faults: the same for a seed, within its time, and complete."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.schedule import LASTS_S, every_fault, plan

SEEDS = st.integers(0, 2**32)


def test_every_kind_has_a_length_and_a_target() -> None:
    assert {kind for kind, _ in every_fault()} == set(LASTS_S)


@given(SEEDS)
def test_a_seed_gives_one_schedule(seed: int) -> None:
    assert plan(seed, 100) == plan(seed, 100)


@given(SEEDS, st.floats(1, 600), st.floats(0.2, 2))
def test_all_faults_end_in_time_and_come_in_order(seed: int, length_s: float, scale: float) -> None:
    found = plan(seed, length_s, scale=scale)
    assert all(fault.at_s + fault.lasts_s <= length_s + 0.01 for fault in found)
    assert [fault.at_s for fault in found] == sorted(fault.at_s for fault in found)


@given(SEEDS)
def test_ten_minutes_have_every_kind_and_most_targets(seed: int) -> None:
    found = {(fault.kind, fault.targets) for fault in plan(seed, 600)}
    assert {kind for kind, _ in found} == set(LASTS_S)
    assert len(found) > len(every_fault()) * 0.8
