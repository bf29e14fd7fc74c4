"""GPUs of this machine, for the benchmarks that need one. As a program: ends with 2 and what is needed where none is.

It runs before anything is installed, so that it imports torch only where a driver is.
"""

from __future__ import annotations

import shutil
import sys

NO_GPU = """No CUDA device was found, so nothing was checked or measured. It takes a Linux machine with an NVIDIA GPU
of 24 GB or more, its driver (nvidia-smi lists the device), a CUDA build of torch in this environment, 48 GB of memory
and 40 GB of disk. `python -m tests.bench.gpu --device cpu --quick` runs the same parts on the CPU with small models,
which shows that they run and nothing else."""


def about_gpus() -> list[str]:
    """Name and memory of each visible GPU; empty without one."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [f"{one.name}, {one.total_memory / 1e9:.0f} GB" for one in found]


if __name__ == "__main__":
    if shutil.which("nvidia-smi") is None:
        print(NO_GPU, file=sys.stderr)
        sys.exit(2)
