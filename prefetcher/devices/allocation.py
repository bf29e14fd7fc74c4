"""The node's devices and the shares that workers have of them: reservations, binding of processes, rates of loads and
of steps.

The planner decides which devices a worker gets; here it is checked once more that the memory is there, as an order may
be older than what became of other workers. Whole devices and shares are both reserved in bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.devices import (
    Device,
    DeviceId,
    DeviceReport,
    DeviceShare,
    cpu_devices,
)
from fleetstart.runtime.contract.node.messages import DeviceBinding, DeviceLoaded
from fleetstart.runtime.contract.node.speed import Speed
from fleetstart.runtime.contract.process.moving_average import MovingAverage
from fleetstart.runtime.contract.sizes import MIB

from . import nvml

LEAST_LOAD_BYTES = 16 * MIB
"""Least load that counts: a smaller one measures calls, not bandwidth."""
LOAD_MAX_BYTES_PER_S = 1e12
"""More than any link from host memory takes: what is above is no measurement."""
DECODE_MAX_BYTES_PER_S = 1e14
"""More than any device's memory gives: what is above is no measurement."""
UNKNOWN = MovingAverage(0.0)


class DeviceAllocator:
    """Devices of a node, with what workers have of each."""

    def __init__(
        self,
        devices: Sequence[Device],
        used_bytes: Callable[[Device], int] = lambda device: 0,
        used_by_process: Callable[[], dict[int, int]] | None = None,
    ) -> None:
        """`used_bytes`: memory of a GPU that is in use, by its driver. `used_by_process`: that of each process, on all
        GPUs; None if there are none."""
        self.devices = {device.id: device for device in devices}
        self._used_bytes = used_bytes
        self.used_by_process = used_by_process
        self._shares: dict[WorkerId, tuple[DeviceShare, ...]] = {}
        self._rates: dict[DeviceId, MovingAverage] = {}
        self._speeds: dict[DeviceId, MovingAverage] = {}

    def reserve(self, worker: WorkerId, shares: Sequence[DeviceShare]) -> None:
        """Reserves a worker's shares, all or none. Errors: Unavailable, naming the device."""
        for share in shares:
            device = self.devices.get(share.id)
            if device is None:
                raise Unavailable(
                    f"the node has no device {share.id}: {', '.join(self.devices) or 'it has none'}",
                    hint="the node was started with other devices; the start is planned again",
                    retry_after_s=1.0,
                )
            taken_bytes = self.reserved_bytes(share.id)
            if share.memory_bytes <= 0 or share.memory_bytes + taken_bytes > device.memory_bytes:
                raise Unavailable(
                    f"device {share.id} has {(device.memory_bytes - taken_bytes) // MIB} of "
                    f"{device.memory_bytes // MIB} MiB free, the worker needs {share.memory_bytes // MIB} MiB",
                    hint="other workers have it; the start is planned again",
                    retry_after_s=1.0,
                )
        if len({share.id for share in shares}) < len(shares):
            raise Unavailable("the order names a device twice", retry_after_s=1.0)
        if shares:
            self._shares[worker] = tuple(shares)

    def release(self, worker: WorkerId) -> None:
        self._shares.pop(worker, None)

    def reserved_bytes(self, device: DeviceId) -> int:
        return sum(share.memory_bytes for shares in self._shares.values() for share in shares if share.id == device)

    def use_of(self, shares: Sequence[DeviceShare]) -> tuple[str, int]:
        """Type and memory of a worker's devices, for its bill; none: "" and 0."""
        types = [self.devices[share.id].type for share in shares if share.id in self.devices]
        return (types[0], sum(share.memory_bytes for share in shares)) if types else ("", 0)

    def binding(self, shares: Sequence[DeviceShare]) -> DeviceBinding | None:
        """How a worker's process is bound; None where the node has no devices, and nothing is bound."""
        if not self.devices:
            return None
        chosen = [self.devices[share.id] for share in shares]
        gpus = [(share, device) for share, device in zip(shares, chosen, strict=True) if device.kind == "cuda"]
        return DeviceBinding(
            devices=tuple(device.id for device in chosen),
            visible=",".join(device.uuid for _, device in gpus),
            files=tuple(dict.fromkeys(device.file for _, device in gpus)),
            fractions=tuple(min(1.0, share.memory_bytes / device.memory_bytes) for share, device in gpus),
            cores=tuple(sorted({core for device in chosen for core in device.cores})),
            cores_of=tuple(device.cores for device in chosen),
        )

    def loaded(self, worker: WorkerId, load: DeviceLoaded) -> None:
        """Learns the rate p of a worker's devices from a load; several devices share it evenly. Untrusted: a worker's
        word moves the estimate of its own devices alone."""
        shares = self._shares.get(worker, ())
        if not shares or load.size_bytes < LEAST_LOAD_BYTES or load.busy_ns <= 0:
            return
        rate = min(LOAD_MAX_BYTES_PER_S, load.size_bytes / load.busy_ns * 1e9) / len(shares)
        for share in shares:
            known = self._rates.get(share.id, UNKNOWN)
            self._rates[share.id] = known.fold(rate)

    def stepped(self, worker: WorkerId, speed: Speed, weight_bytes: int) -> Speed:
        """Learns the compute speed of a worker's devices from the steps of a whole language model, which reads all of
        its weights for a token; several devices share them evenly. Returns the worker's speed with its devices'."""
        shares = self._shares.get(worker, ())
        if speed.stages == 1 and speed.decode_s and speed.decode_s > 0 and weight_bytes:
            rate = min(DECODE_MAX_BYTES_PER_S, weight_bytes / speed.decode_s) / max(1, len(shares))
            for share in shares:
                self._speeds[share.id] = self._speeds.get(share.id, UNKNOWN).fold(rate)
        known = [self._speeds.get(share.id, UNKNOWN).value for share in shares]
        return msgspec.structs.replace(speed, device_bytes_per_s=sum(known) if all(known) else 0.0)

    def reports(self) -> tuple[DeviceReport, ...]:
        return tuple(
            DeviceReport(
                **{
                    **msgspec.structs.asdict(device),
                    "load_bytes_per_s": self._rates.get(device.id, UNKNOWN).value,
                    "decode_bytes_per_s": self._speeds.get(device.id, UNKNOWN).value,
                },
                reserved_bytes=self.reserved_bytes(device.id),
                used_bytes=self._used_bytes(device) if device.kind == "cuda" else 0,
            )
            for device in self.devices.values()
        )


def open_devices(declared: Sequence[int], env: Mapping[str, str], *, gpus: bool = True) -> DeviceAllocator:
    """The node's devices: the GPUs that NVML finds, and the CPU devices that are declared. `gpus`: whether NVML is
    asked."""
    library = nvml.open_nvml() if gpus else None
    found = nvml.read_gpus(library, env) if library is not None else ()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    return DeviceAllocator(
        (*found, *cpu_devices(tuple(declared), cores)),
        used_bytes=lambda device: nvml.used_bytes(library, device) if library is not None else 0,
        used_by_process=(lambda: nvml.used_by_process(library, found)) if found else None,
    )
