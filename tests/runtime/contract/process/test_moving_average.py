"""The moving average: it lies among its samples, forgets its prior and follows a change."""

from __future__ import annotations

from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.process.moving_average import WEIGHT, MovingAverage, fold


@given(st.floats(-1e6, 1e6), st.lists(st.floats(0, 1000), min_size=1, max_size=30))
def test_an_estimate_lies_among_its_samples_and_forgets_its_prior(prior: float, samples: list[float]) -> None:
    estimate = MovingAverage(prior)
    for sample in samples:
        estimate = estimate.fold(sample)
    assert estimate.count == len(samples)
    assert min(samples) - 1e-6 <= estimate.value <= max(samples) + 1e-6


def test_a_change_is_learnt_in_a_dozen_samples() -> None:
    estimate = MovingAverage(1.0, 100)
    for _ in range(12):
        estimate = estimate.fold(2.0)
    assert estimate.value > 1.9


@pytest.mark.slow
@given(st.lists(st.floats(0, 1000), min_size=1, max_size=round(1 / WEIGHT)))
def test_the_first_samples_have_a_plain_mean(samples: list[float]) -> None:
    average = MovingAverage(7.0)
    for sample in samples:
        average = average.fold(sample)
    assert average.value == pytest.approx(mean(samples))


@given(st.floats(0, 1000), st.floats(0, 1000), st.integers(0, 10_000), st.floats(0.01, 1))
def test_a_sample_never_weighs_less_than_its_weight(old: float, sample: float, count: int, weight: float) -> None:
    assert abs(sample - fold(old, sample, count, weight)) <= (1 - weight) * abs(sample - old) + 1e-9
