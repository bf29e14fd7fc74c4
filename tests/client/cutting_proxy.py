"""A TCP proxy that cuts connections after a request was passed on: its client does not know what became of it."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.servers import listening_socket


class CuttingProxy:
    """Passes connections to a port of this machine; the first `cuts` are cut when their answer begins."""

    def __init__(self, port: int, *, cuts: int) -> None:
        self._port = port
        self._cuts = cuts
        self.connections = 0
        self._listener = listening_socket()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(("127.0.0.1", self._port))
            self._sockets += [client, server]
            cut = self.connections <= self._cuts
            for arguments in ((client, server, False), (server, client, cut)):
                thread = threading.Thread(target=self._pass, args=arguments, daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, target: socket.socket, cut: bool) -> None:
        with contextlib.suppress(OSError):
            while block := source.recv(65_536):
                if cut:
                    break
                target.sendall(block)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
