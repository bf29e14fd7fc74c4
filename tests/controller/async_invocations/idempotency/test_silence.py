from __future__ import annotations

from collections.abc import Sequence

from fleetstart.controller.async_invocations.idempotency.silence import RUNNING_MS, SILENT_MS, SilenceWatch


def looks(
    renewed_at_s: list[float],
    begin_s: float,
    end_s: float,
    watch: SilenceWatch | None = None,
    refused_s: Sequence[tuple[float, float]] = (),
) -> float | None:
    """Looks each quarter of a second; the moment of the first at which the gateway is silent."""
    watch = watch or SilenceWatch()
    now_s = begin_s
    while now_s <= end_s:
        last_s = max((at_s for at_s in renewed_at_s if at_s <= now_s), default=0.0)
        watch.look(RUNNING_MS - int((now_s - last_s) * 1000), now_s, refused=any(a <= now_s < b for a, b in refused_s))
        if watch.silent():
            return now_s
        now_s += 0.25
    return None


def test_a_gateway_that_renews_is_never_silent() -> None:
    assert looks([1.5 * number for number in range(100)], 0, 100) is None


def test_a_dead_gateway_is_silent_after_ten_seconds() -> None:
    assert looks([], 0, 30) == SILENT_MS / 1000


def test_who_comes_later_watches_for_five_seconds_itself() -> None:
    assert looks([], 100, 130) == 105


def test_after_a_pause_of_redis_the_watch_begins_again() -> None:
    """Redis' clock went on for 20 s; the gateway renews 2 s after Redis is back."""
    watch = SilenceWatch()
    assert looks([], 0, 7, watch) is None
    assert looks([29.0, 30.5, 32.0, 33.5], 27, 35, watch) is None


def test_a_redis_that_refuses_writes_makes_no_gateway_silent() -> None:
    """For 20 s no gateway can renew; the one that lives does so within 1.5 s after."""
    assert looks([21.4 + 1.5 * number for number in range(20)], 0, 40, refused_s=[(0, 20)]) is None
    assert looks([], 0, 40, refused_s=[(0, 20)]) == 24.75, "a dead one is silent 5 s after the last refusal"
