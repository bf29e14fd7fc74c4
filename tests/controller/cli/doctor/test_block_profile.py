"""What `fs doctor --profile` says of measured times."""

from __future__ import annotations

import pytest

from fleetstart.controller.cli.doctor.block_profile import block_finding
from fleetstart.runtime.contract.node.throughput import BlockTimes

GB = 1_000_000_000


def test_the_overhead_of_a_block_and_the_elbow_follow_from_measured_times() -> None:
    dear = BlockTimes(size_bytes=GB, seconds={count: 0.5 + count * 0.01 for count in (10, 100, 1000)})
    found = block_finding(dear)
    assert found.numbers is not None
    assert found.numbers["block_overhead_s"] == pytest.approx(0.01)
    assert found.numbers["bytes_per_s"] == pytest.approx(2 * GB)
    assert found.found.startswith("a block costs 10000 µs beside its bytes")
    cheap = block_finding(BlockTimes(size_bytes=GB, seconds={10: 0.5001, 1000: 0.51}))
    assert cheap.numbers is not None
    assert cheap.numbers["blocks"] > found.numbers["blocks"]
