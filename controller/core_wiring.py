"""Wiring of the data path and the scheduler, for `app`."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import aiohttp
import redis.asyncio as redis

from .auth.secret_encryption import SecretCipher
from .auth.secret_sealing import SecretSealer
from .background import BackgroundTask
from .billing.budget_watch import BudgetWatch
from .billing.journal import Journal
from .billing.journal_overflow import JournalOverflow
from .billing.ledger_writer import LedgerWriter
from .config import Config
from .gateway.app import Gateway
from .gateway.load_reporter import LoadReporter
from .gateway.node_links import NodeLinks
from .identity.nodes import NodeIdentities
from .identity.peer_keys import NodePeerKeys
from .scheduler.calibration.calibrator import Calibrator
from .scheduler.leader import LeaderLease
from .scheduler.loop import Scheduler
from .state.redis_client import REDIS_ERRORS, RedisClients, connect_all
from .state.redis_server.memory_watch import MemoryWatch
from .state.redis_server.stream_followers import StreamFollowers
from .state.sync import StateSync
from .state.view import View

log = logging.getLogger(__name__)

FLUSH_S = 3.0
"""Timeout for the last ledger rows at shutdown; those still unwritten then stay in the journal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The parts of the data path and the scheduler. Owns the connections to Redis and the journal."""

    gateway_id: str
    clients: RedisClients
    followers: StreamFollowers
    view: View
    state: StateSync
    journal: Journal
    overflow: JournalOverflow
    ledger: LedgerWriter
    scheduler: Scheduler
    calibrator: Calibrator
    reporter: LoadReporter
    billing: BudgetWatch
    memory: MemoryWatch
    identities: NodeIdentities
    gateway: Gateway
    links: NodeLinks

    @property
    def client(self) -> redis.Redis:
        """The client of what people ask for."""
        return self.clients.calls

    @property
    def parts(self) -> tuple[BackgroundTask, ...]:
        return (self.state, self.scheduler, self.calibrator, self.reporter, self.ledger, self.billing, self.memory)

    def fence(self) -> int:
        """The fencing token; 0 while another controller schedules."""
        return self.scheduler.fence

    async def withdraw(self) -> None:
        """Writes the last ledger rows and releases the leader lease, after all calls have ended."""
        try:
            async with asyncio.timeout(FLUSH_S):
                await self.ledger.flush()
                await self.scheduler.release()
                await self.reporter.withdraw()
        except REDIS_ERRORS as error:
            log.error("ledger rows stay in the journal", extra={"rows": self.ledger.pending, "error": str(error)})

    async def close(self) -> None:
        await self.gateway.close()
        await self.followers.close()
        await self.clients.aclose()
        self.journal.close()
        self.overflow.close()


def build_core(
    config: Config,
    gateway_id: str,
    cipher: SecretCipher,
    *,
    clients: RedisClients | None = None,
    session: aiohttp.ClientSession | None = None,
) -> Core:
    """`clients` and `session` reach Redis and the workers; by default they are opened here. Closed by `Core.close`."""
    view = View()
    clients = clients or connect_all(config.redis_url)
    state = StateSync(clients.view, view, requests=clients.calls)
    journal = Journal(config.home / "journal", gateway_id)
    overflow = JournalOverflow(config.home / "journal", gateway_id)
    ledger = LedgerWriter(clients.ledger, journal, view.unreadable, overflow)
    scheduler = Scheduler(
        gateway_id,
        LeaderLease(clients.leases, state),
        ledger,
        SecretSealer(view, cipher),
        NodePeerKeys(view, cipher),
    )
    calibrator = Calibrator(state, lambda: scheduler.fence)
    reporter = LoadReporter(state, clients.leases)
    billing = BudgetWatch(clients.ledger, view, unwritten=lambda: ledger.unwritten, fence=lambda: scheduler.fence)
    ledger.on_row(billing.note)
    memory = MemoryWatch(clients.calls, leads=lambda: bool(scheduler.fence))
    ledger.trace_kept_s = lambda row: memory.trace_kept_s(failed=row.status >= 500)
    links = NodeLinks(view, plain=config.plain_links)
    gateway = Gateway(
        gateway_id,
        state,
        ledger,
        billing,
        links,
        max_body_bytes=config.max_body_bytes,
        report_now=reporter.report_now,
        report_soon=reporter.report_soon,
        session=session,
    )
    reporter.gateway = gateway
    return Core(
        gateway_id=gateway_id,
        clients=clients,
        followers=StreamFollowers(clients.followers, clients.calls),
        view=view,
        state=state,
        journal=journal,
        overflow=overflow,
        ledger=ledger,
        scheduler=scheduler,
        calibrator=calibrator,
        reporter=reporter,
        billing=billing,
        memory=memory,
        identities=NodeIdentities(state, cipher),
        gateway=gateway,
        links=links,
    )
