"""User ids of functions: laws of who has which, whatever the order of starts and ends."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.processes.worker_uids import WorkerUids
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import FunctionName

FUNCTIONS = st.sampled_from([FunctionName(name) for name in "abcdef"])
STEPS = st.lists(st.tuples(st.sampled_from(["start", "end"]), FUNCTIONS), max_size=60)


@given(STEPS, st.integers(1, 4))
def test_no_two_functions_with_workers_have_one_id_and_all_workers_of_one_function_have_the_same(
    steps: list[tuple[str, FunctionName]], count: int
) -> None:
    uids = WorkerUids(range(100, 100 + count))
    workers: Counter[FunctionName] = Counter()
    held: dict[FunctionName, int] = {}
    for step, function in steps:
        if step == "end":
            uids.give_back(function)
            workers[function] = max(0, workers[function] - 1)
            if not workers[function]:
                held.pop(function, None)
        elif function in held or len(held) < count:
            user = uids.take(function)
            assert user in range(100, 100 + count)
            assert held.setdefault(function, user) == user
            workers[function] += 1
            assert len(set(held.values())) == len(held)
        else:
            with pytest.raises(Unavailable, match="FS_ISOLATION_UIDS"):
                uids.take(function)


def test_an_id_that_was_given_back_comes_last() -> None:
    uids = WorkerUids(range(7, 10))
    for expected in (7, 8, 9, 7, 8):
        function = FunctionName(f"f{expected}")
        assert uids.take(function) == expected
        uids.give_back(function)


def test_without_a_range_nobody_has_an_id_of_his_own() -> None:
    uids = WorkerUids(range(0))
    assert [uids.take(FunctionName(name)) for name in "ab"] == [0, 0]
    uids.give_back(FunctionName("a"))
