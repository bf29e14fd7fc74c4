"""Files of `fs up` under FS_HOME, and whether its processes run.

A supervisor runs as long as it holds a lock, which the kernel frees: a file left behind means nothing. Its record, in
the locked file itself and in `run/supervisor.json`, names pid and start time, so that a signal cannot hit another
process that got the same pid later. It writes `run/` again when something else has removed it.
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

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import Refused

HomeRecord = TypeVar("HomeRecord", bound=msgspec.Struct)

SOCKET_PATH_MAX_BYTES = 107
"""sun_path has 108 bytes, and the last is its end."""
SOCKET_DIR_PREFIX = "fleetstart-"
NO_TEXT_HINT = "set FS_HOME to a folder whose name is UTF-8"


class SupervisorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Content of `run/supervisor.json`."""

    pid: int
    start_ticks: int
    url: str
    redis_url: str
    store: str
    public_url: str = ""
    """URL of the address for other machines (`fs up --listen`); empty: only this machine reaches the controller."""
    joined: str = ""
    """URL of the system that a lone node has joined (`fs node join`); empty: a controller runs here."""
    socket_dir: str = ""
    """A folder outside FS_HOME for sockets, if FS_HOME's own path is too long for them."""


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """State of one process under the supervisor; pid 0 while it does not run."""

    pid: int
    deaths: int
    stopping_s: float = 0.0
    """While the process is being stopped: the time it may take. Otherwise 0."""


@dataclass(frozen=True, slots=True)
class HomeLayout:
    """Paths of the files under one FS_HOME."""

    home: Path

    @property
    def run(self) -> Path:
        """Folder of run files; it exists only while a supervisor runs."""
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
        """File of the owner's API key, which the local `fs` sends (`auth.owner_key_file`)."""
        return self.home / "key"

    @property
    def open(self) -> Path:
        """Marker file of `fs up --open`: requests from this machine need no key."""
        return self.home / "open"

    @property
    def is_open(self) -> bool:
        """Checks whether requests from this machine need no key; a home that has a key is not open."""
        return self.open.exists() and not self.key.exists()

    @property
    def dashboard_page(self) -> Path:
        """Page that redirects to the dashboard with the key, mode 0600; `fs dashboard --open` opens it."""
        return self.home / "dashboard.html"

    @property
    def master_key(self) -> Path:
        """File of the controller's master key for secrets (`auth.secret_encryption`)."""
        return self.home / "master.key"

    @property
    def cache(self) -> Path:
        return self.home / "cache" / "checkpoints"

    def log(self, service: str) -> Path:
        return self.logs / f"{service}.log"

    def create(self) -> None:
        """Creates its folders. Errors: Refused for a home whose name cannot stand in the records of the system."""
        if not is_text(self.home):
            raise Refused(f"{self.home} cannot be a home: its name is not UTF-8", hint=NO_TEXT_HINT)
        for folder in (self.home, self.run, self.logs, self.redis_data, self.store):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)

    def socket_dir(self, runtime_dir: str | None) -> Path:
        """Folder for sockets: `run` if their paths fit, otherwise a new private folder with a short path."""
        if len(os.fsencode(self.run / "redis.sock")) <= SOCKET_PATH_MAX_BYTES:
            return self.run
        return Path(tempfile.mkdtemp(prefix=SOCKET_DIR_PREFIX, dir=runtime_dir or None))

    def clean_run(self) -> None:
        """Removes the run files of a supervisor that has ended. Call with the lock free or held."""
        record = read_record(self.supervisor, SupervisorRecord)
        if record and record.socket_dir:
            _remove_socket_dir(Path(record.socket_dir))
        shutil.rmtree(self.run, ignore_errors=True)


def is_text(path: Path | str) -> bool:
    """Checks whether a path or an argument is UTF-8; file systems and command lines take any bytes."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _remove_socket_dir(folder: Path) -> None:
    """Removes sockets, and only in a folder that `socket_dir` made: the path comes from a file."""
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
    except (OSError, *UNDECODABLE):
        return None


def read_supervisor(layout: HomeLayout) -> SupervisorRecord | None:
    """The record of the supervisor that runs or ran last; whether it runs, the lock tells."""
    return read_record(layout.supervisor, SupervisorRecord) or read_record(layout.lock, SupervisorRecord)


def read_services(layout: HomeLayout) -> dict[str, ServiceRecord]:
    try:
        return msgspec.json.decode(layout.services.read_bytes(), type=dict[str, ServiceRecord])
    except (OSError, *UNDECODABLE):
        return {}


def write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(data)  # the URL of Redis may have a password
    temporary.replace(path)


@contextmanager
def try_lock(path: Path) -> Iterator[bool]:
    """Tries to take the lock for the block; yields whether it did. A forked child that execs does not keep it."""
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


def clean_if_free(layout: HomeLayout) -> bool:
    """Removes what a supervisor that has ended, perhaps by SIGKILL, left in `run/`; returns whether none runs."""
    with try_lock(layout.lock) as mine:
        if mine:
            layout.clean_run()
        return mine


def start_ticks(pid: int) -> int | None:
    """Start time of a process in kernel ticks since boot; None if it does not exist or is a zombie."""
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
