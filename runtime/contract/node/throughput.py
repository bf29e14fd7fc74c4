"""Measured throughput limits of a machine: the result of the measuring process, for `fs doctor`."""

from __future__ import annotations

from typing import Literal

import msgspec

Limit = Literal["checksum", "prefault", "disk", "store", "device"]
"""`checksum` is reading memory with every core and hashing it; `prefault` is making new memory with every core."""


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput of each part of the path that weights take."""

    pages: Literal["hugetlb", "thp", "small"]
    """Kind of pages of the memory for weights, which all reads went to."""
    refused: dict[str, str] = {}
    """Better kinds of pages, and why the machine does not give them."""
    bytes_per_s: dict[Limit, float] = {}
    measured: dict[Limit, str] = {}
    """Method or place of each measurement, in a few words."""
    left_out: dict[Limit, str] = {}
    """Limits that had nothing to measure, with the reason."""
    failed: dict[Limit, str] = {}
    """Limits that could not be measured, with the reason."""
    buffered: list[Limit] = []
    """Disks that refuse direct reads: what is read goes through the page cache and is copied."""


class DeviceCeiling(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput from pinned host memory to a device."""

    bytes_per_s: float = 0.0
    device: str = ""
    left_out: str = ""
    failed: str = ""


class BlockTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of transfers of the same bytes between two memories, in few blocks and in many."""

    size_bytes: int
    seconds: dict[int, float]
    """By number of blocks."""
