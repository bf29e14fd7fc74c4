"""A warm parent that has imported what workers need, and forks one in milliseconds: `python -m ...forkserver`.

Started by the node daemon with one end of a socketpair. It imports by profile, tries what isolation the
kernel grants, says `Warm`, and then forks a worker for every `Fork`. It is single-threaded for as long
as it lives, because a fork copies one thread only, and never touches a GPU, because a CUDA context does
not survive a fork. It ends with its daemon, and its workers end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from fleetstart.runtime import isolation, kernel
from fleetstart.runtime.contract import exits
from fleetstart.runtime.contract.channel import Channel, ChannelClosed
from fleetstart.runtime.contract.ids import WorkerId
from fleetstart.runtime.contract.messages import Exited, Fork, Forked, ForkFailed, Warm
from fleetstart.runtime.isolation import Isolation
from fleetstart.runtime.output import Lines

INHERITED = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES",
    "SSL_CERT_FILE", "SSL_CERT_DIR",
)  # fmt: skip
"""What of the daemon's environment a worker gets to see. Everything else may be a secret."""
CONTROL_FD = 3
"""In every worker: 0 is /dev/null, 1 and 2 are its log, this is its control socket, and there is no other."""


@dataclass(frozen=True, slots=True)
class Child:
    worker: WorkerId
    pid: int
    pidfd: int


class ForkServer:
    """Forks workers, reaps them, and tells the daemon of both."""

    def __init__(self, sock: socket.socket, granted: Isolation, hide: tuple[str, ...]) -> None:
        self._channel: Channel[Fork] = Channel(sock, Fork)
        self._granted = granted
        self._steps = isolation.plan(hide)
        self._own_pidfd = os.pidfd_open(os.getpid())
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ, None)

    def run(self, profile: str) -> None:
        """Returns when the daemon has gone."""
        try:
            self._channel.send(Warm(profile, self._granted.describe(), self._granted.refused))
            while True:
                for key, _ in self._selector.select():
                    if isinstance(key.data, Child):
                        self._reap(key.data)
                    else:
                        self._fork_one()
        except ChannelClosed:
            return

    def _fork_one(self) -> None:
        request, descriptors = self._channel.receive()
        try:
            if len(descriptors) != 2:
                reason = f"two descriptors belong to a fork (control socket, log), {len(descriptors)} came"
                self._channel.send(ForkFailed(request.worker, reason))
                return
            try:
                pid = isolation.fork_into_namespaces() if self._granted.namespaces else os.fork()
            except OSError as error:
                self._channel.send(ForkFailed(request.worker, str(error)))
                return
            if pid == 0:
                self._become_worker(request, descriptors[0], descriptors[1])
            child = Child(request.worker, pid, os.pidfd_open(pid))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        isolated = self._granted.describe(network=request.network)
        self._channel.send(Forked(child.worker, _pid_outside(child), isolated))

    def _reap(self, child: Child) -> None:
        """The descriptor of a process is readable once it ended."""
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        if not self._granted.namespaces:
            # A pid namespace dies with its first process; without one, the worker's children are its process
            # group. Before the wait: until then its number cannot be another's.
            # It may never have become the leader of a group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        self._channel.send(Exited(child.worker, os.waitstatus_to_exitcode(status)))

    def _become_worker(self, request: Fork, control_fd: int, log_fd: int) -> NoReturn:
        """In the child: never returns, and never runs another line of the fork server's."""
        try:
            kernel.die_with_parent(signal.SIGKILL)
            if select.select([self._own_pidfd], [], [], 0)[0]:
                os._exit(exits.ORPHANED)  # the fork server died before it could be told what to do at its death
            self._settle(request, control_fd, log_fd)
            from fleetstart.runtime import shim

            place = shim.Place(confined=bool(self._granted.namespaces), steps=self._steps)
            shim.run(socket.socket(fileno=CONTROL_FD), place)
        except BaseException as error:
            # Standard error is the worker's log by then, or, if not even that worked, the daemon's.
            os.write(2, f"worker {request.worker} did not start: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(exits.START_FAILED)

    def _settle(self, request: Fork, control_fd: int, log_fd: int) -> None:
        """Descriptors, signals, limits and namespaces of a new worker."""
        os.setsid()
        _arrange_descriptors(control_fd, log_fd)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        gc.enable()
        for path in request.cgroup_procs:
            with open(path, "w") as procs:
                procs.write("0")
        if self._granted.namespaces:
            isolation.enter_namespaces(network=request.network)
            socket.sethostname(request.worker)
        _reseed()
        kernel.die_with_parent(signal.SIGKILL)


def _pid_outside(child: Child) -> int:
    """The child's pid in the namespace of /proc, which is the daemon's; ours may be one of our own."""
    with open(f"/proc/self/fdinfo/{child.pidfd}") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), child.pid)


