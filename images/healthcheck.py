"""`python -m fleetstart.images.healthcheck controller|node`: the health checks of the images.

A controller is healthy while it is ready for calls, a node while its lease is in Redis. Exit codes: 0 healthy, 1 not.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def controller() -> str:
    """Reason why the controller of this container is not ready; empty if it is."""
    secure = bool(os.environ.get("FS_TLS_CERT"))
    url = f"http{'s' if secure else ''}://127.0.0.1:{os.environ.get('FS_PORT') or 7433}/readyz"
    context = ssl._create_unverified_context() if secure else None  # its certificate is not for 127.0.0.1
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=context)] if context else [])
    )
    try:
        with opener.open(url, timeout=TIMEOUT_S):
            return ""
    except (OSError, urllib.error.HTTPError) as error:
        return f"{url}: {error}"


def node() -> str:
    """Reason why the node of this container is not in the system; empty if it is."""
    import redis  # late: a controller's check starts without it

    from fleetstart.runtime.contract import redis_keys as keys
    from fleetstart.runtime.contract.ids import NodeId

    name = os.environ.get("FS_NODE") or socket.gethostname()
    try:
        with redis.Redis.from_url(
            os.environ["FS_REDIS_URL"], socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
        ) as client:
            return "" if client.exists(keys.node(NodeId(name))) else f"Redis has no lease of the node {name}"
    except redis.RedisError as error:
        return f"Redis: {error}"


def main(part: str) -> int:
    reason = {"controller": controller, "node": node}[part]()
    if reason:
        print(reason)
    return 1 if reason else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
