"""Eviction of unpacked bundles from a node's disk. Pure.

Those that no worker uses, the longest unused first: all that were unused for `UNUSED_S`, and as many more as the limit
asks for. Each can be fetched again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fleetstart.runtime.contract.ids import BundleId
from fleetstart.runtime.contract.sizes import GIB

LIMIT_BYTES = 10 * GIB
"""Limit of all unpacked bundles: ten thousand of a megabyte."""
UNUSED_S = 30 * 24 * 3600.0
"""After a month the next start may as well fetch it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpackedBundle:
    bundle: BundleId
    size_bytes: int
    used_unix_s: float
    """When a worker was last started with it."""
    in_use: bool = False


def bundles_to_evict(bundles: Iterable[UnpackedBundle], now_unix_s: float, limit_bytes: int) -> list[BundleId]:
    """The bundles that leave, the longest unused first."""
    there = sorted(bundles, key=lambda one: one.used_unix_s)
    held = sum(one.size_bytes for one in there)
    chosen = []
    for one in there:
        if one.in_use:
            continue
        if held <= limit_bytes and now_unix_s - one.used_unix_s < UNUSED_S:
            break
        held -= one.size_bytes
        chosen.append(one.bundle)
    return chosen
