"""Grants: the right of a running call to call other functions, which ends with the call's attempt.

A grant is a secret that the attempt's request carries to its worker. Whatever the worker asks for with it is decided by
what this gateway knows of the call: its function and project, its key, its deadline and trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_urlsafe
from typing import TYPE_CHECKING

from fleetstart.runtime.contract.billing.ledger import TraceContext
from fleetstart.runtime.contract.ids import WorkerId

from ...http.request_context import TRACE
from .version_backend import Attempt, Worker

if TYPE_CHECKING:
    from .call_record import CallRecord


@dataclass(slots=True, eq=False, kw_only=True)
class Grant:
    """The grant of one attempt."""

    secret: str = field(repr=False)
    record: CallRecord
    attempt: Attempt
    context: TraceContext
    """The call's place in its trace."""
    ended: bool = False
    on_end: set[Callable[[], object]] = field(default_factory=set)
    """Called once when it ends: each cancels a call that was made with it."""


class Grants:
    """The grants of one gateway."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._grants: dict[str, Grant] = {}
        self._of_workers: Counter[WorkerId] = Counter()
        self.on_issue: Callable[[Worker], object] = lambda worker: None
        """Called when a call that may call others begins on a worker."""

    def issue(self, record: CallRecord, attempt: Attempt) -> Grant:
        """Issues the grant of an attempt; called in the task of its request."""
        grant = Grant(secret=token_urlsafe(24), record=record, attempt=attempt, context=TRACE.get())
        self._grants[grant.secret] = grant
        self._of_workers[attempt.worker.id] += 1
        self.on_issue(attempt.worker)
        return grant

    def end(self, grant: Grant) -> None:
        """Ends a grant, and with it the calls that were made with it; again is harmless."""
        if self._grants.pop(grant.secret, None) is None:
            return
        grant.ended = True
        worker = grant.attempt.worker.id
        self._of_workers[worker] -= 1
        if not self._of_workers[worker]:
            del self._of_workers[worker]
        for callback in tuple(grant.on_end):
            callback()

    def find(self, secret: str, worker: WorkerId) -> Grant | None:
        """The grant with this secret, if it is of a call on this worker."""
        grant = self._grants.get(secret)
        return grant if grant is not None and grant.attempt.worker.id == worker else None

    def any_of(self, worker: WorkerId) -> bool:
        """Checks whether a call on the worker has one."""
        return worker in self._of_workers

    def header(self, grant: Grant) -> str:
        """The value of GRANT_HEADER."""
        return f"{self._gateway}:{grant.secret}"
