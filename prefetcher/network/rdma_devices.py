"""RDMA devices of this node: what the kernel shows in /sys/class/infiniband, with pyverbs where it is installed.

Sysfs has all that discovery needs: state, link layer, rate. The GID comes from libibverbs when a device is opened.
A device is usable if its port is up and the native module for it is built and loads, which takes libibverbs.so.1. As a
program it prints a line for each device, for `fs doctor`: name, state, link, rate, firmware and problem, between tabs.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

SYSFS = Path("/sys/class/infiniband")
FIRST_PORT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaDeviceInfo:
    """An RDMA device, by its first port."""

    name: str
    state: str
    """The kernel's word: ACTIVE, DOWN, INIT."""
    link: str
    """Ethernet or InfiniBand."""
    rate: str
    """As the kernel gives it, such as `100 Gb/sec (4X EDR)`; empty if it does not."""
    firmware: str = ""
    problem: str = ""
    """Reason why this node cannot use it; empty if it can."""

    @property
    def usable(self) -> bool:
        return not self.problem


def rdma_devices(sysfs: Path = SYSFS) -> list[RdmaDeviceInfo]:
    """The machine's devices by name; none on a machine without."""
    if not sysfs.is_dir():
        return []
    module_problem = _module_problem()
    devices = []
    for folder in sorted(sysfs.iterdir()):
        port = folder / "ports" / str(FIRST_PORT)
        state = _state(folder)
        devices.append(
            RdmaDeviceInfo(
                name=folder.name,
                state=state,
                link=_word(port / "link_layer"),
                rate=_word(port / "rate"),
                firmware=_firmware(folder),
                problem=f"its port is {state}" if state != "ACTIVE" else module_problem,
            )
        )
    return devices


def is_port_active(device: Path) -> bool:
    """True if the device's port is up now. `device`: its folder in sysfs."""
    return _state(device) == "ACTIVE"


def _state(device: Path) -> str:
    return _word(device / "ports" / str(FIRST_PORT) / "state").partition(": ")[2] or "unknown"


def _firmware(folder: Path) -> str:
    """Known to pyverbs of every device, and to the kernel of some."""
    try:
        device: Any = importlib.import_module("pyverbs.device")
        with device.Context(name=folder.name) as context:
            version = context.query_device().fw_version
        return version.decode(errors="replace") if isinstance(version, bytes) else str(version)
    except Exception:  # it is not installed, or does not go with this libibverbs
        return _word(folder / "fw_ver")


def _module_problem() -> str:
    try:
        importlib.import_module("fleetstart.native._rdma")
    except ImportError as error:
        return (
            f"the native module for RDMA does not load ({error}): install libibverbs and its headers, then build again"
        )
    return ""


def _word(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


if __name__ == "__main__":
    for found in rdma_devices(Path(sys.argv[1])):
        print(*astuple(found), sep="\t")
