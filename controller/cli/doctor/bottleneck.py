"""Bottleneck of a weight load: compares the rates of past loads with the measured limits of the machine.

A load passes several limits one after the other: its source, the checksum, and, if no memory was allocated ahead, the
allocation of memory. It can be no faster than the slowest of them; the limit that it comes near is its bottleneck.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetstart.runtime.contract.node.throughput import Ceilings, Limit

from .checks import Finding

NEAR = 0.8
"""A load that reaches this share of its source's limit is as fast as the source."""
EXPLAINS = 0.7
"""A load that reaches this share of another, lower limit is bound by it: two measurements agree no better than that."""
ABOVE = 1.25
"""A load above this multiple of its source's limit was helped by a cache, or the source has changed."""

_SOURCES: dict[str, Limit] = {"disk": "disk", "store": "store"}
_PASSED: dict[str, tuple[Limit, ...]] = {"disk": ("checksum", "prefault"), "store": ("checksum", "prefault")}
_SMALL_PAGES = "memory for weights has 4 KiB pages, which slow direct reads down"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLoads:
    """Rates of a node's latest loads, by source."""

    node: str
    pages: str
    bytes_per_s: dict[str, float]


def format_rate(bytes_per_s: float) -> str:
    """Formats a rate: 2.9e9 → "2.90 GB/s"; four decimals below 0.1, for slow networks."""
    amount = bytes_per_s / 1e9
    digits = 1 if amount >= 100 else 2 if amount >= 0.1 else 4
    return f"{amount:.{digits}f} GB/s"


def diagnose(ceilings: Ceilings, observed: ObservedLoads, *, remote_store: bool) -> list[Finding]:
    """One finding for each source from which the node has loaded."""
    return [
        _diagnose(source, reached, ceilings, observed, remote_store)
        for source, reached in observed.bytes_per_s.items()
        if source in _SOURCES
    ]


def _diagnose(source: str, reached: float, ceilings: Ceilings, observed: ObservedLoads, remote_store: bool) -> Finding:
    begun = f"{observed.node}: loads from the {source} run at {format_rate(reached)}"
    own = ceilings.bytes_per_s.get(_SOURCES[source])
    numbers = {"bytes_per_s": reached}
    if not own:
        why = {**ceilings.left_out, **ceilings.failed}.get(_SOURCES[source], "it was not measured")
        return Finding(check="loads", verdict="ok", found=f"{begun}; nothing to compare: {why}", numbers=numbers)
    share = reached / own
    numbers["share"] = share
    begun += f", {share:.0%} of the rate measured now ({format_rate(own)})"
    if share >= ABOVE:
        found = f"{begun}: a cache helped, or the source is slower now than it was then"
        return Finding(check="loads", verdict="ok", found=found, numbers=numbers)
    if share >= NEAR:
        limit, advice = _at_the_limit(source, observed, remote_store)
        return Finding(check="loads", verdict="ok", found=f"{begun}: {limit}", advice=advice, numbers=numbers)
    limit, advice = _below(source, reached, own, ceilings, observed, remote_store)
    return Finding(check="loads", verdict="warn", found=f"{begun}: {limit}", advice=advice, numbers=numbers)


def _at_the_limit(source: str, observed: ObservedLoads, remote_store: bool) -> tuple[str, str]:
    if source == "store" and remote_store:
        return "the network or the store is the limit", "cache weights on the node's disk: FS_DISK_CACHE"
    if observed.pages == "small":
        return f"the disk is the limit, and {_SMALL_PAGES}", "give it huge pages, see above"
    return "the disk is the limit", ""


def _below(
    source: str, reached: float, own: float, ceilings: Ceilings, observed: ObservedLoads, remote_store: bool
) -> tuple[str, str]:
    """The other limit that the load comes nearest to, if it comes near one."""
    near = max(_explanations(source, reached, own, ceilings), default=None)
    if near is not None:
        _, limit, ceiling = near
        if limit == "prefault":
            return (
                f"memory allocation is the limit: it runs at {format_rate(ceilings.bytes_per_s['prefault'])}, "
                f"which allows {format_rate(ceiling)}",
                "allocate more memory ahead: FS_POOL_MEMORY",
            )
        return (
            f"the cores are the limit: together they checksum {format_rate(ceiling)}",
            "give the node more cores, or fewer workers that compute while it loads",
        )
    if observed.pages == "small" and ceilings.pages != "small":
        return (
            f"the node's {_SMALL_PAGES}; larger pages are available now",
            "restart it: fs down, fs up",
        )
    if source == "store" and remote_store:
        return "no limit is near", "fetch more ranges at once: FS_FETCH_THREADS"
    return "no limit is near", "other programs may have used the disk or the cores: load again, and compare"


def _explanations(source: str, reached: float, own: float, ceilings: Ceilings) -> Iterator[tuple[float, Limit, float]]:
    """Other limits that the load comes near: the share reached, the limit, and the rate that it allows."""
    for limit in _PASSED.get(source, ()):
        rate_alone = ceilings.bytes_per_s.get(limit)
        if not rate_alone:
            continue
        # A thread first makes the chunk's memory and then reads into it, so these two times add up.
        ceiling = 1 / (1 / rate_alone + 1 / own) if limit == "prefault" else rate_alone
        if ceiling < NEAR * own and reached >= EXPLAINS * ceiling:
            yield reached / ceiling, limit, ceiling
