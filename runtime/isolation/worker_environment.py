"""Environment of a worker (the node's kernel, gVisor, a container), and how it is confined before user code runs."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from socket import socket
from typing import Protocol

from ..contract.function.layer import LAYER_DIR
from ..contract.function.volume import MountedVolume, volume_path
from ..contract.node.messages import Assign, Prepare
from . import gpu_files, namespaces


class WorkerEnvironment(Protocol):
    """Confines a worker in its environment."""

    @property
    def clock_shift_ns(self) -> int:
        """Nanoseconds to add to the worker's monotonic clock to get the node's."""

    def confine(self, assign: Assign, descriptors: list[int]) -> tuple[str, socket | None]:
        """Confines the process; takes the first descriptors of the assignment from the list, one or more.

        Returns the bundle's folder and the listening socket, None if the node accepts connections.
        Errors: OSError.
        """

    def prepare(self, message: Prepare, descriptors: list[int]) -> str:
        """Confines the process ahead of its assignment; returns the bundle's folder. Errors: OSError."""

    def volume_folder(self, volume: MountedVolume) -> str:
        """Where the worker sees a volume; empty if it has no version yet."""

    def layer_folder(self, folder: str) -> str:
        """Where the worker sees its layer, by its folder on the node; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """The node's own kernel. `confined`: whether the worker has its namespaces."""

    confined: bool
    clock_shift_ns: int = 0

    def confine(self, assign: Assign, descriptors: list[int]) -> tuple[str, socket | None]:
        return self._confine(assign, terminals=assign.shell), socket(fileno=descriptors.pop(0))

    def prepare(self, message: Prepare, descriptors: list[int]) -> str:
        return self._confine(message, terminals=False)

    def _confine(self, message: Assign | Prepare, *, terminals: bool) -> str:
        bundle_dir = message.bundle_dir
        if self.confined:
            shown = message.volumes if isinstance(message, Assign) else []  # functions with volumes are not prepared
            volumes = {self.volume_folder(volume): volume.folder for volume in shown if volume.folder}
            namespaces.confine(
                bundle_dir,
                name=os.uname().nodename,
                user=message.user,
                writable_bytes=message.spec.memory_bytes // 2,
                terminals=terminals,
                layer_dir=message.layer_dir,
                volumes=volumes,
                hidden=gpu_files.hidden(gpu_files.present(), message.binding),
            )
            bundle_dir = namespaces.FUNCTION_DIR
            if message.user:
                _own_log(message.user)
        else:
            os.chdir(bundle_dir)
        namespaces.limit_file_size(message.spec.memory_bytes)
        node_network = message.spec.network is True or not self.confined
        namespaces.drop_privileges(message.user if self.confined else 0, node_network=node_network)
        return bundle_dir

    def volume_folder(self, volume: MountedVolume) -> str:
        return volume_path(volume) if self.confined else volume.folder

    def layer_folder(self, folder: str) -> str:
        return LAYER_DIR if self.confined and folder else folder


def _own_log(user: int) -> None:
    """Lets a user open the worker's log by its name, /dev/stderr."""
    for log in (1, 2):
        if stat.S_ISFIFO(os.fstat(log).st_mode):
            os.fchown(log, user, user)
