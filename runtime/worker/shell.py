"""Shell worker (`Assign.shell`): serves one command over a WebSocket, with a terminal or with pipes.

It is a new worker, forked, limited and confined like any other; it starts a shell instead of the handler. Entering a
running worker was rejected: no root process enters namespaces in which user code runs, a shell that exhausts the memory
kills no call, and an idle function has a shell, too. It sees no processes and files of other workers, and no weights.

It serves one WebSocket (`contract.node.shell`) and ends with it, or if none is opened. The pid namespace ends all
processes that were started in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import Any

import msgspec

from ..contract.decoding import UNDECODABLE
from ..contract.node.shell import CHUNK_BYTES, STDERR, STDOUT, EndOfInput, Exit, Size, Start, read_client
from ..isolation import linux
from ..worker_io.asgi import Receive, Scope, Send

UNCLAIMED_S = 30.0
"""Wait for the controller's WebSocket: it connects at once, unless it is gone."""
LAST_OUTPUT_S = 1.0
"""Wait for the last output after the command has ended: a process that it left may hold its output open."""
SHELLS = ("/bin/bash", "/bin/sh")
NOT_FOUND, NOT_RUN = 127, 126
POLICY = 1008


class ShellApp:
    """ASGI app of one shell session. `leave` is called when it has ended."""

    def __init__(self, leave: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._leave = leave
        self._claimed = False
        loop.call_later(UNCLAIMED_S, self._end_unclaimed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            raise LookupError("a shell worker only serves a WebSocket")
        await receive()  # websocket.connect
        if self._claimed:
            await send({"type": "websocket.close", "code": POLICY, "reason": "this shell is in use"})
            return
        self._claimed = True
        try:
            await send({"type": "websocket.accept"})
            await _session(receive, send)
        finally:
            self._leave()

    def _end_unclaimed(self) -> None:
        if not self._claimed:
            self._leave()


async def _session(receive: Receive, send: Send) -> None:
    message = await receive()
    start = read_client(message["text"]) if message.get("text") is not None else None
    if not isinstance(start, Start):
        return
    try:
        command = ShellCommand(start)
    except (OSError, ValueError) as error:
        status = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_RUN
        await _print(send, STDERR, f"{start.argv[:1]}: {error}\n".encode("utf-8", "replace"))
        await _send_exit(send, status)
        return
    printing = [asyncio.ensure_future(_forward_output(fd, stream, send)) for fd, stream in command.outputs]
    typing = asyncio.ensure_future(_handle_input(receive, command))
    ending = asyncio.ensure_future(command.exited())
    try:
        await asyncio.wait({typing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            await asyncio.wait(printing, timeout=LAST_OUTPUT_S)
            await _send_exit(send, ending.result())
    finally:
        tasks = [typing, ending, *printing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        command.close()


async def _send_exit(send: Send, status: int) -> None:
    await send({"type": "websocket.send", "text": msgspec.json.encode(Exit(status)).decode()})
    await send({"type": "websocket.close", "code": 1000})


async def _print(send: Send, stream: bytes, data: bytes) -> None:
    await send({"type": "websocket.send", "bytes": stream + data})


async def _forward_output(fd: int, stream: bytes, send: Send) -> None:
    while data := await _read(fd):
        await _print(send, stream, data)


async def _handle_input(receive: Receive, command: ShellCommand) -> None:
    """Handles the client's messages until it disconnects or violates the protocol."""
    while (message := await receive())["type"] == "websocket.receive":
        if message.get("bytes") is not None:
            await command.type(message["bytes"])
            continue
        try:
            said = read_client(message["text"])
        except UNDECODABLE:
            return
        if isinstance(said, Size):
            command.resize(said)
        elif isinstance(said, EndOfInput):
            command.end_input()


class ShellCommand:
    """One process in its own session, on a terminal or on pipes. Errors: OSError, ValueError if it cannot start."""

    def __init__(self, start: Start) -> None:
        argv = start.argv or [next((shell for shell in SHELLS if os.path.exists(shell)), SHELLS[-1])]
        # The worker's own Python and its packages' programs come first on PATH.
        environment = {**os.environ, "PATH": f"{os.path.dirname(sys.executable)}:{os.environ.get('PATH', os.defpath)}"}
        self._terminal = -1
        if start.window is not None:
            self._process = self._on_terminal(argv, environment | {"TERM": start.term}, start.window)
            self._input, self.outputs = self._terminal, [(self._terminal, STDOUT)]
        else:
            self._process = _started(argv, environment, subprocess.PIPE, lambda: None)
            pipes: list[Any] = [self._process.stdin, self._process.stdout, self._process.stderr]
            self._input, out, err = (pipe.fileno() for pipe in pipes)
            self.outputs = [(out, STDOUT), (err, STDERR)]
        for fd in {self._input, *(fd for fd, _ in self.outputs)}:
            os.set_blocking(fd, False)

    def _on_terminal(self, argv: list[str], environment: dict[str, str], window: Size) -> subprocess.Popen[bytes]:
        self._terminal, theirs = os.openpty()
        try:
            self.resize(window)
            return _started(argv, environment, theirs, lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0))
        except BaseException:
            os.close(self._terminal)
            raise
        finally:
            os.close(theirs)

    async def type(self, data: bytes) -> None:
        """Writes to the command's input; drops the data if the input is closed."""
        while data and self._input >= 0:
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _wait_ready(loop.add_writer, loop.remove_writer, self._input)
            except OSError:
                return

    def end_input(self) -> None:
        if self._process.stdin is not None and self._input >= 0:
            self._input = -1
            self._process.stdin.close()

    def resize(self, window: Size) -> None:
        if self._terminal >= 0:
            fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", window.rows, window.columns, 0, 0))

    async def exited(self) -> int:
        # In a thread: gVisor has no descriptors of processes that the loop could watch.
        status = await asyncio.to_thread(self._process.wait)
        return 128 - status if status < 0 else status

    def close(self) -> None:
        """Kills the process group; processes outside it end with the worker."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._terminal >= 0:
            os.close(self._terminal)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


def _started(
    argv: list[str], environment: dict[str, str], stream: int, settle: Callable[[], object]
) -> subprocess.Popen[bytes]:
    def first() -> None:
        linux.die_with_parent(signal.SIGKILL)
        settle()

    return subprocess.Popen(
        argv, env=environment, stdin=stream, stdout=stream, stderr=stream, bufsize=0, start_new_session=True,
        preexec_fn=first,
    )  # fmt: skip


async def _read(fd: int) -> bytes:
    """Next output; empty at the end, which a terminal reports as an error."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            await _wait_ready(loop.add_reader, loop.remove_reader, fd)
        except OSError:
            return b""


async def _wait_ready(add: Callable[..., Any], remove: Callable[[int], Any], fd: int) -> None:
    """Waits until the loop reports the descriptor as ready."""
    ready = asyncio.Event()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)
