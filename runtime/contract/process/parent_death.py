"""The end of a child process with its parent, by the kernel: also where the parent is killed and can end nothing."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def kill_with_parent(parent: int) -> Callable[[], None]:
    """Makes a function for the child to run between fork and exec: the kernel then kills it when its parent dies. The
    parent must start it in its main thread."""

    def arm() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent died in between

    return arm
