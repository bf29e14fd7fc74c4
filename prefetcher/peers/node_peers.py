"""A node's part in reading between nodes: its server, its connections to other nodes, and what it reports of both."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from fleetstart.runtime.contract.identity import is_loopback
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import Peer, Transport

from ..segments.feeds import FetchMemory
from ..segments.store import SegmentStore
from .connections import PeerConnections
from .grants import PeerKeys
from .holdings import Holdings
from .rdma import NodeRdma, RdmaReads, open_rdma
from .reader import PeerChunks
from .server import PeerServer

if TYPE_CHECKING:
    from ..network.node_identity import NodeCertificate

log = logging.getLogger(__name__)


class NodePeers:
    """Used on the event loop, but for `chunks`."""

    def __init__(
        self, *, node: NodeId, epoch: str, read_key: Callable[[], Awaitable[bytes | None]], rdma: bool = True
    ) -> None:
        """`read_key` returns the key that grants of this epoch are signed with, None if there is none. `rdma`: use an
        RDMA device where there is one, and the network is private."""
        self._node = node
        self._epoch = epoch
        self._read_key = read_key
        self._certificate: NodeCertificate | None = None
        self.server: PeerServer | None = None
        """The server; None before it listens."""
        self._connections = PeerConnections(self._client_context)
        self.address = ""
        """host:port of the server; empty if there is none."""
        self._encrypted = False
        self._allows_rdma = rdma
        self.rdma: NodeRdma | None = None
        """The device that reads go by; None: TCP alone."""

    def open(
        self, address: str, certificate: NodeCertificate | None, segments: SegmentStore, *, encrypted: bool
    ) -> None:
        """Lets other nodes read the segments. A port that cannot be opened leaves the node without a server: it fetches
        and serves calls as before."""
        self._certificate = certificate
        self._encrypted = encrypted
        if self._allows_rdma and not encrypted and not is_loopback(address):
            self.rdma = open_rdma()
        server = PeerServer(
            node=self._node,
            epoch=self._epoch,
            holdings=Holdings(segments),
            keys=PeerKeys(self._read_key),
            context=certificate.context if encrypted and certificate is not None else None,
            rdma=self.rdma,
        )
        try:
            host, port = server.open(address)
        except OSError as error:
            log.warning("no peer reads from this node: its server cannot listen", extra={"error": str(error)})
            return
        self.server = server
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def chunks(self, peer: Peer, memory: FetchMemory) -> PeerChunks:
        """A peer as a source of the chunks that its grant names, for a fetch into this memory."""
        rdma = RdmaReads(self.rdma, memory, self._connections) if self.rdma is not None else None
        return PeerChunks(peer, self._connections, rdma)

    @property
    def host(self) -> str:
        """Name in the node's certificate that readers expect; empty where it serves without TLS."""
        return self._certificate.host if self._encrypted and self._certificate is not None else ""

    @property
    def transports(self) -> tuple[Transport, ...]:
        if self.server is None:
            return ()
        return ("rdma", "tcp") if self.rdma is not None and self.rdma.is_up else ("tcp",)

    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks sent to other nodes, since the daemon started."""
        return sum(self.server.sent_bytes.values()) if self.server is not None else 0

    async def close(self) -> None:
        self._connections.close()
        if self.server is not None:
            await asyncio.to_thread(self.server.close)

    def _client_context(self) -> ssl.SSLContext:
        if self._certificate is None:
            raise ValueError("it expects TLS, and this node has no certificate")
        return self._certificate.client_context()
