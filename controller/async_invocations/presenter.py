"""Presents an invocation as an API struct: its state, its response if small, the row and timeline of its last run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from fleetstart.runtime.contract.billing.ledger import InvocationTrace, dollars
from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.ids import InvocationId

from ..schemas.invocations import RESULT_INLINE_BYTES, InvocationInfo
from ..state.invocation_records import Progress, run_id
from .store import lifecycle
from .store.invocations import StoredInvocation
from .store.payloads import PayloadStore


class InvocationPresenter:
    def __init__(
        self, url: str, payloads: PayloadStore, trace: Callable[[InvocationId], Awaitable[InvocationTrace]]
    ) -> None:
        self._url = url
        self._payloads = payloads
        self._trace = trace

    def briefly(self, entry: StoredInvocation) -> InvocationInfo:
        envelope, progress = entry.envelope, entry.progress
        at = f"{self._url}/api/v1/invocations/{envelope.id}"
        answer = progress.answer
        version, start, billed_ms, cost = _bill_of(progress)
        return InvocationInfo(
            id=envelope.id,
            function=envelope.function,
            status=progress.status,
            origin=envelope.origin,
            method=envelope.method,
            target=envelope.target,
            url=at,
            result_url=f"{at}/result",
            events_url=f"{at}/events",
            accepted_unix_ms=envelope.accepted_unix_ms,
            queue_until_unix_ms=progress.queue_until_unix_ms,
            started_unix_ms=progress.started_unix_ms,
            finished_unix_ms=progress.finished_unix_ms,
            kept_until_unix_ms=lifecycle.kept_until_unix_ms(progress, envelope) if progress.ended else 0,
            cancelling=progress.cancelling and not progress.ended,
            dead_letter=progress.dead,
            runs=progress.runs,
            error=progress.error if progress.status != "succeeded" else None,
            http_status=answer.http_status if answer is not None else 0,
            content_type=answer.content_type if answer is not None else "",
            result_bytes=answer.body_bytes if answer is not None else 0,
            version=version,
            start=start,
            billed_ms=billed_ms,
            cost=cost,
            webhook=envelope.webhook,
            delivery=progress.delivery,
            source=envelope.source,
            history=progress.moments,
            progress=progress.told,
        )

    async def with_result(self, entry: StoredInvocation) -> InvocationInfo:
        """The invocation with its response, as webhooks carry it."""
        info = self.briefly(entry)
        result = await self._result(entry)
        return msgspec.structs.replace(info, result=result) if result is not None else info

    async def fully(self, entry: StoredInvocation) -> InvocationInfo:
        info = await self.with_result(entry)
        try:
            trace = await self._trace(run_id(entry.envelope.id, entry.progress.runs))
        except FleetError:
            return info
        if not info.cost:  # its gateway died, and another one wrote the row; or an earlier release ran it
            row = trace.row
            info = msgspec.structs.replace(
                info,
                billed_ms=row.billed_ms,
                cost=dollars(row.cost_nusd),
                version=row.version,
                start=row.start if row.worker else "",
            )
        return msgspec.structs.replace(
            info,
            row=trace.row,
            timeline=trace.timeline,
            isolation=trace.isolation,
            pooled=trace.pooled,
            events=trace.events,
        )

    async def _result(self, entry: StoredInvocation) -> msgspec.Raw | None:
        """The response, if it is small JSON and the store has it; otherwise the reader follows `result_url`."""
        answer = entry.progress.answer
        if answer is None or answer.body_bytes > RESULT_INLINE_BYTES:
            return None
        if not answer.content_type.partition(";")[0].strip().endswith("json"):
            return None
        try:
            kept = await self._payloads.answer(entry.envelope.id, answer.claim)
            if kept is None:
                return None
            msgspec.json.decode(kept[1])
            return msgspec.Raw(kept[1])
        except (FleetError, *UNDECODABLE):
            return None


def _bill_of(progress: Progress) -> tuple[int, str, int, str]:
    """Version, kind of start, billed time and cost; as its answer's headers have them if an earlier release ran it."""
    bill, answer = progress.bill, progress.answer
    if bill is not None:
        return bill.version, bill.start, bill.billed_ms, dollars(bill.cost_nusd)
    return (answer.version, answer.start, answer.billed_ms, answer.cost) if answer is not None else (0, "", 0, "")
