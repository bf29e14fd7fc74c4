"""Device throughput: measures copies from pinned memory to the CUDA device; prints JSON.

`python -m fleetstart.runtime.weights.device_throughput` makes plain copies of the driver, of a size at which the link
runs at full speed; this is the upper bound for loads (`cuda`). It runs as its own process, because `fs doctor` and the
node never import torch.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import msgspec

from ..contract.node.throughput import DeviceCeiling
from ..contract.sizes import MIB

COPY_BYTES = 256 * MIB
ROUNDS = 7


def measure() -> DeviceCeiling:
    try:
        import torch
    except ImportError as error:
        return DeviceCeiling(failed=f"torch does not import: {error}")
    if not torch.cuda.is_available():
        return DeviceCeiling(left_out="torch sees no CUDA device")
    try:
        source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        rates = []
        for _ in range(ROUNDS + 1):
            torch.cuda.synchronize()
            began_s = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            rates.append(COPY_BYTES / (time.perf_counter() - began_s))
    except RuntimeError as error:  # no memory left, or a driver that does not fit
        return DeviceCeiling(failed=f"the CUDA device refuses: {str(error).splitlines()[0]}")
    return DeviceCeiling(bytes_per_s=median(rates[1:]), device=torch.cuda.get_device_name())


def main() -> int:
    sys.stdout.buffer.write(msgspec.json.encode(measure()) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
