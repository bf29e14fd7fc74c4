"""GPUs by NVML, over a library that answers as the real one does. The real one is asked where there is a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fleetstart.prefetcher.devices.nvml import gpu_type, open_nvml, read_gpus, used_by_process, used_bytes
from fleetstart.runtime.contract.node.devices import Device, DeviceId
from fleetstart.runtime.contract.sizes import GIB


class Refused(Exception):
    """An error of the library."""


class Library:
    """Three GPUs: two that NVLink connects, and one in two partitions."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"GPU-{index}aaaa"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlDeviceGetMinorNumber(self, handle: str) -> int:
        if handle == "GPU-1aaaa":
            raise Refused("not supported")
        return 7 - int(handle[4])

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "NVIDIA H100 80GB HBM3"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=(40 if handle.startswith("MIG") else 80) * GIB, used=3 * GIB)

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if handle == "GPU-0aaaa":
            raise Refused("not supported")
        return (1, 1) if handle == "GPU-2aaaa" else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index > 1:
            raise Refused("not found")
        return f"MIG-{index}bbbb"

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[Any]:
        if handle.startswith("MIG-1"):
            raise Refused("not supported")
        return [SimpleNamespace(pid=7, usedGpuMemory=GIB), SimpleNamespace(pid=8, usedGpuMemory=None)]

    def nvmlDeviceGetP2PStatus(self, handle: str, peer: str, index: int) -> int:
        return 0 if {handle, peer} == {"GPU-0aaaa", "GPU-1aaaa"} else 1


def ids(devices: tuple[Device, ...]) -> list[str]:
    return [device.id for device in devices]


def test_gpus_and_partitions_are_listed() -> None:
    first, second, *parts = read_gpus(Library(), {})
    assert first == Device(
        id=DeviceId("cuda:0"), kind="cuda", type="H100", memory_bytes=80 * GIB, uuid="GPU-0aaaa",
        links=(DeviceId("cuda:1"),), pcie_bytes_per_s=3.938e9 * 16, file="/dev/nvidia7",
    )  # fmt: skip
    assert second.links == (DeviceId("cuda:0"),)
    assert [one.file for one in (first, second, *parts)] == ["/dev/nvidia7", "", "/dev/nvidia5", "/dev/nvidia5"]
    assert [(part.id, part.uuid, part.memory_bytes) for part in parts] == [
        ("cuda:2:0", "MIG-0bbbb", 40 * GIB), ("cuda:2:1", "MIG-1bbbb", 40 * GIB),
    ]  # fmt: skip
    assert used_bytes(Library(), first) == 3 * GIB
    assert used_by_process(Library(), (first, second, *parts)) == {7: 3 * GIB}, "not of which the driver does not say"


def test_a_node_uses_the_gpus_that_it_sees() -> None:
    assert ids(read_gpus(Library(), {"CUDA_VISIBLE_DEVICES": "1"})) == ["cuda:1"]
    assert ids(read_gpus(Library(), {"CUDA_VISIBLE_DEVICES": "GPU-0aaaa, 1"})) == ["cuda:0", "cuda:1"]
    assert ids(read_gpus(Library(), {"CUDA_VISIBLE_DEVICES": ""})) == []


def test_a_library_that_fails_is_a_node_without_gpus() -> None:
    class Failing(Library):
        def nvmlDeviceGetCount(self) -> int:
            raise Refused("driver not loaded")

    assert read_gpus(Failing(), {}) == ()


def test_without_a_driver_there_is_none() -> None:
    library = open_nvml()
    assert library is None or isinstance(read_gpus(library, {}), tuple)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA GeForce RTX 4070 Ti", "RTX-4070-TI"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("4242", "GPU-4242"),
        ("", "GPU"),
    ],
)
def test_types_are_short(name: str, short: str) -> None:
    assert gpu_type(name) == short
