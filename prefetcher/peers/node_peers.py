"""A node's part in reading between nodes: its server, its connections to other nodes, and what it reports of both."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import Peer, Transport

from ..network.node_identity import NodeCertificate
from ..segments.store import SegmentStore
from .connections import PeerConnections
from .grants import PeerKeys
from .holdings import Holdings
from .reader import PeerChunks
from .server import PeerServer

log = logging.getLogger(__name__)


class NodePeers:
    """Used on the event loop, but for `chunks`."""

    def __init__(self, *, node: NodeId, epoch: str, read_key: Callable[[], Awaitable[bytes | None]]) -> None:
        """`read_key` returns the key that grants of this epoch are signed with, None if there is none."""
        self._node = node
        self._epoch = epoch
        self._read_key = read_key
        self._certificate: NodeCertificate | None = None
        self._server: PeerServer | None = None
        self._connections = PeerConnections(self._client_context)
        self.address = ""
        """host:port of the server; empty if there is none."""
        self._encrypted = False

    def open(
        self, address: str, certificate: NodeCertificate | None, segments: SegmentStore, *, encrypted: bool
    ) -> None:
        """Lets other nodes read the segments. A port that cannot be opened leaves the node without a server: it fetches
        and serves calls as before."""
        self._certificate = certificate
        self._encrypted = encrypted
        server = PeerServer(
            node=self._node,
            epoch=self._epoch,
            holdings=Holdings(segments),
            keys=PeerKeys(self._read_key),
            context=certificate.context if encrypted and certificate is not None else None,
        )
        try:
            host, port = server.open(address)
        except OSError as error:
            log.warning("no peer reads from this node: its server cannot listen", extra={"error": str(error)})
            return
        self._server = server
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def chunks(self, peer: Peer) -> PeerChunks:
        """A peer as a source of the chunks that its grant names."""
        return PeerChunks(peer, self._connections)

    @property
    def host(self) -> str:
        """Name in the node's certificate that readers expect; empty where it serves without TLS."""
        return self._certificate.host if self._encrypted and self._certificate is not None else ""

    @property
    def transports(self) -> tuple[Transport, ...]:
        return ("tcp",) if self._server is not None else ()

    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks sent to other nodes, since the daemon started."""
        return sum(self._server.sent_bytes.values()) if self._server is not None else 0

    async def close(self) -> None:
        self._connections.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    def _client_context(self) -> ssl.SSLContext:
        if self._certificate is None:
            raise ValueError("it expects TLS, and this node has no certificate")
        return self._certificate.client_context()
