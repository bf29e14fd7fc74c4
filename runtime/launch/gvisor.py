"""gVisor launcher: starts each worker as a `runsc run` with its own kernel in user space.

It speaks the fork server's protocol (`launcher`), but forks no worker from a warm parent, since processes of one
sandbox share its kernel. Each worker imports for itself (`gvisor_worker`), and a pool of them waits.

A sandbox sees the system's programs and libraries, the folders of this Python, and nothing else of the node: its root
is a folder with four files that name users and hosts. Its control socket is its standard input, through which it
receives everything else.

gVisor: Young et al., The True Cost of Containing, HotCloud 2019; the bundle is of the OCI runtime specification.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ..contract.node import exit_codes
from ..contract.node.messages import Fork, LauncherReady
from ..contract.process.program import run_program
from ..contract.timeline import machine_origin_ns
from ..isolation import linux
from ..isolation.namespaces import OPEN_FILES_MAX
from ..isolation.root import NAME_SERVICES, SYSTEM, Mount, interpreter_paths, mounts, name_files
from .launcher import LaunchedWorker, begin, has_ended, join_groups, refuse, serve
from .profiles import worker_environment

NAME = "gvisor"
PROGRAM = "runsc"
NAMESPACES = ("pid", "mount", "ipc", "uts", "network")
"""Namespaces of runsc's own processes, around gVisor's isolation."""
PROBE_S = 30.0
"""Time limit of the first sandbox, generous for a busy machine."""


def oci_config(
    arguments: list[str],
    environment: dict[str, str],
    shown: Iterable[Mount],
    *,
    kept: Iterable[Mount] = (),
    root: str,
    hostname: str,
    network: bool = False,
) -> dict[str, Any]:
    """The OCI bundle's config.json: no capabilities, only `shown` of the node, read-only, its network on request. Those
    of `kept`, which nothing changes while the sandbox lives, gVisor looks at once: else it asks its gofer again at each
    look, a third of the time that a worker takes to import."""
    binds = [
        {"destination": mount.path, "type": "bind", "source": mount.source, "options": ["rbind", "ro"]}
        if mount.source
        else {"destination": mount.path, "type": "tmpfs", "source": "tmpfs", "options": ["ro", "size=64k"]}
        for mount in shown
    ]
    own = [
        {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
        for path in ("/tmp", "/dev/shm")
    ]
    none: list[str] = []
    return {
        "ociVersion": "1.0.2",
        "hostname": hostname,
        "root": {"path": root, "readonly": True},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": arguments,
            "env": [f"{name}={value}" for name, value in environment.items()],
            "cwd": "/",
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "inheritable", "permitted", "ambient"), none),
            "rlimits": [
                {"type": "RLIMIT_NOFILE", "hard": OPEN_FILES_MAX, "soft": OPEN_FILES_MAX},
                {"type": "RLIMIT_CORE", "hard": 0, "soft": 0},
            ],
        },
        "mounts": [{"destination": "/proc", "type": "proc", "source": "proc"}, *own, *binds],
        "annotations": {
            f"dev.gvisor.spec.mount.m{number}.{key}": value
            for number, mount in enumerate(mount for mount in kept if mount.source)
            for key, value in (("source", mount.source), ("type", "bind"), ("share", "container"))
        },
        "linux": {"namespaces": [{"type": kind} for kind in NAMESPACES if not (network and kind == "network")]},
    }


class GVisorLauncher:
    """Launcher of sandboxes. `state`: its own folder for bundles and runsc's records of live sandboxes."""

    def __init__(self, program: str, state: Path, hide: Iterable[str], environment: Mapping[str, str]) -> None:
        self._program = program
        self._bundles, self._records, self._root = state / "bundles", state / "records", state / "root"
        shutil.rmtree(state, ignore_errors=True)  # left by a killed launcher: its sandboxes ended with it
        for folder in (self._bundles, self._records, self._root):
            folder.mkdir(mode=0o700, parents=True)
        (self._root / "etc").mkdir()
        for name, text in {**name_files(NAME, 0), "nsswitch.conf": NAME_SERVICES}.items():
            (self._root / "etc" / name).write_text(text)
        there = [(path, os.path.realpath(path)) for path in (*SYSTEM, "/etc/resolv.conf") if os.path.exists(path)]
        own = [(path, path) for path in interpreter_paths(environment.get("LD_LIBRARY_PATH", ""))]
        self._shown = mounts([*there, *own], map(os.path.realpath, hide))
        self._programs = [mount for mount in self._shown if not mount.path.startswith("/etc")]
        self._environment = worker_environment(environment)
        # runsc hides itself in the system's temporary folder, not in that of a TMPDIR.
        self._runsc_environment = {"PATH": environment.get("PATH", os.defpath)}
        self._python = os.path.join(os.path.realpath(sys.prefix), "bin", os.path.basename(sys.executable))

    def describe(self, *, network: bool) -> str:
        return NAME

    def launch(self, fork: Fork, control_fd: int, log_fd: int) -> LaunchedWorker:
        arguments = ["-m", "fleetstart.runtime.launch.gvisor_worker", "--profile", fork.profile]
        arguments += ["--origin", str(machine_origin_ns())]
        own_pidfd = os.pidfd_open(os.getpid())
        try:
            command = self._command(fork.worker, arguments, network=fork.network, folders=fork.folders)
            pid = os.fork()
            if pid == 0:
                self._become_sandbox(command, fork, own_pidfd, control_fd, log_fd)
            return LaunchedWorker(fork.worker, pid, os.pidfd_open(pid))
        except OSError:
            shutil.rmtree(self._bundles / fork.worker, ignore_errors=True)
            raise
        finally:
            os.close(own_pidfd)

    def reap(self, child: LaunchedWorker) -> int:
        """Cleans up after a sandbox. runsc exits as its worker did, with 128 + number for a signal."""
        _, status = os.waitpid(child.pid, 0)
        for folder in self._records.glob(f"{child.worker}*"):
            folder.unlink() if folder.is_file() else shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(self._bundles / child.worker, ignore_errors=True)
        code = os.waitstatus_to_exitcode(status)
        return 128 - code if code > 128 else code

    def probe(self) -> None:
        """Starts and ends one sandbox. Errors: OSError if that fails."""
        name = f"probe-{uuid.uuid4().hex[:12]}"  # runsc's socket of a sandbox is named so, for all of the machine
        try:
            command = self._command(name, ["-S", "-c", ""], network=False)
            done = subprocess.run(
                command,
                env=self._runsc_environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=PROBE_S,
                text=True,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(str(error)) from error
        finally:
            shutil.rmtree(self._bundles / name, ignore_errors=True)
        if done.returncode:
            said = " ".join(done.stderr.split())[-300:]
            raise OSError(f"{self._program} ended with {done.returncode}: {said}")

    def _command(
        self, name: str, arguments: list[str], *, network: bool, folders: Mapping[str, str] | None = None
    ) -> list[str]:
        bundle = self._bundles / name
        bundle.mkdir(mode=0o700)
        config = oci_config(
            [self._python, *arguments],
            self._environment,
            (*self._shown, *(Mount(path, source) for path, source in (folders or {}).items())),
            kept=self._programs,
            root=str(self._root),
            hostname=name,
            network=network,
        )
        (bundle / "config.json").write_bytes(msgspec.json.encode(config))
        command = [self._program, "--root", str(self._records), f"--network={'host' if network else 'none'}"]
        command += ["--ignore-cgroups"]  # the process joins its control groups before it executes runsc
        return [*command, "run", "--bundle", str(bundle), name]

    def _become_sandbox(
        self, command: list[str], fork: Fork, parent_pidfd: int, control_fd: int, log_fd: int
    ) -> NoReturn:
        try:
            linux.die_with_parent(signal.SIGKILL)
            if has_ended(parent_pidfd):
                os._exit(exit_codes.ORPHANED)
            os.setsid()
            join_groups(fork.cgroup_procs)
            os.dup2(control_fd, 0)
            os.dup2(log_fd, 1)
            os.dup2(log_fd, 2)
            linux.close_from(3)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(command[0], command, self._runsc_environment)
        except BaseException as error:
            os.write(2, f"worker {fork.worker} did not start: {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(exit_codes.START_FAILED)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="fleetstart.runtime.launch.gvisor", description="Starts workers inside gVisor."
    )
    parser.add_argument("--fd", type=int, required=True, help="this side of the socketpair with the daemon")
    parser.add_argument("--state", type=Path, required=True, help="folder of its own, emptied at the start")
    parser.add_argument("--hide", action="append", default=[], metavar="DIR", help="folder that no worker may see")
    options = parser.parse_args(arguments)
    sock = begin(options.fd)
    try:
        launcher = _probed_launcher(options.state, options.hide, os.environ)
    except OSError as error:
        refuse(sock, str(error))
        return
    try:
        serve(sock, launcher, LauncherReady(NAME, NAME))
    finally:
        shutil.rmtree(options.state, ignore_errors=True)


def _probed_launcher(state: Path, hide: Iterable[str], environment: Mapping[str, str]) -> GVisorLauncher:
    """A launcher that works on this machine. Errors: OSError with the reason if none does."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise OSError(f"there is no {PROGRAM} on PATH")
    launcher = GVisorLauncher(program, state, hide, environment)
    launcher.probe()
    return launcher


if __name__ == "__main__":
    run_program(main)
