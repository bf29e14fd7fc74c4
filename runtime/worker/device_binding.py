"""Binding of a worker's process to its devices: the GPUs that it sees, its cores, and its part of a GPU's memory.

A process is forked from one that has imported torch, but has not initialised CUDA: the environment is read at the
first use of a GPU. The node enforces a CPU device's memory by the worker's limit; a GPU's is enforced by torch's own
allocator (`device_init`), as the driver has no limit by process.
"""

from __future__ import annotations

import contextlib
import os

from ..contract.node.messages import DeviceBinding

DEVICES_VARIABLE = "FS_WORKER_DEVICES"
"""Ids of the worker's devices, for its handler: "cuda:0,cuda:1"."""


def bind_devices(binding: DeviceBinding | None) -> None:
    """Binds this process, before it runs code of the function. Nothing is bound on a node without devices."""
    if binding is None:
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = binding.visible
    os.environ[DEVICES_VARIABLE] = ",".join(binding.devices)
    if binding.cores:
        for thread in os.listdir("/proc/self/task"):  # new threads inherit it, those that are there do not
            with contextlib.suppress(OSError):  # a core that was taken offline, or a thread that has ended
                os.sched_setaffinity(int(thread), binding.cores)
