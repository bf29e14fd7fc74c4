"""A fetch that is divided over its sources: by hand, and that every byte comes once, from who has it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.planner.links.division import FetchSource, divide


def size_bytes(layers: int) -> int:
    return 100 * layers.bit_count()


def test_two_sources_that_have_all_end_together() -> None:
    assert divide(0b1111, [FetchSource(-1, 30.0), FetchSource(-1, 10.0)], size_bytes) == pytest.approx([300, 100])


def test_what_one_alone_has_comes_from_it_and_the_others_do_the_rest() -> None:
    shares = divide(0b1111, [FetchSource(0b0111, 10.0), FetchSource(0b1111, 10.0)], size_bytes)
    assert shares == pytest.approx([200, 200])
    shares = divide(0b1111, [FetchSource(0b0001, 10.0), FetchSource(0b1111, 10.0)], size_bytes)
    assert shares == pytest.approx([100, 300]), "it has no more to give"


def test_a_source_that_is_busy_longer_than_the_others_together_gets_nothing_more() -> None:
    shares = divide(0b111, [FetchSource(0b001, 1.0), FetchSource(0b111, 1.0), FetchSource(0b110, 100.0)], size_bytes)
    assert shares == pytest.approx([50, 50, 200], abs=3)


def test_layers_that_no_source_has_are_left_out() -> None:
    assert divide(0b11, [FetchSource(0b01, 1.0)], size_bytes) == pytest.approx([100])
    assert divide(0b11, [], size_bytes) == []


sources = st.lists(st.builds(FetchSource, st.integers(0, 255), st.floats(1, 1e9)), max_size=6)


@given(st.integers(0, 255), sources)
def test_every_byte_that_any_source_has_comes_once_and_no_source_gives_what_it_has_not(
    layers: int, sources: list[FetchSource]
) -> None:
    shares = divide(layers, sources, size_bytes)
    there = 0
    for source in sources:
        there |= source.layers
    assert sum(shares) == pytest.approx(size_bytes(layers & there))
    for source, share in zip(sources, shares, strict=True):
        assert 0 <= share <= size_bytes(layers & source.layers) * (1 + 1e-9)


@given(st.integers(1, 255), st.lists(st.floats(1, 1e6), min_size=1, max_size=6))
def test_sources_that_have_all_are_as_quick_as_one_of_their_rates_together(layers: int, rates: list[float]) -> None:
    shares = divide(layers, [FetchSource(-1, rate) for rate in rates], size_bytes)
    ends_s = [share / rate for share, rate in zip(shares, rates, strict=True)]
    assert ends_s == pytest.approx([size_bytes(layers) / sum(rates)] * len(rates))
