"""Handlers of nodes: join, renewal of certificates, drain, remove.

A node joins with a key that it has made, and gets a certificate for it, and the addresses and passwords that all parts
of the system share: a join token is all that stands before them, and is good once. Draining is a mark: the scheduler
sends the node's workers away and starts none there.
"""

from __future__ import annotations

import ipaddress
import re
import time
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.process.redis_url import read_ca, split_ca

from ..auth.request_context import caller_of, set_audit_object
from ..http.json_api import json_body, json_response, now_unix_ms
from ..identity.nodes import NodeIdentities
from ..schemas.nodes import JoinTerms, NodeInfo, NodeJoin, Renewal, Renewed
from ..state.sync import StateSync

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
"""Host names, which are the default."""


class NodesApi:
    def __init__(self, state: StateSync, identities: NodeIdentities, *, redis_url: str, store_url: str) -> None:
        """Errors: ConfigError, if the file that Redis' certificate is checked by cannot be read."""
        self._state = state
        self._identities = identities
        self._redis_url, ca = split_ca(redis_url)
        self._redis_ca = read_ca(ca) if ca else ""
        self._store_url = store_url

    async def join(self, request: Request) -> Response:
        body = await json_body(request, NodeJoin)
        node, caller = body.node, caller_of(request)
        set_audit_object(request, node[:80])
        if not _NAME.fullmatch(node):
            raise InvalidInput(
                f"node name {node[:80]!r} is not allowed", hint="use 1 to 253 of a-z, A-Z, 0-9, . _ and -"
            )
        require_reachable_redis(self._redis_url, request.client.host if request.client else "")
        if self._alive(NodeId(node)):
            address = self._state.view.nodes[NodeId(node)].report.address
            raise InvalidInput(
                f"node {node} is alive already, at {address}",
                hint="give this one another name: fs node join --name NAME, or FS_NODE",
            )
        require_valid(body.request)
        if caller.key is not None and caller.key.rights == ["node"]:  # a token; other keys are their owner's
            await self._identities.use_token(caller.name)
        certificate, authority = await self._identities.join(node, body.request)
        await self._state.client.hdel(keys.NODES_DRAINING, node)
        await self._state.resync()
        terms = JoinTerms(
            redis_url=self._redis_url,
            redis_ca=self._redis_ca,
            store=self._store_url,
            certificate=certificate,
            authority=authority,
        )
        return json_response(terms)

    async def renew(self, request: Request) -> Response:
        """Needs no API key: the request is signed by the node's own, and the answer is of use to its holder alone."""
        body = await json_body(request, Renewal)
        return json_response(Renewed(certificate=await self._identities.renew(body.node, body.request)))

    async def drain(self, request: Request) -> Response:
        node = self._known(request)
        await self._state.client.hset(keys.NODES_DRAINING, node, str(now_unix_ms()))
        await self._changed(node)
        return json_response(self._info(node))

    async def undrain(self, request: Request) -> Response:
        node = self._known(request)
        await self._state.client.hdel(keys.NODES_DRAINING, node)
        await self._changed(node)
        return json_response(self._info(node))

    async def remove(self, request: Request) -> Response:
        """Forgets a node, and voids its certificates. One that lives and is removed by force loses its workers, and
        stays drained."""
        node, force = self._known(request), request.query_params.get("force") == "1"
        before = self._info(node)
        if before.alive and not force:
            raise InvalidInput(
                f"node {node} is alive" + (f", with {before.workers} workers" if before.workers else ""),
                hint=f"`fs node drain {node}`, then `fs down` on its machine; or --force, which ends its workers",
            )
        await self._identities.remove(node)
        async with self._state.client.pipeline(transaction=True) as pipe:
            pipe.delete(keys.desired(node), keys.copies(node), keys.peer_key(node))
            pipe.hdel(keys.PEER_KEYS, node)
            if not before.alive:
                pipe.delete(keys.observed(node), keys.node(node))
                pipe.hdel(keys.NODES, node)
                pipe.hdel(keys.NODES_DRAINING, node)
                pipe.hdel(keys.MEASURES, f"node:{node}")
            else:
                pipe.hset(keys.NODES_DRAINING, node, str(now_unix_ms()))
            await pipe.execute()
        await self._changed(node)
        return json_response(before)

    async def _changed(self, node: NodeId) -> None:
        await self._state.client.publish(keys.EVENTS_FUNCTIONS, f"node:{node}")
        await self._state.resync()

    def _known(self, request: Request) -> NodeId:
        node = NodeId(request.path_params["name"])
        view = self._state.view
        if node not in view.node_names and node not in view.draining:
            known = ", ".join(sorted(view.node_names)[:20]) or "none"
            raise NotFound(f"node {node[:80]} does not exist", hint=f"these do: {known}")
        return node

    def _alive(self, node: NodeId) -> bool:
        seen = self._state.view.nodes.get(node)
        return seen is not None and not seen.lost(time.monotonic_ns())

    def _info(self, node: NodeId) -> NodeInfo:
        view = self._state.view
        return NodeInfo(
            node=node,
            alive=self._alive(node),
            draining=node in view.draining,
            workers=sum(order.node == node for order in view.orders.values()),
        )


def require_valid(certificate_request: str) -> None:
    """Errors: InvalidInput, before anything is changed."""
    from ..identity.certificates import requested_key  # late: most systems have one machine

    requested_key(certificate_request)


def require_reachable_redis(redis_url: str, caller: str) -> None:
    """Errors: InvalidInput, if the caller's machine cannot reach a Redis at this URL."""
    advice = "start the system with a Redis that all machines reach: fs up --redis redis://:PASSWORD@HOST:6379/0"
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        raise InvalidInput("this system's Redis is a private Unix socket, which no other machine reaches", hint=advice)
    if _is_loopback(parts.hostname or "") and not _is_loopback(caller):
        raise InvalidInput(
            f"this system's Redis is at {parts.hostname}, which is another one on every machine", hint=advice
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