def _arrange_descriptors(control_fd: int, log_fd: int) -> None:
    """0, 1, 2 and CONTROL_FD; all others are the fork server's or other workers', and are closed."""
    # Copies out of the way first, so that no step overwrites what a later one needs.
    control_fd = fcntl.fcntl(control_fd, fcntl.F_DUPFD_CLOEXEC, CONTROL_FD + 1)
    log_fd = fcntl.fcntl(log_fd, fcntl.F_DUPFD_CLOEXEC, CONTROL_FD + 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.dup2(control_fd, CONTROL_FD, inheritable=False)
    kernel.close_from(CONTROL_FD + 1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = Lines(1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = Lines(2)  # type: ignore[misc]


def _reseed() -> None:
    """Siblings must not share numpy's random state if it was seeded in the parent; random reseeds itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


PROFILES = {
    "python": ("httptools", "starlette.applications", "uvloop", "fleetstart.runtime.shim"),
    "torch": ("torch", "tokenizers", "jinja2", "fleetstart.runtime.weights", "fleetstart.runtime.llm.app"),
}
"""What workers would otherwise each import for themselves; torch comes on top of python."""


def import_profile(profile: str) -> None:
    for name in (*PROFILES["python"], *(PROFILES["torch"] if profile == "torch" else ())):
        importlib.import_module(name)
    if profile == "torch":
        # No threads before a fork: only the forking one would exist in the child.
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        # The first product picks the kernels for this processor; the children inherit the choice.
        torch.ones(64, 64) @ torch.ones(64, 64)


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """A worker's environment before its function is known; the function's own comes on top."""
    inherited = {name: environment[name] for name in INHERITED if name in environment}
    # OpenBLAS, inside numpy, starts its threads when it is loaded, before any fork: it gets none.
    return {"LANG": "C.UTF-8"} | inherited | {"HOME": "/tmp", "TMPDIR": "/tmp", "OPENBLAS_NUM_THREADS": "1"}


def _leave_environment() -> None:
    """Starts this program anew if its environment holds more than a worker may see.

    Unsetting is not enough: /proc/self/environ shows a process the environment that it was executed with,
    and to a worker that of its fork server.
    """
    wanted = worker_environment(os.environ)
    if dict(os.environ) != wanted:
        # The running binary by its link in /proc: the folders on its path may not be this user's to walk.
        os.execve("/proc/self/exe", [sys.executable, *sys.orig_argv[1:]], wanted)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="fleetstart.runtime.forkserver", description="Forks warm workers.")
    parser.add_argument("--profile", choices=("python", "torch"), required=True)
    parser.add_argument("--fd", type=int, required=True, help="this side of the socketpair with the daemon")
    parser.add_argument("--hide", action="append", default=[], metavar="DIR", help="folder that no worker may see")
    options = parser.parse_args(arguments)
    kernel.die_with_parent(signal.SIGKILL)
    # Ctrl-C in a terminal reaches the whole group: the daemon drains, and ends this process when it is done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _leave_environment()
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    sock = socket.socket(fileno=options.fd)
    sock.set_inheritable(False)
    import_profile(options.profile)
    importlib.import_module("fleetstart.runtime.rehearsal").rehearse()
    if options.profile == "torch":
        importlib.import_module("fleetstart.runtime.llm.rehearsal").rehearse()
        importlib.import_module("fleetstart.runtime.weights_rehearsal").rehearse_weights()
    granted, inside_user_namespace = isolation.probe()
    if inside_user_namespace:
        isolation.become_user_root()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.stderr.write(f"the fork server has {threads} threads after its imports; a worker gets the first alone\n")
    gc.collect()
    gc.freeze()
    ForkServer(sock, granted, tuple(options.hide)).run(options.profile)


if __name__ == "__main__":
    main()
