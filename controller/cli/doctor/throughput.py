"""Throughput findings of `fs doctor`: the limits of this machine, and how loads compare with them.

Programs of the prefetcher and the runtime measure the limits (`diagnostics/throughput`, `weights/device_throughput`);
the command line runs and never imports them. `bottleneck.py` decides what the figures mean for loads.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.node.throughput import Ceilings, DeviceCeiling, Limit
from fleetstart.runtime.contract.sizes import GIB, MIB
from fleetstart.runtime.contract.store_url import is_s3

from ...schemas.functions import SystemStatus
from ..api_client import ApiClient, find_server
from ..home import HomeLayout, is_locked, read_services, read_supervisor
from ..local.services import NODE
from .bottleneck import ObservedLoads, diagnose, format_rate
from .checks import Finding, available_bytes

Answer = TypeVar("Answer")

MEASURE_S = 60.0
"""Timeout of the measurement. It takes about 5 s, and a few times that with a store that does not answer."""
STATUS_S = 5.0
BACKED_BYTES_PER_S = 1e9
"""Below this rate the host does not back the memory: zeroing a page that it has is several times faster."""
HUGE_PAGE_BYTES = 2 * MIB
GPU_NODES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Device files of GPUs. Without one torch is not imported to look, which takes seconds."""

PAGES = {
    "hugetlb": "reserved huge pages of 2 MiB (hugetlb)",
    "thp": "transparent huge pages of 2 MiB",
    "small": "4 KiB pages, into which direct reads are two to three times slower",
}
LIMIT_NAMES: dict[Limit, str] = {
    "checksum": "checksums",
    "prefault": "new memory",
    "disk": "disk speed",
    "store": "store speed",
    "device": "device speed",
}


class MeasurementFailed(Exception):
    """The measuring process failed or timed out; the text says how."""


def check_throughput(home: Path, store: str, size_bytes: int = 0) -> list[Finding]:
    """Pages, limits, and how the loads of a server that runs here compare with them. Takes seconds."""
    node, problem = running_node(home)
    try:
        ceilings = measure(home, store, size_bytes)
    except MeasurementFailed as error:
        return [Finding(check="speed", verdict="warn", found=f"could not be measured: {error}")]
    found = [page_finding(ceilings, node), *speed_findings(ceilings)]
    if problem:
        found.append(Finding(check="loads", verdict="warn", found=problem))
    elif node is not None:
        found.extend(load_findings(ceilings, node, remote_store=is_s3(store)))
    return found


def store_location(home: Path) -> str:
    """Store of the server that runs here, or of the one that `fs up` would start."""
    record = read_supervisor(HomeLayout(home))
    return record.store if record is not None else str(HomeLayout(home).store)


def running_node(home: Path) -> tuple[NodeReport | None, str]:
    """Report of the node that `fs up` runs here, and why there is none if the server does not answer.

    Nodes on other machines have other limits.
    """
    layout = HomeLayout(home)
    record = read_supervisor(layout)
    try:
        if record is None or not is_locked(layout.lock):
            return None, ""
        with ApiClient(find_server(record.url, home), timeout_s=STATUS_S) as server:
            nodes = server.get("/api/v1/status", SystemStatus, functions="none").nodes
    except FleetError as error:
        return None, error.message
    except OSError as error:  # a home of another user
        return None, f"cannot be compared with those of the server here: {error}"
    service = read_services(layout).get(NODE)
    return next((node for node in nodes if service and service.pid and node.pid == service.pid), None), ""


# ── measuring ──────────────────────────────────────────────────────────────────────────────────────


def measure(home: Path, store: str, size_bytes: int = 0) -> Ceilings:
    """Measures all limits, moving `size_bytes` for each; 0: as many as it takes. Errors: MeasurementFailed."""
    options = ("--home", str(home), "--store", store, "--bytes", str(size_bytes))
    ceilings = run_measurement("fleetstart.prefetcher.diagnostics.throughput", options, Ceilings)
    device = _device()
    if device.bytes_per_s:
        return msgspec.structs.replace(
            ceilings,
            bytes_per_s={**ceilings.bytes_per_s, "device": device.bytes_per_s},
            measured={**ceilings.measured, "device": f"{device.device}, from pinned memory"},
        )
    if device.failed:
        return msgspec.structs.replace(ceilings, failed={**ceilings.failed, "device": device.failed})
    return msgspec.structs.replace(ceilings, left_out={**ceilings.left_out, "device": device.left_out})


