"""Devices in the plan: the nodes that could ever hold a request, the devices that a worker is given now, and the error
if no node has what is asked for.

A share goes to the fullest device that has room for it, so that whole devices stay free. Whole devices are taken free,
those that NVLink connects first, then the smallest that suffice. What does not fit one device goes to another one, of
the node or of another node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.devices import Device, DeviceKind, DeviceReport, DeviceRequest, DeviceShare
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.sizes import GIB

OneDevice = TypeVar("OneDevice", bound=Device)

NODES_NAMED = 6
"""Nodes whose devices an error lists; the others are counted."""


class DeviceNeed(NamedTuple):
    """Need of devices of one worker of a version."""

    request: DeviceRequest
    cuda: bool = False
    """It needs a GPU, as its KV cache does not fit into the host memory of its worker."""
    raised_bytes: int = 0
    """Memory on all its devices together that was found to be too little; 0: none was."""

    def suits(self, device: Device) -> bool:
        return self.request.suits(device) and not (self.cuda and device.kind != "cuda")

    @property
    def share_bytes(self) -> int:
        """The share that it gets of a device; 0: whole devices."""
        if not self.request.memory_bytes:
            return 0
        return max(self.request.memory_bytes, raised_share(self.raised_bytes) if self.raised_bytes else 0)


def raised_share(short_bytes: int) -> int:
    """The share after one that was too small: a quarter more."""
    return short_bytes + short_bytes // 4


def could_hold(need: DeviceNeed, devices: Sequence[Device]) -> bool:
    """True if the node would have the devices, were they free."""
    suitable = [device for device in devices if need.suits(device) and device.memory_bytes >= need.share_bytes]
    if need.share_bytes:
        return bool(suitable)
    return any(_most_bytes(alike, need.request.count) > need.raised_bytes for alike in _by_type(suitable))


def _by_type(devices: Sequence[OneDevice]) -> list[list[OneDevice]]:
    """The devices of each type: a worker gets several of one type, as its parts keep step and its bill has one rate."""
    found: dict[str, list[OneDevice]] = {}
    for device in devices:
        found.setdefault(device.type, []).append(device)
    return list(found.values())


def _most_bytes(alike: Sequence[Device], count: int) -> int:
    """Memory of the largest so many devices together; 0 if there are fewer."""
    largest = sorted((device.memory_bytes for device in alike), reverse=True)[:count]
    return sum(largest) if len(largest) == count else 0


def choose_devices(
    need: DeviceNeed, devices: Sequence[DeviceReport], least_bytes: int = 0
) -> tuple[DeviceShare, ...] | None:
    """The devices that a worker gets on a node, with `least_bytes` of memory at least on all of them together; None if
    these are not free."""
    if share_bytes := need.share_bytes:
        roomy = [device for device in devices if need.suits(device) and device.free_bytes >= share_bytes]
        if not roomy or share_bytes < least_bytes:
            return None
        fullest = min(roomy, key=lambda device: (device.free_bytes, device.id))
        return (DeviceShare(fullest.id, share_bytes),)
    free = sorted(
        (device for device in devices if need.suits(device) and not device.reserved_bytes),
        key=lambda device: (device.memory_bytes, device.id),
    )
    least_bytes = max(least_bytes, need.raised_bytes + 1)
    chosen = _smallest_that_suffice(free, need.request.count, least_bytes)
    return None if chosen is None else tuple(DeviceShare(device.id, device.memory_bytes) for device in chosen)


def _smallest_that_suffice(free: Sequence[DeviceReport], count: int, least_bytes: int) -> list[DeviceReport] | None:
    """So many devices of one type, of a list sorted by memory: the smallest that suffice, and before these such as
    NVLink connects."""
    found = []
    for alike in _by_type(free):
        plain = [alike[at : at + count] for at in range(len(alike) - count + 1)]
        linked = _linked_runs(alike, count) if count > 1 else []
        for unlinked, runs in ((False, linked), (True, plain)):
            found += [
                (unlinked, size, run) for run in runs if (size := sum(d.memory_bytes for d in run)) >= least_bytes
            ]
    return min(found, key=lambda one: one[:2])[2] if found else None


def _linked_runs(free: Sequence[DeviceReport], count: int) -> list[list[DeviceReport]]:
    """Sets of devices that are all connected with a first one by NVLink, smallest devices first."""
    found = []
    for first in free:
        near = [device for device in free if device.id in first.links]
        if len(near) >= count - 1:
            found.append([first, *near[: count - 1]])
    return found


def device_room(need: DeviceNeed, devices: Sequence[DeviceReport]) -> int:
    """The most memory that a worker could get now on its devices together; 0 if they are not free."""
    if share_bytes := need.share_bytes:
        return share_bytes if choose_devices(need, devices) is not None else 0
    free = [device for device in devices if need.suits(device) and not device.reserved_bytes]
    room = max((_most_bytes(alike, need.request.count) for alike in _by_type(free)), default=0)
    return room if room > need.raised_bytes else 0


def load_bytes_per_s(devices: Sequence[Device], shares: Sequence[DeviceShare], prior: float) -> float:
    """Rate p at which weights get onto these devices, each of which takes in its part; `prior` for one that has not
    loaded anything yet."""
    rates = {device.id: device.load_bytes_per_s for device in devices}
    return sum(rates.get(share.id, 0.0) or prior for share in shares) or prior


def decode_bytes_per_s(devices: Sequence[Device], shares: Sequence[DeviceShare], by_type: Mapping[str, float]) -> float:
    """Compute speed of these devices together; that of a device without steps is the mean of its type, by `by_type`.
    0: that of one is not known."""
    known = {device.id: device.decode_bytes_per_s or by_type.get(device.type, 0.0) for device in devices}
    speeds = [known.get(share.id, 0.0) for share in shares]
    return sum(speeds) if all(speeds) else 0.0


def mean_speeds(devices: Iterable[Device]) -> dict[str, float]:
    """Mean compute speed by type, of the devices that have one."""
    found: dict[str, list[float]] = {}
    for device in devices:
        if device.decode_bytes_per_s:
            found.setdefault(device.type, []).append(device.decode_bytes_per_s)
    return {kind: sum(speeds) / len(speeds) for kind, speeds in found.items()}


def kinds_of(devices: Sequence[Device], shares: Sequence[DeviceShare]) -> set[DeviceKind]:
    chosen = {share.id for share in shares}
    return {device.kind for device in devices if device.id in chosen}


def with_reserved(devices: Sequence[DeviceReport], shares: Iterable[DeviceShare]) -> tuple[DeviceReport, ...]:
    """The devices with these shares reserved besides."""
    added: Counter[str] = Counter()
    for share in shares:
        added[share.id] += share.memory_bytes
    return tuple(with_bytes(device, device.reserved_bytes + added[device.id]) for device in devices)


def with_bytes(device: DeviceReport, reserved_bytes: int) -> DeviceReport:
    """The device with so much of it reserved."""
    return device if reserved_bytes == device.reserved_bytes else replace(device, reserved_bytes=reserved_bytes)


def missing_devices(need: DeviceNeed, reports: Iterable[NodeReport]) -> str:
    """The reason why no node can ever hold a worker, with the devices that nodes have; empty if one can."""
    known = list(reports)
    if not known or any(could_hold(need, report.devices) for report in known):
        return ""
    return f"{wanted_in_words(need)}, which no node has: {devices_in_words(known)}"


def wanted_in_words(need: DeviceNeed) -> str:
    request = need.request
    kind = f"{request.type} " if request.type else ""
    what = (
        f"a share of {need.share_bytes / GIB:g} GiB of a {kind}device"
        if request.memory_bytes
        else (f"{request.count} {kind}device{'s' if request.count > 1 else ''}")
    )
    short = f", as {need.raised_bytes / GIB:g} GiB was too little" if need.raised_bytes else ""
    return f"each worker asks for {what} (gpu={str(request)!r}{short})"


def devices_in_words(reports: Iterable[NodeReport]) -> str:
    """Devices by node: "a has 2 × H100 of 80 GiB, b has none"."""
    known = sorted(reports, key=lambda report: (not report.devices, report.node))
    named = [f"{report.node} has {inventory(report.devices)}" for report in known[:NODES_NAMED]]
    more = len(known) - NODES_NAMED
    return ", ".join([*named, *([f"{more} more nodes"] if more > 0 else [])])


class DeviceOwner(Protocol):
    """A node, as far as its devices are named."""

    @property
    def node(self) -> NodeId: ...

    @property
    def devices(self) -> Sequence[DeviceReport]: ...


def free_in_words(need: DeviceNeed, nodes: Iterable[DeviceOwner]) -> str:
    """Free memory of the devices that would do, in words: "12 of 80 GiB of cuda:0 on a"."""
    found = [
        (
            device.free_bytes,
            f"{device.free_bytes / GIB:.3g} of {device.memory_bytes / GIB:.3g} GiB of {device.id} on {node.node}",
        )
        for node in nodes
        for device in node.devices
        if need.suits(device)
    ]
    words = [text for _, text in sorted(found, key=lambda one: (-one[0], one[1]))[:NODES_NAMED]]
    return ", ".join(words) or "none"


def inventory(devices: Sequence[Device]) -> str:
    """Devices by type and size: "2 × H100 of 80 GiB"."""
    counts = Counter((device.type, device.memory_bytes) for device in devices)
    return " and ".join(f"{count} × {kind} of {size / GIB:.3g} GiB" for (kind, size), count in counts.items()) or "none"
