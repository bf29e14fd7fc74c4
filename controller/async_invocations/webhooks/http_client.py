"""HTTP client of webhooks: checks every resolved address, connects to a checked one only, follows no redirect."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.function.public_addresses import Address, Network, literal

from .lookups import NameLookups
from .signing import WebhookRefused, check_address, check_url

POST_S = 10.0
READ_BYTES = 64 * 1024
"""How much of the receiver's response is read and discarded."""
PROJECT: ContextVar[str] = ContextVar("project", default="")
"""Project of the delivery, for the resolver: aiohttp tells it the name alone."""


class CheckedResolver(AbstractResolver):
    """Resolver for aiohttp that checks addresses. It connects to these alone: a second lookup could give others."""

    def __init__(self, allowed: Sequence[Network], lookups: NameLookups) -> None:
        self._allowed = allowed
        self._lookups = lookups

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        results = []
        for kind, _, protocol, _, address in await self._lookups.resolve(host, port, family, project=PROJECT.get()):
            await self.check(host, ipaddress.ip_address(str(address[0]).partition("%")[0]))
            results.append(
                ResolveResult(
                    hostname=host, host=str(address[0]), port=port, family=kind, proto=protocol,
                    flags=socket.AI_NUMERICHOST,
                )
            )  # fmt: skip
        return results

    async def check(self, host: str, address: Address) -> None:
        """Errors: WebhookRefused, also for the platform's own public addresses: behind them a webhook would be a call
        from within."""
        check_address(host, address, self._allowed)
        if not any(address in network for network in self._allowed) and await self._lookups.is_own(address):
            raise WebhookRefused(
                f"Fs-Webhook: {host} is an address of this system",
                hint=f"an operator can allow it: FS_WEBHOOK_ALLOW={address}/{address.max_prefixlen}",
            )

    async def close(self) -> None:
        self._lookups.close()


class WebhookClient:
    def __init__(self, allowed: Sequence[Network], urls: Iterable[str] = ()) -> None:
        """`urls`: where the platform itself is reached."""
        self._allowed = allowed
        self._resolver = CheckedResolver(allowed, NameLookups(urls))
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._resolver.close()

    async def post(self, url: str, headers: Mapping[str, str], body: bytes, *, project: str = "") -> tuple[int, str]:
        """Posts a project's webhook; returns the receiver's status (0: none) and the error ("": none)."""
        PROJECT.set(project)
        try:
            check_url(url, self._allowed)
            async with asyncio.timeout(POST_S):
                if (address := literal(urlsplit(url).hostname or "")) is not None:  # which nobody looks up
                    await self._resolver.check(str(address), address)
                async with self._open().post(url, data=body, headers=dict(headers), allow_redirects=False) as response:
                    await response.content.read(READ_BYTES)
                    good = 200 <= response.status < 300
                    return response.status, "" if good else f"HTTP {response.status}"
        except FleetError as error:
            return 0, error.message
        except TimeoutError:
            return 0, f"no answer within {POST_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = error.__cause__ if isinstance(error.__cause__, FleetError) else error
            return 0, f"{type(error).__name__}: {cause}"[:300]

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # Who delivers bounds the connections: one that waited here for another would be taken for a slow receiver.
            connector = aiohttp.TCPConnector(limit=0, resolver=self._resolver, use_dns_cache=False, force_close=True)
            self._session = aiohttp.ClientSession(
                connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
            )
        return self._session
