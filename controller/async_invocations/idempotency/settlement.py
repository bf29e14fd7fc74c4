"""Settlement of claims: a claim ends with its call's response, which is stored, too large to be kept, or none that
later calls should get, so that the key is free again."""

from __future__ import annotations

import asyncio
import logging
import time

import msgspec

from fleetstart.runtime.contract.errors import FleetError, WorkerLost

from ...state.redis_client import REDIS_ERRORS
from .response_recorder import ResponseRecorder
from .store import CallPlaces, IdempotencyKeys, KeyClaim

log = logging.getLogger(__name__)

SETTLE_S = 60.0
"""How long a response that was sent is tried to be stored: longer than Redis takes to come back."""
SETTLE_EVERY_S = 0.5


class ClaimSettlement:
    """Settles the claims of one gateway. Owns the responses that were sent and are not stored yet."""

    def __init__(self, claims: IdempotencyKeys, places: CallPlaces) -> None:
        self._claims = claims
        self._places = places
        self._unsettled: set[asyncio.Task[None]] = set()

    async def settle(self, recorder: ResponseRecorder, digest: str, claim: KeyClaim, raw: bytes) -> None:
        """Stores the response. If store or Redis fail, it is stored after it was sent, and the key is held until
        then: a later call would run again, and get another answer."""
        try:
            await self._store(recorder, digest, claim, raw)
        except (*REDIS_ERRORS, FleetError) as error:
            log.warning("an answer is kept later", extra={"invocation": claim.invocation, "error": str(error)})
            task = asyncio.get_running_loop().create_task(self._settle_later(recorder, digest, claim, raw))
            self._unsettled.add(task)
            task.add_done_callback(self._unsettled.discard)

    async def _store(self, recorder: ResponseRecorder, digest: str, claim: KeyClaim, raw: bytes) -> None:
        """Errors: REDIS_ERRORS, StoreFailed."""
        if not recorder.worth_keeping:
            if recorder.ran or recorder.status == WorkerLost.status:  # else it may run at a worker
                await self._places.remove(digest)
            await self._claims.free(digest, raw)
        elif recorder.too_large:
            await self._claims.settle(digest, raw, msgspec.structs.replace(claim, state="unkept"), b"")
        else:
            done = msgspec.structs.replace(claim, state="done", answer=recorder.answer())
            await self._claims.settle(digest, raw, done, bytes(recorder.body))

    async def _settle_later(self, recorder: ResponseRecorder, digest: str, claim: KeyClaim, raw: bytes) -> None:
        """Tries again until the response is stored, another call has the key, or `SETTLE_S` are over. A call that goes
        on with this one at its worker is answered from here: the worker may be lost before it is."""
        ends_s = time.monotonic() + SETTLE_S
        while time.monotonic() < ends_s:
            await asyncio.sleep(SETTLE_EVERY_S)
            try:
                standing = claim, raw
                if await self._claims.renew(digest, raw) is not None:
                    found = await self._claims.read(digest)
                    if found is None or not _goes_on(found[0], claim) or not recorder.worth_keeping:
                        return  # stored by an attempt that seemed to fail, or taken by another call
                    standing = found
                await self._store(recorder, digest, *standing)
                return
            except (*REDIS_ERRORS, FleetError):
                continue
        log.warning("an answer could not be kept", extra={"invocation": claim.invocation})


def _goes_on(standing: KeyClaim, claim: KeyClaim) -> bool:
    """Checks whether the claim that stands is that of a gateway that goes on with the call of the other one."""
    return standing.state == "running" and standing.invocation == claim.invocation
