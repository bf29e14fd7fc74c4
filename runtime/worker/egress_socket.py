"""Egress socket: a listening socket on the worker's loopback that its node serves as an HTTP proxy.

It is opened inside the worker's network namespace and handed to the node, which accepts its connections: no byte
passes through a process of the worker, and no thread is needed.
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
    """Opens the socket and sends it to the node; returns the proxy variables. Errors: OSError, ChannelClosed."""
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listener:
        port = listener.getsockname()[1]
        send(EgressListener(), (listener.fileno(),))
    found = {name: f"http://127.0.0.1:{port}" for name in _VARIABLES} | {"no_proxy": DIRECT}
    return found | {name.upper(): value for name, value in found.items()}
