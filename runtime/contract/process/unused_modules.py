"""Modules of libraries that our own processes never use, and that take longer to import than the rest of the library.

httpx imports its command line, with rich, where that is installed: 55 ms of a core. redis imports the SDK of
OpenTelemetry's metrics: 110 ms. Both do without where they are not installed. Not for processes that run code of users:
a client's, or a worker.
"""

from __future__ import annotations

import sys

UNUSED = ("httpx._main", "opentelemetry.sdk.metrics")


def leave_out_unused_modules() -> None:
    """Makes imports of them fail as if they were not installed. To be called before the libraries are imported."""
    for name in UNUSED:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # how Python marks what must not be imported
