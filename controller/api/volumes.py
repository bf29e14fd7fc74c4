"""Handlers of volumes: create, list, publish a version, prune, remove. Files go through the object store's handlers."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from fleetstart.runtime.contract.errors import Forbidden, InvalidInput
from fleetstart.runtime.contract.function.names import project_of
from fleetstart.runtime.contract.function.volume import VolumeRecord, check_volume_name

from ..auth.authorize import Caller, project_not_found
from ..auth.request_context import caller_of, set_audit_object
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
        return json_response([self._info(record, caller) for record in records if caller.sees_project(record.project)])

    async def volume(self, request: Request) -> Response:
        return json_response(self._info(self._volumes.find(self._name(request)), caller_of(request)))

    async def create(self, request: Request) -> Response:
        caller = caller_of(request)
        record = await self._volumes.create(self._name(request, change=True), caller.name, now_unix_ms())
        return json_response(self._info(record, caller))

    async def publish(self, request: Request) -> Response:
        name, caller = self._name(request, change=True), caller_of(request)
        new = await json_body(request, NewVolumeVersion)
        record, added = await self._volumes.publish(name, new, caller.name, now_unix_ms())
        return json_response(self._info(record, caller), status=201 if added else 200)

    async def prune(self, request: Request) -> Response:
        name = self._name(request, change=True)
        terms = await json_body(request, PruneTerms)
        if terms.keep < 1:
            raise InvalidInput(f"keep must be 1 or more, got {terms.keep}", hint="`fs volume rm` removes all")
        pinned = pinned_versions(self._view, name)
        record, removed = await self._volumes.prune(name, terms.keep)
        older = record.versions[: -terms.keep]
        kept_for = {str(version.number): pinned.get(version.number, "") for version in older}
        return json_response(Pruned(removed=removed, kept_for=kept_for))

    async def remove(self, request: Request) -> Response:
        record = await self._volumes.remove(self._name(request, change=True))
        return json_response(self._info(record, caller_of(request)))

    def _name(self, request: Request, *, change: bool = False) -> str:
        """The full name. Errors: InvalidInput, Forbidden, NotFound."""
        caller = caller_of(request)
        name = str(caller.full_name(check_volume_name(request.path_params["name"])))
        project = project_of(name)
        if change:
            set_audit_object(request, name)
        if change and caller.key is not None and caller.key.functions:
            raise Forbidden(
                f"key {caller.name} is for functions {', '.join(caller.key.functions)}; a volume is of a whole project",
                hint="use a key that was made without --function",
            )
        if not caller.sees_project(project) or not self._view.access.has_project(project):
            raise project_not_found(project, [one for one in self._view.access.projects if caller.sees_project(one)])
        return name

    def _info(self, record: VolumeRecord, caller: Caller) -> VolumeInfo:
        """The volume, and those of its functions that the caller sees."""
        users = functions_using_volume(self._view, record.full_name)
        return VolumeInfo(
            name=record.full_name,
            project=record.project,
            versions=record.versions,
            created_unix_ms=record.created_unix_ms,
            created_by=record.created_by,
            used_by=[name for name in users if caller.sees(name)],
        )
