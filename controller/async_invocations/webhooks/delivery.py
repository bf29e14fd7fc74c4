"""Webhook delivery: posts an ended invocation, signed with its project's secret."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable

import msgspec

from fleetstart.runtime.contract.function.names import project_of

from ...auth.secret_encryption import SecretCipherError
from ...schemas.invocations import InvocationInfo
from ..store import lifecycle
from ..store.invocations import InvocationStore, StoredInvocation
from ..store.redis_clock import RedisClock
from . import signing
from .http_client import WebhookClient
from .secrets import WebhookSecrets

log = logging.getLogger(__name__)


class WebhookMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a webhook."""

    type: str
    """ "invocation.succeeded", or another end status."""
    timestamp: str
    data: InvocationInfo


class WebhookDelivery:
    def __init__(
        self,
        invocations: InvocationStore,
        http: WebhookClient,
        secrets: WebhookSecrets,
        info: Callable[[StoredInvocation], Awaitable[InvocationInfo]],
        clock: RedisClock,
    ) -> None:
        """`clock`: that by which runners read when the next attempt is due."""
        self._invocations = invocations
        self._http = http
        self._secrets = secrets
        self._info = info
        self._clock = clock

    async def close(self) -> None:
        await self._http.close()

    async def deliver(self, entry: StoredInvocation) -> None:
        """Makes one delivery attempt and stores its result."""
        await self._clock.refresh()
        now_unix_ms = self._clock.now_unix_ms()
        claimed = await self._invocations.write(entry, lifecycle.delivering(entry.progress, now_unix_ms))
        if claimed is None:
            return
        envelope = entry.envelope
        body = msgspec.json.encode(
            WebhookMessage(
                type=f"invocation.{entry.progress.status}",
                timestamp=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.progress.finished_unix_ms / 1000)),
                data=await self._info(entry),
            )
        )
        try:
            project = envelope.project or project_of(envelope.function)
            secrets = await self._secrets.get(project)
        except SecretCipherError as closed:
            status, error = 0, closed.message
        else:
            now_s = time.time()
            message = lifecycle.message_id(entry.progress, envelope)
            headers = signing.headers(secrets.at(int(now_s * 1000)), message, int(now_s), body)
            status, error = await self._http.post(envelope.webhook, headers, body, project=project)
        now_unix_ms = self._clock.now_unix_ms()
        after = lifecycle.delivered(claimed.progress, now_unix_ms, http_status=status, error=error)
        await self._invocations.write(claimed, after, publish=after.status)
        if error:
            log.warning(
                "a webhook was not delivered",
                extra={"invocation": envelope.id, "error": error, "tries": claimed.progress.delivery.tries}
                if claimed.progress.delivery
                else {},
            )
