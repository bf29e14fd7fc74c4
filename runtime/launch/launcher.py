"""Launcher loop: starts a worker for each `Fork` message and reports its exit, and tells whose image has changed.

Single-threaded, because a fork copies one thread only. It ends with its daemon.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..contract.ids import WorkerId
from ..contract.node.channel import Channel, ChannelClosed
from ..contract.node.messages import (
    CheckImage,
    Exited,
    Fork,
    Forked,
    ForkFailed,
    ImageChecked,
    LauncherReady,
    LauncherRequest,
    LauncherUnavailable,
)
from ..isolation import linux
from ..worker_io.log_tagging import TaggedStream

CONTROL_FD = 3
"""Control socket of every worker. 0 is /dev/null, 1 and 2 are its log; no other descriptor is open."""


@dataclass(frozen=True, slots=True)
class LaunchedWorker:
    """A worker process that this launcher has started."""

    worker: WorkerId
    pid: int
    pidfd: int


class LaunchRefused(OSError):
    """The function asks for what this node has not: trying again is of no use."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason)
        self.hint = hint


class Launcher(Protocol):
    """Starts worker processes: children of this process, or of a container engine."""

    def describe(self, *, network: bool) -> str:
        """Name of the isolation that a worker gets."""

    def launch(self, fork: Fork, control_fd: int, log_fd: int) -> LaunchedWorker:
        """Starts a worker, whose process may have ended already. Errors: OSError, LaunchRefused."""

    def reap(self, child: LaunchedWorker) -> int:
        """Cleans up after a worker that has ended; returns its exit status, or its signal as a negative number."""


def serve(
    sock: socket.socket,
    launcher: Launcher,
    warm: LauncherReady,
    is_current: Callable[[WorkerId], bool] = lambda worker: True,
) -> None:
    """Runs the loop; returns when the daemon has closed its channel. `is_current`: whether a worker's image is still
    the one that its name means."""
    channel: Channel[LauncherRequest] = Channel(sock, LauncherRequest)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ, None)
    try:
        channel.send(warm)
        while True:
            for key, _ in selector.select():
                if isinstance(key.data, LaunchedWorker):
                    selector.unregister(key.data.pidfd)
                    os.close(key.data.pidfd)
                    channel.send(Exited(key.data.worker, launcher.reap(key.data)))
                else:
                    child = _answer(channel, launcher, is_current)
                    if child is not None:
                        selector.register(child.pidfd, selectors.EVENT_READ, child)
    except ChannelClosed:
        return


def refuse(sock: socket.socket, reason: str) -> None:
    """Rejects every request with the reason; returns when the daemon has closed its channel."""
    channel: Channel[LauncherRequest] = Channel(sock, LauncherRequest)
    with contextlib.suppress(ChannelClosed):
        channel.send(LauncherUnavailable(reason))
        while True:
            request, descriptors = channel.receive()
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(request, CheckImage):
                channel.send(ImageChecked(request.worker, current=False))
            else:
                channel.send(ForkFailed(request.worker, reason))


def _answer(
    channel: Channel[LauncherRequest], launcher: Launcher, is_current: Callable[[WorkerId], bool]
) -> LaunchedWorker | None:
    """Does what the next request asks for; returns the worker if it has started one."""
    request, descriptors = channel.receive()
    if isinstance(request, Fork):
        return _launch_one(channel, launcher, request, descriptors)
    for descriptor in descriptors:
        os.close(descriptor)
    channel.send(ImageChecked(request.worker, is_current(request.worker)))
    return None


def _launch_one(
    channel: Channel[LauncherRequest], launcher: Launcher, request: Fork, descriptors: list[int]
) -> LaunchedWorker | None:
    try:
        if len(descriptors) != 2:
            reason = f"expected two descriptors (control socket, log), got {len(descriptors)}"
            channel.send(ForkFailed(request.worker, reason))
            return None
        try:
            child = launcher.launch(request, descriptors[0], descriptors[1])
        except LaunchRefused as error:
            channel.send(ForkFailed(request.worker, str(error), error.hint, refused=True))
            return None
        except OSError as error:
            channel.send(ForkFailed(request.worker, str(error)))
            return None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    channel.send(Forked(child.worker, _pid_outside(child), launcher.describe(network=request.network)))
    return child


def _pid_outside(child: LaunchedWorker) -> int:
    """The child's pid in the daemon's namespace, which /proc shows; this process may be in another one."""
    with open(f"/proc/self/fdinfo/{child.pidfd}") as lines:
        pid = next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), child.pid)
    return pid if pid > 0 else child.pid  # -1: it has ended, and was not this process' to reap


def has_ended(pidfd: int) -> bool:
    """Checks whether a process has ended, by its pidfd."""
    return bool(select.select([pidfd], [], [], 0)[0])


def begin(fd: int) -> socket.socket:
    """Prepares a launcher process: it ends with its daemon only. Returns the socket to the daemon.

    Ctrl-C in a terminal reaches the whole group: the daemon drains, and ends this process when it is done.
    """
    linux.die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    sock = socket.socket(fileno=fd)
    sock.set_inheritable(False)
    return sock


def join_groups(procs: list[str]) -> None:
    """Moves this process into control groups, by their `cgroup.procs` files."""
    for path in procs:
        with open(path, "w") as file:
            file.write("0")


def arrange_descriptors(control_fd: int, log_fd: int) -> None:
    """Sets up descriptors 0, 1, 2 and CONTROL_FD of a worker and closes all others."""
    # Copies out of the way first, so that no step overwrites what a later one needs.
    control_fd = fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, CONTROL_FD + 1)
    log_fd = fcntl.fcntl(log_fd, fcntl.F_DUPFD_CLOEXEC, CONTROL_FD + 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.dup2(control_fd, CONTROL_FD, inheritable=False)
    linux.close_from(CONTROL_FD + 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = TaggedStream(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = TaggedStream(2)  # type: ignore[misc]
