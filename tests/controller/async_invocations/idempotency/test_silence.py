from __future__ import annotations

from fleetstart.controller.async_invocations.idempotency.silence import RUNNING_MS, SILENT_MS, SilenceWatch


def looks(renewed_at_s: list[float], begin_s: float, end_s: float, watch: SilenceWatch | None = None) -> float | None:
    """Looks each quarter of a second; the moment of the first at which the gateway is silent."""
    watch = watch or SilenceWatch()
    now_s = begin_s
    while now_s <= end_s:
        last_s = max((at_s for at_s in renewed_at_s if at_s <= now_s), default=0.0)
        if watch.silent(RUNNING_MS - int((now_s - last_s) * 1000), now_s):
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
