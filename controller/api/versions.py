"""Handlers of a function's versions and traffic: aliases, splits, rollbacks, scaling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract.errors import InvalidInput, NotFound
from fleetstart.runtime.contract.ids import FunctionName, Version
from fleetstart.runtime.contract.node.orders import FINAL

from ..auth.deploy_policy import check_scale
from ..http.json_api import json_body, json_response, now_unix_ms
from ..registry.registry import NO_VERSION, Registry
from ..schemas.functions import Share, Traffic, VersionInfo, VersionRef
from ..state import traffic
from ..state.records import FunctionRecord, ScaleOverride, VersionKey
from ..state.view import View

Kind = TypeVar("Kind", bound=msgspec.Struct)


class VersionsApi:
    def __init__(self, view: View, registry: Registry) -> None:
        self._view = view
        self._registry = registry

    async def versions(self, request: Request) -> Response:
        record = self._record(request)
        workers = Counter(
            status.version for status in self._view.statuses_of(record.name).values() if status.state not in FINAL
        )
        return json_response(
            [
                VersionInfo(
                    version=one.version,
                    roles=traffic.roles(record, one.version),
                    workers=workers[one.version],
                    deployed_unix_ms=one.created_unix_ms,
                    spec=one.spec,
                    error=self._error(record, one.version),
                )
                for one in await self._registry.versions(record.name)
            ]
        )

    async def traffic(self, request: Request) -> Response:
        return json_response(traffic_of(self._record(request)))

    async def set_alias(self, request: Request) -> Response:
        alias, record = request.path_params["alias"], self._record(request)
        version = await self._version(record, (await json_body(request, VersionRef)).version)
        return await self._change(
            record.name, lambda now: traffic.with_alias(now, alias, version, now_unix_ms()), fresh=version
        )

    async def delete_alias(self, request: Request) -> Response:
        alias = request.path_params["alias"]
        return await self._change(self._record(request).name, lambda now: traffic.without_alias(now, alias))

    async def split(self, request: Request) -> Response:
        record = self._record(request)
        weights: dict[Version, int] = {}
        for share in await json_body(request, list[Share]):
            version = await self._version(record, share.version)
            if version in weights:
                raise InvalidInput(f"version {version} is named twice", hint="give each version one share")
            weights[version] = share.percent
        return await self._change(record.name, lambda now: traffic.with_split(now, weights, now_unix_ms()))

    async def rollback(self, request: Request) -> Response:
        record = self._record(request)
        wanted = await _or_nothing(request, VersionRef)
        to = await self._version(record, wanted.version) if wanted is not None else None
        fresh = traffic.rolled_back(record, to, 0).live
        return await self._change(record.name, lambda now: traffic.rolled_back(now, to, now_unix_ms()), fresh=fresh)

    async def scale(self, request: Request) -> Response:
        wanted = await _or_nothing(request, ScaleOverride)
        check_scale(self._view, self._record(request).name, wanted)
        return await self._change(self._record(request).name, lambda now: traffic.scaled(now, wanted))

    async def _change(
        self, name: FunctionName, change: Callable[[FunctionRecord], FunctionRecord], *, fresh: Version = NO_VERSION
    ) -> Response:
        return json_response(traffic_of(await self._registry.change(name, change, fresh=fresh)))

    async def _version(self, record: FunctionRecord, ref: int | str) -> Version:
        """Resolves a version number or an alias. Errors: NotFound."""
        if isinstance(ref, str) and not (ref.isascii() and ref.isdecimal() and len(ref) <= 9):
            return traffic.version_of_alias(record, ref)
        return (await self._registry.version(record.name, Version(int(ref)))).version

    def _record(self, request: Request) -> FunctionRecord:
        name = request.path_params["name"]
        record = self._view.functions.get(FunctionName(name))
        if record is None:
            raise NotFound(f"function {name[:127]} does not exist", hint="`fs ls` lists what does")
        return record

    def _error(self, record: FunctionRecord, version: Version) -> str:
        """The error of its last start, or of its rejected rollout; "" if there is none."""
        failure = self._view.failures.get(VersionKey(record.name, version))
        if record.rejected is not None and record.rejected.version == version:
            return record.rejected.error.message
        return failure.error.message if failure is not None else ""


def traffic_of(record: FunctionRecord) -> Traffic:
    return Traffic(
        name=record.name,
        live=record.live,
        aliases=record.aliases,
        split=[Share(version=version, percent=percent) for version, percent in sorted(record.split.items())],
        past=record.past,
        trying=record.rollout.version if record.rollout is not None else None,
        rejected=record.rejected.version if record.rejected is not None else None,
        error=record.rejected.error if record.rejected is not None else None,
        scaled=record.scaled,
    )


async def _or_nothing(request: Request, kind: type[Kind]) -> Kind | None:
    """Decodes an optional JSON body: None for an empty one, or null."""
    either: Any = kind | None
    return cast("Kind | None", await json_body(request, either, empty=b"null"))
