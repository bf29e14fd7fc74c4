"""When a read of the store is tried again: of whole objects here, of chunks in `fetch`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..sources.base import SourceError
from .fetch_errors import store_failed

log = logging.getLogger(__name__)

RETRY_DELAYS_S = (0.1, 0.3, 1.0)
"""Between tries of one read: a store that is restarted is back within them, a dead one holds nobody for long."""


def with_retries(read: Callable[[], bytes], what: str) -> bytes:
    """Errors: StoreFailed after the last try, and whatever is no SourceError at once. Blocks."""
    for delay_s in RETRY_DELAYS_S:
        try:
            return read()
        except SourceError as error:
            log.warning("store did not answer, trying again", extra={"what": what, "error": str(error)})
            time.sleep(delay_s)
    try:
        return read()
    except SourceError as error:
        raise store_failed(what, error, len(RETRY_DELAYS_S) + 1) from error
