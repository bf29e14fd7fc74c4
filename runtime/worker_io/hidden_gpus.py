"""Hides GPUs from a fork server that tries a model: CUDA that has started in a process does not survive its forks.

A driver that was asked in vain keeps its answer, too, so workers would see no GPU.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import torch

HIDING = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""The second variable: torch counts the visible GPUs without the driver."""
ASKING = ("transformers.utils.import_utils", "torch.utils._triton")
"""Modules whose functions ask for GPUs and keep the answer."""


@contextlib.contextmanager
def gpus_hidden() -> Iterator[None]:
    """Lets torch see no GPU, and not look for one, until the block ends: in the whole process, so no thread may need
    one."""
    before = {name: os.environ.get(name) for name in HIDING}
    capturing = torch.cuda.is_current_stream_capturing
    os.environ.update(HIDING)
    # transformers asks it for each mask, and it starts the driver.
    torch.cuda.is_current_stream_capturing = lambda: False
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = capturing
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        _forget_answers()


def _forget_answers() -> None:
    """Clears what libraries keep of their questions about GPUs: workers, which have one, would get the same answers."""
    for module in map(sys.modules.get, ASKING):
        for value in vars(module).values() if module is not None else ():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()
