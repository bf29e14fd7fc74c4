"""A worker's part in a pipeline, as the worker sees it: messages of its node, on their way to its stage.

Connections to other stages, and the word that the rest of the model is coming, may arrive while the stage is still
being loaded: they wait here. A thread hears them, since the loop does not run yet then.
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
    """A stage that was loaded."""

    def connect(self, index: int, link: socket.socket) -> None: ...

    def grow(self) -> None: ...


class NodeMessages:
    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        """For the other stages' links; the stage's own once it is adopted."""
        self._lock = threading.Lock()
        self._stage: LoadedStage | None = None
        self._early: list[tuple[int, socket.socket]] = []
        self._grows = False

    def adopt(self, stage: LoadedStage) -> None:
        """It gets what came before, and all that comes. Called before its layers are there."""
        with self._lock:
            self._stage = stage
            early, self._early = self._early, []
        for index, link in early:
            stage.connect(index, link)
        if self._grows:
            stage.grow()

    def hear(
        self, channel: Channel[DaemonMessage], other: Callable[[DaemonMessage], object], gone: Callable[[], object]
    ) -> None:
        """Passes messages on, in a thread, until the channel ends; `other` and `gone` are called there."""
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
                self._grow()
            else:
                other(message)

    def _connect(self, index: int, link: socket.socket) -> None:
        with self._lock:
            if self._stage is None:
                self._early.append((index, link))
                return
        self._stage.connect(index, link)

    def _grow(self) -> None:
        with self._lock:
            self._grows = True
            stage = self._stage
        if stage is not None:
            stage.grow()
