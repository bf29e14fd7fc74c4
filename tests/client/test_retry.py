from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.client.retry import RetryPolicy, retry_after_s

SECONDS = st.floats(0, 1000)


@given(st.integers(0, 20), SECONDS, SECONDS, st.floats(0, 1))
def test_a_pause_is_what_was_asked_for_or_more_and_fits_into_the_time(
    done: int, asked_s: float, left_s: float, jitter: float
) -> None:
    policy = RetryPolicy(retries=6)
    pause_s = policy.pause_s(done, asked_s=asked_s, left_s=left_s, jitter=jitter)
    if pause_s is not None:
        assert done < 6
        assert asked_s <= pause_s < left_s
        assert pause_s >= policy.first_pause_s / 2


def test_pauses_double_up_to_a_limit() -> None:
    policy = RetryPolicy(retries=9)
    pauses = [policy.pause_s(done, asked_s=0, left_s=100, jitter=0) for done in range(9)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0]


def test_the_retries_outlast_a_restart_of_the_controller() -> None:
    policy = RetryPolicy()
    pauses = [policy.pause_s(done, asked_s=0, left_s=100, jitter=1.0) or 0 for done in range(policy.retries)]
    assert sum(pauses) > 5


@pytest.mark.parametrize(
    ("status", "headers", "after_s"),
    [
        (503, {"fs-error": "overloaded", "retry-after": "2", "retry-after-ms": "1500"}, 1.5),
        (503, {"fs-error": "unavailable", "retry-after": "2"}, 2.0),
        (429, {"fs-error": "rate_limited", "retry-after": "0"}, 0.0),
        (409, {"fs-error": "idempotency_in_progress", "retry-after": "5"}, 5.0),
        (503, {"fs-error": "unavailable"}, None),
        (503, {"fs-error": "unavailable", "retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        (503, {"fs-error": "unavailable", "retry-after": "nan"}, None),
        (503, {"retry-after": "2"}, None),
        (409, {"fs-error": "idempotency_mismatch", "retry-after": "5"}, None),
        (402, {"fs-error": "budget_spent", "retry-after": "5"}, None),
        (502, {"fs-error": "worker_lost", "retry-after": "5"}, None),
        (200, {}, None),
    ],
)
def test_only_rejections_of_the_platform_are_retried(status: int, headers: Any, after_s: float | None) -> None:
    assert retry_after_s(status, headers) == after_s
