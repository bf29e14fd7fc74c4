"""Which version calls go to, and how that changes: records in, records out."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fleetstart.controller.state import traffic
from fleetstart.controller.state.records import Failure, FunctionRecord, Rejection, Rollout, ScaleOverride
from fleetstart.runtime.contract.errors import ErrorInfo, InvalidInput, InvalidSpec, NotFound
from fleetstart.runtime.contract.function.spec import Limits, Scale
from fleetstart.runtime.contract.ids import FunctionName, Version
from tests.controller.scheduler.test_autoscaler import spec

ONE = FunctionRecord(name=FunctionName("f"), live=Version(1), deployed_unix_ms=5)
V1, V2, V3 = Version(1), Version(2), Version(3)


def plan(version: Version, alias: str = "live", percent: int = 100) -> Rollout:
    return Rollout(version=version, alias=alias, percent=percent, begun_unix_ms=10)


def never(version: Version) -> bool:
    return False


def test_a_record_from_before_there_were_aliases_is_read() -> None:
    old = b'{"name":"f","live":1,"deployed_unix_ms":5}'
    assert msgspec.json.decode(old, type=FunctionRecord) == ONE
    full = traffic.with_split(traffic.with_alias(ONE, "prod", V2, 6), {V1: 90, V2: 10}, 7)
    assert msgspec.json.decode(msgspec.json.encode(full), type=FunctionRecord) == full


# ── calls ──────────────────────────────────────────────────────────────────────────────────────────


def test_calls_go_to_live_or_where_their_alias_points() -> None:
    record = traffic.with_alias(ONE, "prod", V3, 6)
    assert traffic.version_for_call(record, "live", "inv-1", never) == V1
    assert traffic.version_for_call(record, "prod", "inv-1", never) == V3
    with pytest.raises(NotFound) as refused:
        traffic.version_for_call(record, "porod", "inv-1", never)
    assert "live, prod" in refused.value.hint


@given(st.integers(1, 99), st.text())
def test_a_split_gives_each_version_its_share_and_each_invocation_one_version(percent: int, prefix: str) -> None:
    record = traffic.with_split(ONE, {V1: 100 - percent, V2: percent}, 6)
    ids = [f"{prefix}{n}" for n in range(1000)]
    got = [traffic.version_for_call(record, "live", id, never) for id in ids]
    assert abs(got.count(V2) / len(ids) * 100 - percent) < 8
    assert got == [traffic.version_for_call(record, "live", id, never) for id in ids]


def test_a_canary_that_cannot_start_gets_no_calls() -> None:
    record = traffic.with_split(ONE, {V1: 1, V2: 99}, 6)
    assert {traffic.version_for_call(record, "live", str(n), lambda version: version == V2) for n in range(200)} == {V1}
    assert traffic.in_service(record) == {V1, V2}


# ── changes ────────────────────────────────────────────────────────────────────────────────────────


def test_rollback_undoes_the_last_change_first() -> None:
    two = traffic.deployed(ONE, plan(V2), probe=False)
    assert (two.live, two.past) == (V2, [V1])
    canary = traffic.deployed(two, plan(V3, percent=10), probe=False)
    assert canary.split == {V2: 90, V3: 10}
    trying = traffic.deployed(canary, plan(V3), probe=True)
    assert trying.rollout is not None
    back = traffic.rolled_back(trying, None, 11)
    assert back.rollout is None
    assert back.split == canary.split
    back = traffic.rolled_back(back, None, 11)
    assert back.split == {}
    assert back.live == V2
    back = traffic.rolled_back(back, None, 11)
    assert back.live == V1
    assert back.past == []
    with pytest.raises(InvalidInput, match="no other version"):
        traffic.rolled_back(back, None, 11)
    forth = traffic.rolled_back(back, V3, 12)
    assert (forth.live, forth.past) == (V3, [V1])


@given(st.lists(st.integers(1, 6), max_size=60))
def test_rollbacks_walk_the_way_back_step_by_step(way: list[int]) -> None:
    record = ONE
    lives = [record.live]
    for number in way:
        record = traffic.with_live(record, Version(number), 6)
        if record.live != lives[-1]:
            lives.append(record.live)
    for expected in reversed(lives[-traffic.PAST_KEPT - 1 : -1]):
        record = traffic.rolled_back(record, None, 7)
        assert record.live == expected


@pytest.mark.parametrize(
    "weights", [{}, {V1: 50}, {V1: 100, V2: 1}, {V1: 110, V2: -10}], ids=["none", "half", "more", "negative"]
)
def test_a_split_that_does_not_come_to_100_is_refused(weights: dict[Version, int]) -> None:
    with pytest.raises(InvalidInput, match="come to 100"):
        traffic.with_split(ONE, weights, 6)


def test_all_calls_to_one_is_no_split_any_more() -> None:
    half = traffic.with_split(ONE, {V1: 50, V2: 50}, 6)
    assert half.live == V1
    whole = traffic.with_split(half, {V2: 100}, 7)
    assert (whole.live, whole.split, whole.past) == (V2, {}, [V1])
    assert traffic.with_split(ONE, {V2: 70, V3: 30}, 7).live == V2, "the largest, where live has none"


@pytest.mark.parametrize("alias", ["", "1", "12", "-a", "a-", "A", "a" * 33, "a/b", "a@b", "päd", "a b"])
def test_aliases_that_could_be_taken_for_something_else_are_refused(alias: str) -> None:
    with pytest.raises(InvalidInput):
        traffic.with_alias(ONE, alias, V1, 6)


def test_aliases_are_set_moved_removed_and_bounded() -> None:
    record = traffic.with_alias(traffic.with_alias(ONE, "prod", V1, 6), "prod", V2, 6)
    assert record.aliases == {"prod": V2}
    assert traffic.without_alias(record, "prod").aliases == {}
    with pytest.raises(InvalidInput):
        traffic.without_alias(record, "live")
    with pytest.raises(NotFound):
        traffic.without_alias(record, "dev")
    assert traffic.with_alias(record, "live", V2, 6).live == V2
    full = replace(ONE, aliases={f"a{n}": V1 for n in range(traffic.ALIASES_MAX)})
    with pytest.raises(InvalidInput, match="20 aliases"):
        traffic.with_alias(full, "more", V1, 6)


def test_scaling_lasts_until_another_version_is_live() -> None:
    record = traffic.scaled(ONE, ScaleOverride(min=2))
    assert traffic.scale_of(record, spec(scale=Scale(max=3))) == Scale(min=2, max=3)
    record = traffic.scaled(record, ScaleOverride(keep_alive_s=5.0))
    assert traffic.scale_of(record, spec(scale=Scale(max=3))) == Scale(min=2, max=3, keep_alive_s=5.0)
    assert traffic.scaled(record, None).scaled is None
    assert traffic.with_live(record, V1, 6).scaled is not None
    assert traffic.with_live(record, V2, 6).scaled is None
    with pytest.raises(InvalidSpec):
        traffic.scaled(record, ScaleOverride(max=1))
    with pytest.raises(InvalidSpec):
        traffic.scaled(ONE, ScaleOverride(min=-1))


def test_limits_are_the_versions_unless_they_were_set() -> None:
    own = spec(limits=Limits(rate=5, burst=9))
    assert traffic.limits_of(None, own) == traffic.limits_of(ONE, own) == own.limits
    record = traffic.scaled(ONE, ScaleOverride(concurrent=3))
    assert traffic.limits_of(record, own) == Limits(rate=5, burst=9, concurrent=3)
    assert traffic.scale_of(record, own) == own.scale
    record = traffic.scaled(record, ScaleOverride(rate=0))
    assert traffic.limits_of(record, own) == Limits(concurrent=3)
    with pytest.raises(InvalidSpec, match="rate"):
        traffic.scaled(ONE, ScaleOverride(rate=-1))
    with pytest.raises(InvalidSpec, match="burst"):
        traffic.scaled(ONE, ScaleOverride(burst=-1))


@given(
    st.builds(
        ScaleOverride,
        min=st.none() | st.integers(0, 1000),
        max=st.none() | st.integers(1, 1000),
        keep_alive_s=st.none() | st.floats(0, 86_400),
    ),
    st.integers(0, 1000).flatmap(
        lambda least: st.builds(Scale, min=st.just(least), max=st.integers(max(1, least), 1000))
    ),
)
def test_whatever_is_set_fits_whatever_a_version_says(change: ScaleOverride, own: Scale) -> None:
    try:
        record = traffic.scaled(ONE, change)
    except InvalidSpec:
        return
    scale = traffic.scale_of(record, spec(scale=own))
    assert change.min in (None, scale.min) or change.max is not None
    assert change.max in (None, scale.max)


# ── deploys ────────────────────────────────────────────────────────────────────────────────────────


def test_a_deploy_that_is_tried_changes_no_calls_until_it_has_answered() -> None:
    trying = traffic.deployed(ONE, plan(V2), probe=True)
    assert traffic.in_service(trying) == {V1}
    assert traffic.tracked_versions(trying) == {V1, V2}
    good = traffic.promoted(trying, 20)
    assert (good.live, good.past, good.rollout, good.deployed_unix_ms) == (V2, [V1], None, 20)
    bad = traffic.rejected(trying, ErrorInfo(code="handler_failed", message="it raised"), 20)
    assert (bad.live, bad.rollout) == (V1, None)
    assert bad.rejected is not None
    assert bad.rejected.version == V2
    assert traffic.deployed(bad, plan(V3), probe=True).rejected is None


def test_a_deploy_to_an_alias_leaves_live_alone_and_a_canary_gets_its_share() -> None:
    staged = traffic.promoted(traffic.deployed(ONE, plan(V2, alias="staging"), probe=True), 20)
    assert (staged.live, staged.aliases, staged.deployed_unix_ms) == (V1, {"staging": V2}, 5)
    canary = traffic.promoted(traffic.deployed(staged, plan(V2, percent=25), probe=True), 20)
    assert (canary.live, canary.split) == (V1, {V1: 75, V2: 25})
    whole = traffic.deployed(canary, plan(V2), probe=False)
    assert (whole.live, whole.split) == (V2, {})


def test_a_canary_that_was_made_live_meanwhile_ends_and_live_keeps_all_calls() -> None:
    trying = traffic.deployed(ONE, plan(V2, percent=10), probe=True)
    moved = traffic.with_alias(trying, "live", V2, 15)
    assert traffic.ended(moved, None, 20) == replace(moved, rollout=None)
    split = traffic.with_split(trying, {V2: 70, V3: 30}, 15)
    assert traffic.ended(split, None, 20) == replace(split, rollout=None)


def test_a_rollout_that_can_no_longer_get_its_alias_is_rejected_with_the_reason() -> None:
    trying = traffic.deployed(ONE, plan(V2, alias="staging"), probe=True)
    full = replace(trying, aliases={f"a{n}": V1 for n in range(traffic.ALIASES_MAX)})
    ended = traffic.ended(full, None, 20)
    assert (ended.rollout, ended.aliases) == (None, full.aliases)
    assert ended.rejected is not None
    assert (ended.rejected.version, ended.rejected.error.code) == (V2, "invalid_input")


def test_the_same_deploy_again_changes_nothing() -> None:
    assert traffic.deployed(ONE, plan(V1), probe=True) == ONE
    trying = traffic.deployed(ONE, plan(V2), probe=True)
    assert traffic.deployed(trying, plan(V1), probe=True) == ONE, "the newest wish counts"
    split = traffic.with_split(ONE, {V1: 90, V2: 10}, 6)
    assert traffic.deployed(split, plan(V2, percent=10), probe=True) == split
    assert traffic.deployed(split, plan(V1), probe=False).split == {}


def test_a_deploy_of_what_failed_to_start_is_tried_again_or_remembers_it() -> None:
    failed = Rejection(version=V1, error=ErrorInfo(code="start_failed", message="it raised"), unix_ms=8)
    again = traffic.deployed(ONE, plan(V1), probe=True, failed=failed)
    assert again.rollout == plan(V1)
    assert traffic.deployed(again, plan(V1), probe=True).rollout == plan(V1), "it is being tried"
    untried = traffic.deployed(ONE, plan(V1), probe=False, failed=failed)
    assert (untried.rollout, untried.rejected) == (None, failed)
    assert traffic.deployed(untried, plan(V1), probe=False).rejected == failed
    assert traffic.deployed(untried, plan(V1), probe=True).rollout == plan(V1)
    assert traffic.deployed(untried, plan(V2), probe=False).rejected is None


def test_the_last_failure_is_told_until_a_later_start_succeeds() -> None:
    error = ErrorInfo(code="start_failed", message="it raised")
    failed = Rejection(version=V1, error=error, unix_ms=8)
    assert traffic.last_failure(ONE, None) is None
    assert traffic.last_failure(ONE, Failure(count=1, last_unix_ms=8, error=error)) == failed
    record = replace(ONE, rejected=failed)
    assert traffic.last_failure(record, None) == failed
    assert traffic.last_failure(replace(record, live=V2), None) is None
    assert traffic.with_start(record, 7) == replace(record, started=V1), "a worker that was ready before it"
    assert traffic.with_start(record, 9) == replace(ONE, started=V1)


@pytest.mark.parametrize(
    "wrong", [plan(V2, percent=0), plan(V2, percent=101), plan(V2, alias="x", percent=5), plan(V1, percent=5)]
)
def test_canaries_that_make_no_sense_are_refused(wrong: Rollout) -> None:
    with pytest.raises(InvalidInput):
        traffic.deployed(ONE, wrong, probe=False)


def test_roles_are_what_people_call_a_version() -> None:
    record = traffic.with_split(traffic.with_alias(ONE, "prod", V1, 6), {V1: 90, V2: 10}, 6)
    record = traffic.deployed(record, plan(V3), probe=True)
    assert traffic.roles(record, V1) == ["live", "90%", "prod"]
    assert traffic.roles(record, V2) == ["10%"]
    assert traffic.roles(record, V3) == ["being tried"]
    assert traffic.roles(record, Version(4)) == []
