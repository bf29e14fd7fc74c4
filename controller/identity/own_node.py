"""The node of a controller's own FS_HOME, which needs no token: its controller vouches for it while it starts.

Only where other machines reach that node (FS_NODE_ADDRESS). The file is for this user alone, and the daemon reads it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.identity import Identity, read_identity, write_identity
from fleetstart.runtime.contract.ids import NodeId

from ..state.redis_client import REDIS_ERRORS
from ..state.view import View
from .nodes import NodeIdentities

log = logging.getLogger(__name__)

RETRY_S = 0.5


class OwnNode:
    """A background task: writes the identity, once."""

    def __init__(self, node: str, path: Path, view: View, identities: NodeIdentities) -> None:
        self._node = node
        self._path = path
        self._view = view
        self._identities = identities

    async def run(self) -> None:
        while not await self._vouched():
            await asyncio.sleep(RETRY_S)
        await asyncio.Event().wait()

    async def _vouched(self) -> bool:
        from .certificates import digest_of, new_request

        if not self._view.synced:
            return False
        known, own = self._view.identities.get(NodeId(self._node)), read_identity(self._path)
        if known is not None and own is not None and digest_of(own.key) == known.key_sha256:
            return True
        with contextlib.suppress(*REDIS_ERRORS):
            try:
                key, request = new_request(self._node)
                certificate, authority = await self._identities.join(self._node, request)
                write_identity(self._path, Identity(certificate=certificate, key=key, authority=authority))
            except (FleetError, OSError) as error:
                log.warning("the node of this machine has no certificate", extra={"error": str(error)})
                return False
            return True
        return False
