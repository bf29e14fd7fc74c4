"""uv's explanation of a failure is one sentence."""

from __future__ import annotations

from fleetstart.controller.cli.packages.build import packages_of
from fleetstart.controller.cli.packages.uv import sentence_of


def test_the_sentence_of_a_conflict_has_no_frames() -> None:
    lines = [
        "Resolved 3 packages in 5ms",
        "  × No solution found when resolving dependencies:",
        "  ╰─▶ Because there is no version of shape==9 and you require",
        "      shape==9, we can conclude that your requirements are unsatisfiable.",
    ]
    assert sentence_of(lines) == (
        "No solution found when resolving dependencies: Because there is no version of shape==9 and you require "
        "shape==9, we can conclude that your requirements are unsatisfiable."
    )


def test_the_sentence_of_an_error_begins_after_the_word() -> None:
    assert sentence_of(["Using Python 3.11", "error: Failed to fetch `x`"]) == "Failed to fetch `x`"
    assert sentence_of([]) == ""


def test_packages_of_a_lock_are_its_pinned_lines() -> None:
    lock = "six==1.16.0 \\\n    --hash=sha256:00\ncolorama==0.4.6 ; sys_platform == 'win32'\n"
    assert packages_of(lock) == ["six==1.16.0", "colorama==0.4.6"]
