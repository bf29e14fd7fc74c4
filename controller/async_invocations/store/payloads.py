"""Store of requests and responses in the object store: `invocations/{id}/request`, `invocations/{id}/answer-{claim}`.

An object is a head, one line of JSON, and the body unchanged. A request's head is its envelope, so that accepted calls
can be recovered from the store alone. A response has the number of the claim under which it was made: `Progress.answer`
names the valid one.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from fleetstart.runtime.contract.decoding import UNDECODABLE
from fleetstart.runtime.contract.errors import StoreFailed
from fleetstart.runtime.contract.ids import InvocationId
from fleetstart.runtime.contract.sizes import MIB

from ...state.invocation_records import Answer, Envelope
from ...storage.object_store import ObjectStore

FOLDER = "invocations/"
REQUEST = "request"
REQUEST_MAX_BYTES = 16 * MIB
ANSWER_MAX_BYTES = 16 * MIB
HEAD_MAX_BYTES = 256 * 1024
"""Maximum size of a head: twice the headers that uvicorn accepts."""

Head = TypeVar("Head", Envelope, Answer)


class PayloadStore:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def keep_request(self, envelope: Envelope, body: bytes) -> Envelope:
        """Stores a request; returns the stored envelope, an earlier one if the id was taken. Errors: StoreFailed."""
        key = request_key(envelope.id)
        if await self._store.create(key, pack(envelope, body)):
            return envelope
        known = await self.request(envelope.id)
        if known is None:
            raise StoreFailed(f"{key} was removed while it was read", hint="call again")
        return known[0]

    async def request(self, invocation: InvocationId) -> tuple[Envelope, bytes] | None:
        data = await self._store.read(request_key(invocation), REQUEST_MAX_BYTES + HEAD_MAX_BYTES)
        return unpack(data, Envelope) if data is not None else None

    async def keep_answer(self, invocation: InvocationId, answer: Answer, body: bytes) -> None:
        """Stores a response. Errors: StoreFailed."""
        await self._store.create(answer_key(invocation, answer.claim), pack(answer, body))

    async def answer(self, invocation: InvocationId, claim: int) -> tuple[Answer, bytes] | None:
        data = await self._store.read(answer_key(invocation, claim), ANSWER_MAX_BYTES + HEAD_MAX_BYTES)
        return unpack(data, Answer) if data is not None else None

    async def drop_answer(self, invocation: InvocationId, claim: int) -> None:
        await self._store.delete(answer_key(invocation, claim))

    async def drop(self, invocation: InvocationId) -> None:
        """Deletes all objects of an invocation, the request last: it identifies the rest."""
        found = await self._store.list(f"{FOLDER}{invocation}/")
        for stored in sorted(found, key=lambda stored: stored.key.endswith("/" + REQUEST)):
            await self._store.delete(stored.key)

    async def contents(self) -> dict[InvocationId, dict[str, int]]:
        """Maps each invocation to its objects' names and the times at which they were written (unix ms)."""
        found: dict[InvocationId, dict[str, int]] = {}
        for stored in await self._store.list(FOLDER):
            invocation, _, name = stored.key.removeprefix(FOLDER).partition("/")
            found.setdefault(InvocationId(invocation), {})[name] = stored.modified_unix_ms
        return found


def request_key(invocation: InvocationId) -> str:
    return f"{FOLDER}{invocation}/{REQUEST}"


def answer_key(invocation: InvocationId, claim: int) -> str:
    return f"{FOLDER}{invocation}/answer-{claim}"


def pack(head: Envelope | Answer, body: bytes) -> bytes:
    return msgspec.json.encode(head) + b"\n" + body


def unpack(data: bytes, kind: type[Head]) -> tuple[Head, bytes]:
    """Splits an object into head and body. Errors: StoreFailed if it is malformed."""
    line, newline, body = data.partition(b"\n")
    try:
        head = msgspec.json.decode(line, type=kind)
    except UNDECODABLE as error:
        raise StoreFailed(f"a kept {kind.__name__.lower()} cannot be read: {error}") from error
    if not newline or len(body) != head.body_bytes:
        raise StoreFailed(f"a kept {kind.__name__.lower()} has {len(body):,} bytes, its head says {head.body_bytes:,}")
    return head, body
