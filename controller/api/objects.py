"""Handlers of the object store: objects by key, checkpoints by id."""

from __future__ import annotations

import time
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
from fleetstart.runtime.contract.weights.manifest import MANIFEST_MAX_BYTES, MANIFEST_OBJECT

from ..auth.authorize import Caller
from ..auth.request_context import caller_of
from ..http.asgi import error_json
from ..http.byte_range import NotSatisfiable, parse_range
from ..http.json_api import json_response, query_flag
from ..registry.checkpoints import Checkpoints
from ..registry.store_accounts import StoreAccounts
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
    def __init__(self, store: ObjectStore, checkpoints: Checkpoints, accounts: StoreAccounts, view: View) -> None:
        self._store = store
        self._checkpoints = checkpoints
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
        _require_digest_of_limited(request, key)
        project, declared = store_project(caller_of(request)), request.headers.get("content-length", "")
        record = self._view.access.projects.get(project)
        quotas = record.quotas if record is not None else Quotas()
        size_bytes = int(declared) if declared.isdecimal() else None
        counted = await self._accounts.reserve(key, project, size_bytes, quotas)
        try:
            return await self._put(request, key)
        except BaseException as error:
            if counted:
                await self._accounts.forget(key)
            if isinstance(error, ClientDisconnect):
                return Response(status_code=499)
            raise

    async def _put(self, request: Request, key: str) -> Response:
        """Errors: ClientDisconnect; those of the store."""
        chunks = _chunks(request)
        if key.endswith("/" + MANIFEST_OBJECT):
            data = await _small(key, chunks)
            if isinstance(named := parse_key(key), LayerKey):
                await require_layer_parts(self._store, named.layer, data)
            elif isinstance(named, VolumeKey):
                await require_volume_parts(self._store, named.tree, data)
            else:
                await self._checkpoints.check_parts(check_checkpoint(key.split("/")[1]), data)
            chunks = _once(data)
        elif key.endswith("/" + LAYOUT_OBJECT):
            # Pushes of equal weights from other files have other layouts. The first one stays.
            created = await self._store.create(key, await _small(key, chunks))
            return json_response({"key": key}, status=201 if created else 200)
        created = await self._store.put(key, Upload(key, chunks))
        return json_response({"key": key}, status=201 if created else 200)

    async def list_checkpoints(self, request: Request) -> Response:
        return json_response(await self._checkpoints.list(unfinished=query_flag(request, "unfinished")))

    async def get_manifest(self, request: Request) -> Response:
        data = await self._checkpoints.manifest(check_checkpoint(request.path_params["id"]))
        return Response(data, media_type="application/json")

    async def delete_checkpoint(self, request: Request) -> Response:
        checkpoint = check_checkpoint(request.path_params["id"])
        return json_response(await self._checkpoints.remove(checkpoint, time.time_ns() // 1_000_000))

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


def _require_digest_of_limited(request: Request, key: str) -> None:
    """Demands a digest in the name of what limited keys upload: without one, they could leave forged parts where others
    will publish theirs. Errors: Forbidden."""
    caller, named = caller_of(request), parse_key(key)
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


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    async for chunk in request.stream():
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
