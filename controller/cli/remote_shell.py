"""Client side of `fs shell`: connects the terminal (in raw mode) or pipes to a WebSocket (`contract.node.shell`).

The terminal's mode is restored in every case.
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

from fleetstart.runtime.contract.decoding import UNDECODABLE
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
"""Timeout of opening a shell, for a dead server: a live one limits the worker's start itself, and reports errors."""
WAITING_FRAMES = 1024
"""Received frames (32 MiB) that a slow reader, such as a pager, may leave waiting while the connection stays alive."""

Write = Callable[[int, bytes], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellRequest:
    """A shell to open, or a command to run."""

    path: str
    version: str
    idle_s: float | None
    argv: tuple[str, ...]
    terminal: bool


def run_shell(address: Address, wanted: ShellRequest, write: Write) -> int:
    """Runs a shell or a command, and returns its exit status. `write` gets 1 or 2, and output. Errors: FleetError."""
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
        raise  # the reader of stdout has closed it
    except (OSError, InvalidHandshake) as error:
        raise Unreachable(f"{address.url} does not answer: {error or type(error).__name__}") from error


async def _session(socket: ClientConnection, wanted: ShellRequest, write: Write) -> int:
    loop = asyncio.get_running_loop()
    window = _window() if wanted.terminal else None
    term = os.environ.get("TERM") or "dumb"
    await _send(socket, Start(argv=list(wanted.argv), window=window, term=term))
    with _raw_terminal() if wanted.terminal else contextlib.nullcontext():
        if wanted.terminal:
            tasks: set[asyncio.Task[None]] = set()

            def resized() -> None:
                task = loop.create_task(_send(socket, _window()))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            loop.add_signal_handler(signal.SIGWINCH, resized)
        threading.Thread(target=_forward_stdin, args=(socket, loop), daemon=True).start()
        return await _receive_output(socket, write)


async def _receive_output(socket: ClientConnection, write: Write) -> int:
    while True:
        frame = await socket.recv()
        if isinstance(frame, str):
            try:
                return read_exit(frame).status
            except UNDECODABLE as error:
                raise FleetError(f"the server sent a shell message that is not understood: {error}") from error
        if frame[:1] in (STDOUT, STDERR):
            # The reader of stdout may be slow; the connection must not wait for it.
            await asyncio.to_thread(write, 1 if frame[:1] == STDOUT else 2, frame[1:])


async def _send(socket: ClientConnection, message: msgspec.Struct) -> None:
    with contextlib.suppress(ConnectionClosed):  # the receiving side raises it
        await socket.send(msgspec.json.encode(message).decode())


def _forward_stdin(socket: ClientConnection, loop: asyncio.AbstractEventLoop) -> None:
    """Forwards stdin, in a thread of its own: a file on stdin cannot be awaited."""
    with contextlib.suppress(RuntimeError, ConnectionClosed):  # the loop, or the connection, is closed
        while data := _read_stdin():
            asyncio.run_coroutine_threadsafe(socket.send(data), loop).result()
        asyncio.run_coroutine_threadsafe(_send(socket, EndOfInput()), loop).result()


def _read_stdin() -> bytes:
    try:
        return os.read(0, CHUNK_BYTES)
    except OSError:
        return b""


def _window() -> Size:
    columns, rows = shutil.get_terminal_size((80, 24)) if not sys.stdin.isatty() else os.get_terminal_size(0)
    return Size(rows=min(max(rows, 1), 4096), columns=min(max(columns, 1), 4096))


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Raw mode inside the block: every key is sent, ctrl-C too. SIGTERM and SIGHUP end the shell as ctrl-C ends other
    verbs."""
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
        with contextlib.suppress(termios.error):  # the terminal may be closed
            termios.tcsetattr(0, termios.TCSADRAIN, before)


def write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
