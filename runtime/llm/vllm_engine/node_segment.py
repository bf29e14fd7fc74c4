"""A node's segment for a process that the node has not started: asked for at the daemon's socket, mapped, given back.

No file with weights is read: the node has them in memory already, or fetches them as for a worker. While the process
copies them the segment is pinned.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fleetstart.native import SegmentFailed

from ...contract.errors import ErrorInfo, Unavailable, error_from
from ...contract.ids import CheckpointId
from ...contract.node.channel import Channel, ChannelClosed, socket_address
from ...contract.node.messages import (
    READERS_SOCKET,
    LenderMessage,
    ReadRefused,
    ReadSegment,
    SegmentLent,
    SegmentRead,
    SegmentVerified,
)
from ...weights.weights import Weights

TIMEOUT_S = 600.0
"""Limit of one load, which may wait for the node's fetch: that of vLLM's own start."""


@contextmanager
def segment_weights(home: Path, checkpoint: CheckpointId, *, timeout_s: float = TIMEOUT_S) -> Iterator[Weights]:
    """The checkpoint's weights in the memory of the node that runs in this FS_HOME, until the block ends, which waits
    for the check of their digests.

    Errors: Unavailable if no node listens there; those with which the node refuses; those of the segment.
    """
    deadline_ns = time.monotonic_ns() + round(timeout_s * 1e9)
    channel = _connect(home, timeout_s)
    try:
        channel.send(ReadSegment(checkpoint))
        control, *slabs = _answer(channel, SegmentLent)
        weights = Weights.attach(control, slabs, deadline_ns=deadline_ns)
        weights.map_ahead()
        yield weights
        channel.send(SegmentRead())
        _answer(channel, SegmentVerified)
    except SegmentFailed as error:
        code, message = error.args
        raise error_from(ErrorInfo(code=code, message=message)) from error
    except ChannelClosed as error:
        raise Unavailable(f"the node in {home} ended while checkpoint {checkpoint[:12]} was read: {error}") from error
    finally:
        channel.close()


def _connect(home: Path, timeout_s: float) -> Channel[LenderMessage]:
    path, connection = home / READERS_SOCKET, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with socket_address(path) as address:
            connection.connect(address)
    except OSError as error:
        connection.close()
        raise Unavailable(
            f"no node listens at {path}: {error.strerror}", hint="start one with `fs up`, or name its FS_HOME"
        ) from error
    connection.settimeout(timeout_s)
    return Channel(connection, LenderMessage)


def _answer(channel: Channel[LenderMessage], wanted: type[SegmentLent | SegmentVerified]) -> list[int]:
    """Descriptors of the answer. Errors: ChannelClosed; the node's refusal."""
    message, descriptors = channel.receive()
    if isinstance(message, ReadRefused):
        raise error_from(message.error)
    if not isinstance(message, wanted):
        raise ChannelClosed(f"{type(message).__name__} came, and {wanted.__name__} was expected")
    return descriptors
