"""Simulated minutes of load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.scheduler.autoscaler import KeepAliveWindow
from fleetstart.runtime.contract.function.spec import FunctionSpec, Scale
from fleetstart.runtime.contract.ids import BundleId, FunctionName

SECOND = 1_000_000_000


def spec(**fields: object) -> FunctionSpec:
    values = {"name": FunctionName("f"), "bundle": BundleId("b"), "entry": "a:b", **fields}
    return FunctionSpec(**values)  # type: ignore[arg-type]


def test_up_at_once_down_after_the_keep_alive() -> None:
    scale, window = Scale(max=8, keep_alive_s=60), KeepAliveWindow(0, 0)
    assert window.desired(scale, 0) == 0
    window.observe(5, 10 * SECOND)
    assert window.desired(scale, 10 * SECOND) == 5
    assert window.falls_ns(scale) is None, "five are needed"
    window.observe(2, 20 * SECOND)
    assert window.desired(scale, 79 * SECOND) == 5, "five were needed until second 20"
    assert window.falls_ns(scale) == 80 * SECOND
    assert window.desired(scale, 80 * SECOND) == 2
    window.observe(0, 90 * SECOND)
    assert window.desired(scale, 149 * SECOND) == 2
    assert window.desired(scale, 150 * SECOND) == 0


def test_a_new_scheduler_keeps_what_is_there_for_one_keep_alive() -> None:
    scale, window = Scale(max=8, keep_alive_s=60), KeepAliveWindow(3, 100 * SECOND)
    assert window.desired(scale, 159 * SECOND) == 3
    assert window.desired(scale, 160 * SECOND) == 0


def test_no_keep_alive_means_none() -> None:
    scale, window = Scale(keep_alive_s=0), KeepAliveWindow(0, 0)
    window.observe(1, 1)
    assert window.desired(scale, 2) == 1
    window.observe(0, 3)
    assert window.desired(scale, 3) == 0


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 12)), max_size=40),
    st.integers(0, 5),
    st.integers(1, 60),
)
def test_the_window_is_the_highest_need_of_the_last_keep_alive(
    steps: list[tuple[int, int]], least: int, keep_alive_s: int
) -> None:
    scale, window = Scale(min=least, max=10, keep_alive_s=keep_alive_s), KeepAliveWindow(0, 0)
    now_s, held = 0, [(0, 0)]
    for wait_s, need in steps:
        now_s += wait_s
        window.observe(need, now_s * SECOND)
        held.append((now_s, need))
        ends = [begun for begun, _ in held[1:]] + [now_s + 1]
        within = [n for (_, n), end in zip(held, ends, strict=True) if end > now_s - keep_alive_s and (end > 0 or n)]
        # A step that lasted no time was never in force, except for the present one.
        expected = max(least, min(10, max(within)))
        assert window.desired(scale, now_s * SECOND) <= expected
        assert window.desired(scale, now_s * SECOND) >= max(least, min(10, need))
