"""A worker's way out of its own network: a socket on its loopback, which its node answers as an HTTP proxy.

The socket is opened here, inside the worker's network, and handed over: whoever connects to it is accepted by the node
(`prefetcher.egress`), so no byte passes through a process of the worker's, and nothing here needs a thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

import msgspec

from ..contract.node.messages import EgressListener

BACKLOG = 128
DIRECT = "127.0.0.1,localhost"
_VARIABLES = ("http_proxy", "https_proxy", "all_proxy")


def open_egress_socket(send: Callable[[msgspec.Struct, tuple[int, ...]], None]) -> dict[str, str]:
    """Hands the socket over; returns the environment that leads clients to it. Errors: OSError, ChannelClosed."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        port = listener.getsockname()[1]
        send(EgressListener(), (listener.fileno(),))
    found = {name: f"http://127.0.0.1:{port}" for name in _VARIABLES} | {"no_proxy": DIRECT}
    return found | {name.upper(): value for name, value in found.items()}
