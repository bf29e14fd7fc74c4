"""Measured rates: of each peer and of all together, of as many as a report shall have."""

from __future__ import annotations

from fleetstart.prefetcher.fetch.bandwidth import LEAST_BYTES, PEERS_MAX, Bandwidths


def test_a_peer_s_rate_is_its_own_and_counts_for_all_peers() -> None:
    rates = Bandwidths()
    rates.note("store", LEAST_BYTES, 1.0)
    rates.note("peer:one", 2 * LEAST_BYTES, 1.0)
    rates.note("peer:two", LEAST_BYTES - 1, 1.0)
    assert rates.bytes_per_s() == {
        "store": LEAST_BYTES,
        "peer:one": 2 * LEAST_BYTES,
        "peer": 2 * LEAST_BYTES,
    }


def test_rates_of_peers_that_were_read_from_long_ago_are_forgotten() -> None:
    rates = Bandwidths()
    for number in range(2 * PEERS_MAX):
        rates.note("peer:first", LEAST_BYTES, 1.0)
        rates.note(f"peer:{number}", LEAST_BYTES, 1.0)
    found = rates.bytes_per_s()
    assert len(found) == PEERS_MAX + 1
    assert {"peer", "peer:first", f"peer:{2 * PEERS_MAX - 1}"} <= set(found)
