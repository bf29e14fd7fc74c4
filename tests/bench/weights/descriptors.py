"""Client for a segment's descriptors from the node that `ours` runs, without importing what a node needs."""

from __future__ import annotations

import socket

FILES_MAX = 250
"""Descriptors that one message may carry."""
MESSAGE_MAX = 4096


def ask_descriptors(place: str, checkpoint: str) -> tuple[int, list[int]]:
    """Control block and slabs of the segment, from the node at that socket; its pin lasts as long as this process."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link.connect(place)
    link.sendall(checkpoint.encode())
    descriptors: list[int] = []
    while True:
        said, some, _, _ = socket.recv_fds(link, MESSAGE_MAX, FILES_MAX)
        descriptors += some
        if said != b"more":
            break
    if said != b"all":
        raise RuntimeError(f"the node said {said.decode()}")
    _LINKS.append(link)
    return descriptors[0], descriptors[1:]


_LINKS: list[socket.socket] = []
