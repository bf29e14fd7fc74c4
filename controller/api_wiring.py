"""Wiring of the management API and its services, for `app`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from starlette.applications import Starlette

from fleetstart.runtime.contract.identity import FILE
from fleetstart.runtime.contract.store_url import is_s3

from .api.app import build_app
from .api.billing import BillingApi
from .api.endpoints import endpoints, route_rules
from .api.functions import FunctionsApi
from .api.keys import KeysApi
from .api.metrics import ObservabilityApi
from .api.nodes import NodesApi
from .api.objects import ObjectsApi
from .api.openapi.document import document
from .api.projects import ProjectsApi
from .api.secrets import SecretsApi
from .api.system import SystemApi
from .api.traces import History, TracesApi
from .api.versions import VersionsApi
from .api.volumes import VolumesApi
from .async_invocations.webhooks.secrets import WebhookSecrets
from .async_wiring import AsyncInvocations, build_async_invocations
from .auth.audit_journal import AuditJournal
from .auth.audit_log import AuditLog
from .auth.route_rules import RouteRules
from .auth.secret_encryption import SecretCipher
from .auth.secret_sealing import SecretSealer
from .background import BackgroundTask
from .billing.archive_store import LedgerArchive
from .billing.compactor import Compactor
from .billing.ledger_reader import LedgerReader
from .billing.stored_sums import StoredSums
from .config import Config
from .core_wiring import Core
from .history.service import HistoryApi
from .history.writer import HistoryWriter
from .identity.own_certificate import OwnCertificate
from .identity.own_node import OwnNode
from .observability.call_metrics import CallMetrics
from .observability.process_metrics import LoopLag, ProcessMetrics
from .registry.checkpoints import Checkpoints
from .registry.layers import LayerCollector
from .registry.registry import Registry
from .registry.rollouts import RolloutController
from .registry.store_accounts import AccountedStore, StoreAccounts
from .registry.uploads import Uploads
from .registry.volumes import Volumes
from .schemas.functions import BudgetInfo
from .shell.service import ShellService
from .state import readiness
from .storage.factory import open_store
from .storage.probe import LinkProbe

if TYPE_CHECKING:
    from collections.abc import Callable

    from .observability.otlp import TraceExport


@dataclass(frozen=True, slots=True, kw_only=True)
class Management:
    api: Starlette
    rules: RouteRules
    audit: AuditLog
    calls: CallMetrics
    history: HistoryWriter
    invocations: AsyncInvocations
    parts: tuple[BackgroundTask, ...]


def build_management(
    config: Config, core: Core, cipher: SecretCipher, traces: TraceExport | None, stopping: asyncio.Event
) -> Management:
    accounts = StoreAccounts(core.client)
    store = AccountedStore(open_store(config.store), accounts)
    registry = Registry(core.state, store)
    uploads = Uploads(core.client, store, accounts)
    checkpoints = Checkpoints(store, registry, uploads)
    volumes = Volumes(core.state, store)
    archive = LedgerArchive(store)
    reader = LedgerReader(core.client, archive)
    sums = StoredSums(store, archive, reader, core.fence)
    rollouts = RolloutController(core.state, registry, core.scheduler, core.links)
    history = History(core.client, reader)
    history_writer = HistoryWriter(core.client, core.gateway_id)
    audit = AuditLog(core.client, store, core.fence, AuditJournal(config.home / "audit", core.gateway_id))
    billing = BillingApi(core.client, reader, sums, core.billing, core.view)
    calls, lag = CallMetrics(), LoopLag()
    webhook_secrets = WebhookSecrets(core.client, cipher)
    invocations = build_async_invocations(config, core, store, history, stopping, webhook_secrets)
    shells = ShellService(core.state, core.links, SecretSealer(core.view, cipher))
    functions = _functions_api(config, core, registry, stopping)
    apis = (
        _system_api(config, core, store, functions, audit, billing, stopping),
        functions,
        VersionsApi(core.view, registry),
        shells,
        ObjectsApi(store, checkpoints, uploads, accounts, core.view),
        TracesApi(core.view, history, invocations.api),
        invocations.api,
        billing,
        _observability_api(core, reader, calls, lag, billing.shown, traces),
        HistoryApi(core.client, audit, core.view),
        KeysApi(core.state),
        ProjectsApi(core.state, accounts, webhook_secrets),
        NodesApi(core.state, core.identities, redis_url=config.redis_url, store_url=config.store),
        SecretsApi(core.state, cipher, webhook_secrets, core.identities),
        VolumesApi(core.view, volumes),
    )
    return Management(
        api=build_app(apis),
        rules=RouteRules(route_rules()),
        audit=audit,
        calls=calls,
        history=history_writer,
        invocations=invocations,
        parts=(
            rollouts,
            checkpoints,
            volumes,
            LayerCollector(core.client, store, registry),
            Compactor(core.client, archive, reader, core.fence, segment_rows=config.segment_rows),
            sums,
            lag,
            audit,
            history_writer,
            shells,
            *_own_certificates(config, core),
            *([LinkProbe(store)] if is_s3(config.store) else []),
            *invocations.parts,
        ),
    )


def _functions_api(config: Config, core: Core, registry: Registry, stopping: asyncio.Event) -> FunctionsApi:
    return FunctionsApi(
        url=config.url,
        view=core.view,
        registry=registry,
        client=core.client,
        followers=core.followers,
        stopping=stopping,
    )


def _system_api(
    config: Config,
    core: Core,
    store: AccountedStore,
    functions: FunctionsApi,
    audit: AuditLog,
    billing: BillingApi,
    stopping: asyncio.Event,
) -> SystemApi:
    def problems() -> list[str]:
        return readiness.problems(core.view, stopping=stopping.is_set(), now_ns=time.monotonic_ns())

    return SystemApi(
        url=config.url,
        store_url=config.store,
        store=store,
        redis_url=config.redis_url,
        gateway=core.gateway_id,
        open_access=config.open,
        view=core.view,
        functions=functions,
        audit=audit,
        budgets=billing.shown,
        document=partial(document, endpoints()),
        memory=core.memory,
        readiness=problems,
    )


def _own_certificates(config: Config, core: Core) -> Iterator[OwnCertificate | OwnNode]:
    """Renewals of the controller's own certificate, and of that of the node which it was started with."""
    yield OwnCertificate(core.gateway_id, core.view, core.identities, core.links)
    if config.own_node:
        yield OwnNode(config.own_node, config.home / "node" / FILE, core.view, core.identities)


def _observability_api(
    core: Core,
    reader: LedgerReader,
    calls: CallMetrics,
    lag: LoopLag,
    budgets: Callable[[], list[BudgetInfo]],
    traces: TraceExport | None,
) -> ObservabilityApi:
    process = ProcessMetrics(
        unwritten=lambda: core.ledger.pending,
        leads=lambda: bool(core.fence()),
        redis=lambda: core.view.redis,
        memory=core.memory,
    )
    return ObservabilityApi(
        core.client,
        reader,
        core.view,
        calls=calls,
        lag=lag,
        process=process,
        budgets=budgets,
        extra=traces.families if traces is not None else lambda: (),
    )