def _device() -> DeviceCeiling:
    if not any(Path(node).exists() for node in GPU_NODES):
        return DeviceCeiling(left_out="no GPU here")
    try:
        return run_measurement("fleetstart.runtime.weights.device_throughput", (), DeviceCeiling)
    except MeasurementFailed as error:
        return DeviceCeiling(failed=str(error))


def run_measurement(module: str, options: Sequence[str], kind: type[Answer]) -> Answer:
    """What a measuring process printed. Errors: MeasurementFailed."""
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", module, *options], capture_output=True, timeout=MEASURE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise MeasurementFailed(f"{module} took more than {MEASURE_S:g} s") from error
    except OSError as error:
        raise MeasurementFailed(f"{module} cannot be run: {error}") from error
    if process.returncode:
        last = (process.stderr.decode(errors="replace").strip().splitlines() or ["no message"])[-1]
        raise MeasurementFailed(f"{module} ended with {process.returncode}: {last}")
    try:
        return msgspec.json.decode(process.stdout, type=kind)
    except UNDECODABLE as error:
        raise MeasurementFailed(f"{module} printed no result: {error}") from error


# ── what it says ───────────────────────────────────────────────────────────────────────────────────


def page_finding(ceilings: Ceilings, node: NodeReport | None) -> Finding:
    """Page size of the running node, which may hold all huge pages; without one, of a node started now."""
    said = node.weights_memory if node is not None else ceilings
    refused = "".join(f"; no {kind}: {why}" for kind, why in said.refused.items())
    found = PAGES[said.pages] + refused
    if said.pages != "small":
        return Finding(check="pages", verdict="ok", found=found)
    count = max(GIB, available_bytes() // 2) // HUGE_PAGE_BYTES
    return Finding(
        check="pages",
        verdict="warn",
        found=found,
        advice=f"reserve huge pages, here half of what is free: sysctl vm.nr_hugepages={count}; or run the node as "
        "root, with /sys/kernel/mm/transparent_hugepage/shmem_enabled at anything but deny",
    )


def speed_findings(ceilings: Ceilings) -> list[Finding]:
    return [_speed(limit, ceilings) for limit in LIMIT_NAMES]


def _speed(limit: Limit, ceilings: Ceilings) -> Finding:
    check = LIMIT_NAMES[limit]
    if limit in ceilings.left_out:
        return Finding(check=check, verdict="ok", found=f"left out: {ceilings.left_out[limit]}")
    if limit in ceilings.failed or limit not in ceilings.bytes_per_s:
        why = ceilings.failed.get(limit, "no figure came")
        return Finding(check=check, verdict="warn", found=f"could not be measured: {why}")
    reached = ceilings.bytes_per_s[limit]
    found = f"{format_rate(reached)}, {ceilings.measured.get(limit, '')}"
    numbers = {"bytes_per_s": reached}
    if limit == "prefault" and reached < BACKED_BYTES_PER_S:
        return Finding(
            check=check,
            verdict="warn",
            found=f"{found}: the host has not backed this machine's memory yet, which slows each first load down",
            advice="allocate memory for weights ahead: FS_POOL_MEMORY; give a virtual machine fixed memory, no balloon",
            numbers=numbers,
        )
    if limit in ceilings.buffered:
        return Finding(
            check=check,
            verdict="warn",
            found=f"{found}: its file system rejects direct reads, so all reads go through the page cache",
            advice="keep it on a local disk with ext4 or xfs",
            numbers=numbers,
        )
    return Finding(check=check, verdict="ok", found=found, numbers=numbers)


def load_findings(ceilings: Ceilings, node: NodeReport, *, remote_store: bool) -> list[Finding]:
    observed = ObservedLoads(node=node.node, pages=node.weights_memory.pages, bytes_per_s=node.bytes_per_s)
    found = diagnose(ceilings, observed, remote_store=remote_store)
    if not found:
        return [Finding(check="loads", verdict="ok", found=f"{node.node} has loaded too little yet to compare")]
    return found
