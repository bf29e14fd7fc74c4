"""Decisions that the benchmark changes in its controllers are where it changes them."""

from __future__ import annotations

import inspect

import pytest

from tests.bench.coldstart.controller import CHANGES


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_is_there_and_of_the_same_kind(change: str) -> None:
    patches = CHANGES[change]()
    assert patches
    for owner, name, value in patches:
        was = inspect.getattr_static(owner, name)
        assert callable(was) == callable(value), f"{owner}: {name} is {was!r}"
