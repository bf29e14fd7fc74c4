"""Where a function may run: which nodes fit, and what is said where none does.

A node says in which region it is, or nothing. A function that names regions runs in these alone, each stage of a
pipeline too; one that names none runs anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def admits(wanted: Sequence[str], region: str) -> bool:
    """`region` of a node; "" of one that says none."""
    return not wanted or region in wanted


def lack(wanted: Sequence[str], regions: Iterable[str]) -> str:
    """Why none of the nodes, which are in these regions, may run it; empty if one may, or if there is no node."""
    found = list(regions)
    if not found or any(admits(wanted, region) for region in found):
        return ""
    return f"it may run in {_either(wanted)}, and no node is there: {where(found)}"


def where(regions: Iterable[str]) -> str:
    """ "2 nodes are in us, 1 in no region"."""
    counts = sorted(Counter(regions).items(), key=lambda pair: (not pair[0], -pair[1], pair[0]))
    parts = [f"{count} in {region or 'no region'}" for region, count in counts]
    first = counts[0][1]
    parts[0] = parts[0].replace(" in ", " node is in " if first == 1 else " nodes are in ", 1)
    return ", ".join(parts)


def _either(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
