"""TCP sockets that a node opens and a worker serves. Its code, which nobody trusts, can open no connection with them.

A socket stays in the network namespace that it was made in, whoever holds it. Its holder can make an unconnected one of
it: of a listening socket by `shutdown`, of a connected one by `connect` with AF_UNSPEC. So a worker without a network
would reach by its own listening socket all that its node reaches. A filter in the kernel, which nobody can take off
again and which accepted connections inherit, drops what would complete a connection from this side.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import socket
import struct

from fleetstart.runtime.contract.identity import is_loopback

_SO_ATTACH_FILTER, _SO_LOCK_FILTER = 26, 44
_LOAD_HALF, _LOAD_BYTE, _AND, _JEQ, _RETURN = 0x28, 0x30, 0x54, 0x15, 0x06
_DESTINATION_PORT, _FLAGS = 2, 13
"""Offsets in the TCP header, with which what a filter sees begins."""
_SYN_ACK = 0x12
_WHOLE = 0xFFFF_FFFF


def listening_socket(address: str, backlog: int) -> socket.socket:
    """A listening socket for a worker, at a free port of the address. Errors: OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, 0))
        only_serve(listener)  # before any connection is accepted
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def only_serve(sock: socket.socket) -> None:
    """Takes from a bound socket, for good, what serving it does not need. It accepts connections as before; one that it
    opens never comes about, nor one to another port that it is bound to later. Where the kernel lets this process put
    no filter on sockets (`why_unfiltered`) it can open some. Errors: OSError."""
    address, port = sock.getsockname()[:2]
    if not why_unfiltered():
        _attach(sock, port)
        sock.setsockopt(socket.SOL_SOCKET, _SO_LOCK_FILTER, 1)
    if is_loopback(address):
        # Nothing leaves the machine either, not even what asks for a connection. Linux before 5.7 lets only root do so.
        with contextlib.suppress(PermissionError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")


@functools.cache
def why_unfiltered() -> str:
    """The reason for which sockets have no filter: some kernels ask for CAP_NET_ADMIN. Empty if they have one."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            _attach(tried, 0)
        except PermissionError as error:
            return f"SO_ATTACH_FILTER: {error.strerror}"
    return ""


def _attach(sock: socket.socket, port: int) -> None:
    """Attaches the filter for a socket that is bound to the port. Errors: OSError."""
    code = (
        (_LOAD_HALF, 0, 0, _DESTINATION_PORT),
        (_JEQ, 0, 3, port),
        (_LOAD_BYTE, 0, 0, _FLAGS),
        (_AND, 0, 0, _SYN_ACK),
        (_JEQ, 0, 1, _SYN_ACK),  # the answer to a connection that was opened here
        (_RETURN, 0, 0, 0),
        (_RETURN, 0, 0, _WHOLE),
    )
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in code))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(code), ctypes.addressof(program)))
