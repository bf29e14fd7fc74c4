"""Decision whether a call is run again after its worker was lost. Pure.

A call that its worker had not entered when it died goes to another worker. A handler that may have begun may have had
effects: its call is repeated only as often as `retries` of its function says, and never after it ran out of memory,
which it would do again. A stream with resume markers that has begun is continued instead: nothing that its caller has
seen is computed twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from fleetstart.runtime.contract.errors import FleetError, OutOfMemory, WorkerLost
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.node.orders import WorkerStatus

STREAM_DEATHS_ALLOWED = 3
"""A stream that ended three workers would end the fourth: it must not eat workers for ever."""
UNENTERED_DEATHS_ALLOWED = 3
"""A call under which that many workers died without entering it may be what they die of, by a fault of their server."""
CLOSED = "it closed the connection without a response"
SILENT = "its host does not answer"


@dataclass(slots=True)
class LostWorkers:
    """The workers that one call has lost: those that may have begun it, and those that died without entering it."""

    begun: int = 0
    unentered: int = 0
    is_async: bool = False
    """The call is a run of an async one, which is repeated by itself."""

    def count(
        self, spec: FunctionSpec, request: str, entered_before: int, status: WorkerStatus | None, otherwise: str
    ) -> FleetError | None:
        """Counts one more worker, with its final status. Returns the error of the call; None: it runs again.

        `entered_before`: calls that the worker had entered for certain when this one was sent.
        `otherwise`: the cause, if its node names none.
        """
        if status is not None and status.drained:
            return None  # it ended in order, after all that it had begun
        if never_entered(status, request, entered_before):
            self.unentered += 1
            if self.unentered <= UNENTERED_DEATHS_ALLOWED:
                return None
        self.begun += 1
        return give_up(spec, self.begun, status, otherwise, is_async=self.is_async)


def never_entered(status: WorkerStatus | None, request: str, entered_before: int) -> bool:
    """True if the lost worker's node read, after its death, that it had not entered the call."""
    return status is not None and status.entered is not None and status.entered.excludes(request, entered_before)


def is_billed_when_cut(status: WorkerStatus | None) -> bool:
    """Checks whether a call is billed, until then, whose answer its worker cut off; with the worker's final status.

    Its client has what came, and a handler that sends all and then exits, or closes its connection, must not be free of
    charge. A worker without a final status lives. What the platform ended is not billed: drained workers, damaged
    weights.
    """
    if status is None:
        return True
    return status.error is not None and status.error.code in (WorkerLost.code, OutOfMemory.code)


def give_up(
    spec: FunctionSpec, lost: int, status: WorkerStatus | None, otherwise: str, *, is_async: bool = False
) -> FleetError | None:
    """The error of a call under which so many workers were lost, the last with this status; None: it runs again.

    `otherwise` is the cause, if its node names none.
    """
    cause = status.error if status is not None else None
    out_of_memory = cause is not None and cause.code == OutOfMemory.code
    if lost <= spec.retries and not out_of_memory:
        return None
    why = cause.message if cause is not None else otherwise
    text = f"function {spec.name}: {'its worker' if lost == 1 else f'{lost} workers'} ended under this call: {why}"
    logs = f"`fs logs {spec.name}` shows the last lines"
    if out_of_memory and cause is not None:
        return OutOfMemory(text, hint=cause.hint or logs)
    if not spec.retries and not is_async:
        logs += "; it is not run again, because it may have had effects: `retries=2` in the declaration allows that"
    return WorkerLost(text, hint=logs)
