"""A worker's device, which must be there before its handler is."""

from __future__ import annotations

import threading

from ..contract.timeline import Timeline


class DeviceInit:
    """Comes up beside the import. A CUDA context takes most of a second; a CPU needs a number."""

    def __init__(self, threads: int, timeline: Timeline) -> None:
        self._threads = max(1, threads)
        self._timeline = timeline
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self) -> None:
        import torch

        if torch.version.cuda is None:
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
                if torch.cuda.is_available():
                    torch.zeros(1, device="cuda")
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
