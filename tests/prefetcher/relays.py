"""Both ends of a relayed link through a real store, in this process."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from fleetstart.prefetcher.stage_links.relay import Relays
from fleetstart.prefetcher.stage_links.relay_messages import RelayLink
from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.contract.object_keys import RELAY
from tests.prefetcher.nodes import S3Server, Store
from tests.servers import wait_until

LINK = RelayLink(pipeline=PipelineId("p-1"), sender=0, receiver=1, secret="word")


class Ends:
    """A link's workers: `sender` and `receiver` are their sockets. The receiver's exists once the first bytes have
    come."""

    def __init__(self, relays: Relays, link: RelayLink = LINK) -> None:
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
def joined(relays: Relays, link: RelayLink = LINK) -> Iterator[Ends]:
    """A link that carries bytes."""
    ends = Ends(relays, link)
    ends.send()
    ends.receive()
    try:
        yield ends
    finally:
        ends.close()
        ends.stop()


def carry_late(relays: Relays, s3_server: S3Server, ends: Ends) -> None:
    """Repeats a write that the store carries out late, after both ends have gone."""
    assert s3_server.process is not None
    s3_server.process.send_signal(signal.SIGSTOP)
    ends.sender.sendall(b"late")
    wait_until(lambda: repeats(relays), what="a write that came to nothing")
    s3_server.process.send_signal(signal.SIGCONT)
    assert ends.read(4) == b"late"
    ends.sender.close()
    assert ends.receiver.recv(1) == b""


# ── what others see of it ──────────────────────────────────────────────────────────────────────────


def left(store: Store) -> list[str]:
    """Objects of relays that are left in the bucket."""
    found = [Path(folder, name) for folder, _, names in os.walk(store.path(RELAY)) for name in names]
    return sorted(str(path.relative_to(store.folder)) for path in found)


def wait_empty(store: Store) -> None:
    assert wait_until(lambda: "nothing" if not left(store) else "", 10, what="an empty bucket") == "nothing"


def repeats(relays: Relays) -> bool:
    """True if some write failed and is being repeated."""
    return any(outgoing._repeated for outgoing in relays._outgoing)


def at_work(part: str) -> bool:
    return any(thread.name.startswith(part) for thread in threading.enumerate())


def says_more(ends: Ends) -> bool:
    """Writes as a stage does that is alive. True once the link is closed."""
    try:
        ends.sender.sendall(b"is anybody there?")
    except BrokenPipeError:
        return True
    return False
