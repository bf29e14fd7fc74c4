"""The standby of one worker: its process stays, its weights and its memory go back to the node until it is woken."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleetstart.runtime.contract.node.channel import ChannelClosed
from fleetstart.runtime.contract.node.messages import StandBy, Wake
from fleetstart.runtime.contract.node.orders import WorkerOrder

from ..concurrency.threads import in_thread
from ..processes.process_memory import private_bytes
from .worker_process import WorkerProcess
from .worker_record import WorkerRecord
from .worker_resources import WorkerResources


class Standby:
    """The way of one worker to standby and back: messages, memory, record. The state that others are told is the
    worker's own."""

    def __init__(
        self, order: WorkerOrder, process: WorkerProcess, resources: WorkerResources, record: WorkerRecord
    ) -> None:
        self._order = order
        self._process = process
        self._resources = resources
        self._record = record
        self.given_back = False
        """True if its weights are given back."""
        self.served_again = False
        """True if it has served since a standby."""
        self._waking_since_ns = 0
        """When it was told to take them again; 0: it was not."""

    def begin(self) -> bool:
        """Tells the process to give its weights back once its calls have ended. False if the process has ended."""
        return self._send(StandBy())

    def wake(self) -> bool:
        """Takes memory again and tells the process. False if that was done before, or the process has ended. Errors:
        FleetError if the node has no memory for it any more."""
        if self._waking_since_ns:
            return False
        self._resources.wake(self._order)
        if not self._send(Wake()):
            return False
        self._waking_since_ns, self.given_back = time.monotonic_ns(), False
        self._record.waking()
        return True

    async def on_given_back(self, is_on_standby: Callable[[], bool]) -> bool:
        """Counts what is left of the worker. False if nothing changes: it is woken already, or had said so before."""
        if not is_on_standby() or self._waking_since_ns or self.given_back or self._process.forked is None:
            return False
        pid = self._process.forked.pid
        left_bytes = await in_thread(lambda: private_bytes(pid), "standby")
        if self._waking_since_ns or not is_on_standby():
            return False
        self.given_back = True
        self._resources.stand_by(self._order, left_bytes)
        self._record.stood_by(self._resources.reserved_bytes)
        return True

    def on_woken(self) -> bool:
        """False if it was not being woken: user code said so."""
        if not self._waking_since_ns:
            return False
        self.served_again = True
        since_ns, self._waking_since_ns = self._waking_since_ns, 0
        self._record.woken(since_ns)
        return True

    def _send(self, message: StandBy | Wake) -> bool:
        """False if the process has ended, which its exit event tells."""
        if self._process.forked is None:
            return False
        try:
            self._process.forked.send(message)
        except ChannelClosed:
            return False
        return True
