"""A network between a reader and a holder that breaks what the holder sends: flips, cuts, holds and drips bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass

from fleetstart.prefetcher.peers import frames

FIRST_BYTES = frames.CHALLENGE_BYTES + frames.LENGTH.size
"""What a holder sends before the answer to the first request."""


@dataclass(frozen=True, slots=True)
class Harm:
    """What becomes of the holder's bytes from `at` on. `change` gets a byte; None from it ends the connection."""

    at: int
    change: Callable[[int], int | None] = lambda byte: byte
    hold: bool = False
    """Lets no more bytes through, and keeps the connection open."""
    drip_s: float = 0.0
    """Pause after each byte."""
    once: bool = False
    """Only on the first connection."""


class Tampering:
    """A relay to one holder."""

    def __init__(self, address: str, harm: Harm) -> None:
        host, port = address.split(":")
        self._holder = (host, int(port))
        self._harm = harm
        self._stop = threading.Event()
        self._closing = threading.Lock()
        """Held while connections become those that `close` closes, and by it."""
        self._sockets: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                try:
                    holder = socket.create_connection(self._holder)
                except OSError:  # the holder is gone
                    reader.close()
                    continue
                with self._closing:
                    self._sockets += [reader, holder]
                    if self._stop.is_set():
                        self._close_sockets()
                        return
                self.connections += 1
                harmless = self._harm.once and self.connections > 1
                self._start(reader, holder, None)
                self._start(holder, reader, None if harmless else self._harm)

    def _start(self, source: socket.socket, sink: socket.socket, harm: Harm | None) -> None:
        thread = threading.Thread(target=self._forward, args=(source, sink, harm), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _forward(self, source: socket.socket, sink: socket.socket, harm: Harm | None) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if harm is None or passed + len(data) <= harm.at:
                    sink.sendall(data)
                else:
                    sound = max(0, harm.at - passed)
                    sink.sendall(data[:sound])
                    if not self._harm_rest(sink, data[sound:], harm, first=passed + sound == harm.at):
                        break
                passed += len(data)
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _harm_rest(self, sink: socket.socket, data: bytes, harm: Harm, *, first: bool) -> bool:
        """False if the connection shall end."""
        if harm.hold:
            self._stop.wait()
            return False
        if harm.drip_s:
            for byte in data:
                sink.sendall(bytes([byte]))
                if self._stop.wait(harm.drip_s):
                    return False
            return True
        if not first:
            sink.sendall(data)
            return True
        changed = harm.change(data[0])
        if changed is None:
            return False
        sink.sendall(bytes([changed]) + data[1:])
        return True

    def close(self) -> None:
        with self._closing:
            self._stop.set()
            self._close_sockets()
        for thread in self._threads:
            thread.join(5)

    def _close_sockets(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
