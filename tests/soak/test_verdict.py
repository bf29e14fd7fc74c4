"""Tests of the soak's verdict: leaks are found in noise and steps, and what is flat or falls is not called one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.soak.verdict import SAMPLES_LEAST, Series, judge, table

EVERY_S = 20.0
NOISE = st.lists(st.floats(-1, 1), min_size=60, max_size=60)


def series(values: list[float], **rest: float) -> Series:
    return Series(name="one", points=[(number * EVERY_S, value) for number, value in enumerate(values)], **rest)


def flat(values: list[float], *, warmup_s: float = 0.0, **rest: float) -> bool:
    return judge(series(values, **rest), warmup_s=warmup_s).flat


def test_a_constant_is_flat() -> None:
    assert flat([7.0] * 30)


def test_one_descriptor_a_minute_is_a_leak() -> None:
    assert not flat([40.0 + number / 3 for number in range(60)])


def test_growth_in_the_warm_up_does_not_count() -> None:
    values = [float(number) for number in range(20)] + [20.0] * 40
    assert flat(values, warmup_s=20 * EVERY_S)
    assert not flat(values)


def test_a_sawtooth_of_compactions_is_flat() -> None:
    assert flat([float(number % 7) * 100 for number in range(70)])


def test_a_leak_below_a_sawtooth_is_found_once_it_is_higher_than_the_teeth() -> None:
    assert not flat([float(number % 7) * 10 + number * 5 for number in range(70)])


def test_a_step_in_the_middle_is_found_by_its_height() -> None:
    assert not flat([100.0] * 30 + [200.0] * 30)


def test_what_users_keep_may_grow_by_so_much_and_no_more() -> None:
    values = [1000.0 + number * 50 for number in range(61)]  # 3000 bytes in all
    assert flat(values, by_design=3200)
    assert not flat(values, by_design=1500)


def test_too_few_samples_are_an_error_that_says_so() -> None:
    with pytest.raises(ValueError, match=f"{SAMPLES_LEAST - 1} samples after a warm-up of 0 s"):
        flat([1.0] * (SAMPLES_LEAST - 1))


def test_the_table_begins_with_what_grows() -> None:
    leak = judge(series([float(number) for number in range(30)]), warmup_s=0)
    still = judge(series([5.0] * 30), warmup_s=0)
    lines = table([still, leak], calls=1).splitlines()
    assert lines[2].endswith("GROWS |")
    assert lines[3].endswith("flat |")


@given(noise=NOISE, level=st.floats(0, 1e9))
def test_noise_alone_is_never_a_leak_of_more_than_itself(noise: list[float], level: float) -> None:
    assert flat([level + each for each in noise], least=4.0)


@given(noise=NOISE, level=st.floats(0, 100), per_sample=st.floats(0.5, 1e6))
def test_a_leak_that_outgrows_noise_and_level_is_always_found(
    noise: list[float], level: float, per_sample: float
) -> None:
    assert not flat([level + each + per_sample * number for number, each in enumerate(noise)])


@given(noise=NOISE, per_sample=st.floats(0.1, 100))
def test_what_falls_is_flat(noise: list[float], per_sample: float) -> None:
    found = judge(series([1e6 + each - per_sample * number for number, each in enumerate(noise)]), warmup_s=0)
    assert found.flat
    assert math.isfinite(found.per_hour)
