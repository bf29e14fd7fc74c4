"""Puts the parts of this package together, for `app`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import redis.asyncio as redis

from fleetstart.controller.access.seen import project_of
from fleetstart.controller.config import Config
from fleetstart.controller.gateway import Gateway
from fleetstart.controller.history import History
from fleetstart.controller.invocations.acceptance import Acceptance
from fleetstart.controller.invocations.api import InvocationsApi
from fleetstart.controller.invocations.book import Book
from fleetstart.controller.invocations.courier import Courier
from fleetstart.controller.invocations.following import Follower
from fleetstart.controller.invocations.idempotency import Keys
from fleetstart.controller.invocations.keeping import Keeping
from fleetstart.controller.invocations.layer import Invocations
from fleetstart.controller.invocations.once import Once
from fleetstart.controller.invocations.posting import Poster
from fleetstart.controller.invocations.runner import Runner
from fleetstart.controller.invocations.schedules import Schedules
from fleetstart.controller.invocations.showing import Showing
from fleetstart.controller.invocations.sweeper import Sweeper
from fleetstart.controller.invocations.vault import Vault
from fleetstart.controller.invocations.webhook_secrets import WebhookSecrets
from fleetstart.controller.objects import ObjectStore
from fleetstart.controller.parts import Part
from fleetstart.controller.view import View


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
