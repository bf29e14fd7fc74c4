"""Finding of `fs doctor --profile`: what a block of a multicast costs here, and the number of blocks at the elbow."""

from __future__ import annotations

from fleetstart.runtime.contract.node.throughput import BlockTimes
from fleetstart.runtime.contract.sizes import GIB
from fleetstart.runtime.contract.weights.manifest import CHUNK_BYTES

from ...planner.multicast import BlockCost, elbow, fit_cost
from .bottleneck import format_rate
from .checks import Finding
from .throughput import MeasurementFailed, run_measurement

MODEL_BYTES = 16 * GIB
LINK_BYTES_PER_S = 1.25e9
"""10 Gbit/s, which cloud machines have."""
NODES = 8


def check_blocks() -> Finding:
    """Measures for about a second."""
    try:
        times = run_measurement("fleetstart.prefetcher.diagnostics.block_cost", (), BlockTimes)
    except MeasurementFailed as error:
        return Finding(check="blocks", verdict="warn", found=f"could not be measured: {error}")
    return block_finding(times)


def block_finding(times: BlockTimes) -> Finding:
    cost = fit_cost(times.size_bytes, list(times.seconds.items()))
    link = BlockCost(min(cost.bytes_per_s, LINK_BYTES_PER_S), cost.overhead_s)
    blocks = elbow(MODEL_BYTES, link, NODES, MODEL_BYTES // CHUNK_BYTES)
    found = (
        f"a block costs {cost.overhead_s * 1e6:.0f} µs beside its bytes at {format_rate(cost.bytes_per_s)}; 16 GiB to "
        f"{NODES} nodes at {format_rate(link.bytes_per_s)} go best in {blocks} blocks"
    )
    numbers = {"block_overhead_s": cost.overhead_s, "bytes_per_s": cost.bytes_per_s, "blocks": float(blocks)}
    return Finding(check="blocks", verdict="ok", found=found, numbers=numbers)
