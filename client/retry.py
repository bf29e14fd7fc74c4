"""Decision whether and when a request is sent again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from fleetstart.runtime.contract.worker_headers import ERROR_HEADER

KEY_BUSY = "idempotency_in_progress"
"""Code of a 409 while an earlier request with the same key still runs."""
RETRIES = 7
"""With the pauses of the policy these last for more than 5 s, in which a restarted controller is back."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of retries. A call's time bounds them too."""

    retries: int = RETRIES
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0

    def pause_s(self, retries_done: int, *, asked_s: float, left_s: float, jitter: float) -> float | None:
        """Seconds until the next try; None to give up.

        `asked_s` is the server's Retry-After, 0 without one. `jitter`, from 0 to 1, spreads clients that were rejected
        together: it takes up to half of a pause away, and never goes below what the server asked for.
        """
        if retries_done >= self.retries:
            return None
        backoff_s = min(self.max_pause_s, self.first_pause_s * 2**retries_done)
        pause_s = max(backoff_s * (1 - jitter / 2), asked_s + backoff_s * jitter if asked_s else 0.0)
        return pause_s if pause_s < left_s else None


def retry_after_s(status: int, headers: Mapping[str, str]) -> float | None:
    """Retry-After of a rejection by the platform, in seconds; None for a response that is not to be retried.

    Rejected calls have run nothing. A handler's own 503 has, so it is an answer.
    """
    code = headers.get(ERROR_HEADER, "")
    if not code or not (status in (429, 503) or code == KEY_BUSY):
        return None
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            after_s = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        if math.isfinite(after_s) and after_s >= 0:
            return after_s
    return None
