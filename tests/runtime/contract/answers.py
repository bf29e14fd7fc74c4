"""Types that a caller of a function gives for its answers."""

from __future__ import annotations

import msgspec


class Inner(msgspec.Struct):
    a: str
    b: list[int]


class Outer(msgspec.Struct):
    inner: Inner
