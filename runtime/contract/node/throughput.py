"""What a machine gives weights on their way, as measured on it: the answer of one process to `fs doctor`, another."""

from __future__ import annotations

from typing import Literal

import msgspec

Limit = Literal["checksum", "prefault", "disk", "store", "device"]
"""`checksum` is reading memory with every core and hashing it; `prefault` is making new memory with every core."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    pages: Literal["hugetlb", "thp", "small"]
    """Of the memory for weights, into which everything was read."""
    refused: dict[str, str] = {}
    """Better kinds of pages, and why the machine does not give them."""
    bytes_per_s: dict[Limit, float] = {}
    measured: dict[Limit, str] = {}
    """How, or where, in a few words."""
    left_out: dict[Limit, str] = {}
    """Where there was nothing to measure, and why."""
    failed: dict[Limit, str] = {}
    """What could not be measured though it is there, and why."""
    buffered: list[Limit] = []
    """Disks that refuse direct reads: what is read goes through the page cache and is copied."""


class DeviceCeiling(msgspec.Struct, frozen=True, kw_only=True):
    """From pinned host memory to a device."""

    bytes_per_s: float = 0.0
    device: str = ""
    left_out: str = ""
    failed: str = ""
