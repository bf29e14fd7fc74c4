"""Options of the connections between nodes."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from fleetstart.prefetcher.peers.links import prepare

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
NAME_BYTES = 16


def congestion(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, NAME_BYTES).rstrip(b"\0").decode()


def test_congestion_control_that_estimates_rates_is_replaced_and_any_other_stays() -> None:
    available = AVAILABLE.read_text().split()
    for name in available:
        with socket.socket() as sock:
            with contextlib.suppress(PermissionError):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            before = congestion(sock)
            prepare(sock)
            assert congestion(sock) == ("cubic" if before == "bbr" and "cubic" in available else before)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_socket_that_is_no_tcp_is_prepared_too() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        prepare(ours)
