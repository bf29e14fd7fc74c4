"""Plans of pulls: in order, two at a time, each chunk from its source until that is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.fetch.pulls import WINDOW, PullPlan

PULLS = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 20), max_size=4, unique=True)), max_size=8)


@given(PULLS, st.sets(st.integers(0, 20)), st.data())
def test_every_pull_begins_once_and_in_order(
    pulls: list[tuple[int, list[int]]], awaited: set[int], data: st.DataObject
) -> None:
    plan = PullPlan(pulls)
    left, begun = set(awaited), plan.advance(awaited.__contains__)
    while under_way := [pull for pull in begun if left & set(pull.chunks)]:
        assert len(under_way) <= WINDOW
        left -= set(data.draw(st.sampled_from(under_way)).chunks)
        begun += plan.advance(left.__contains__)
    named = {chunk for _, chunks in pulls for chunk in chunks}
    assert not left & named, "all that was awaited has begun"
    assert [chunk for pull in begun for chunk in pull.chunks] == list(
        dict.fromkeys(chunk for pull in begun for chunk in pull.chunks)
    )
    assert all(plan.owner(chunk) is None for chunk in named), "nothing is held back at the end"


@given(PULLS, st.integers(0, 3))
def test_a_lost_source_s_chunks_are_released_and_the_plan_goes_on(
    pulls: list[tuple[int, list[int]]], lost: int
) -> None:
    plan, left = PullPlan(pulls), set(range(21))
    begun = plan.advance(left.__contains__)
    left -= set(plan.release_source(lost))  # others have delivered them
    while True:
        begun += (opened := plan.advance(left.__contains__))
        assert all(plan.owner(chunk) != lost for pull in opened for chunk in pull.chunks)
        under_way = [pull for pull in begun if left & {chunk for chunk in pull.chunks if plan.owner(chunk) is not None}]
        if not under_way:
            break
        left -= set(under_way[0].chunks)
    assert all(plan.owner(chunk) is None for chunk in range(21))
