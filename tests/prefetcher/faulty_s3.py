"""An HTTP server over a folder that answers ranges as S3 does, or fails in one of the ways of real stores."""

from __future__ import annotations

import socket
import ssl
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.servers import wait_until

Fault = Callable[["Handler", bytes, int, int], None]
"""Given the connection, the whole object, and the range that was asked for: answers it, badly."""

BLOCK_BYTES = 64 * 1024


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyS3

    def do_GET(self) -> None:
        path = self.server.root / self.path.partition("?")[0].lstrip("/")
        if not path.is_file():
            self.answer(404, b"", {})
            return
        data = path.read_bytes()
        asked = self.headers.get("Range")
        if asked is None:
            self.answer(200, data, {})
            return
        begin, end = (int(text) for text in asked.removeprefix("bytes=").split("-"))
        with self.server.lock:
            self.server.ranges.append((begin, end + 1))
            self.server.readers.append(self.client_address)
            self.server.queries.append(self.path.partition("?")[2])
            fault = self.server.faults.pop(0) if self.server.faults else self.server.always
        fault(self, data, begin, min(end + 1, len(data)))

    def answer(self, status: int, body: bytes, headers: dict[str, str], *, length: int | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body) if length is None else length), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def begin(self, data: bytes, begin: int, end: int) -> None:
        """The headers of the right answer."""
        self.send_response(206)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError:  # the reader left, as it may
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        pass


class FaultyS3(ThreadingHTTPServer):
    """A server with injected faults: `faults` apply to the next ranges, one each; `always` to those after them."""

    daemon_threads = True

    def __init__(self, root: Path, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.root = root
        self.lock = threading.Lock()
        self.faults: list[Fault] = []
        self.always: Fault = right
        self.ranges: list[tuple[int, int]] = []
        self.readers: list[tuple[str, int]] = []
        """The other end of the connection that each range was asked for on."""
        self.queries: list[str] = []
        self.released = threading.Event()
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.server_address[1]}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def handle_error(self, request: object, client_address: object) -> None:
        pass

    def close(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()
        wait_until(lambda: not self._thread.is_alive())


def right(handler: Handler, data: bytes, begin: int, end: int) -> None:
    handler.begin(data, begin, end)
    handler.wfile.write(data[begin:end])


def closes_after_it(handler: Handler, data: bytes, begin: int, end: int) -> None:
    """The right answer, and the last one on its connection, as a store that drains gives it."""
    headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}", "Connection": "close"}
    handler.answer(206, data[begin:end], headers)


def stalls_after(size_bytes: int) -> Fault:
    def fault(handler: Handler, data: bytes, begin: int, end: int) -> None:
        handler.begin(data, begin, end)
        handler.wfile.write(data[begin : min(begin + size_bytes, end)])
        handler.wfile.flush()
        handler.server.released.wait(60)
        handler.close_connection = True

    return fault


def comes_in(block_bytes: int, pause_s: float) -> Fault:
    def fault(handler: Handler, data: bytes, begin: int, end: int) -> None:
        handler.begin(data, begin, end)
        for at in range(begin, end, block_bytes):
            handler.wfile.write(data[at : min(at + block_bytes, end)])
            handler.wfile.flush()
            if handler.server.released.wait(pause_s):
                break
        handler.close_connection = True

    return fault


trickles = comes_in(BLOCK_BYTES, 0.05)
"""A megabyte and a quarter a second."""


def resets_after(size_bytes: int) -> Fault:
    def fault(handler: Handler, data: bytes, begin: int, end: int) -> None:
        handler.begin(data, begin, end)
        handler.wfile.write(data[begin : min(begin + size_bytes, end)])
        handler.wfile.flush()
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
        handler.close_connection = True

    return fault


def ends_after(size_bytes: int) -> Fault:
    def fault(handler: Handler, data: bytes, begin: int, end: int) -> None:
        handler.begin(data, begin, end)
        handler.wfile.write(data[begin : min(begin + size_bytes, end)])
        handler.close_connection = True

    return fault


def answers_200(handler: Handler, data: bytes, begin: int, end: int) -> None:
    handler.answer(200, data, {})


def says(status: int) -> Fault:
    def fault(handler: Handler, data: bytes, begin: int, end: int) -> None:
        handler.answer(status, b"<Error/>", {})

    return fault


def gives_another_range(handler: Handler, data: bytes, begin: int, end: int) -> None:
    size = end - begin
    handler.answer(206, data[:size], {"Content-Range": f"bytes 0-{size - 1}/{len(data)}"})


def lies_about_its_length(handler: Handler, data: bytes, begin: int, end: int) -> None:
    headers = {"Content-Range": f"bytes {begin}-{end - 1}/{len(data)}"}
    handler.answer(206, data[begin:end], headers, length=end - begin + 1000)
    handler.close_connection = True


def flips_a_bit(handler: Handler, data: bytes, begin: int, end: int) -> None:
    handler.begin(data, begin, end)
    body = bytearray(data[begin:end])
    body[len(body) // 2] ^= 1
    handler.wfile.write(body)


def talks_nonsense(handler: Handler, data: bytes, begin: int, end: int) -> None:
    handler.wfile.write(b"\x16\x03\x01 not HTTP at all\r\n\r\n" * 10)
    handler.close_connection = True
