"""Quotas: what fits, what a refusal says, and that a bucket lets pass what it promises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.auth.quotas import ProjectRateLimiter, ResourceDemand, check_quotas
from fleetstart.controller.state.access_records import Quotas
from fleetstart.runtime.contract.errors import InvalidInput, QuotaExceeded, RateLimited
from fleetstart.runtime.contract.sizes import GIB


def claim(name: str, workers: int, gib: int = 1) -> ResourceDemand:
    return ResourceDemand(function=name, workers=workers, memory_bytes=workers * gib * GIB)


@pytest.mark.parametrize(
    ("quotas", "told"),
    [
        (Quotas(functions=2), "may have 2 functions: its other functions come to 2, and c wants 1"),
        (Quotas(workers=8), "may have 8 workers: its other functions come to 6, and c wants 4 (scale.max counts)"),
        (Quotas(memory_bytes=9 * GIB), "may have 9 GiB of memory: its other functions come to 6 GiB of"),
    ],
)
def test_a_refusal_says_which_quota_how_much_and_who_raises_it(quotas: Quotas, told: str) -> None:
    others = [claim("a", 2), claim("b", 4)]
    with pytest.raises(QuotaExceeded) as caught:
        check_quotas("ml", quotas, others, claim("c", 4))
    assert told in caught.value.message
    assert "an admin raises it: fs project quota ml --" in caught.value.hint
    check_quotas("ml", Quotas(), others, claim("c", 4))
    check_quotas("ml", quotas, [], claim("c", 4))


def test_what_a_function_has_it_may_keep_when_the_quota_was_lowered() -> None:
    others, quotas = [claim("a", 4)], Quotas(functions=1, workers=4, memory_bytes=GIB)
    check_quotas("ml", quotas, others, claim("c", 4), claim("c", 4))
    check_quotas("ml", quotas, others, claim("c", 3), claim("c", 4))
    with pytest.raises(QuotaExceeded):
        check_quotas("ml", quotas, others, claim("c", 5), claim("c", 4))


@given(
    limit=st.integers(0, 20),
    others=st.lists(st.integers(0, 5), max_size=5),
    wanted=st.integers(0, 8),
    has=st.integers(0, 8),
)
def test_a_sum_passes_its_quota_only_by_what_was_there(limit: int, others: list[int], wanted: int, has: int) -> None:
    claims = [claim(str(number), workers) for number, workers in enumerate(others)]
    try:
        check_quotas("ml", Quotas(workers=limit), claims, claim("c", wanted), claim("c", has))
        assert sum(others) + wanted <= limit or wanted <= has
    except QuotaExceeded:
        assert sum(others) + wanted > limit
        assert wanted > has


@given(
    rate=st.floats(0.1, 1000),
    gateways=st.integers(1, 5),
    steps_ns=st.lists(st.integers(0, 2_000_000_000), min_size=1, max_size=60),
)
def test_no_more_calls_pass_than_the_rate_and_a_second_of_it(rate: float, gateways: int, steps_ns: list[int]) -> None:
    rates, now_ns, passed = ProjectRateLimiter(), 0, 0
    for step_ns in steps_ns:
        now_ns += step_ns
        try:
            rates.take("ml", rate, gateways, now_ns)
            passed += 1
        except RateLimited as error:
            now_ns += round((error.retry_after_s or 0) * 1e9) + 1000
            rates.take("ml", rate, gateways, now_ns)
            passed += 1
    share = rate / gateways
    assert passed <= share * now_ns / 1e9 + max(1.0, share) + 1e-6


def test_a_rate_of_nothing_lets_nothing_pass() -> None:
    rates = ProjectRateLimiter()
    with pytest.raises(RateLimited, match="may make 0 calls a second"):
        rates.take("ml", 0.0, 1, 10**12)


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e16])
def test_quotas_that_make_no_sense(value: float) -> None:
    with pytest.raises(InvalidInput, match="must be 0 to 1,000,000,000,000,000, got"):
        Quotas(calls_per_s=value)
