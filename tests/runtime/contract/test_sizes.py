"""Sizes: what people write, and what is no size."""

from __future__ import annotations

from typing import Any

import pytest

from fleetstart.runtime.contract.errors import InvalidSpec
from fleetstart.runtime.contract.sizes import MIB, parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * MIB),
        ("1GiB", 1024 * MIB),
        ("1.5G", 1536 * MIB),
        ("64k", 65536),
        ("7", 7),
        (9, 9),
        ("2 MB", 2 * MIB),
    ],
)
def test_sizes(text: str | int, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "1XiB", "1e9", True, None, 1.5])
def test_what_is_no_size_is_refused(text: Any) -> None:
    with pytest.raises(InvalidSpec, match="not understood"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0.5", "1.5B"])
def test_a_part_of_a_byte_is_refused(text: str) -> None:
    with pytest.raises(InvalidSpec, match="part of a byte"):
        parse_size(text)
