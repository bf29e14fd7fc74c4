"""Wiring of asynchronous invocations, for `app`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from .api.invocations import InvocationsApi
from .api.traces import History
from .async_invocations.cron_schedules import CronScheduler
from .async_invocations.event_stream import EventStream
from .async_invocations.idempotency.middleware import IdempotentCall
from .async_invocations.idempotency.store import CallPlaces, IdempotencyKeys
from .async_invocations.middleware import AsyncMiddleware
from .async_invocations.presenter import InvocationPresenter
from .async_invocations.replay_recorder import ReplayRecorder
from .async_invocations.retention import RetentionSweeper
from .async_invocations.runner import InvocationRunner
from .async_invocations.store.invocations import InvocationStore
from .async_invocations.store.payloads import PayloadStore
from .async_invocations.store.redis_clock import RedisClock
from .async_invocations.submit import AsyncSubmitter
from .async_invocations.webhooks.delivery import WebhookDelivery
from .async_invocations.webhooks.http_client import WebhookClient
from .async_invocations.webhooks.secrets import WebhookSecrets
from .background import BackgroundTask
from .config import Config
from .core_wiring import Core
from .storage.object_store import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncInvocations:
    layer: AsyncMiddleware
    api: InvocationsApi
    parts: tuple[BackgroundTask, ...]
    runner: InvocationRunner
    replay_recorder: ReplayRecorder
    webhook_delivery: WebhookDelivery

    def stop(self) -> None:
        """Begins no more runs, which are other gateways' from now on. Webhooks and queue timeouts go on."""
        self.runner.stop()

    async def hand_back(self, drain_s: float = 0.0) -> None:
        """Waits so long for running invocations, then queues those left for other gateways; to be called before the
        last ledger rows are written."""
        await self.runner.hand_back(drain_s)
        await self.replay_recorder.close()

    async def close(self) -> None:
        await self.webhook_delivery.close()


def build_async_invocations(
    config: Config,
    core: Core,
    store: ObjectStore,
    history: History,
    stopping: asyncio.Event,
    webhook_secrets: WebhookSecrets,
) -> AsyncInvocations:
    client, view, gateway = core.client, core.view, core.gateway
    invocations, payloads, claims = InvocationStore(client), PayloadStore(store), IdempotencyKeys(client, store)
    submitter = AsyncSubmitter(invocations, payloads, gateway.check, RedisClock(client))
    presenter = InvocationPresenter(config.url, payloads, history.trace)
    webhook_delivery = WebhookDelivery(
        invocations,
        WebhookClient(config.webhook_allow, (config.url,)),
        webhook_secrets,
        presenter.with_result,
        RedisClock(client),
    )
    runner = InvocationRunner(
        core.gateway_id, client, view, invocations, payloads, webhook_delivery, gateway, trace=history.trace
    )
    replay_recorder = ReplayRecorder(gateway, view, invocations, payloads)
    schedules = CronScheduler(client, view, submitter, core.fence)
    layer = AsyncMiddleware(
        gateway,
        submitter,
        IdempotentCall(core.gateway_id, gateway, claims, CallPlaces(client)),
        replay_recorder,
        invocations,
        payloads,
        presenter.briefly,
        bodies=gateway.bodies,
        require_function=gateway.require_function,
        allowed=config.webhook_allow,
        max_body_bytes=config.max_body_bytes,
        stopping=stopping,
    )
    event_stream = EventStream(client, core.followers, invocations, presenter, stopping)
    api = InvocationsApi(
        invocations,
        payloads,
        presenter,
        submitter,
        webhook_secrets,
        schedules,
        event_stream,
        view,
        RedisClock(client),
        stopping,
    )
    return AsyncInvocations(
        layer=layer,
        api=api,
        parts=(invocations, runner, schedules, RetentionSweeper(client, invocations, payloads, claims, core.fence)),
        runner=runner,
        replay_recorder=replay_recorder,
        webhook_delivery=webhook_delivery,
    )
