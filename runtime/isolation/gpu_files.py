"""Device files of GPUs: those that a worker sees, by the devices that it was given. Pure, but for `present`.

The root of a node's workers has all of them; what is not a worker's own is taken from it when it is confined. Files
that every process on a GPU opens are shared: the driver's control file and unified memory, which give access to no GPU
that the process cannot open. Partitions (MIG) are files of capabilities in one folder, which stays as a whole: the
partition that CUDA uses is chosen by its name alone.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..contract.node.messages import DeviceBinding

SHARED = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset", "nvidia-caps")
"""Files of NVIDIA's driver, and a folder, that belong to no single GPU."""
_OTHERS = ("dri", "kfd", "dxg")
"""Folder and files of other drivers: nodes list no devices of theirs."""
_GPU = re.compile(r"nvidia[0-9]+")


def is_gpu_file(name: str) -> bool:
    """True for a name in /dev that is of GPUs."""
    return name.startswith("nvidia") or name in _OTHERS or name.startswith(_OTHERS)


def present(folder: str = "/dev") -> list[str]:
    """Paths of all that are there."""
    return sorted(os.path.join(folder, name) for name in os.listdir(folder) if is_gpu_file(name))


def hidden(paths: Iterable[str], binding: DeviceBinding | None) -> list[str]:
    """The paths of GPUs' device files that a worker does not see. None of them on a node that lists no devices, and for
    a GPU whose file is not known."""
    if binding is None or "" in binding.files:
        return []
    if not binding.files:
        return list(paths)
    own = set(binding.files)
    return [path for path in paths if path not in own and not _is_shared(os.path.basename(path))]


def _is_shared(name: str) -> bool:
    return name in SHARED or (name.startswith("nvidia") and not _GPU.fullmatch(name))
