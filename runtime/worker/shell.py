"""What a worker serves that is a shell for a person (`Assign.shell`): one command, with a terminal or with pipes.

Such a worker is a fresh one, forked, limited and shut in by the very code that does this for calls; then it starts a
shell where others import the handler. It was preferred to going into a worker that runs: no root process ever steps
into namespaces in which a user's code is at work, a shell that eats the memory kills no call with it, and a function
that sleeps has one, too. What it does not see is another worker's processes and files; and it maps no weights.

It serves one WebSocket (`contract.terminal`), and is over when that is, or when nobody comes: its end is that of the
pid namespace, and so of all that was started in it.
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

from ..contract.node.shell import CHUNK_BYTES, STDERR, STDOUT, EndOfInput, Exit, Size, Start, read_client
from ..isolation import linux as kernel
from ..worker_io.asgi import Receive, Scope, Send

UNCLAIMED_S = 30.0
"""The controller connects at once; one that is gone will not."""
REST_S = 1.0
"""For what was printed last, once the command has ended: something that it left behind may hold its output open."""
SHELLS = ("/bin/bash", "/bin/sh")
NOT_FOUND, NOT_RUN = 127, 126
POLICY = 1008


class ShellApp:
    """An ASGI app for one session. `leave` is called when it is over."""

    def __init__(self, leave: Callable[[], object], loop: asyncio.AbstractEventLoop) -> None:
        self._leave = leave
        self._claimed = False
        loop.call_later(UNCLAIMED_S, self._give_up)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            raise LookupError("a shell is a WebSocket, and nothing else is served here")
        await receive()  # websocket.connect
        if self._claimed:
            await send({"type": "websocket.close", "code": POLICY, "reason": "this shell is taken"})
            return
        self._claimed = True
        try:
            await send({"type": "websocket.accept"})
            await _session(receive, send)
        finally:
            self._leave()

    def _give_up(self) -> None:
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
        await _over(send, status)
        return
    printing = [asyncio.ensure_future(_copy(fd, stream, send)) for fd, stream in command.outputs]
    typing = asyncio.ensure_future(_obey(receive, command))
    ending = asyncio.ensure_future(command.exited())
    try:
        await asyncio.wait({typing, ending}, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            await asyncio.wait(printing, timeout=REST_S)
            await _over(send, ending.result())
    finally:
        tasks = [typing, ending, *printing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        command.close()


async def _over(send: Send, status: int) -> None:
    await send({"type": "websocket.send", "text": msgspec.json.encode(Exit(status)).decode()})
    await send({"type": "websocket.close", "code": 1000})


async def _print(send: Send, stream: bytes, data: bytes) -> None:
    await send({"type": "websocket.send", "bytes": stream + data})


async def _copy(fd: int, stream: bytes, send: Send) -> None:
    while data := await _read(fd):
        await _print(send, stream, data)


async def _obey(receive: Receive, command: ShellCommand) -> None:
    """Returns when the client has gone, or breaks the rules."""
    while (message := await receive())["type"] == "websocket.receive":
        if message.get("bytes") is not None:
            await command.type(message["bytes"])
            continue
        try:
            said = read_client(message["text"])
        except msgspec.DecodeError:
            return
        if isinstance(said, Size):
            command.resize(said)
        elif isinstance(said, EndOfInput):
            command.end_input()


class ShellCommand:
    """One process in a session of its own. Errors: OSError, ValueError if it cannot be started."""

    def __init__(self, start: Start) -> None:
        argv = start.argv or [next((shell for shell in SHELLS if os.path.exists(shell)), SHELLS[-1])]
        # The worker's own Python, and what is installed with it, by the name under which one looks for it.
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
        """What nobody reads any more is dropped."""
        while data and self._input >= 0:
            try:
                data = data[os.write(self._input, data) :]
            except BlockingIOError:
                loop = asyncio.get_running_loop()
                await _until(loop.add_writer, loop.remove_writer, self._input)
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
        """With everything in its process group; what has left that ends with the worker."""
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
        kernel.die_with_parent(signal.SIGKILL)
        settle()

    return subprocess.Popen(
        argv, env=environment, stdin=stream, stdout=stream, stderr=stream, bufsize=0, start_new_session=True,
        preexec_fn=first,
    )  # fmt: skip


async def _read(fd: int) -> bytes:
    """Empty at the end; a terminal's is an error, once nobody has its other side open."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return os.read(fd, CHUNK_BYTES)
        except BlockingIOError:
            await _until(loop.add_reader, loop.remove_reader, fd)
        except OSError:
            return b""


async def _until(add: Callable[..., Any], remove: Callable[[int], Any], fd: int) -> None:
    """Until the loop says that the descriptor is ready."""
    ready = asyncio.Event()
    add(fd, ready.set)
    try:
        await ready.wait()
    finally:
        remove(fd)
