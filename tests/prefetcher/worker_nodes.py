"""Workers that a node has forked."""

from __future__ import annotations

import msgspec
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


def newest_spare(node: Node) -> int:
    """The pid of the worker that was preforked last, 0 if none was."""
    spares = [msgspec.json.decode("{" + line.split("{", 1)[1]) for line in node.log().splitlines() if SPARE in line]
    return int(spares[-1]["pid"]) if spares else 0


def has_a_spare_alone(node: Node) -> bool:
    return [worker.pid for worker in workers_of(node)] == [newest_spare(node)]


def wait_for_spare(node: Node) -> None:
    wait_until(lambda: SPARE in node.log(), 20, what="a spare")
