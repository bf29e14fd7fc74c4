"""Prefork policy: no fork in the way of a start, and none faster than the machine allows."""

from __future__ import annotations

import pytest

from fleetstart.prefetcher.processes.prefork_policy import FAILURE_PAUSES_S, SETTLE_S, PoolState, choose_pool, pause_s

EMPTY = PoolState(warm=True, waiting=0, forking=0)
FULL = PoolState(warm=True, waiting=1, forking=0)
COLD = PoolState(warm=False, waiting=0, forking=0)
FORKING = PoolState(warm=True, waiting=0, forking=1)


@pytest.mark.parametrize(
    ("pools", "starts", "last_start_s", "expected"),
    [
        ({"python": EMPTY}, 0, 0.0, "python"),
        ({"python": FULL}, 0, 0.0, None),
        ({"python": COLD}, 0, 0.0, None),
        ({"python": EMPTY}, 1, 0.0, None),
        ({"python": EMPTY}, 0, 100.0 - SETTLE_S / 2, None),
        ({"python": FULL, "torch": EMPTY}, 0, 0.0, "torch"),
        ({"python": EMPTY, "torch": FORKING}, 0, 0.0, None),
        ({}, 0, 0.0, None),
    ],
)
def test_a_spare_is_forked_when_one_is_missing_and_nobody_waits(
    pools: dict[str, PoolState], starts: int, last_start_s: float, expected: str | None
) -> None:
    assert choose_pool(pools, size=1, starts_under_way=starts, last_start_s=last_start_s, now_s=100.0) == expected


def test_without_a_pool_none_is_forked() -> None:
    assert choose_pool({"python": EMPTY}, size=0, starts_under_way=0, last_start_s=0, now_s=100) is None


def test_spares_that_die_are_replaced_ever_more_slowly() -> None:
    dying = PoolState(warm=True, waiting=0, forking=0, failures=2, failed_at_s=100.0)

    def choice(now_s: float) -> str | None:
        return choose_pool({"python": dying}, size=1, starts_under_way=0, last_start_s=0, now_s=now_s)

    assert choice(100.0 + FAILURE_PAUSES_S[1] - 0.01) is None
    assert choice(100.0 + FAILURE_PAUSES_S[1] + 0.01) == "python"
    assert pause_s(1000) == FAILURE_PAUSES_S[-1]
