"""Links to workers: plain on loopback, else TLS in which the worker's node and this controller prove themselves.

Which node a worker is on is known by its status; the node must show a certificate with the name that its record has
(`contract.identity.node_host`). A node that was removed has no record, and is not reached.
"""

from __future__ import annotations

import functools
import ssl
from typing import TypedDict

import aiohttp
from yarl import URL

from fleetstart.runtime.contract.identity import is_loopback, node_host
from fleetstart.runtime.contract.node.orders import WorkerStatus

from ..state.view import View


class TlsArguments(TypedDict, total=False):
    """What aiohttp takes for a link with TLS; nothing for a plain one."""

    ssl: ssl.SSLContext
    server_hostname: str


class NodeNotVouched(aiohttp.ClientConnectionError):
    """A worker's node has no certificate that this controller would take; nothing was sent."""


class NodeLinks:
    """How this controller reaches workers. `context` is replaced whenever its certificate is renewed."""

    def __init__(self, view: View, *, plain: bool = False) -> None:
        """`plain`: never encrypt (FS_LINKS=plain)."""
        self._view = view
        self._plain = plain
        self.context: ssl.SSLContext | None = None

    def target(self, status: WorkerStatus, path: str) -> tuple[URL, TlsArguments]:
        """URL of a path at a worker, and the arguments of aiohttp that its link takes. Errors: NodeNotVouched."""
        if self._plain or on_this_machine(status.endpoint):
            return URL(f"http://{status.endpoint}{path}", encoded=True), {}
        record = self._view.identities.get(status.node)
        if record is None:
            raise NodeNotVouched(f"node {status.node} has no certificate: it was removed, or has not joined")
        if self.context is None:
            raise NodeNotVouched("this controller has no certificate yet")
        url = URL(f"https://{status.endpoint}{path}", encoded=True)
        return url, {"ssl": self.context, "server_hostname": node_host(record.node, record.id)}


@functools.lru_cache(maxsize=4096)
def on_this_machine(endpoint: str) -> bool:
    """Checks whether an endpoint, host:port, is on loopback."""
    return is_loopback(endpoint.rpartition(":")[0])
