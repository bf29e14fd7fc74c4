"""Progress of long operations on stderr: a bar on a terminal, a line every few seconds in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from . import output

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 5.0


class ProgressBar:
    """Progress bar. Called with the current step, bytes done and bytes in all; its line is removed at the end."""

    def __init__(self, label: str, *, live: bool) -> None:
        self._label = label
        self._next_s = time.monotonic() + LINE_EVERY_S
        self._bar: Progress | None = _bar() if live else None
        self._task: TaskID | None = None

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        text = f"{self._label}: {what}"
        if self._bar is not None:
            if self._task is None:
                self._task = self._bar.add_task(text)
            self._bar.update(self._task, description=text, completed=done, total=total)
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + LINE_EVERY_S
            share = done / total if total else 1.0
            output.message(f"{text} {share:4.0%} of {output.format_size(total)}")


def _bar() -> Progress:
    """Makes the bar; rich is imported only here, since most commands do not need it."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True), transient=True)
