"""Device initialisation (CUDA) of a worker, complete before its handler is built."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ..contract.errors import StartFailed
from ..contract.timeline import Timeline


class DeviceInit:
    """Initialises the device in parallel with the import: a CUDA context takes most of a second, a CPU needs only its
    thread count."""

    def __init__(self, threads: int, timeline: Timeline, fractions: Sequence[float] = ()) -> None:
        """`fractions`: the part of each visible GPU's memory that this process may allocate."""
        self._fractions = fractions
        self._threads = max(1, threads)
        self._timeline = timeline
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        """Starts the initialisation; on a CPU it is done when this returns."""
        import torch

        if torch.version.cuda is None and not self._fractions:
            with self._timeline.span("device"):
                torch.set_num_threads(self._threads)
            return
        self._thread = threading.Thread(target=self._touch, name="device", daemon=True)
        self._thread.start()

    def _touch(self) -> None:
        import torch

        try:
            with self._timeline.span("device"):
                torch.set_num_threads(self._threads)
                seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
                if seen < len(self._fractions):
                    raise _unseen(seen, len(self._fractions), torch.__version__, torch.version.cuda)
                for index, fraction in enumerate(self._fractions):
                    torch.cuda.set_per_process_memory_fraction(fraction, index)
                if seen:
                    torch.zeros(1, device="cuda")
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Waits for the end of the initialisation. Errors: its own."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error


def _unseen(seen: int, given: int, version: str, cuda: str | None) -> StartFailed:
    """The error of a worker that would compute on the CPU what its caller pays a GPU for."""
    built = f"built for CUDA {cuda}" if cuda else "built without CUDA"
    return StartFailed(
        f"the worker was given {given} of the node's GPUs and sees {seen}: torch {version} is {built}",
        hint="on the node, `nvidia-smi` and python -c 'import torch; torch.zeros(1).cuda()' say more",
    )
