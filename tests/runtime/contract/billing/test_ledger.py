"""Money: integers, rounded to nearest, written once."""

from __future__ import annotations

from fractions import Fraction

import msgspec
import redis
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import (
    APPEND_KEYS,
    InvocationRow,
    append_args,
    append_script,
    cost_nusd,
    dollars,
)
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from fleetstart.runtime.contract.sizes import GIB


@given(st.integers(0, 10**9), st.integers(0, 1024 * GIB), st.integers(0, 10**6))
def test_cost_is_the_exact_product_rounded_to_nearest(billed_ms: int, memory_bytes: int, rate: int) -> None:
    exact = Fraction(billed_ms * memory_bytes * rate, 1000 * GIB)
    assert abs(cost_nusd(billed_ms, memory_bytes, rate) - exact) <= Fraction(1, 2)


def test_a_gib_for_a_second_costs_the_rate() -> None:
    assert cost_nusd(1000, GIB, 16_667) == 16_667
    assert dollars(16_667) == "0.000016667"
    assert dollars(3 * 10**9 + 5) == "3.000000005"


def _row(name: str, *, accepted_unix_ms: int, cost: int = 0) -> InvocationRow:
    return InvocationRow(
        id=InvocationId(name), function=FunctionName("f"), version=Version(1), status=200, queue_ms=0, billed_ms=1,
        accepted_unix_ms=accepted_unix_ms, memory_bytes=1, cost_nusd=cost,
    )  # fmt: skip


def test_a_row_is_taken_once_and_closes_its_open_call(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        append = client.register_script(append_script())
        client.hset(keys.OPEN, "inv-1", b"{}")
        first = _row("inv-1", accepted_unix_ms=1000, cost=7)
        assert append(keys=APPEND_KEYS, args=append_args(first)) == 1
        assert append(keys=APPEND_KEYS, args=append_args(_row("inv-1", accepted_unix_ms=2000, cost=9))) == 0
        [(entry, fields)] = client.xrange(keys.LEDGER)
        assert fields == {b"row": msgspec.json.encode(first)}
        assert not client.hexists(keys.OPEN, "inv-1")
        day = int(entry.split(b"-")[0]) // 86_400_000
        assert client.hgetall(keys.LEDGER_SPENT) == {f"{day}:f".encode(): b"7"}


def test_an_id_is_remembered_by_the_later_of_its_two_times(redis_url: str) -> None:
    """A clock that is ahead must not make the ledger forget what it has."""
    with redis.Redis.from_url(redis_url) as client:
        append = client.register_script(append_script())
        ahead = 32_503_680_000_000  # the year 3000
        append(keys=APPEND_KEYS, args=append_args(_row("ahead", accepted_unix_ms=ahead)))
        append(keys=APPEND_KEYS, args=append_args(_row("past", accepted_unix_ms=1000)))
        assert client.zscore(keys.LEDGER_IDS, "ahead") == ahead
        assert client.zscore(keys.LEDGER_IDS, "past") > 1000


def test_a_row_from_before_the_horizon_is_put_aside_unless_it_is_known(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        append = client.register_script(append_script())
        known = append_args(_row("known", accepted_unix_ms=1000))
        append(keys=APPEND_KEYS, args=known)
        client.set(keys.LEDGER_HORIZON, 2000)
        assert append(keys=APPEND_KEYS, args=known) == 0
        late = _row("late", accepted_unix_ms=1999)
        assert append(keys=APPEND_KEYS, args=append_args(late)) == 2
        assert append(keys=APPEND_KEYS, args=append_args(_row("in time", accepted_unix_ms=2000))) == 1
        assert [fields for _, fields in client.xrange(keys.LEDGER_LATE)] == [{b"row": msgspec.json.encode(late)}]
        assert client.xlen(keys.LEDGER) == 2
