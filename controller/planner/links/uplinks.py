"""Rates of nodes' uplinks, from what readers measured when they pulled from them. Pure.

A node's reports have a moving average for each peer that it has read from: the rate of that direction of that path. It
is the holder's uplink only where the reader could have taken more; else it is the reader's own link, of which all that
it reads has a part. Until one reader has shown a limit, a node is taken to send as fast as it receives at best, as
networks of machine rooms are symmetric.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fleetstart.runtime.contract.ids import NodeId

LIMITED = 0.8
"""Share of a reader's rate from which on its own link may have been the limit."""
PEER = "peer:"


class PairRate(NamedTuple):
    """Rate at which one node has read from another one."""

    bytes_per_s: float
    reader_limits: bool
    """True if the reader's own link may have been the limit."""


def pair_rates(bytes_per_s: Mapping[str, float]) -> dict[NodeId, PairRate]:
    """What a reader's report says of those that it has read from. `bytes_per_s`: its rates by source."""
    rates = {
        NodeId(name[len(PEER) :]): rate for name, rate in bytes_per_s.items() if name.startswith(PEER) and rate > 0
    }
    if not rates:
        return {}
    limits = sum(rates.values()) >= LIMITED * max(bytes_per_s.values())
    return {holder: PairRate(rate, limits) for holder, rate in rates.items()}


def uplink_bytes_per_s(receives_bytes_per_s: float, read_at: Iterable[PairRate]) -> float:
    """A node's sending rate, by the rates at which others have read from it."""
    pairs = list(read_at)
    if not pairs:
        return receives_bytes_per_s
    fastest = max(pair.bytes_per_s for pair in pairs)
    return max(receives_bytes_per_s, fastest) if any(pair.reader_limits for pair in pairs) else fastest
