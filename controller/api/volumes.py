"""Handlers of volumes: create, list, publish a version, prune, remove. Files go through the object store's handlers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract.errors import Forbidden, InvalidInput
from fleetstart.runtime.contract.function.volume import VolumeRecord, check_volume_name

from ..auth.authorize import Caller, project_not_found
from ..auth.request_context import caller_of
from ..http.json_api import json_body, json_response, now_unix_ms
from ..registry.volumes import Volumes, functions_using_volume, pinned_versions
from ..schemas.volumes import NewVolumeVersion, Pruned, PruneTerms, VolumeInfo
from ..state.view import View


class VolumesApi:
    def __init__(self, view: View, volumes: Volumes) -> None:
        self._view = view
        self._volumes = volumes

    async def volumes(self, request: Request) -> Response:
        caller = caller_of(request)
        records = sorted(self._view.access.volumes.values(), key=lambda record: (record.project, record.name))
        return json_response([self._info(record) for record in records if _may_see(caller, record.project)])

    async def volume(self, request: Request) -> Response:
        return json_response(self._info(self._volumes.find(*self._place(request))))

    async def create(self, request: Request) -> Response:
        project, name = self._place(request, change=True)
        check_volume_name(name)
        record = await self._volumes.create(project, name, caller_of(request).name, now_unix_ms())
        return json_response(self._info(record))

    async def publish(self, request: Request) -> Response:
        project, name = self._place(request, change=True)
        new = await json_body(request, NewVolumeVersion)
        record, added = await self._volumes.publish(project, name, new, caller_of(request).name, now_unix_ms())
        return json_response(self._info(record), status=201 if added else 200)

    async def prune(self, request: Request) -> Response:
        project, name = self._place(request, change=True)
        terms = await json_body(request, PruneTerms)
        if terms.keep < 1:
            raise InvalidInput(f"keep must be 1 or more, got {terms.keep}", hint="`fs volume rm` removes all")
        pinned = pinned_versions(self._view, project, name)
        record, removed = await self._volumes.prune(project, name, terms.keep)
        older = record.versions[: -terms.keep]
        kept_for = {str(version.number): pinned.get(version.number, "") for version in older}
        return json_response(Pruned(removed=removed, kept_for=kept_for))

    async def remove(self, request: Request) -> Response:
        return json_response(self._info(await self._volumes.remove(*self._place(request, change=True))))

    def _place(self, request: Request, *, change: bool = False) -> tuple[str, str]:
        """Project and name. Errors: Forbidden, NotFound."""
        project, name, caller = request.path_params["project"], request.path_params["name"], caller_of(request)
        if change and caller.key is not None and caller.key.functions:
            raise Forbidden(
                f"key {caller.name} is for functions {', '.join(caller.key.functions)}; a volume is of a whole project",
                hint="use a key that was made without --function",
            )
        if not _may_see(caller, project) or not self._view.access.has_project(project):
            raise project_not_found(project, [one for one in self._view.access.projects if _may_see(caller, one)])
        return project, name

    def _info(self, record: VolumeRecord) -> VolumeInfo:
        return VolumeInfo(
            name=record.name,
            project=record.project,
            versions=record.versions,
            created_unix_ms=record.created_unix_ms,
            created_by=record.created_by,
            used_by=functions_using_volume(self._view, record.project, record.name),
        )


def _may_see(caller: Caller, project: str) -> bool:
    return caller.project in ("", project)
