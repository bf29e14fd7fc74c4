"""One forked worker process: control socket, log pipe, exit. Independent of what the process runs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.node.channel import Channel, ChannelClosed
from fleetstart.runtime.contract.node.messages import DaemonMessage, EgressListener, Pooled, WorkerMessage

from .control_groups.groups import Cgroup
from .read_budget import FairReader, ReadBudget, WorkerShare
from .worker_logs import LogPipe

READS_AT_ONCE = 16
"""Messages read of one worker before the event loop continues: a flood must not delay the others."""
FINAL_READS = 1024
"""Messages read of a worker that has ended: more than its socket buffer holds."""


class ChannelEnded:
    """The worker's control socket has ended; its exit should follow."""


class ProcessExited:
    """The process has exited. `status` as of os.waitstatus_to_exitcode, None if unknown."""

    def __init__(self, status: int | None) -> None:
        self.status = status


def has_own_network(isolation: str) -> bool:
    """Checks whether a worker that asked for no network gets one of its own, by the names of its namespaces."""
    return "net" in isolation.split(",")


def has_own_user(isolation: str) -> bool:
    """Checks whether a worker may be told to take a user id of its function."""
    return "uid" in isolation.split(",")


ProcessEvent = WorkerMessage | ChannelEnded | ProcessExited


class ForkedProcess:
    """One forked worker. Owns its control socket, log pipe, pidfd and control group."""

    def __init__(
        self,
        *,
        fork_id: WorkerId,
        pool: str,
        control: socket.socket,
        log_fd: int,
        group: Cgroup | None,
        share: WorkerShare | None = None,
    ):
        control.setblocking(False)
        self.fork_id = fork_id
        self.pool = pool
        self.group = group
        share = share or ReadBudget().own_share()
        self.log = LogPipe(log_fd, share)
        self.pid = 0
        self.isolation = ""
        self.user = 0
        """The user id that it was told to take; 0 for the daemon's."""
        self._give_user_back: Callable[[], None] = lambda: None
        self.pooled_ns = 0
        """When its own code began to run; 0 until it has reported."""
        self.exited = asyncio.Event()
        self._outlet: int | None = None
        """Descriptor of its egress listener, once received; -1 once taken."""
        self._on_event: Callable[[ProcessEvent], None] = lambda event: None
        self._early: list[ProcessEvent] = []
        self._listening = False
        self._pidfd = -1
        self._channel: Channel[WorkerMessage] | None = Channel(control, WorkerMessage, descriptors=1)
        self._reader = FairReader(control.fileno(), self._receive, share, most_reads=READS_AT_ONCE)

    def listen(self, on_event: Callable[[ProcessEvent], None]) -> None:
        """Delivers events to `on_event` from now on, those buffered so far first."""
        self._on_event = on_event
        self._listening = True
        early, self._early = self._early, []
        for event in early:
            on_event(event)

    def send(self, message: DaemonMessage, descriptors: tuple[int, ...] = ()) -> None:
        """Sends a message with descriptors. Errors: ChannelClosed if the worker is gone."""
        if self._channel is None:
            raise ChannelClosed("the worker is gone")
        self._channel.send(message, descriptors)

    def kill(self) -> None:
        if self._pidfd >= 0 and not self.exited.is_set():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def hold_user(self, user: int, give_back: Callable[[], None]) -> None:
        """Keeps a user id until the process is closed."""
        self.user, self._give_user_back = user, give_back

    def close(self) -> None:
        """Closes everything but the control group, which may still hold exiting processes."""
        give_back, self._give_user_back = self._give_user_back, lambda: None
        give_back()
        self._close_channel()
        if (outlet := self.take_outlet()) is not None:
            os.close(outlet)
        self.log.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def take_outlet(self) -> int | None:
        """The socket of the first `EgressListener`, sent before any code of a function runs. The caller owns it."""
        if self._outlet is None or self._outlet < 0:
            return None
        outlet, self._outlet = self._outlet, -1
        return outlet

    def forked(self, pid: int, isolation: str) -> None:
        self.pid = pid
        self.isolation = isolation
        with contextlib.suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def ended(self, status: int | None) -> None:
        if not self.exited.is_set():
            if self._channel is not None:
                for _ in range(FINAL_READS):  # its last words come before its end
                    if not self._receive():
                        break
            self.exited.set()
            self._emit(ProcessExited(status))

    def _emit(self, event: ProcessEvent) -> None:
        if isinstance(event, Pooled):
            self.pooled_ns = event.started_ns
        if self._listening:
            self._on_event(event)
        else:
            self._early.append(event)

    def _receive(self) -> bool:
        """Receives a message; False if there is none now, or none any more."""
        if self._channel is None:
            return False
        try:
            message, descriptors = self._channel.receive()
        except BlockingIOError:
            return False
        except ChannelClosed:
            self._close_channel()
            self._emit(ChannelEnded())
            return False
        if isinstance(message, EgressListener) and self._outlet is None and descriptors:
            self._outlet = descriptors.pop()
        for descriptor in descriptors:
            os.close(descriptor)
        self._emit(message)
        return True

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._reader.close()
            self._channel.close()
            self._channel = None
