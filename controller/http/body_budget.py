"""Budget of memory for request bodies: bytes are counted as they arrive, before anything looks at what they say."""

from __future__ import annotations

from fleetstart.runtime.contract.errors import QueueFull

RETRY_AFTER_S = 1.0


class BodyBudget:
    """Bytes of bodies that this process holds, over all calls."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self.held_bytes = 0

    def require_room(self, body_bytes: int) -> None:
        """Checks that a body of that length would fit now. Nothing is reserved, or a client that declares a long body
        and sends nothing would keep others out. Errors: QueueFull."""
        if self.held_bytes + body_bytes > self._limit_bytes:
            raise QueueFull(
                f"this gateway holds {self.held_bytes} bytes of bodies of calls under way and takes no more than "
                f"{self._limit_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )

    def open(self) -> HeldBody:
        return HeldBody(self)


class HeldBody:
    """One call's part of the budget: grows with its body, and is free again when the call has ended."""

    __slots__ = ("_budget", "_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def grow_to(self, body_bytes: int) -> None:
        """Errors: QueueFull; the body is still counted as before."""
        more = body_bytes - self._bytes
        self._budget.require_room(more)
        self._budget.held_bytes += more
        self._bytes = body_bytes

    def release(self) -> None:
        self._budget.held_bytes -= self._bytes
        self._bytes = 0
