from __future__ import annotations

from fleetstart.controller.cli.local.restart_policy import BACKOFF_MAX_S, STEADY_S, RestartPolicy


def test_the_first_death_is_answered_at_once_and_later_ones_later_and_later() -> None:
    policy = RestartPolicy()
    delays = [policy.died(lived_s=0.1) for _ in range(12)]
    assert delays[:4] == [0.0, 0.1, 0.2, 0.4]
    assert delays == sorted(delays)
    assert delays[-1] == BACKOFF_MAX_S


def test_a_steady_life_forgives() -> None:
    policy = RestartPolicy()
    for _ in range(10):
        policy.died(lived_s=0)
    assert policy.died(lived_s=STEADY_S) == 0.0
    assert policy.died(lived_s=1) == 0.1


def test_weeks_of_failure_do_not_overflow() -> None:
    policy = RestartPolicy()
    for _ in range(5000):
        delay = policy.died(lived_s=0)
    assert delay == BACKOFF_MAX_S
