"""Handlers of the object store: objects by key, checkpoints by id, and their uploads."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from fleetstart.runtime.contract.errors import Forbidden, InvalidInput, TooLarge
from fleetstart.runtime.contract.object_keys import (
    LAYOUT_OBJECT,
    CheckpointKey,
    LayerKey,
    VolumeKey,
    checkpoint_key,
    digest_in_name,
    is_object_name,
    parse_key,
)
from fleetstart.runtime.contract.weights.manifest import MANIFEST_MAX_BYTES, MANIFEST_OBJECT, checkpoint_id

from ..auth.authorize import Caller
from ..auth.request_context import caller_of, set_audit_object
from ..http.asgi import error_json
from ..http.byte_range import NotSatisfiable, parse_range
from ..http.json_api import json_response, now_unix_ms, query_flag
from ..registry.checkpoints import Checkpoints
from ..registry.store_accounts import StoreAccounts
from ..registry.uploads import OpenUpload, UploadRecord, Uploads, no_upload, project_of_upload, upload_id
from ..schemas.functions import UploadInfo
from ..state.access_records import Quotas
from ..state.view import View
from ..storage.object_store import (
    ObjectStore,
    Upload,
    check_checkpoint,
    check_key,
    not_found,
    require_layer_parts,
    require_volume_parts,
)

BYTES = "application/octet-stream"


class ObjectsApi:
    def __init__(
        self, store: ObjectStore, checkpoints: Checkpoints, uploads: Uploads, accounts: StoreAccounts, view: View
    ) -> None:
        self._store = store
        self._checkpoints = checkpoints
        self._uploads = uploads
        self._accounts = accounts
        self._view = view

    async def head_object(self, request: Request) -> Response:
        _, size_bytes = await self._found(request)
        return Response(headers={"content-length": str(size_bytes), "accept-ranges": "bytes"})

    async def get_object(self, request: Request) -> Response:
        key, size_bytes = await self._found(request)
        try:
            wanted = parse_range(request.headers.get("range"), size_bytes)
        except NotSatisfiable as error:
            shown = InvalidInput(f"{key}: {error}")
            headers = {"content-range": f"bytes */{size_bytes}", "fs-error": shown.code}
            return Response(error_json(shown, ""), 416, headers, "application/json")
        offset, count = wanted or (0, size_bytes)
        headers = {"content-length": str(count), "accept-ranges": "bytes"}
        if wanted is not None:
            headers["content-range"] = f"bytes {offset}-{offset + count - 1}/{size_bytes}"
        content = await _begun(self._store.read_range(key, offset, count))
        return StreamingResponse(content, 200 if wanted is None else 206, headers, BYTES)

    async def put_object(self, request: Request) -> Response:
        key = check_key(request.path_params["key"])
        caller, declared = caller_of(request), request.headers.get("content-length", "")
        _require_digest_of_limited(caller, key)
        project = store_project(caller)
        size_bytes = int(declared) if declared.isdecimal() else None
        upload, most_bytes = await self._announced(caller, key, size_bytes)
        counted = await self._accounts.reserve(key, project, size_bytes, self._quotas(project))
        try:
            answer = await self._put(key, _chunks(request, key, most_bytes))
        except BaseException as error:
            if counted:
                await self._accounts.forget(key)
            if isinstance(error, ClientDisconnect):
                return Response(status_code=499)
            raise
        if upload is not None:
            await self._uploads.received(upload, key.rpartition("/")[2], now_unix_ms())
        return answer

    async def _announced(
        self, caller: Caller, key: str, size_bytes: int | None
    ) -> tuple[UploadRecord | None, int | None]:
        """The open upload that an object belongs to, and the bytes that it may have. Keys without limits may send what
        no upload has announced, as releases of `fs` did before there were any. Errors: Forbidden; InvalidInput."""
        named = parse_key(key)
        if not isinstance(named, CheckpointKey):
            return None, None
        upload = await self._uploads.find(store_project(caller), named.checkpoint, now_unix_ms())
        if upload is None and caller.limited:
            raise Forbidden(
                f"key {caller.name} is limited, and no upload of {named.checkpoint[:12]} is open in its project",
                hint="push with the fs of this release, which announces the parts; or use a key without limits",
            )
        if upload is None or named.object == LAYOUT_OBJECT:
            return upload, None
        return upload, upload.check(named.object, size_bytes)

    def _quotas(self, project: str) -> Quotas:
        record = self._view.access.projects.get(project)
        return record.quotas if record is not None else Quotas()

    async def _put(self, key: str, chunks: AsyncIterator[bytes]) -> Response:
        """Errors: ClientDisconnect; those of the store."""
        if key.endswith("/" + MANIFEST_OBJECT):
            data = await _small(key, chunks)
            if isinstance(named := parse_key(key), CheckpointKey):
                created = await self._checkpoints.publish(named.checkpoint, data, now_unix_ms())
                return json_response({"key": key}, status=201 if created else 200)
            if isinstance(named, LayerKey):
                await require_layer_parts(self._store, named.layer, data)
            elif isinstance(named, VolumeKey):
                await require_volume_parts(self._store, named.tree, data)
            chunks = _once(data)
        elif key.endswith("/" + LAYOUT_OBJECT):
            # Pushes of equal weights from other files have other layouts. The first one stays.
            created = await self._store.create(key, await _small(key, chunks))
            return json_response({"key": key}, status=201 if created else 200)
        created = await self._store.put(key, Upload(key, chunks))
        return json_response({"key": key}, status=201 if created else 200)

    async def begin_upload(self, request: Request) -> Response:
        """The body is the manifest."""
        data = await _small("the manifest", _chunks(request))
        caller = caller_of(request)
        project = store_project(caller)
        set_audit_object(request, upload_id(project, checkpoint_id(data)))
        upload = await self._uploads.begin(
            data, project=project, key=caller.name, quotas=self._quotas(project), now_unix_ms=now_unix_ms()
        )
        return json_response(upload_info(upload), status=201)

    async def list_uploads(self, request: Request) -> Response:
        caller = caller_of(request)
        found = await self._uploads.open_uploads(
            now_unix_ms(), project=store_project(caller) if caller.limited else None
        )
        return json_response([upload_info(upload) for upload in found])

    async def abort_upload(self, request: Request) -> Response:
        id, caller = request.path_params["id"], caller_of(request)
        if caller.limited and project_of_upload(id) != store_project(caller):
            raise no_upload(id)
        return json_response(upload_info(await self._uploads.abort(id, now_unix_ms())))

    async def list_checkpoints(self, request: Request) -> Response:
        return json_response(await self._checkpoints.list(unfinished=query_flag(request, "unfinished")))

    async def get_manifest(self, request: Request) -> Response:
        data = await self._checkpoints.manifest(check_checkpoint(request.path_params["id"]))
        return Response(data, media_type="application/json")

    async def delete_checkpoint(self, request: Request) -> Response:
        checkpoint = check_checkpoint(request.path_params["id"])
        return json_response(await self._checkpoints.remove(checkpoint, now_unix_ms()))

    async def delete_part(self, request: Request) -> Response:
        checkpoint, name = check_checkpoint(request.path_params["id"]), request.path_params["object"]
        key = checkpoint_key(checkpoint, name)
        if not is_object_name(name) or name == MANIFEST_OBJECT:
            raise InvalidInput(f"{name[:80]!r} is no part of a checkpoint")
        if await self._store.size(key) is None:
            raise not_found(key)
        await self._store.delete(key)
        return json_response({"key": key})

    async def _found(self, request: Request) -> tuple[str, int]:
        key = check_key(request.path_params["key"])
        size_bytes = await self._store.size(key)
        if size_bytes is None:
            raise not_found(key)
        return key, size_bytes


def store_project(caller: Caller) -> str:
    """The project to which a caller's uploads are counted: of several that its key covers, the first."""
    projects = caller.key.projects if caller.key is not None else frozenset()
    return min(projects) if projects else caller.home


