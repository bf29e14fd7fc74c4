"""Errors of an attempt at a worker that are not errors of the function itself.

UpstreamError
├── UpstreamUnreachable    no connection: the worker never saw the call
├── UpstreamBusy           the worker ran nothing: it is full, or draining
├── HostSilent             the worker's host does not answer
└── UpstreamDisconnected   the connection ended while the worker had the call

After each of these the call may be tried again. ResponseTruncated ends it: its response had begun and cannot go on.
"""

from __future__ import annotations

from fleetstart.runtime.contract.errors import FleetError


class UpstreamError(Exception):
    """The attempt failed, and another may succeed."""


class UpstreamUnreachable(UpstreamError):
    """No connection could be made: the worker never saw the call."""


class UpstreamBusy(UpstreamError):
    """The worker ran nothing: it is full, or draining."""


class HostSilent(UpstreamError):
    """The worker's host does not answer."""


class UpstreamDisconnected(UpstreamError):
    """The connection ended without a response, or amid a stream that can continue at another worker."""


class ResponseTruncated(Exception):
    """The response had begun and cannot go on.

    `lost_ns`: until then its call is billed for what its client has; None if the platform cut it off.
    """

    def __init__(self, error: FleetError, lost_ns: int | None = None) -> None:
        self.error = error
        self.lost_ns = lost_ns
