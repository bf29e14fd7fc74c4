"""Bodies are counted as they arrive: what a gateway holds of them is bounded, whoever sends them and however slowly."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.http.body_budget import BodyBudget
from fleetstart.runtime.contract.errors import QueueFull
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until

MIB = 1 << 20


@given(st.lists(st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 40), st.none())), max_size=60))
def test_what_is_held_is_the_sum_of_the_bodies_and_below_the_limit(steps: list[tuple[int, int | None]]) -> None:
    budget = BodyBudget(100)
    held, sizes = [budget.open() for _ in range(4)], [0, 0, 0, 0]
    for place, more in steps:
        if more is None:
            held[place].release()
            sizes[place] = 0
            continue
        try:
            held[place].grow_to(sizes[place] + more)
        except QueueFull:
            assert sum(sizes) + more > 100
        else:
            sizes[place] += more
        assert budget.held_bytes == sum(sizes) <= 100


def _begin(controller: ControllerProcess, path: str, *, declared: bool, headers: str = "") -> socket.socket:
    """A request that has sent 2 MiB of its body, and whose end does not come."""
    client = socket.create_connection(controller.socket.getsockname(), timeout=10)
    length = f"Content-Length: {2 * MIB}" if declared else "Transfer-Encoding: chunked"
    client.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{headers}{length}\r\n\r\n".encode())
    part = b"x" * (2 * MIB - 1)
    client.sendall(part if declared else b"%x\r\n%b\r\n" % (len(part), part))
    return client


def _refused(client: socket.socket) -> bytes:
    client.settimeout(0.05)
    try:
        return client.recv(4096)
    except (TimeoutError, BlockingIOError):
        return b""
    except ConnectionError:
        return b"reset"


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("headers", ["", "Idempotency-Key: {}\r\n", "Prefer: respond-async\r\n"])
def test_slow_bodies_share_one_budget(
    tmp_path: Path, redis_server: RedisServer, node: HandNode, headers: str, declared: bool
) -> None:
    """8 times the largest body: the ninth that arrives is refused, and there is room again once they have gone."""
    controller = ControllerProcess(tmp_path / "home", redis_server.url, FS_MAX_BODY=str(2 * MIB)).start()
    clients: list[socket.socket] = []
    try:
        controller.deploy("f")
        for number in range(12):
            clients.append(_begin(controller, "/fn/f", declared=declared, headers=headers.format(number)))
        refused = wait_until(
            lambda: [answer for client in clients if (answer := _refused(client))], what="a refusal for want of memory"
        )
        assert any(b"429" in answer and b"queue_full" in answer for answer in refused), refused
        for client in clients:
            client.close()
        wait_until(
            lambda: controller.http.post("/fn/f", content=b"x" * MIB).status_code == 200, what="room for a body again"
        )
    finally:
        for client in clients:
            client.close()
        controller.close()


def test_a_call_of_no_function_is_refused_before_its_body_is_read(
    controller: ControllerProcess, node: HandNode
) -> None:
    for headers in ("Idempotency-Key: a\r\n", "Prefer: respond-async\r\n", ""):
        client = socket.create_connection(controller.socket.getsockname(), timeout=10)
        with client:
            head = f"POST /fn/nobody HTTP/1.1\r\nHost: localhost\r\n{headers}Content-Length: {MIB}\r\n\r\n"
            client.sendall(head.encode())
            assert b" 404 " in client.recv(4096)
