"""Messages of the node to a pipeline stage: connections to other stages, and the order to consolidate.

They may arrive while the stage is still being loaded and are kept until then. A thread receives them, because the event
loop does not run yet.
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from ..contract.node.channel import Channel, ChannelClosed
from ..contract.node.messages import Consolidate, DaemonMessage, Peers


class LoadedStage(Protocol):
    """Receiver of the node's messages: a stage."""

    def connect(self, index: int, link: socket.socket) -> None: ...

    def consolidate(self) -> None: ...


class NodeMessages:
    """Receives the node's messages and forwards them to the stage, or keeps them until there is one."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        """Listening socket for the links of other stages; the stage owns it after `adopt`."""
        self._lock = threading.Lock()
        self._stage: LoadedStage | None = None
        self._early: list[tuple[int, socket.socket]] = []
        self._consolidation_requested = False

    def adopt(self, stage: LoadedStage) -> None:
        """Forwards kept and future messages to the stage. Called before its layers are loaded."""
        with self._lock:
            self._stage = stage
            early, self._early = self._early, []
        for index, link in early:
            stage.connect(index, link)
        if self._consolidation_requested:
            stage.consolidate()

    def hear(
        self, channel: Channel[DaemonMessage], other: Callable[[DaemonMessage], object], gone: Callable[[], object]
    ) -> None:
        """Receives messages in a thread until the channel ends; `other` and `gone` are called in that thread."""
        threading.Thread(target=self._hear, args=(channel, other, gone), name="control", daemon=True).start()

    def _hear(
        self, channel: Channel[DaemonMessage], other: Callable[[DaemonMessage], object], gone: Callable[[], object]
    ) -> None:
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        while True:
            poll.poll()
            try:
                message, descriptors = channel.receive()
            except BlockingIOError:
                continue
            except ChannelClosed:
                gone()
                return
            links = [socket.socket(fileno=descriptor) for descriptor in descriptors]
            if isinstance(message, Peers) and len(links) == len(message.stages):
                for index, link in zip(message.stages, links, strict=True):
                    self._connect(index, link)
                continue
            for link in links:
                link.close()
            if isinstance(message, Consolidate):
                self._consolidate()
            else:
                other(message)

    def _connect(self, index: int, link: socket.socket) -> None:
        with self._lock:
            if self._stage is None:
                self._early.append((index, link))
                return
        self._stage.connect(index, link)

    def _consolidate(self) -> None:
        with self._lock:
            self._consolidation_requested = True
            stage = self._stage
        if stage is not None:
            stage.consolidate()
