"""Puts the parts of this package together, for `app`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import redis.asyncio as redis

from .api.invocations import InvocationsApi
from .api.traces import History
from .async_invocations.cron_schedules import CronScheduler
from .async_invocations.event_stream import EventStream
from .async_invocations.idempotency.middleware import IdempotentCall
from .async_invocations.idempotency.store import IdempotencyKeys
from .async_invocations.middleware import AsyncMiddleware
from .async_invocations.presenter import InvocationPresenter
from .async_invocations.request_retention import RequestRetention
from .async_invocations.retention import RetentionSweeper
from .async_invocations.runner import InvocationRunner
from .async_invocations.store.invocations import InvocationStore
from .async_invocations.store.payloads import PayloadStore
from .async_invocations.submit import AsyncSubmitter
from .async_invocations.webhooks.delivery import WebhookDelivery
from .async_invocations.webhooks.http_client import WebhookClient
from .async_invocations.webhooks.secrets import WebhookSecrets
from .auth.lookups import project_of
from .background import BackgroundTask
from .config import Config
from .gateway.app import Gateway
from .state.view import View
from .storage.object_store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncInvocations:
    layer: AsyncMiddleware
    api: InvocationsApi
    parts: tuple[BackgroundTask, ...]
    runner: InvocationRunner
    keeping: RequestRetention
    courier: WebhookDelivery

    async def hand_back(self) -> None:
        """Before the last ledger rows are written: what runs here ends, and is queued for others."""
        await self.runner.hand_back()
        await self.keeping.close()

    async def close(self) -> None:
        await self.courier.close()


def build_async_invocations(
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
) -> AsyncInvocations:
    book, vault, claims = InvocationStore(client), PayloadStore(store), IdempotencyKeys(client, store)
    acceptance = AsyncSubmitter(book, vault, gateway.check)
    showing = InvocationPresenter(config.url, vault, history.trace)
    courier = WebhookDelivery(
        book,
        WebhookClient(config.webhook_allow),
        webhook_secrets,
        showing.with_result,
        lambda function: project_of(view, function),
    )
    runner = InvocationRunner(gateway_id, client, view, book, vault, courier, gateway, trace=history.trace)
    keeping = RequestRetention(gateway, view, book, vault)
    schedules = CronScheduler(client, view, acceptance, fence)
    layer = AsyncMiddleware(
        gateway,
        acceptance,
        IdempotentCall(gateway, claims),
        keeping,
        book,
        vault,
        showing.briefly,
        allowed=config.webhook_allow,
        max_body_bytes=config.max_body_bytes,
        stopping=stopping,
    )
    follower = EventStream(client, book, showing, stopping)
    api = InvocationsApi(book, vault, showing, acceptance, webhook_secrets, schedules, follower, view, stopping)
    return AsyncInvocations(
        layer=layer,
        api=api,
        parts=(book, runner, schedules, RetentionSweeper(client, book, vault, claims, fence)),
        runner=runner,
        keeping=keeping,
        courier=courier,
    )
