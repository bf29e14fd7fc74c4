"""Devices: what a node computes on beside its host, what a function asks for, and the share that a worker gets.

A device is a GPU, a partition of one (MIG), or a CPU device: some cores and a budget of memory, which the node's
operator declares (`parse_declared`). A CPU device answers the same requests as a GPU where its type is asked for or
none is, so that everything but CUDA itself runs where there is no GPU.

A request takes whole devices, or a share of one by its memory. Whole devices are reserved with all their memory, so
reservations of either kind add up in bytes.
"""

from __future__ import annotations

import re
from typing import Literal, NewType

import msgspec

from ..errors import InvalidSpec
from ..sizes import MIB, parse_size

DeviceId = NewType("DeviceId", str)
"""Name of a device on its node: "cpu:0", "cuda:0", or "cuda:0:1" for the second partition of a GPU."""
DeviceKind = Literal["cpu", "cuda"]

CPU_TYPE = "cpu"
REQUEST_MAX = 16
"""Most devices of one worker: more than the machines have that are sold with NVLink."""
SHARE_MIN_BYTES = 16 * MIB
"""Least share of a device: less holds no weights, and is a missing unit."""
DECLARED_MAX = 64
"""Most CPU devices that a node declares."""

_TYPE = re.compile(r"[A-Za-z][A-Za-z0-9-]{0,31}")
_COUNT = re.compile(r"[0-9]{1,4}")
_DECLARED = re.compile(r"cpu:([0-9]{1,4})x([0-9].*)")
_HINT = 'write gpu=1, gpu="H100", gpu="H100:2", or a share of one by memory: gpu="24GiB", gpu="H100:24GiB"'


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One device of a node."""

    id: DeviceId
    kind: DeviceKind
    type: str
    """Model in short, as functions ask for it: "cpu", "H100", "RTX-4090"."""
    memory_bytes: int
    cores: tuple[int, ...] = ()
    """The cores of a CPU device; none for others."""
    load_bytes_per_s: float = 0.0
    """Measured rate from host memory to the device; 0: nothing was loaded yet."""
    decode_bytes_per_s: float = 0.0
    """Measured compute speed: weights of language models that it goes through a second while they decode; 0: none did
    yet."""
    links: tuple[DeviceId, ...] = ()
    """Devices that NVLink connects it to."""
    uuid: str = ""
    """The driver's name for it, which selects it in CUDA_VISIBLE_DEVICES; empty for a CPU device."""
    pcie_bytes_per_s: float = 0.0
    """Rate of its PCIe link by the driver; 0: not known."""
    file: str = ""
    """Its device file, "/dev/nvidia0", that of the whole GPU for a partition; empty: none, or not known."""


class DeviceReport(Device, frozen=True, kw_only=True):
    """A device in its node's report."""

    reserved_bytes: int = 0
    """Memory that the node's workers have reserved."""
    used_bytes: int = 0
    """Memory in use, by the driver or the processes themselves; also of processes that are none of ours."""

    @property
    def free_bytes(self) -> int:
        return max(0, self.memory_bytes - self.reserved_bytes)


class DeviceShare(msgspec.Struct, frozen=True):
    """Memory of one device that a worker has for itself."""

    id: DeviceId
    memory_bytes: int


class DeviceRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices that each worker of a function needs: whole devices, or a share of one."""

    count: int = 1
    type: str = ""
    """Type of the devices; empty: any."""
    memory_bytes: int = 0
    """Share of one device; 0: whole devices."""

    def __post_init__(self) -> None:
        if not 1 <= self.count <= REQUEST_MAX:
            raise InvalidSpec(f"gpu: a worker has 1 to {REQUEST_MAX} devices, got {self.count}", hint=_HINT)
        if self.type and not is_device_type(self.type):
            raise InvalidSpec(f"gpu: {self.type[:80]!r} is no type that a device could have", hint=_HINT)
        if self.memory_bytes and self.count > 1:
            raise InvalidSpec("gpu: a share by memory is of one device", hint=_HINT)
        if self.memory_bytes and self.memory_bytes < SHARE_MIN_BYTES:
            raise InvalidSpec(f"gpu: a share has at least 16 MiB, got {self.memory_bytes} bytes", hint=_HINT)

    def __str__(self) -> str:
        """The request as it is written: "1", "H100:2", "24GiB"."""
        amount = f"{_size_text(self.memory_bytes)}" if self.memory_bytes else str(self.count)
        return f"{self.type}:{amount}" if self.type else amount

    def suits(self, device: Device) -> bool:
        """True if the device, were it free, could be one that is asked for."""
        return self.type in ("", device.type) and device.memory_bytes >= self.memory_bytes

    def bytes_on(self, device: Device) -> int:
        """Memory that the request reserves of a device."""
        return self.memory_bytes or device.memory_bytes


def parse_request(value: object) -> DeviceRequest:
    """The request that 2, "2", "H100", "H100:2", "24GiB" or "H100:24GiB" means. Errors: InvalidSpec."""
    if isinstance(value, int) and not isinstance(value, bool):
        return DeviceRequest(count=value)
    if not isinstance(value, str) or not value.strip():
        raise InvalidSpec(f"gpu: {value!r} is not understood", hint=_HINT)
    kind, colon, amount = value.strip().partition(":")
    if not colon and not _TYPE.fullmatch(kind):
        kind, amount = "", kind
    if (colon and not kind) or (kind and not _TYPE.fullmatch(kind)) or (colon and not amount):
        raise InvalidSpec(f"gpu: {value[:80]!r} is not understood", hint=_HINT)
    kind = canonical_type(kind)
    if not amount or _COUNT.fullmatch(amount):
        return DeviceRequest(type=kind, count=int(amount or 1))
    return DeviceRequest(type=kind, memory_bytes=max(1, _share(amount, value)))


def _share(amount: str, value: str) -> int:
    try:
        if amount[-1].isdigit():
            raise InvalidSpec("a share has a unit")
        return parse_size(amount)
    except (InvalidSpec, OverflowError) as error:
        raise InvalidSpec(f"gpu: {value[:80]!r} is not understood", hint=_HINT) from error


def canonical_type(name: str) -> str:
    """A type as devices have it: upper case, but for "cpu"."""
    return CPU_TYPE if name.lower() == CPU_TYPE else name.upper()


def is_device_type(name: str) -> bool:
    return bool(_TYPE.fullmatch(name)) and name == canonical_type(name)


def parse_declared(text: str) -> tuple[int, ...]:
    """Memory of each CPU device that a node's operator declares: "cpu:2x4GiB", several with commas; "" and "none" are
    none. Errors: InvalidSpec."""
    sizes: list[int] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _DECLARED.fullmatch(part)
        if part == "none" and text.strip() == "none":
            return ()
        try:
            count, size = (int(match[1]), parse_size(match[2])) if match else (0, 0)
        except OverflowError:
            count, size = 0, 0
        if count < 1 or size < SHARE_MIN_BYTES or len(sizes) + count > DECLARED_MAX:
            raise InvalidSpec(
                f"devices {text[:80]!r} are not understood",
                hint='write "cpu:2x4GiB" for two CPU devices of 4 GiB each (64 devices at most), or "none"',
            )
        sizes += [size] * count
    return tuple(sizes)


def cpu_devices(sizes: tuple[int, ...], cores: tuple[int, ...]) -> tuple[Device, ...]:
    """The CPU devices of a node: its cores split evenly among them, in order. With fewer cores than devices, some share
    one."""
    devices: list[Device] = []
    for index, size in enumerate(sizes):
        own = cores[index * len(cores) // len(sizes) : (index + 1) * len(cores) // len(sizes)]
        own = own or cores[index % len(cores) : index % len(cores) + 1]
        devices.append(Device(id=DeviceId(f"cpu:{index}"), kind="cpu", type=CPU_TYPE, memory_bytes=size, cores=own))
    return tuple(devices)


def host_bytes(own_bytes: int, shares: tuple[DeviceShare, ...]) -> int:
    """Host memory that a worker may use: its own, or its share of CPU devices where that is more, as their memory is
    the host's."""
    return max(own_bytes, sum(share.memory_bytes for share in shares if share.id.startswith("cpu:")))


def _size_text(size_bytes: int) -> str:
    """The size exactly, in the largest binary unit that divides it."""
    for unit, name in ((1024**4, "TiB"), (1024**3, "GiB"), (1024**2, "MiB"), (1024, "KiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return f"{size_bytes}B"
