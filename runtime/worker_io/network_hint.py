"""Hint for an error of user code that comes of the function's own network settings."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

_NO_ROUTE = frozenset((errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL))
_CHAIN_MAX = 20


def network_hint(error: BaseException, network: bool | list[str]) -> str:
    """What to change so that the error does not come again; empty if the function's network has no part in it.

    A worker without a network sees names that cannot be resolved and hosts without a route, which HTTP clients wrap in
    errors of their own. With a list of hosts all others are refused by the node's proxy, and unknown to a resolver.
    """
    if network is True or not any(_is_unreachable(one) for one in chain(error)):
        return ""
    if network:
        return (
            f"this function reaches {', '.join(network)} alone, through the proxy in its environment:"
            " add the host to `network`"
        )
    return 'this function has no network: allow the host with @function(network=["HOST"]), or all with network=True'


def _is_unreachable(error: BaseException) -> bool:
    return isinstance(error, socket.gaierror) or (isinstance(error, OSError) and error.errno in _NO_ROUTE)


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    found: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if found is None:
            return
        yield found
        found = found.__cause__ or found.__context__
