"""First process of a gVisor sandbox: a worker whose kernel is gVisor.

Its control socket is its standard input. Descriptors that it receives are the node's: memory can be mapped and
connected sockets can be used, but listening ones cannot, so the node accepts its connections. It can send no
descriptors back. Folders of the node cannot be passed: its bundle arrives as a tar.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from dataclasses import dataclass
from socket import socket

from fleetstart import native

from ..contract.function.layer import LAYER_DIR
from ..contract.function.volume import MountedVolume, volume_path
from ..contract.node.messages import Assign, Prepare
from ..contract.timeline import machine_origin_ns
from ..isolation.namespaces import FUNCTION_DIR, limit_file_size
from .launcher import CONTROL_FD, arrange_descriptors
from .profiles import warm_up


@dataclass(frozen=True, slots=True)
class GVisorEnvironment:
    """A gVisor sandbox, which confines the worker from its start."""

    clock_shift_ns: int

    def confine(self, assign: Assign, descriptors: list[int]) -> tuple[str, socket | None]:
        import tarfile  # late: waiting workers need none

        with os.fdopen(descriptors.pop(0), "rb") as file, tarfile.open(fileobj=file, mode="r:") as bundle:
            bundle.extractall(FUNCTION_DIR, filter="data")
        os.chdir(FUNCTION_DIR)
        limit_file_size(assign.spec.memory_bytes)
        return FUNCTION_DIR, None

    def prepare(self, message: Prepare, descriptors: list[int]) -> str:
        raise OSError("a sandbox gets its bundle with its assignment, and cannot be prepared")

    def volume_folder(self, volume: MountedVolume) -> str:
        return volume_path(volume)

    def layer_folder(self, folder: str) -> str:
        return LAYER_DIR if folder else ""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="fleetstart.runtime.launch.gvisor_worker", description="A worker inside gVisor."
    )
    parser.add_argument("--profile", choices=("python", "torch"), required=True)
    parser.add_argument("--origin", type=int, required=True, help="Unix time, ns, of the zero of the node's clock")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    arrange_descriptors(0, 1)
    for log in (1, 2):
        os.set_blocking(log, True)  # one pipe twice: gVisor takes either first, and has it not block then
    sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
    native.attach_across_kernels()
    warm_up(options.profile)
    from ..worker import lifecycle  # late, as in the fork server: the profile imports it

    lifecycle.run(socket(fileno=CONTROL_FD), GVisorEnvironment(machine_origin_ns() - options.origin))


if __name__ == "__main__":
    main()
