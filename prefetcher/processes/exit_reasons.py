"""Errors for workers that ended unexpectedly, derived from exit status and memory figures. Pure."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from fleetstart.runtime.contract.errors import DeviceOutOfMemory, FleetError, OutOfMemory, StartFailed, WorkerLost
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.devices import DeviceShare
from fleetstart.runtime.contract.sizes import GIB, MIB


def format_size(size_bytes: int) -> str:
    if size_bytes % GIB == 0:
        return f"{size_bytes // GIB} GiB"
    return f"{size_bytes // MIB} MiB" if size_bytes % MIB == 0 else f"{size_bytes:,} bytes"


def out_of_memory(limit_bytes: int) -> OutOfMemory:
    return OutOfMemory(
        f"out of memory: limit {format_size(limit_bytes)}",
        hint="give the function more memory, or let it hold less",
    )


def device_out_of_memory(shares: Sequence[DeviceShare]) -> DeviceOutOfMemory:
    had = ", ".join(f"{format_size(share.memory_bytes)} of {share.id}" for share in shares)
    return DeviceOutOfMemory(
        f"out of device memory: the worker had {had}",
        hint="further workers get more; ask for more with `gpu` to spare them the failed start",
    )


def describe_status(status: int | None) -> str:
    """The exit status for people: "exit code 3", "killed by SIGSEGV"."""
    if status is None:
        return "its fork server died"
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def exit_error(
    status: int | None, *, oom: bool, limit_bytes: int, was_ready: bool, stuck_status: int | None = None
) -> FleetError:
    """The error for a worker that ended without being told to. `stuck_status` is the exit code with which a worker's
    own watchdog ends it."""
    if oom:
        return out_of_memory(limit_bytes)
    words = describe_status(status)
    if status is not None and status == stuck_status:
        words = f"a call did not end at its deadline ({words})"
    if status == exit_codes.RANK_LOST:
        words = f"one of the processes that its model is split over was lost ({words})"
    if was_ready:
        return WorkerLost(f"the worker ended by itself: {words}", hint="fs logs shows what it printed last")
    return StartFailed(f"the worker ended before it was ready: {words}", hint="fs logs shows what it printed last")
