"""Both ends of a link through a real store, in this process."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

from fleetstart.prefetcher.relay import Relays
from fleetstart.prefetcher.relay_objects import Link
from fleetstart.runtime.contract.ids import PipelineId

LINK = Link(pipeline=PipelineId("p-1"), sender=0, receiver=1, secret="word")


class Ends:
    """`sender` and `receiver` are what the two workers have. The receiver's is there once the first bytes are."""

    def __init__(self, relays: Relays, link: Link = LINK) -> None:
        self.link = link
        self.relays = relays
        self.sender, self._ours = socket.socketpair()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(20)
        self.sent_failed: list[str] = []
        self.received_failed: list[str] = []
        self._receiver: socket.socket | None = None
        self.sender.settimeout(20)

    def send(self) -> None:
        self.relays.send(self.link, self._ours, self.sent_failed.append)

    def receive(self) -> None:
        self.stop = self.relays.receive(self.link, self._connect, self.received_failed.append)

    def _connect(self) -> socket.socket:
        return socket.create_connection(self._listener.getsockname())

    @property
    def receiver(self) -> socket.socket:
        if self._receiver is None:
            self._receiver, _ = self._listener.accept()
            self._receiver.settimeout(20)
        return self._receiver

    def read(self, count: int) -> bytes:
        """So many bytes, or fewer at the end."""
        data = bytearray()
        while len(data) < count and (more := self.receiver.recv(count - len(data))):
            data += more
        return bytes(data)

    def close(self) -> None:
        self.sender.close()
        self._ours.close()
        self._listener.close()
        if self._receiver is not None:
            self._receiver.close()


@contextlib.contextmanager
def joined(relays: Relays, link: Link = LINK) -> Iterator[Ends]:
    """A link at work."""
    ends = Ends(relays, link)
    ends.send()
    ends.receive()
    try:
        yield ends
    finally:
        ends.close()
        ends.stop()
