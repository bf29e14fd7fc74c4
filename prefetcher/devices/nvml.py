"""GPUs by NVML, NVIDIA's management library: type, memory, PCIe, NVLink and the partitions of MIG.

The library is read through `nvidia-ml-py`, an optional package, and imported here alone. Without it, without a driver
or with one that fails, a node has no GPUs. No CUDA context is made.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from fleetstart.runtime.contract.node.devices import Device, DeviceId

log = logging.getLogger(__name__)

LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Rate of one PCIe lane in one direction, by generation, after line coding."""
_BRAND = re.compile(r"\b(nvidia|tesla|quadro|geforce|graphics|laptop gpu)\b", re.IGNORECASE)
_MODEL = re.compile(r"(RTX|GTX|TITAN)?\s*([A-Z0-9]+)(?:[ -](Ti|Super))?", re.IGNORECASE)


def open_nvml() -> Any | None:
    """The library, initialised; None where there is none."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except Exception as error:  # the library has a class for each of its errors
        log.info("NVML cannot be used: the node has no GPUs", extra={"error": str(error)})
        return None
    return nvml


def read_gpus(nvml: Any, env: Mapping[str, str]) -> tuple[Device, ...]:
    """The GPUs that the node may use, by CUDA_VISIBLE_DEVICES of its own environment; of one in partitions, these."""
    try:
        gpus = list(_gpus(nvml, _visible(env)))
    except Exception as error:
        log.warning("NVML failed: the node has no GPUs", extra={"error": str(error)})
        return ()
    return tuple(gpus)


def used_bytes(nvml: Any, device: Device) -> int:
    """Memory of a GPU that is in use; 0 if the driver does not say."""
    return int(_or(0, lambda: nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(device.uuid)).used))


def used_by_process(nvml: Any, devices: Iterable[Device]) -> dict[int, int]:
    """Memory of GPUs that each process has, by its pid; without those of which the driver does not say."""
    found: dict[int, int] = {}
    for device in devices:
        handle = _or(None, partial(nvml.nvmlDeviceGetHandleByUUID, device.uuid))
        for process in _or([], partial(nvml.nvmlDeviceGetComputeRunningProcesses, handle)):
            if process.usedGpuMemory is not None:
                found[process.pid] = found.get(process.pid, 0) + int(process.usedGpuMemory)
    return found


def _gpus(nvml: Any, visible: Callable[[int, str], bool]) -> Iterator[Device]:
    handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    for index, handle in enumerate(handles):
        uuid, name = _text(nvml.nvmlDeviceGetUUID(handle)), gpu_type(_text(nvml.nvmlDeviceGetName(handle)))
        pcie = _pcie_bytes_per_s(nvml, handle)
        if not visible(index, uuid):
            continue
        file = _file(nvml, handle)
        if _or((0, 0), partial(nvml.nvmlDeviceGetMigMode, handle))[0]:
            yield from _partitions(nvml, handle, index, name, pcie, file)
            continue
        yield Device(
            id=DeviceId(f"cuda:{index}"),
            kind="cuda",
            type=name,
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(handle).total,
            links=tuple(
                DeviceId(f"cuda:{other}")
                for other, peer in enumerate(handles)
                if other != index and _linked(nvml, handle, peer)
            ),
            uuid=uuid,
            pcie_bytes_per_s=pcie,
            file=file,
        )


def _partitions(nvml: Any, handle: Any, index: int, name: str, pcie: float, file: str) -> Iterator[Device]:
    for at in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        part = _or(None, partial(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, at))
        if part is None:  # a place for a partition that was not made
            continue
        yield Device(
            id=DeviceId(f"cuda:{index}:{at}"),
            kind="cuda",
            type=name,
            memory_bytes=nvml.nvmlDeviceGetMemoryInfo(part).total,
            uuid=_text(nvml.nvmlDeviceGetUUID(part)),
            pcie_bytes_per_s=pcie,
            file=file,
        )


def _file(nvml: Any, handle: Any) -> str:
    """The device file: its number is not the index that NVML counts by."""
    minor = _or(None, lambda: int(nvml.nvmlDeviceGetMinorNumber(handle)))
    return "" if minor is None else f"/dev/nvidia{minor}"


def _pcie_bytes_per_s(nvml: Any, handle: Any) -> float:
    generation = _or(0, lambda: nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    width = _or(0, lambda: nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
    return LANE_BYTES_PER_S.get(generation, 0.0) * int(width)


def _linked(nvml: Any, handle: Any, peer: Any) -> bool:
    """True if NVLink connects two GPUs, directly or through a switch."""
    status = _or(None, lambda: nvml.nvmlDeviceGetP2PStatus(handle, peer, nvml.NVML_P2P_CAPS_INDEX_NVLINK))
    return status is not None and bool(status == nvml.NVML_P2P_STATUS_OK)


def gpu_type(name: str) -> str:
    """The type in short: "NVIDIA H100 80GB HBM3" is H100, "NVIDIA GeForce RTX 4090" is RTX-4090."""
    match = _MODEL.match(_BRAND.sub(" ", name).strip())
    parts = [part for part in (match.groups() if match else ()) if part]
    short = re.sub(r"[^A-Z0-9-]", "", "-".join(parts).upper())
    return short if short[:1].isalpha() else f"GPU-{short}".rstrip("-")


def _visible(env: Mapping[str, str]) -> Callable[[int, str], bool]:
    text = env.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return lambda index, uuid: True
    names = [name.strip() for name in text.split(",") if name.strip()]
    return lambda index, uuid: any(name == str(index) or (len(name) > 4 and uuid.startswith(name)) for name in names)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _or(default: Any, read: Callable[[], Any]) -> Any:
    """What the driver says, or the default where it has no answer: what is supported depends on the GPU."""
    try:
        return read()
    except Exception:
        return default
