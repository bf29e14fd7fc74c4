"""A function's own limits, shared among gateways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.gateway.admission.limits import NO_LIMITS, LimitUsage, burst_of, gateway_share
from fleetstart.runtime.contract.errors import InvalidSpec, RateLimited
from fleetstart.runtime.contract.function.spec import Limits
from fleetstart.runtime.contract.ids import FunctionName

rates = st.floats(0.01, 1000)


@given(rates, st.integers(0, 100), st.integers(0, 100), st.integers(1, 9))
def test_shares_come_to_the_whole_or_one_each(rate: float, burst: int, concurrent: int, gateways: int) -> None:
    limits = Limits(rate=rate, burst=burst, concurrent=concurrent)
    parts = [gateway_share(limits, gateways, place) for place in range(gateways)]
    assert sum(part.rate for part in parts) == pytest.approx(rate)
    assert sum(burst_of(part) for part in parts) == max(burst_of(limits), gateways)
    assert sum(part.concurrent for part in parts) == (max(concurrent, gateways) if concurrent else 0)
    assert max(burst_of(part) for part in parts) - min(burst_of(part) for part in parts) <= 1


def test_no_limits_are_none_at_any_number_of_gateways() -> None:
    assert gateway_share(NO_LIMITS, 3, 0) == NO_LIMITS
    assert burst_of(Limits(rate=0.5)) == 1
    assert burst_of(Limits(rate=2.5)) == 3


@pytest.mark.parametrize("fields", [{"rate": -1}, {"burst": 5}, {"rate": 1, "burst": -1}, {"concurrent": -1}])
def test_limits_that_mean_nothing_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidSpec, match="limits"):
        Limits(**fields)  # type: ignore[arg-type]


def test_a_429_says_when_the_next_token_or_place_is_free() -> None:
    name = FunctionName("f")
    usage = LimitUsage()
    usage.add_call(name, Limits(rate=2, burst=1), service_s=1.0, now_s=10.0)
    with pytest.raises(RateLimited) as caught:
        usage.add_call(name, Limits(rate=2, burst=1), service_s=1.0, now_s=10.1)
    assert caught.value.retry_after_s == pytest.approx(0.4)
    usage.add_call(name, Limits(rate=2, burst=1), service_s=1.0, now_s=10.5)
    with pytest.raises(RateLimited) as caught:
        usage.add_call(name, Limits(concurrent=2), service_s=3.0, now_s=11.0)
    assert caught.value.retry_after_s == pytest.approx(1.5)
    assert usage.calls == 2
