"""First process of a container of the node's engine: a worker that waits for its launcher.

Its launcher is at a unix socket that is mounted into the container. It says which profile to import, and, when the
container is taken, sends the worker's control socket and the pipe for its log. The engine has confined the process from
its start; what depends on the function (limits of files, the filter of system calls) is added with the assignment, or
before it if the worker is prepared for a version.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
from dataclasses import dataclass

from ..contract.function.layer import LAYER_DIR
from ..contract.function.spec import FunctionSpec
from ..contract.function.volume import MountedVolume, volume_path
from ..contract.node import exit_codes
from ..contract.node.messages import Assign, Prepare
from ..isolation import linux, seccomp
from ..isolation.namespaces import FUNCTION_DIR, limit_file_size
from .base_image import OWN_DIR
from .launcher import CONTROL_FD, arrange_descriptors
from .profiles import warm_up

CONTROL_PATH = f"{OWN_DIR}/control"
WARM = b"warm"
"""Answer of a worker that has imported its profile."""
MESSAGE_MAX = 4096


@dataclass(frozen=True, slots=True)
class ContainerEnvironment:
    """A container of the node's engine, on the node's kernel."""

    clock_shift_ns: int = 0

    def confine(self, assign: Assign, descriptors: list[int]) -> tuple[str, socket.socket | None]:
        listening = socket.socket(fileno=descriptors.pop(0))
        return _confine(assign.spec, descriptors.pop(0)), listening

    def prepare(self, message: Prepare, descriptors: list[int]) -> str:
        return _confine(message.spec, descriptors.pop(0))

    def volume_folder(self, volume: MountedVolume) -> str:
        return volume_path(volume)

    def layer_folder(self, folder: str) -> str:
        return LAYER_DIR if folder else ""


def _confine(spec: FunctionSpec, packed: int) -> str:
    """Unpacks the bundle, then adds what depends on the function; returns the bundle's folder."""
    import tarfile  # late: waiting workers need none

    with os.fdopen(packed, "rb") as file, tarfile.open(fileobj=file, mode="r:") as bundle:
        bundle.extractall(FUNCTION_DIR, filter="data")
    os.chdir(FUNCTION_DIR)
    limit_file_size(spec.memory_bytes)
    linux.forbid_new_privileges()
    local_sockets = spec.network is not True or linux.scope_abstract_sockets()
    if seccomp.supported():
        seccomp.install(local_sockets=local_sockets)
    return FUNCTION_DIR


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    if seccomp.supported():
        seccomp.forbid_rings()
        seccomp.prepare()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as launcher:
        launcher.connect(CONTROL_PATH)
        profile = launcher.recv(MESSAGE_MAX).decode()
        if not profile:
            os._exit(exit_codes.ORPHANED)
        warm_up(profile)
        gc.collect()
        gc.freeze()
        launcher.send(WARM)
        _, descriptors, _, _ = socket.recv_fds(launcher, MESSAGE_MAX, 2)
    if len(descriptors) != 2:
        os._exit(exit_codes.ORPHANED)  # the launcher has ended, and this container was not taken
    arrange_descriptors(*descriptors)
    from ..worker import lifecycle  # late, as in the fork server: the profile imports it

    lifecycle.run(socket.socket(fileno=CONTROL_FD), ContainerEnvironment())


if __name__ == "__main__":
    main()
