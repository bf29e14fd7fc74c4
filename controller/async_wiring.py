"""Puts the parts of this package together, for `app`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import redis.asyncio as redis

from .api.event_stream import Follower
from .api.history import History
from .api.invocations import InvocationsApi
from .async_invocations.cron_schedules import Schedules
from .async_invocations.idempotency.middleware import Once
from .async_invocations.idempotency.store import Keys
from .async_invocations.middleware import Invocations
from .async_invocations.presenter import Showing
from .async_invocations.request_retention import Keeping
from .async_invocations.retention import Sweeper
from .async_invocations.runner import Runner
from .async_invocations.store.invocations import Book
from .async_invocations.store.payloads import Vault
from .async_invocations.submit import Acceptance
from .async_invocations.webhooks.delivery import Courier
from .async_invocations.webhooks.http_client import Poster
from .async_invocations.webhooks.secrets import WebhookSecrets
from .auth.lookups import project_of
from .background import Part
from .config import Config
from .gateway.app import Gateway
from .state.view import View
from .storage.object_store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationParts:
    layer: Invocations
    api: InvocationsApi
    parts: tuple[Part, ...]
    runner: Runner
    keeping: Keeping
    courier: Courier

    async def hand_back(self) -> None:
        """Before the last ledger rows are written: what runs here ends, and is queued for others."""
        await self.runner.hand_back()
        await self.keeping.close()

    async def close(self) -> None:
        await self.courier.close()


def assemble(
    config: Config,
    gateway_id: str,
    client: redis.Redis,
    view: View,
    store: ObjectStore,
    gateway: Gateway,
    history: History,
    stopping: asyncio.Event,
    webhook_secrets: WebhookSecrets,
    *,
    fence: Callable[[], int],
) -> InvocationParts:
    book, vault, claims = Book(client), Vault(store), Keys(client, store)
    acceptance = Acceptance(book, vault, gateway.check)
    showing = Showing(config.url, vault, history.trace)
    courier = Courier(
        book,
        Poster(config.webhook_allow),
        webhook_secrets,
        showing.with_result,
        lambda function: project_of(view, function),
    )
    runner = Runner(gateway_id, client, view, book, vault, courier, gateway, trace=history.trace)
    keeping = Keeping(gateway, view, book, vault)
    schedules = Schedules(client, view, acceptance, fence)
    layer = Invocations(
        gateway,
        acceptance,
        Once(gateway, claims),
        keeping,
        book,
        vault,
        showing.briefly,
        allowed=config.webhook_allow,
        max_body_bytes=config.max_body_bytes,
        stopping=stopping,
    )
    follower = Follower(client, book, showing, stopping)
    api = InvocationsApi(book, vault, showing, acceptance, webhook_secrets, schedules, follower, view, stopping)
    return InvocationParts(
        layer=layer,
        api=api,
        parts=(book, runner, schedules, Sweeper(client, book, vault, claims, fence)),
        runner=runner,
        keeping=keeping,
        courier=courier,
    )
