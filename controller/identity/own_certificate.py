"""This controller's own certificate, with which it connects to nodes on other machines: in memory alone, for a day.

It is made with the authority's key once a node has joined, and again at half of its life.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from typing import TYPE_CHECKING

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.identity import client_context

from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from .nodes import NodeIdentities

if TYPE_CHECKING:
    from ..gateway.node_links import NodeLinks

log = logging.getLogger(__name__)

RETRY_S = 1.0
LOOK_S = 3600.0
"""Longest pause between two looks at the clock, which may step."""


class OwnCertificate:
    """A background task, which gives the context to the links."""

    def __init__(self, name: str, view: View, identities: NodeIdentities, links: NodeLinks) -> None:
        self._name = name
        self._view = view
        self._identities = identities
        self._links = links
        self._changed = asyncio.Event()
        view.on_change(self._changed.set)

    async def run(self) -> None:
        while True:
            while not self._view.identities:
                self._changed.clear()
                await self._changed.wait()
            try:
                await self._renew()
            except (*REDIS_ERRORS, FleetError) as error:
                log.warning("this controller has no certificate for nodes", extra={"error": str(error)})
                await asyncio.sleep(RETRY_S)
                continue
            await _half_of_a_life()

    async def _renew(self) -> None:
        authority = await self._identities.authority()
        now = datetime.datetime.now(datetime.UTC)
        self._links.context = client_context(authority.controller_identity(self._name, now))


async def _half_of_a_life() -> None:
    from .certificates import LIFE

    due = datetime.datetime.now(datetime.UTC) + LIFE / 2
    while (left_s := (due - datetime.datetime.now(datetime.UTC)).total_seconds()) > 0:
        await asyncio.sleep(min(left_s, LOOK_S))
