from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.state.redis_server.memory_budget import (
    DAY_S,
    FAMILIES,
    OTHERS,
    family_of,
    memory_problems,
    pressure,
    trace_kept_s,
)
from fleetstart.runtime.contract.sizes import GIB, MIB


@pytest.mark.parametrize(
    ("key", "family"),
    [
        ("fs:trace:r1", "traces"), ("fs:logs:a.b", "logs"), ("fs:invocations:kept", "async calls"),
        ("fs:idempotency:0f", "idempotency"), ("fs:ledger:ids", "ledger"), ("fs:functions:last", "functions"),
        ("fs:history:m:f:1", "history"), ("fs:node:n", OTHERS),
    ],
)  # fmt: skip
def test_each_key_has_one_family(key: str, family: str) -> None:
    assert family_of(key) == family


@given(st.floats(0, 1.2), st.floats(0, 1.2))
def test_the_fuller_it_is_the_shorter_traces_stay(one: float, other: float) -> None:
    less, more = sorted((one, other))
    for failed in (False, True):
        assert trace_kept_s(less, failed=failed) >= trace_kept_s(more, failed=failed)
    assert trace_kept_s(more, failed=True) >= trace_kept_s(more, failed=False)
    assert trace_kept_s(more, failed=True) > 0


def test_traces_give_way_before_it_is_full() -> None:
    assert trace_kept_s(0.3, failed=False) == DAY_S
    assert trace_kept_s(0.86, failed=False) == 0


def test_a_hundred_calls_a_second_do_not_fill_four_gigabytes() -> None:
    """Of 1 KiB each, second by second over two days: traces held never pass their share by half."""
    limit, held, ends = 4 * GIB, 0, [0] * (4 * DAY_S)
    for now_s in range(2 * DAY_S):
        held -= ends[now_s]
        kept_s = trace_kept_s(pressure(held, limit, held), failed=False)
        if kept_s:
            held += 100 * 1024
            ends[now_s + kept_s] += 100 * 1024
        assert held <= 0.45 * limit


def test_an_alarm_comes_before_it_is_full_and_names_what_is_large() -> None:
    assert memory_problems(7 * GIB, 10 * GIB, {}, limited=True, size="7 of 10") == []
    (told,) = memory_problems(8 * GIB, 10 * GIB, {}, limited=True, size="8.0 GiB of 10.0 GiB")
    assert told.startswith("8.0 GiB of 10.0 GiB of memory is used (80% of its maxmemory)")
    (told,) = memory_problems(5 * GIB, 10 * GIB, {"logs": 4 * GIB}, limited=True, size="")
    assert told.startswith("logs hold 40% of the memory that Redis may use, and 25% is theirs: functions that log much")
    assert memory_problems(50 * MIB, 64 * MIB, {"logs": 40 * MIB}, limited=True, size="")[1:] == []
    assert sum(family.share for family in FAMILIES) > 1, "shares are for warnings, not for dividing it up"
