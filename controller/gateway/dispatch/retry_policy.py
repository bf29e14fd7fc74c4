"""Whether a call is run again after its worker was lost: a decision about values.

A handler that may have begun may have had effects: its call is repeated only as often as `retries` of its function
says, and never after it ran out of memory, which it would do again. A stream with resume markers that has begun is
continued instead: nothing that its caller has seen is computed twice.
"""

from __future__ import annotations

from fleetstart.runtime.contract.errors import FleetError, OutOfMemory, WorkerLost
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.node.orders import WorkerStatus

STREAM_DEATHS_ALLOWED = 3
"""A stream that ended three workers would end the fourth: it must not eat workers for ever."""
CLOSED = "it closed the connection without a response"
SILENT = "its host does not answer"


def never_ran(status: WorkerStatus | None) -> bool:
    """True if the lost worker cannot have begun the call: it ended in order, after all that it had begun."""
    return status is not None and status.drained


def give_up(spec: FunctionSpec, lost: int, status: WorkerStatus | None, otherwise: str) -> FleetError | None:
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
    if not spec.retries:
        logs += "; it is not run again, because it may have had effects: `retries=2` in the declaration allows that"
    return WorkerLost(text, hint=logs)
