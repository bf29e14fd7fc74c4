"""The claim of a node's name: two live daemons of one name would end each other's workers."""

from __future__ import annotations

import asyncio
import contextlib

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.reports import NodeReport

from ..processes.epoch import epoch_is_alive, machine_id
from .outbox import retries
from .redis_state import REDIS_ERRORS, NodeState

LEASE_POLL_S = 0.05
"""How often another machine's lease under this node's name is looked at: it is renewed every second, or ends in
three."""


RENEWALS = 2
"""Renewals that show a live daemon. After a step back of Redis' clock a dead one's lease lasts longer, too: once."""


class NodeNameTaken(Exception):
    """Another live daemon runs under this node's name."""


async def take_name(state: NodeState, node: NodeId, stop: asyncio.Event) -> None:
    """Claims the node's name, waiting for Redis as long as necessary. Deletes the statuses of a dead predecessor.

    Errors: NodeNameTaken.
    """
    async for _ in retries("taking the node's name"):
        if stop.is_set():
            return
        with contextlib.suppress(*REDIS_ERRORS):
            former = await state.read_report()
            if former is not None and await _is_alive(state, former, stop):
                raise NodeNameTaken(
                    f"node {node} is alive already, at {former.address} (process {former.pid}): "
                    "end it, or give this one another name with FS_NODE, or `fs node join --name NAME`"
                )
            await state.delete_statuses()
            return


async def _is_alive(state: NodeState, former: NodeReport, stop: asyncio.Event) -> bool:
    """True if the daemon of a report runs. On another machine only its lease tells: it is renewed, or it ends."""
    if former.machine == machine_id():
        return epoch_is_alive(former.epoch)
    left_ms, renewals = await state.lease_left_ms(), 0
    while left_ms and not stop.is_set():
        await asyncio.sleep(LEASE_POLL_S)
        before_ms, left_ms = left_ms, await state.lease_left_ms()
        renewals += left_ms > before_ms
        if renewals == RENEWALS:
            return True
    return False
