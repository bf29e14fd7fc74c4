"""Structs of the management API: nodes that join, are drained and removed."""

from __future__ import annotations

import msgspec


class NodeJoin(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node that is about to join."""

    node: str


class JoinTerms(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses and settings with which a node joins: it holds the password of Redis."""

    redis_url: str
    store: str


class NodeState(msgspec.Struct, frozen=True, kw_only=True):
    """A node as seen by the controller that answers."""

    node: str
    alive: bool
    draining: bool
    workers: int
    """Workers that are ordered to it and have not ended."""
