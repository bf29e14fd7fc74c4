"""A worker that was given a GPU computes on it, or does not start."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.timeline import Timeline
from fleetstart.runtime.worker.device_init import DeviceInit


def test_a_worker_without_devices_starts_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    device = DeviceInit(1, Timeline())
    device.begin()
    device.wait()


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_worker_that_does_not_see_its_gpu_does_not_start(cuda: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would compute on the CPU without a word."""
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    device = DeviceInit(1, Timeline(), (0.5,))
    device.begin()
    with pytest.raises(StartFailed, match=r"given 1 of the node's GPUs and sees 0: torch .* built (for|without) CUDA"):
        device.wait()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_worker_gets_its_part_of_a_gpus_memory() -> None:
    device = DeviceInit(1, Timeline(), (0.25,))
    device.begin()
    device.wait()
    try:
        whole = torch.cuda.get_device_properties(0).total_memory
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(whole // 2, dtype=torch.uint8, device="cuda")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
