"""Stop strings over a stream of text: releases safe text, detects the first stop.

A stop string may begin in one token and end three tokens later, so text that could still become one is
held back. Pure.
"""

from __future__ import annotations


class StopMatcher:
    """Matches stop strings in the text of one sequence."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Adds text; returns the part that can be shown, never the stop string or text after it."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Returns the held-back text at the end of the sequence."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
