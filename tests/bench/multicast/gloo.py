"""A rank of torch.distributed's gloo broadcast, for comparison: rank 0 is the source; commands as those of `node`."""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def main() -> None:
    address, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}", rank=rank, world_size=size, timeout=timedelta(minutes=5)
    )
    dist.broadcast(torch.zeros(1024), 0)  # connections are made
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        blocks, block_bytes = command["blocks"], command["block_bytes"]
        tensors = [torch.zeros(block_bytes, dtype=torch.uint8) for _ in range(blocks)]
        if rank == 0:
            for number, tensor in enumerate(tensors):
                tensor.fill_(number + 1)
        time.sleep(max(0.0, command["at_s"] - time.monotonic()))
        arrivals = []
        works = [dist.broadcast(tensor, 0, async_op=True) for tensor in tensors]
        for number, work in enumerate(works):
            work.wait()
            arrivals.append((number, time.monotonic(), 0))
        right = all(int(tensor[-1]) == number + 1 for number, tensor in enumerate(tensors))
        print(json.dumps({"arrivals": arrivals, "failed": "" if right else "wrong bytes"}), flush=True)


if __name__ == "__main__":
    main()
