"""Money: integers, rounded to nearest, written once."""

from __future__ import annotations

from fractions import Fraction

import redis
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract import keys
from fleetstart.runtime.contract.function import GIB
from fleetstart.runtime.contract.ledger import append_script, cost_nusd, dollars


@given(st.integers(0, 10**9), st.integers(0, 1024 * GIB), st.integers(0, 10**6))
def test_cost_is_the_exact_product_rounded_to_nearest(billed_ms: int, memory_bytes: int, rate: int) -> None:
    exact = Fraction(billed_ms * memory_bytes * rate, 1000 * GIB)
    assert abs(cost_nusd(billed_ms, memory_bytes, rate) - exact) <= Fraction(1, 2)


def test_a_gib_for_a_second_costs_the_rate() -> None:
    assert cost_nusd(1000, GIB, 16_667) == 16_667
    assert dollars(16_667) == "0.000016667"
    assert dollars(3 * 10**9 + 5) == "3.000000005"


def test_a_row_is_taken_once_and_closes_its_open_call(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        append = client.register_script(append_script())
        client.hset(keys.OPEN, "inv-1", b"{}")
        where = [keys.LEDGER, keys.LEDGER_IDS, keys.OPEN]
        assert append(keys=where, args=["inv-1", "row", 1000]) == 1
        assert append(keys=where, args=["inv-1", "row again", 2000]) == 0
        assert [fields for _, fields in client.xrange(keys.LEDGER)] == [{b"row": b"row"}]
        assert not client.hexists(keys.OPEN, "inv-1")


def test_ids_are_forgotten_after_a_week_so_that_the_ledger_does_not_grow_twice(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        append = client.register_script(append_script())
        where = [keys.LEDGER, keys.LEDGER_IDS, keys.OPEN]
        append(keys=where, args=["old", "row", 1000])
        append(keys=where, args=["new", "row", 1000 + 8 * 86_400_000])
        assert client.zrange(keys.LEDGER_IDS, 0, -1) == [b"new"]
