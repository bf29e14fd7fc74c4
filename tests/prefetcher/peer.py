"""A server that workers and proxies connect to in tests."""

from __future__ import annotations

import contextlib
import socket
import threading

from tests.servers import wait_until


class Peer:
    """A server on this machine's loopback: answers requests with what it heard, and keeps connections that say HOLD."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        self.listener = socket.create_server((host, 0))
        self.port = self.listener.getsockname()[1]
        self.held: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        heard = b""
        while b"\r\n\r\n" not in heard and (more := client.recv(65536)):
            heard += more
        if heard.startswith(b"HOLD"):
            self.held.append(client)
            return
        with client:
            head, _, body = heard.partition(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
            while len(body) < length:
                body += client.recv(65536)
            answer = head.partition(b"\r\n")[0] + b"|" + body
            client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(answer) + answer)

    def is_left(self, index: int = 0) -> bool:
        """True if the other side of a connection that is held has closed it."""
        wait_until(lambda: len(self.held) > index, what="a connection that is held")
        self.held[index].settimeout(20)
        try:
            return self.held[index].recv(1) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for client in self.held:
            client.close()
