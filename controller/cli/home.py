"""Where `fs up` keeps things under FS_HOME, and who of us is alive.

Whether a supervisor runs is told by a lock that it holds and the kernel frees, never by a file that somebody
forgot. Its record (`run/supervisor.json`) names pid and start time, so that a signal cannot hit a stranger
who got the same pid later.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

HomeRecord = TypeVar("HomeRecord", bound=msgspec.Struct)

SOCKET_PATH_MAX_BYTES = 107
"""sun_path has 108 bytes, and the last is its end."""
SOCKET_DIR_PREFIX = "fleetstart-"


class SupervisorRecord(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    start_ticks: int
    url: str
    redis_url: str
    store: str
    socket_dir: str = ""
    """A folder outside FS_HOME for sockets, if FS_HOME's own path is too long for them."""


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process under the supervisor; pid 0 while it does not run."""

    pid: int
    deaths: int


@dataclass(frozen=True, slots=True)
class HomeLayout:
    home: Path

    @property
    def run(self) -> Path:
        """Only while a supervisor runs."""
        return self.home / "run"

    @property
    def endpoint(self) -> Path:
        return self.run / "endpoint"

    @property
    def supervisor(self) -> Path:
        return self.run / "supervisor.json"

    @property
    def services(self) -> Path:
        return self.run / "services.json"

    @property
    def lock(self) -> Path:
        return self.home / "lock"

    @property
    def logs(self) -> Path:
        return self.home / "logs"

    @property
    def redis_data(self) -> Path:
        return self.home / "redis"

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def key(self) -> Path:
        """The owner's API key, which the local `fs` shows (`access.own_key`)."""
        return self.home / "key"

    @property
    def open(self) -> Path:
        """There if it was chosen that this machine needs no key."""
        return self.home / "open"

    @property
    def is_open(self) -> bool:
        """A home that has a key is not, whatever was chosen before."""
        return self.open.exists() and not self.key.exists()

    @property
    def dashboard_page(self) -> Path:
        """A page that leads to the dashboard with the key, mode 0600; `fs dashboard --open` shows it."""
        return self.home / "dashboard.html"

    @property
    def master_key(self) -> Path:
        """The controller's, for secrets (`auth.secret_encryption`)."""
        return self.home / "master.key"

    @property
    def cache(self) -> Path:
        return self.home / "cache" / "checkpoints"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def create(self) -> None:
        for folder in (self.home, self.run, self.logs, self.redis_data, self.store):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def socket_dir(self, runtime_dir: str | None) -> Path:
        """`run` if a socket's path fits there; otherwise a new private folder, whose path is short."""
        if len(os.fsencode(self.run / "redis.sock")) <= SOCKET_PATH_MAX_BYTES:
            return self.run
        return Path(tempfile.mkdtemp(prefix=SOCKET_DIR_PREFIX, dir=runtime_dir or None))

    def clean_run(self) -> None:
        """Removes what a supervisor leaves when it ends, however it ended. Call with the lock free or held."""
        record = read_record(self.supervisor, SupervisorRecord)
        if record and record.socket_dir:
            _remove_socket_dir(Path(record.socket_dir))
        shutil.rmtree(self.run, ignore_errors=True)


def _remove_socket_dir(folder: Path) -> None:
    """Only sockets, and only in a folder that we made: the path comes from a file."""
    if not folder.name.startswith(SOCKET_DIR_PREFIX) or folder.is_symlink():
        return
    with suppress(OSError):
        for path in folder.iterdir():
            if path.is_socket():
                path.unlink()
        folder.rmdir()


def read_record(path: Path, kind: type[HomeRecord]) -> HomeRecord | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None


def read_services(layout: HomeLayout) -> dict[str, ServiceRecord]:
    try:
        return msgspec.json.decode(layout.services.read_bytes(), type=dict[str, ServiceRecord])
    except (OSError, msgspec.DecodeError):
        return {}


def write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Holds the lock inside the block, if nobody else does. A forked child that execs does not keep it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with try_lock(path) as mine:
        return not mine


def start_ticks(pid: int) -> int | None:
    """When the process began, in the kernel's ticks since boot; None if there is none, or only its corpse."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name stands in parentheses and may hold anything; the fields are counted from its end.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a log, of its last 64 KiB."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - 65_536))
            return stream.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
