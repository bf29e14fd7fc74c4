"""Openings of calls that come after their rows, as over a connection that was cut off for a while."""

from __future__ import annotations

import asyncio

from fleetstart.controller.billing.ledger_writer import LedgerWriter
from fleetstart.controller.state.redis_client import connect
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import InvocationTrace, OpenInvocation
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version
from fleetstart.runtime.contract.timeline import Timeline
from tests.controller.billing.test_journal import row


def opening(name: str) -> OpenInvocation:
    return OpenInvocation(
        id=InvocationId(name), gateway="gw", function=FunctionName("f"), version=Version(1), accepted_unix_ms=1
    )


def test_an_opening_that_comes_after_the_row_opens_nothing(redis_url: str) -> None:
    async def write() -> None:
        client = connect(redis_url)
        try:
            writer = LedgerWriter(client, None)
            for name in ("ended", "running"):
                writer.opened(opening(name))
            await writer.flush()
            assert await client.hlen(keys.OPEN) == 2
            writer.ended(InvocationTrace(row=row("ended"), timeline=Timeline()))
            await writer.flush()
            # As Redis sees it when what was sent over a connection that hung is read at last.
            await writer._write([opening("ended"), opening("running")], [], [])
            assert await client.hkeys(keys.OPEN) == [b"running"]
        finally:
            await client.aclose()

    asyncio.run(write())
