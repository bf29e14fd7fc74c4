"""Environment of a worker (the node's kernel or gVisor), and how it is confined before user code runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from socket import socket
from typing import Protocol

from ..contract.node.messages import Assign
from . import namespaces


class WorkerEnvironment(Protocol):
    """Confines a worker in its environment."""

    @property
    def clock_shift_ns(self) -> int:
        """Nanoseconds to add to the worker's monotonic clock to get the node's."""

    def confine(self, assign: Assign, first: int) -> tuple[str, socket | None]:
        """Confines the process; takes over `first`, the first descriptor of the assignment.

        Returns the bundle's folder and the listening socket, None if the node accepts connections.
        Errors: OSError.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """The node's own kernel. `confined`: whether the worker has its namespaces; `steps`: its mounts."""

    confined: bool
    steps: tuple[namespaces.MountStep, ...] = ()
    clock_shift_ns: int = 0

    def confine(self, assign: Assign, first: int) -> tuple[str, socket | None]:
        bundle_dir = assign.bundle_dir
        if self.confined:
            writable_bytes = assign.spec.memory_bytes // 2
            namespaces.confine(
                bundle_dir,
                self.steps,
                writable_bytes=writable_bytes,
                terminals=assign.shell,
                layer_dir=assign.layer_dir,
            )
            bundle_dir = namespaces.FUNCTION_DIR
        else:
            os.chdir(bundle_dir)
        namespaces.drop_privileges()
        return bundle_dir, socket(fileno=first)
