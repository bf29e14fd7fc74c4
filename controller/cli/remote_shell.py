"""The client's side of a shell: its terminal in raw mode or its pipes, on a WebSocket (`contract.terminal`).

Whatever happens, the terminal is put back as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from fleetstart.runtime.contract.errors import FleetError, WorkerLost
from fleetstart.runtime.contract.node.shell import (
    CHUNK_BYTES,
    FRAME_MAX_BYTES,
    STDERR,
    STDOUT,
    EndOfInput,
    Size,
    Start,
    read_exit,
)

from .api_client import LOOPBACK, Address, error_of
from .output import Unreachable

OPEN_S = 600.0
"""The server has limits of its own on the start of a worker, and says what went wrong; this is for one that is dead."""
WAITING_FRAMES = 1024
"""32 MiB that a pager need not have taken yet: meanwhile the connection is kept alive."""

Write = Callable[[int, bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellRequest:
    path: str
    version: str
    idle_s: float | None
    argv: tuple[str, ...]
    terminal: bool


def run_shell(address: Address, wanted: ShellRequest, write: Write) -> int:
    """The command's exit status. `write` gets 1 or 2, and what was printed. Errors: FleetError."""
    return asyncio.run(_converse(address, wanted, write))


async def _converse(address: Address, wanted: ShellRequest, write: Write) -> int:
    query = {"version": wanted.version} | ({"idle_s": str(wanted.idle_s)} if wanted.idle_s is not None else {})
    parts = urlsplit(address.url)
    scheme = "wss" if parts.scheme == "https" else "ws"
    try:
        async with connect(
            f"{scheme}://{parts.netloc}{parts.path}{wanted.path}?{urlencode(query)}",
            additional_headers={"authorization": f"Bearer {address.key}"} if address.key else {},
            # A proxy of the environment is for the world outside, never for this machine.
            proxy=None if parts.hostname in LOOPBACK else True,
            compression=None,
            open_timeout=OPEN_S,
            close_timeout=2,
            max_size=FRAME_MAX_BYTES,
            max_queue=WAITING_FRAMES,
        ) as socket:
            return await _session(socket, wanted, write)
    except InvalidStatus as error:
        raise error_of(error.response.status_code, bytes(error.response.body or b"")) from error
    except ConnectionClosed as error:
        close = error.rcvd
        why = close.reason if close is not None and close.reason else "the connection broke"
        raise WorkerLost(f"the shell has ended: {why}") from error
    except BrokenPipeError:
        raise  # whoever reads what is printed has enough of it
    except (OSError, InvalidHandshake) as error:
        raise Unreachable(f"{address.url} does not answer: {error or type(error).__name__}") from error


async def _session(socket: ClientConnection, wanted: ShellRequest, write: Write) -> int:
    loop = asyncio.get_running_loop()
    window = _window() if wanted.terminal else None
    term = os.environ.get("TERM") or "dumb"
    await _say(socket, Start(argv=list(wanted.argv), window=window, term=term))
    with _raw() if wanted.terminal else contextlib.nullcontext():
        if wanted.terminal:
            tasks: set[asyncio.Task[None]] = set()

            def resized() -> None:
                task = loop.create_task(_say(socket, _window()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            loop.add_signal_handler(signal.SIGWINCH, resized)
        threading.Thread(target=_type, args=(socket, loop), daemon=True).start()
        return await _printed(socket, write)


async def _printed(socket: ClientConnection, write: Write) -> int:
    while True:
        frame = await socket.recv()
        if isinstance(frame, str):
            try:
                return read_exit(frame).status
            except msgspec.DecodeError as error:
                raise FleetError(f"the shell said something that is not understood: {error}") from error
        if frame[:1] in (STDOUT, STDERR):
            # Whoever reads us may be slow; the connection must not wait for it.
            await asyncio.to_thread(write, 1 if frame[:1] == STDOUT else 2, frame[1:])


async def _say(socket: ClientConnection, message: msgspec.Struct) -> None:
    with contextlib.suppress(ConnectionClosed):  # who reads the other way hears of it
        await socket.send(msgspec.json.encode(message).decode())


def _type(socket: ClientConnection, loop: asyncio.AbstractEventLoop) -> None:
    """In a thread of its own: a file on stdin cannot be waited for in any other way."""
    with contextlib.suppress(RuntimeError, ConnectionClosed):  # the loop, or the connection, is closed
        while data := _read():
            asyncio.run_coroutine_threadsafe(socket.send(data), loop).result()
        asyncio.run_coroutine_threadsafe(_say(socket, EndOfInput()), loop).result()


def _read() -> bytes:
    try:
        return os.read(0, CHUNK_BYTES)
    except OSError:
        return b""


def _window() -> Size:
    columns, rows = shutil.get_terminal_size((80, 24)) if not sys.stdin.isatty() else os.get_terminal_size(0)
    return Size(rows=min(max(rows, 1), 4096), columns=min(max(columns, 1), 4096))


@contextmanager
def _raw() -> Iterator[None]:
    """Every key goes to the other side, ctrl-C too. A polite end from outside ends it as ctrl-C ends other verbs."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    before = termios.tcgetattr(0)
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, lambda: task.cancel() if task is not None else None)
    try:
        tty.setraw(0, termios.TCSADRAIN)
        yield
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        with contextlib.suppress(termios.error):  # it may be gone
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
