"""Progress of long work on stderr: a bar for a person, a line now and then for a log."""

from __future__ import annotations

import time
from types import TracebackType

from fleetstart.controller.cli import output

LINE_EVERY_S = 5.0
BAR_EVERY_S = 0.1
BAR_WIDTH = 30


class Bar:
    """Called with what is done, bytes done and bytes in all; clears its line at the end."""

    def __init__(self, label: str, *, live: bool) -> None:
        self._label = label
        self._live = live
        self._next_s = time.monotonic() + (0 if live else LINE_EVERY_S)
        self._drawn = False

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._drawn:
            output.draw("")

    def __call__(self, what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (BAR_EVERY_S if self._live else LINE_EVERY_S)
        share = done / total if total else 1.0
        text = f"{self._label}: {what} {share:4.0%} of {output.size(total)}"
        if self._live:
            filled = round(share * BAR_WIDTH)
            output.draw(f"{'█' * filled}{'░' * (BAR_WIDTH - filled)} {text}")
            self._drawn = True
        else:
            output.say(text)
