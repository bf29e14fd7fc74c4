"""Launcher of the fork server: forks workers from the process that has imported what they need.

It imports by profile, probes the isolation that the kernel supports, sends `LauncherReady`, and then forks a worker for
every `Fork`. It never touches a GPU, because a CUDA context does not survive a fork. It ends with its daemon, and its
workers end with it.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import socket
import sys
from typing import NoReturn

from ..contract.node import exit_codes
from ..contract.node.messages import Fork, LauncherReady
from ..isolation import linux, namespaces, root, seccomp
from ..isolation.namespaces import Isolation
from .launcher import CONTROL_FD, LaunchedWorker, arrange_descriptors, begin, has_ended, join_groups, refuse, serve
from .profiles import warm_up


class ForkLauncher:
    """Launcher that forks workers from this process."""

    def __init__(self, granted: Isolation, plan: root.Root, at: str, shared: tuple[str, ...]) -> None:
        """`plan`: of the root of its workers, which is built on `at`, if they have namespaces; `shared`: folders of the
        node in which their code, packages and volumes are."""
        self._shared = shared
        self._granted = granted
        self._plan = plan
        self._at = at
        self._own_pidfd = os.pidfd_open(os.getpid())

    def describe(self, *, network: bool) -> str:
        return self._granted.describe(network=network)

    def launch(self, fork: Fork, control_fd: int, log_fd: int) -> LaunchedWorker:
        pid = namespaces.fork_into_namespaces() if self._granted.namespaces else os.fork()
        if pid == 0:
            self._become_worker(fork, control_fd, log_fd)
        return LaunchedWorker(fork.worker, pid, os.pidfd_open(pid))

    def reap(self, child: LaunchedWorker) -> int:
        if not self._granted.namespaces:
            # A pid namespace ends with its first process; without one, the worker's children are its process
            # group; the daemon finds those that left it by the control group. Killed before the wait, since
            # its number cannot be reused until then. The worker may have died before it led a group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _become_worker(self, request: Fork, control_fd: int, log_fd: int) -> NoReturn:
        """Runs the worker, in the child process; never returns to the fork server's code."""
        try:
            linux.die_with_parent(signal.SIGKILL)
            if has_ended(self._own_pidfd):
                os._exit(exit_codes.ORPHANED)  # the fork server died before die_with_parent took effect
            self._set_up(request, control_fd, log_fd)
            from ..isolation.worker_environment import NodeEnvironment
            from ..worker import lifecycle

            environment = NodeEnvironment(confined=bool(self._granted.namespaces))
            lifecycle.run(socket.socket(fileno=CONTROL_FD), environment)
        except BaseException as error:
            # Standard error is the worker's log by then, or, if not even that worked, the daemon's.
            os.write(2, f"worker {request.worker} did not start: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(exit_codes.START_FAILED)

    def _set_up(self, request: Fork, control_fd: int, log_fd: int) -> None:
        """Sets up descriptors, signals, control groups and namespaces of a new worker."""
        os.setsid()
        arrange_descriptors(control_fd, log_fd)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        gc.enable()
        join_groups(request.cgroup_procs)
        if self._granted.namespaces:
            namespaces.enter_namespaces(self._plan, self._at, self._shared, network=request.network)
            socket.sethostname(request.worker)
        _reseed()
        linux.die_with_parent(signal.SIGKILL)


def _reseed() -> None:
    """Reseeds numpy, whose state forked workers would share; `random` reseeds itself."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()


def run(options: argparse.Namespace) -> None:
    """Serves until the daemon has closed its channel; `options` are those of `forkserver`."""
    library_path = os.environ.get("LD_LIBRARY_PATH", "")
    sock = begin(options.fd)
    if seccomp.supported():
        seccomp.forbid_rings()
        seccomp.prepare()
    granted, inside_user_namespace = namespaces.probe(library_path, options.root, options.user)
    if granted.refused and options.isolation == "required":
        refuse(sock, granted.refused)
        return
    gc.disable()  # what is imported stays: the collector looks through it once, before it is frozen
    warm_up(options.profile, options.preload)
    if inside_user_namespace:
        namespaces.become_user_root()
    plan = root.plan_for_this_python(options.hide, library_path)
    if granted.namespaces:
        namespaces.prepare_root(plan, options.root)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        sys.stderr.write(f"the fork server has {threads} threads after its imports; workers get only the first\n")
    gc.collect()
    gc.freeze()
    gc.enable()
    serve(
        sock,
        ForkLauncher(granted, plan, options.root, tuple(options.share)),
        LauncherReady(options.profile, granted.describe(), granted.refused),
    )
