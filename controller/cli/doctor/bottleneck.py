"""Which limit a slow load is hitting: what loads reached, held against what the machine gives. No measuring here.

A load passes several limits one after the other: its source, the checksum, and, if no memory was made ahead, the
making of memory. It can be no faster than the slowest of them; the one that it comes near is the one that it hits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleetstart.runtime.contract.node.throughput import Ceilings, Limit

from .checks import Finding

NEAR = 0.8
"""Of its source's ceiling: a load that reaches that much is as fast as the source."""
EXPLAINS = 0.7
"""Of another ceiling, which must itself be lower than the source's: two measurements agree no better than that."""
ABOVE = 1.25
"""More than the ceiling by that much is no load from there: caches helped, or the source has changed."""

_SOURCES: dict[str, Limit] = {"disk": "disk", "store": "store", "device": "device"}
_PASSED: dict[str, tuple[Limit, ...]] = {"disk": ("checksum", "prefault"), "store": ("checksum", "prefault")}
_SMALL_PAGES = "memory for weights is of 4 KiB pages, which slow direct reads down"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedLoads:
    """What one node says of its last loads."""

    node: str
    pages: str
    bytes_per_s: dict[str, float]


def format_rate(bytes_per_s: float) -> str:
    """2.9e9 → "2.90 GB/s"; three digits, so that slow networks have some too."""
    amount = bytes_per_s / 1e9
    digits = 1 if amount >= 100 else 2 if amount >= 0.1 else 4
    return f"{amount:.{digits}f} GB/s"


def diagnose(ceilings: Ceilings, observed: ObservedLoads, *, remote_store: bool) -> list[Finding]:
    """One finding for each source of which the node loaded something."""
    return [
        _diagnose(source, reached, ceilings, observed, remote_store)
        for source, reached in observed.bytes_per_s.items()
        if source in _SOURCES
    ]


def _diagnose(source: str, reached: float, ceilings: Ceilings, observed: ObservedLoads, remote_store: bool) -> Finding:
    begun = f"{observed.node}: loads from the {source} run at {format_rate(reached)}"
    if source == "device":
        begun = f"{observed.node}: loads to the device run at {format_rate(reached)}"
    own = ceilings.bytes_per_s.get(_SOURCES[source])
    numbers = {"bytes_per_s": reached}
    if not own:
        why = {**ceilings.left_out, **ceilings.failed}.get(_SOURCES[source], "it was not measured")
        return Finding(check="loads", verdict="ok", found=f"{begun}; nothing to compare: {why}", numbers=numbers)
    share = reached / own
    numbers["share"] = share
    begun += f", {share:.0%} of what it gives now ({format_rate(own)})"
    if share >= ABOVE:
        found = f"{begun}: a cache helped, or it is slower now than it was then"
        return Finding(check="loads", verdict="ok", found=found, numbers=numbers)
    if share >= NEAR:
        limit, advice = _at_the_limit(source, observed, remote_store)
        return Finding(check="loads", verdict="ok", found=f"{begun}: {limit}", advice=advice, numbers=numbers)
    limit, advice = _below(source, reached, own, ceilings, observed, remote_store)
    return Finding(check="loads", verdict="warn", found=f"{begun}: {limit}", advice=advice, numbers=numbers)


def _at_the_limit(source: str, observed: ObservedLoads, remote_store: bool) -> tuple[str, str]:
    if source == "device":
        return "PCIe is the limit", ""
    if source == "store" and remote_store:
        return "the network or the store is the limit", "what is kept on the disk need not come again: FS_DISK_CACHE"
    if observed.pages == "small":
        return f"the disk is the limit, and {_SMALL_PAGES}", "give it huge pages, see above"
    return "the disk is the limit", ""


def _below(
    source: str, reached: float, own: float, ceilings: Ceilings, observed: ObservedLoads, remote_store: bool
) -> tuple[str, str]:
    """The limit among the others that it comes nearest, if it comes near one."""
    near = max(_explanations(source, reached, own, ceilings), default=None)
    if near is not None:
        _, limit, ceiling = near
        if limit == "prefault":
            return (
                f"memory is the limit: new memory comes at {format_rate(ceilings.bytes_per_s['prefault'])}, "
                f"which leaves {format_rate(ceiling)}",
                "keep more of it ready: FS_POOL_MEMORY",
            )
        return (
            f"the cores are the limit: together they check {format_rate(ceiling)}",
            "give the node more cores, or fewer workers that compute while it loads",
        )
    if observed.pages == "small" and ceilings.pages != "small":
        return (
            f"the node's {_SMALL_PAGES}; this machine gives better ones now",
            "start it again: fs down, fs up",
        )
    if source == "device":
        return "no limit is near", "the segment's pieces may come late, or the cores that copy them be busy"
    if source == "store" and remote_store:
        return "no limit is near", "ask for more ranges at once: FS_FETCH_THREADS"
    return "no limit is near", "others may have used the disk or the cores then: load again, and compare"


def _explanations(source: str, reached: float, own: float, ceilings: Ceilings) -> Iterator[tuple[float, Limit, float]]:
    """Share of it that was reached, limit, and the ceiling that it makes."""
    for limit in _PASSED.get(source, ()):
        rate_alone = ceilings.bytes_per_s.get(limit)
        if not rate_alone:
            continue
        # A thread first makes the chunk's memory and then reads into it, so these two times add up.
        ceiling = 1 / (1 / rate_alone + 1 / own) if limit == "prefault" else rate_alone
        if ceiling < NEAR * own and reached >= EXPLAINS * ceiling:
            yield reached / ceiling, limit, ceiling