def upload_info(upload: OpenUpload) -> UploadInfo:
    record = upload.record
    return UploadInfo(
        id=record.id,
        checkpoint=record.checkpoint,
        project=record.project,
        key=record.key,
        objects=len(record.parts),
        object_bytes=sum(record.parts.values()),
        stored=len(upload.stored),
        stored_bytes=sum(stored.size_bytes for stored in upload.stored),
        begun_unix_ms=record.begun_unix_ms,
        ends_unix_ms=upload.ends_unix_ms,
    )


def _require_digest_of_limited(caller: Caller, key: str) -> None:
    """Demands a digest in the name of what limited keys upload: without one, they could leave forged parts where others
    will publish theirs. Errors: Forbidden."""
    named = parse_key(key)
    if not caller.limited or not isinstance(named, CheckpointKey | LayerKey):
        return
    if named.object not in (MANIFEST_OBJECT, LAYOUT_OBJECT) and not digest_in_name(named.object):
        raise Forbidden(
            f"key {caller.name} is limited, and {named.object[:80]} has no digest in its name",
            hint="push with the fs of this release, which names parts by their digests; or use a key without limits",
        )


async def _begun(blocks: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Reads the first block before the response begins, so that an error of the store still gets its own status."""
    first = await anext(blocks, b"")

    async def rest() -> AsyncIterator[bytes]:
        async with aclosing(blocks):
            yield first
            async for block in blocks:
                yield block

    return rest()


async def _chunks(request: Request, key: str = "", most_bytes: int | None = None) -> AsyncIterator[bytes]:
    """The body as it comes. Errors: TooLarge, as soon as more than was announced has come."""
    came_bytes = 0
    async for chunk in request.stream():
        came_bytes += len(chunk)
        if most_bytes is not None and came_bytes > most_bytes:
            raise TooLarge(f"{key}: more than the {most_bytes:,} bytes came that its upload has announced")
        if chunk:
            yield chunk


async def _small(key: str, chunks: AsyncIterator[bytes]) -> bytes:
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        if len(data) > MANIFEST_MAX_BYTES:
            raise TooLarge(f"{key}: a manifest has {MANIFEST_MAX_BYTES} bytes at most")
    return bytes(data)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data
