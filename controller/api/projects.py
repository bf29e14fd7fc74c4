"""Handlers of projects, which group functions, and their quotas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import InvalidInput

from ..async_invocations.webhooks.secrets import WebhookSecrets
from ..auth.authorize import project_not_found
from ..auth.lookups import demands_of
from ..auth.request_context import caller_of
from ..http.json_api import json_body, json_response, now_unix_ms
from ..registry.store_accounts import StoreAccounts
from ..schemas.access import ProjectInfo, ProjectTerms
from ..state.access_records import DEFAULT, ProjectRecord, Quotas, check_name
from ..state.cas_hash import CasHash
from ..state.redis_client import REDIS_ERRORS
from ..state.sync import StateSync
from ..state.view import View

PROJECTS_MAX = 1000


class ProjectsApi:
    def __init__(self, state: StateSync, accounts: StoreAccounts, webhook_secrets: WebhookSecrets) -> None:
        self._view = state.view
        self._accounts = accounts
        self._webhook_secrets = webhook_secrets
        self._hash = CasHash(state, keys.PROJECTS, ProjectRecord)

    async def projects(self, request: Request) -> Response:
        caller = caller_of(request)
        names = sorted({DEFAULT, *self._view.access.projects})
        return json_response(await self._infos([name for name in names if caller.sees_project(name)], caller.sees))

    async def set(self, request: Request) -> Response:
        name = check_name("project", request.path_params["name"])
        terms = await json_body(request, ProjectTerms)
        by, now = caller_of(request).name, now_unix_ms()
        if len(self._view.access.projects) >= PROJECTS_MAX and name not in self._view.access.projects:
            raise InvalidInput(f"there are {PROJECTS_MAX} projects already, and cannot be more")

        def changed(known: ProjectRecord | None) -> ProjectRecord:
            quotas = terms.quotas if terms.quotas is not None else known.quotas if known is not None else Quotas()
            network = terms.network if terms.network is not None else known.network if known is not None else "listed"
            if known is None:
                return ProjectRecord(name=name, quotas=quotas, network=network, created_unix_ms=now, created_by=by)
            return msgspec.structs.replace(known, quotas=quotas, network=network)

        await self._hash.change(name, changed)
        [info] = await self._infos([name])
        return json_response(info)

    async def _infos(self, names: list[str], sees: Callable[[str], bool] = lambda function: True) -> list[ProjectInfo]:
        """Projects, with what their keys have in the store unless Redis does not answer."""
        infos = [project_info(self._view, name, sees) for name in names]
        with contextlib.suppress(*REDIS_ERRORS):
            used = await self._accounts.used(*names) if names else []
            return [
                msgspec.structs.replace(info, store_bytes=size_bytes, objects=objects)
                for info, (size_bytes, objects) in zip(infos, used, strict=True)
            ]
        return infos

    async def remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        table = self._view.access
        if name == DEFAULT:
            raise InvalidInput(f"project {DEFAULT} holds functions that name none, and cannot be removed")
        if name not in table.projects:
            raise project_not_found(name, table.projects)
        info = project_info(self._view, name)
        keys_of = [key.name for key in table.keys.values() if name in key.projects and not key.revoked_unix_ms]
        for what, names, advice in (
            ("functions", info.functions, "fs rm"),
            ("secrets", info.secrets, "fs secret rm"),
            ("volumes", table.volume_names(name), "fs volume rm"),
            ("keys", keys_of, "fs key revoke"),
        ):
            if names:
                raise InvalidInput(
                    f"project {name} has {what}: {', '.join(names[:5])}" + (", …" if len(names) > 5 else ""),
                    hint=f"remove them first: {advice} {names[0]}",
                )
        await self._hash.change(name, lambda known: None)
        await self._webhook_secrets.forget(name)
        return json_response(info)


def project_info(view: View, name: str, sees: Callable[[str], bool] = lambda function: True) -> ProjectInfo:
    """A project with those of its functions that the caller sees, and their sums."""
    record = view.access.projects.get(name)
    claims = [claim for claim in demands_of(view, name) if sees(claim.function)]
    return ProjectInfo(
        name=name,
        quotas=record.quotas if record is not None else Quotas(),
        network=record.network if record is not None else "listed",
        functions=sorted(claim.function for claim in claims),
        workers=sum(claim.workers for claim in claims),
        memory_bytes=sum(claim.memory_bytes for claim in claims),
        secrets=view.access.secret_names(name),
    )
