"""Workers that a node has forked."""

from __future__ import annotations

import psutil

from tests.prefetcher.nodes import Node
from tests.servers import wait_until

SPARE = "worker preforked"


def workers_of(node: Node) -> list[psutil.Process]:
    """Processes below a fork server, preforked ones included."""
    assert node.process is not None
    return [
        worker for server in psutil.Process(node.process.pid).children() for worker in server.children(recursive=True)
    ]


def wait_for_spare(node: Node) -> None:
    wait_until(lambda: SPARE in node.log(), 20, what="a spare")
