"""Puts together what answers beside the calls themselves, for `app`: the management API and what stands behind it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from fleetstart.controller.access.api import AccessApi
from fleetstart.controller.access.audit import AuditLog
from fleetstart.controller.access.sealing import Sealer
from fleetstart.controller.access.vault import Vault
from fleetstart.controller.api import Api, Services
from fleetstart.controller.billing.api import BillingApi
from fleetstart.controller.billing.archive import Archive
from fleetstart.controller.billing.compactor import Compactor
from fleetstart.controller.billing.reader import LedgerReader
from fleetstart.controller.checkpoints import Checkpoints
from fleetstart.controller.config import Config
from fleetstart.controller.core import Core
from fleetstart.controller.history import History
from fleetstart.controller.invocations.assembly import InvocationParts, assemble
from fleetstart.controller.invocations.webhook_secrets import WebhookSecrets
from fleetstart.controller.opening import open_store
from fleetstart.controller.parts import Part
from fleetstart.controller.registry import Registry
from fleetstart.controller.resources import BudgetInfo
from fleetstart.controller.rollouts import Rollouts
from fleetstart.controller.seeing.api import SeeingApi
from fleetstart.controller.seeing.calls import Calls
from fleetstart.controller.seeing.process import LoopLag, Self
from fleetstart.controller.shells import Shells

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleetstart.controller.seeing.otlp import TraceExport


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    api: Starlette
    audit: AuditLog
    calls: Calls
    invocations: InvocationParts
    parts: tuple[Part, ...]


def build_management(
    config: Config, core: Core, vault: Vault, traces: TraceExport | None, stopping: asyncio.Event
) -> Management:
    store = open_store(config.store)
    registry = Registry(core.state, store)
    checkpoints = Checkpoints(store, registry)
    archive = Archive(store)
    reader = LedgerReader(core.client, archive)
    compactor = Compactor(core.client, archive, reader, core.fence, segment_rows=config.segment_rows)
    rollouts = Rollouts(core.state, registry, core.scheduler)
    history = History(core.client, reader)
    audit = AuditLog(core.client, store, core.fence)
    billing = BillingApi(core.client, reader, core.billing, core.view)
    calls, lag = Calls(), LoopLag()
    webhook_secrets = WebhookSecrets(core.client, vault)
    invocations = assemble(
        config, core.gateway_id, core.client, core.view, store, core.gateway, history, stopping, webhook_secrets,
        fence=core.fence,
    )  # fmt: skip
    shells = Shells(core.state, Sealer(core.view, vault))
    services = Services(
        config=config,
        gateway=core.gateway_id,
        view=core.view,
        registry=registry,
        store=store,
        checkpoints=checkpoints,
        history=history,
        billing=billing,
        seeing=_seeing(core, reader, calls, lag, billing.shown, traces),
        invocations=invocations.api,
        access=AccessApi(core.state, audit, vault, webhook_secrets),
        shells=shells,
        stopping=stopping,
    )
    return Management(
        api=Api(services).app,
        audit=audit,
        calls=calls,
        invocations=invocations,
        parts=(rollouts, checkpoints, compactor, lag, audit, shells, *invocations.parts),
    )


def _seeing(
    core: Core,
    reader: LedgerReader,
    calls: Calls,
    lag: LoopLag,
    budgets: Callable[[], list[BudgetInfo]],
    traces: TraceExport | None,
) -> SeeingApi:
    process = Self(
        unwritten=lambda: core.ledger.pending, leads=lambda: bool(core.fence()), redis=lambda: core.view.redis
    )
    return SeeingApi(
        core.client,
        reader,
        core.view,
        calls=calls,
        lag=lag,
        process=process,
        budgets=budgets,
        extra=traces.families if traces is not None else lambda: (),
    )
