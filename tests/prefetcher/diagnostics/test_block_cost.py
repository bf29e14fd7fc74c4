"""The cost of a block on real connections and memory; no times are asserted."""

from __future__ import annotations

import os

from fleetstart.prefetcher.diagnostics.block_cost import measure
from fleetstart.runtime.contract.sizes import MIB
from tests.servers import shared_memory


def test_the_same_bytes_are_timed_in_few_blocks_and_in_many_and_nothing_stays() -> None:
    shared, descriptors = shared_memory(), len(os.listdir("/proc/self/fd"))
    found = measure(8 * MIB, rounds=1)
    assert found.size_bytes == 8 * MIB
    assert list(found.seconds) == [32, 128, 512, 2048]
    assert all(seconds > 0 for seconds in found.seconds.values())
    assert shared_memory() == shared
    assert len(os.listdir("/proc/self/fd")) == descriptors
