"""Where a worker was born, and how it is shut in there before the first line of its function's code."""

from __future__ import annotations

import os
from dataclasses import dataclass
from socket import socket
from typing import Protocol

from ..contract.node.messages import Assign
from . import namespaces


class WorkerEnvironment(Protocol):
    @property
    def clock_shift_ns(self) -> int:
        """What its monotonic clock lacks to the node's."""

    def confine(self, assign: Assign, first: int) -> tuple[str, socket | None]:
        """`first`: the first descriptor of the assignment, which is taken over.

        Returns where the bundle lies from now on, and the socket to listen at; None if connections come one by one.
        Errors: OSError.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeEnvironment:
    """On the node's own kernel. `confined`: whether it has its namespaces; `steps`: the mounts that shut it in."""

    confined: bool
    steps: tuple[namespaces.MountStep, ...] = ()
    clock_shift_ns: int = 0

    def confine(self, assign: Assign, first: int) -> tuple[str, socket | None]:
        bundle_dir = assign.bundle_dir
        if self.confined:
            writable_bytes = assign.spec.memory_bytes // 2
            namespaces.confine(bundle_dir, self.steps, writable_bytes=writable_bytes, terminals=assign.shell)
            bundle_dir = namespaces.FUNCTION_DIR
        else:
            os.chdir(bundle_dir)
        namespaces.give_up_rights()
        return bundle_dir, socket(fileno=first)
