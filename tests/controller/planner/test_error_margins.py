"""How much longer than predicted: what is learned of it, and what a promise is made with."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.cluster import Cluster
from fleetstart.controller.planner.error_margins import (
    ENOUGH,
    KEPT,
    MOST,
    PRIOR,
    PRIOR_MARGINS,
    Margins,
    margins_of,
    pooled_margins,
    with_ratio,
)
from fleetstart.controller.planner.selection import make_plan
from fleetstart.runtime.contract.function.spec import SLO
from tests.controller.planner.worlds import measured, node, request

ratio_lists = st.lists(st.floats(0, 100), max_size=KEPT)


def test_a_version_without_a_record_has_the_others_and_they_the_prior() -> None:
    assert pooled_margins([]) == Margins(PRIOR, PRIOR, PRIOR)
    others = pooled_margins([{"group": [1.5] * 6}, {"group": [1.5] * 6}])
    assert others == Margins(PRIOR, PRIOR, 1.5)
    assert margins_of({}, others) == others


def test_with_enough_starts_a_version_speaks_for_itself() -> None:
    others = Margins(2.0, 2.0, 2.0)
    assert margins_of({"alone": [1.1] * (ENOUGH - 1)}, others).alone == pytest.approx(1.1)
    assert margins_of({"alone": [1.1] * (ENOUGH - 2)}, others).alone == 2.0
    assert margins_of({"alone": [1.1] * KEPT}, others) == (2.0, 1.1, 2.0)


def test_one_outlier_of_ten_is_none_of_the_kinds_habits_and_two_are() -> None:
    assert margins_of({"warm": [1.1] * 9 + [9.0]}, PRIOR_MARGINS).warm == pytest.approx(1.1)
    assert margins_of({"warm": [1.1] * 8 + [1.7] * 2}, PRIOR_MARGINS).warm == pytest.approx(1.7)


def test_only_the_last_starts_count() -> None:
    known = with_ratio({"warm": [5.0]}, "group", 3.0)
    for _ in range(KEPT):
        known = with_ratio(known, "group", 1.3)
    assert known == {"warm": [5.0], "group": [1.3] * KEPT}


@given(ratio_lists, ratio_lists)
def test_a_margin_is_bounded_and_covers_nine_starts_of_ten(own: list[float], others: list[float]) -> None:
    margin = margins_of({"alone": own}, pooled_margins([{"alone": others}])).alone
    assert 1 <= margin <= MOST
    if len(own) >= ENOUGH and margin < MOST:
        assert sum(ratio <= margin for ratio in own) >= 0.9 * len(own)


def four() -> Cluster:
    return Cluster(node(f"n{index}") for index in range(4))


def test_a_promise_is_made_with_the_margin() -> None:
    """400 MB at 100 MB/s: alone 4 s, two 2 s, three 1.5 s, four 1 s."""
    wanted = request(slo=SLO(ttft_s=2.5), measures=measured(prefill_s=0.1))
    assert len(make_plan(wanted, four(), 0.0).stages) == 2
    careful = make_plan(replace(wanted, margins=Margins(1.0, 1.0, 1.3)), four(), 0.0)
    assert len(careful.stages) == 3
    assert careful.margin == 1.3
    assert careful.stages[0].fetch_within_s == pytest.approx(2.5 / 1.3 - 0.1), "the link must leave it its margin"
    assert next(one.why_not for one in careful.considered if one.stages == 2) == "TTFT 2.10 s × 1.30 is above 2.5 s"


def test_what_keeps_the_slo_only_if_nothing_goes_wrong_is_better_than_what_cannot() -> None:
    wanted = request(slo=SLO(ttft_s=1.2), measures=measured(prefill_s=0.1), margins=Margins(1.0, 1.0, 1.5))
    found = make_plan(wanted, four(), 0.0)
    assert len(found.stages) == 4
    assert found.meets_slo
    assert "with its margin" in found.reason
    assert found.stages[0].fetch_within_s == pytest.approx(1.1)
