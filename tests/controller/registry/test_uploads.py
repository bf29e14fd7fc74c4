"""Uploads of checkpoints: announced, gone on with, published or aborted, over a folder and a real HTTP S3 server."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleetstart.controller.registry import uploads as uploads_module
from fleetstart.controller.registry.checkpoints import Checkpoints
from fleetstart.controller.registry.registry import Registry
from fleetstart.controller.registry.store_accounts import AccountedStore, StoreAccounts
from fleetstart.controller.registry.uploads import OPEN_MS, OpenUpload, Uploads, upload_id
from fleetstart.controller.state.access_records import Quotas
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.controller.storage.object_store import ObjectStore, Upload
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import (
    CheckpointInvalid,
    Conflict,
    FleetError,
    InvalidInput,
    NotFound,
    QuotaExceeded,
    Unavailable,
)
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.object_keys import checkpoint_key, name_with_digest
from fleetstart.runtime.contract.weights.manifest import (
    MANIFEST_OBJECT,
    Manifest,
    Part,
    TensorEntry,
    checkpoint_id,
    manifest_bytes,
)
from tests.controller.auth.test_keys import anybody, bearer, error, lock, make
from tests.controller.conftest import ControllerProcess
from tests.controller.storage.s3_server import s3_bucket

PARTS = [b"h" * 64 + bytes([number]) * 4096 for number in (1, 2)]
DIGESTS = [hashlib.sha256(part).hexdigest() for part in PARTS]
NAMES = [name_with_digest(f"part-0000{number}-of-00002", digest) for number, digest in enumerate(DIGESTS, 1)]
MANIFEST = manifest_bytes(
    Manifest(
        chunk_bytes=4096, total_bytes=8192, parts=[Part(name, 64, 4096, at * 4096) for at, name in enumerate(NAMES)],
        chunks=[1, 2], digests=[hashlib.sha256(part[64:]).hexdigest() for part in PARTS],
        tensors={"w": TensorEntry(0, 4032, "U8", (4032,), 0)},
    )
)  # fmt: skip
ID = checkpoint_id(MANIFEST)
ALL_BYTES = sum(map(len, PARTS)) + len(MANIFEST)


class Room:
    """Uploads and checkpoints over a real Redis and a store, with a clock that the test moves."""

    def __init__(self, redis_url: str, store: ObjectStore) -> None:
        self.client = connect(redis_url)
        self.accounts = StoreAccounts(self.client)
        self.store = AccountedStore(store, self.accounts)
        self.registry = Registry(StateSync(self.client, View()), self.store)
        self.uploads = Uploads(self.client, self.store, self.accounts)
        self.checkpoints = Checkpoints(self.store, self.registry, self.uploads)
        self.now_ms = time.time_ns() // 1_000_000

    async def begin(self, project: str = "a", quotas: Quotas | None = None, data: bytes = MANIFEST) -> OpenUpload:
        return await self.uploads.begin(
            data, project=project, key="k", quotas=quotas or Quotas(), now_unix_ms=self.now_ms
        )

    async def send(self, name: str, data: bytes, project: str = "a") -> None:
        """As `PUT /api/v1/objects` does."""
        record = await self.uploads.find(project, ID, self.now_ms)
        assert record is not None
        record.check(name, len(data))
        key = checkpoint_key(ID, name)
        await self.accounts.reserve(key, project, len(data), Quotas())
        if name == MANIFEST_OBJECT:
            await self.checkpoints.publish(ID, data, self.now_ms)
        else:
            await self.store.put(key, Upload(key, _once(data)))
        await self.uploads.received(record, name, self.now_ms)

    async def names(self) -> set[str]:
        return {stored.key.rpartition("/")[2] for stored in await self.store.list(f"checkpoints/{ID}/")}


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


@pytest.fixture(params=["folder", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    if request.param == "folder":
        yield FolderStore(tmp_path / "store")
        return
    with s3_bucket(tmp_path, monkeypatch) as bucket:
        yield bucket


def played(redis_url: str, store: ObjectStore, scenario: Callable[[Room], Awaitable[None]]) -> None:
    async def play() -> None:
        room = Room(redis_url, store)
        try:
            await scenario(room)
        finally:
            await room.client.aclose()

    asyncio.run(play())


def test_an_upload_is_gone_on_with_after_a_break_and_published_at_once(redis_url: str, store: ObjectStore) -> None:
    async def scenario(room: Room) -> None:
        begun = await room.begin()
        assert (begun.record.id, begun.stored) == (upload_id("a", ID), [])
        assert begun.record.parts == dict(zip([*NAMES, MANIFEST_OBJECT], [4160, 4160, len(MANIFEST)], strict=True))
        await room.send(NAMES[0], PARTS[0])
        with pytest.raises(CheckpointInvalid, match=f"{NAMES[1]} is missing"):
            await room.send(MANIFEST_OBJECT, MANIFEST)
        room.now_ms += OPEN_MS - 1
        again = await room.begin()  # the push is run again, a day later
        assert again.record == begun.record
        assert [stored.key for stored in again.stored] == [checkpoint_key(ID, NAMES[0])]
        room.now_ms += OPEN_MS - 1
        assert await room.checkpoints.sweep(room.now_ms) == 0, "it is open"
        await room.send(NAMES[1], PARTS[1])
        assert [one.record.id for one in await room.uploads.open_uploads(room.now_ms)] == [begun.record.id]
        await room.send(MANIFEST_OBJECT, MANIFEST)
        assert await room.uploads.open_uploads(room.now_ms) == []
        assert await room.names() == {*NAMES, MANIFEST_OBJECT}
        (info,) = await room.checkpoints.list()
        assert info.complete
        assert await room.accounts.used("a") == [(ALL_BYTES, 3)]

    played(redis_url, store, scenario)


def test_an_aborted_upload_leaves_nothing_that_nobody_else_names(redis_url: str, store: ObjectStore) -> None:
    async def scenario(room: Room) -> None:
        await room.begin("a")
        await room.send(NAMES[0], PARTS[0], "a")
        await room.begin("b")
        await room.send(NAMES[1], PARTS[1], "b")
        await room.uploads.abort(upload_id("a", ID), room.now_ms)
        assert await room.names() == set(NAMES), "the other upload names them"
        assert await room.accounts.used("a") == [(2 * 4160, 2)], "counted to who announced them first"
        with pytest.raises(NotFound):
            await room.uploads.abort(upload_id("a", ID), room.now_ms)
        await room.uploads.abort(upload_id("b", ID), room.now_ms)
        assert await room.names() == set()
        assert await room.accounts.used("a", "b") == [(0, 0)] * 2
        await room.begin("a")
        for name, part in zip(NAMES, PARTS, strict=True):
            await room.send(name, part)
        await room.begin("b")
        await room.send(MANIFEST_OBJECT, MANIFEST)
        await room.uploads.abort(upload_id("b", ID), room.now_ms)
        assert await room.names() == {*NAMES, MANIFEST_OBJECT}, "a published checkpoint names them"

    played(redis_url, store, scenario)


def test_an_upload_that_nobody_goes_on_with_ends_after_a_day(redis_url: str, store: ObjectStore) -> None:
    async def scenario(room: Room) -> None:
        await room.begin()
        room.now_ms += OPEN_MS // 2
        await room.send(NAMES[0], PARTS[0])
        room.now_ms += OPEN_MS - 1
        assert await room.checkpoints.sweep(room.now_ms) == 0
        room.now_ms += 1
        assert await room.uploads.find("a", ID, room.now_ms) is None
        assert await room.checkpoints.sweep(room.now_ms) == 1
        assert await room.names() == set()
        assert await room.accounts.used("a") == [(0, 0)], "neither what came, nor what did not"
        assert not await room.client.exists(keys.UPLOADS, keys.UPLOADS_ENDS)

    played(redis_url, store, scenario)


def test_a_quota_refuses_an_upload_before_its_first_byte(redis_url: str, tmp_path: Path) -> None:
    async def scenario(room: Room) -> None:
        with pytest.raises(QuotaExceeded, match=f"{ALL_BYTES:,} more came"):
            await room.begin(quotas=Quotas(store_bytes=ALL_BYTES - 1))
        with pytest.raises(QuotaExceeded, match="3 more are to come"):
            await room.begin(quotas=Quotas(objects=2))
        assert await room.uploads.open_uploads(room.now_ms) == []
        assert await room.accounts.used("a") == [(0, 0)]
        await room.begin(quotas=Quotas(store_bytes=ALL_BYTES, objects=3))
        await room.begin(quotas=Quotas(store_bytes=ALL_BYTES, objects=3))
        assert await room.accounts.used("a") == [(ALL_BYTES, 3)], "counted once"

    played(redis_url, FolderStore(tmp_path), scenario)


def test_a_project_has_only_so_many_open_uploads(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads_module, "OPEN_MAX", 1)
    other = MANIFEST.replace(b'"chunks":[1,2]', b'"chunks":[1,3]')

    async def scenario(room: Room) -> None:
        await room.begin()
        with pytest.raises(QuotaExceeded, match="has 1 open uploads, 1 at most"):
            await room.begin(data=other)
        await room.begin("b", data=other)
        room.now_ms += OPEN_MS
        await room.begin(data=other)

    assert other != MANIFEST
    played(redis_url, FolderStore(tmp_path), scenario)


def test_only_what_was_announced_may_come(redis_url: str, tmp_path: Path) -> None:
    async def scenario(room: Room) -> None:
        record = (await room.begin()).record
        assert record.check(NAMES[0], None) == record.check(NAMES[0], 4160) == 4160
        for name, size_bytes in ((NAMES[0], 4161), ("part-9", 1), (f"x-{NAMES[0]}", 4160)):
            with pytest.raises(InvalidInput):
                record.check(name, size_bytes)

    played(redis_url, FolderStore(tmp_path), scenario)


def test_a_part_of_an_upload_that_is_aborted_meanwhile_goes_again(redis_url: str, tmp_path: Path) -> None:
    async def scenario(room: Room) -> None:
        record = (await room.begin()).record
        key = checkpoint_key(ID, NAMES[0])
        await room.uploads.abort(record.id, room.now_ms)
        await room.store.put(key, Upload(key, _once(PARTS[0])))
        with pytest.raises(Conflict, match="aborted while"):
            await room.uploads.received(record, NAMES[0], room.now_ms)
        assert await room.names() == set()

    played(redis_url, FolderStore(tmp_path), scenario)


def test_uploads_aborts_and_sweeps_at_once_never_publish_a_checkpoint_that_lacks_a_part(
    redis_url: str, tmp_path: Path
) -> None:
    async def scenario(room: Room) -> None:
        outcomes: set[str] = set()

        async def attempt(work: Awaitable[Any], turns_late: int) -> None:
            for _ in range(turns_late):
                await asyncio.sleep(0)
            try:
                await work
                outcomes.add("done")
            except FleetError as wrong:
                outcomes.add(wrong.code)

        async def push(project: str) -> None:
            await room.begin(project)
            for name, data in zip([*NAMES, MANIFEST_OBJECT], [*PARTS, MANIFEST], strict=True):
                key = checkpoint_key(ID, name)
                if name == MANIFEST_OBJECT:
                    await room.checkpoints.publish(ID, data, room.now_ms)
                else:
                    await room.store.put(key, Upload(key, _once(data)))
                record = await room.uploads.find(project, ID, room.now_ms)
                if record is None:
                    raise Conflict("aborted")
                await room.uploads.received(record, name, room.now_ms)

        for turn in range(40):
            aborts = [attempt(room.uploads.abort(upload_id(one, ID), room.now_ms), turn * 7 + at * 11)
                      for at, one in enumerate("ab")]  # fmt: skip
            sweep = attempt(room.checkpoints.sweep(room.now_ms + (turn % 3) * OPEN_MS), turn * 5)
            await asyncio.gather(attempt(push("a"), 0), attempt(push("b"), turn), *aborts, sweep)
            names = await room.names()
            assert MANIFEST_OBJECT not in names or names == {*NAMES, MANIFEST_OBJECT}, turn
            await room.uploads.forget(ID)
            for name in names:
                await room.store.delete(checkpoint_key(ID, name))
        assert {"done", "not_found"} <= outcomes, outcomes

    played(redis_url, FolderStore(tmp_path), scenario)


def test_a_manifest_is_taken_back_if_its_parts_were_being_removed(redis_url: str, tmp_path: Path) -> None:
    async def scenario(room: Room) -> None:
        record = (await room.begin()).record
        for name, part in zip(NAMES, PARTS, strict=True):
            await room.send(name, part)
        check = room.checkpoints._check_parts

        async def then_aborted(checkpoint: CheckpointId, data: bytes) -> None:
            await check(checkpoint, data)
            await room.uploads.abort(record.id, room.now_ms)

        room.checkpoints._check_parts = then_aborted  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="removed while"):
            await room.checkpoints.publish(ID, MANIFEST, room.now_ms)
        assert await room.names() == set()

    played(redis_url, FolderStore(tmp_path), scenario)


def test_a_limited_key_sends_what_it_has_announced_while_its_upload_is_open(controller: ControllerProcess) -> None:
    for name in ("ml", "web"):
        controller.http.put(f"/api/v1/projects/{name}", json={}).raise_for_status()
    lock(controller)
    ml, web = (make(controller, name, ["deploy"], project=name) for name in ("ml", "web"))
    urls = [f"/api/v1/objects/checkpoints/{ID}/{name}" for name in (*NAMES, MANIFEST_OBJECT)]
    with anybody(controller) as client:

        def put(url: str, data: bytes | Iterator[bytes], key: str = ml) -> httpx.Response:
            return client.put(url, content=data, headers=bearer(key))

        refused = put(urls[0], PARTS[0])
        assert (refused.status_code, error(refused)["code"]) == (403, "forbidden"), "nothing was announced"
        assert client.post("/api/v1/uploads", content=b"{}", headers=bearer(ml)).status_code == 400
        begun = client.post("/api/v1/uploads", content=MANIFEST, headers=bearer(ml))
        assert begun.status_code == 201, begun.text
        assert (begun.json()["id"], begun.json()["object_bytes"]) == (f"ml:{ID}", ALL_BYTES)
        assert put(urls[0], PARTS[0], web).status_code == 403, "another project announces for itself"
        assert put(urls[0].replace("part-00001", "part-00007"), PARTS[0]).status_code == 400
        assert put(urls[0], PARTS[0] + b"x").status_code == 400
        assert put(urls[0], iter([PARTS[0], b"x"])).status_code == 413, "undeclared, and too much"
        assert put(urls[0], PARTS[0]).status_code == 201
        assert put(urls[2], MANIFEST).status_code == 400, "a part is missing"
        listed = client.get("/api/v1/uploads", headers=bearer(ml)).json()
        assert [(one["key"], one["stored"], one["objects"]) for one in listed] == [("ml", 1, 3)]
        assert client.get("/api/v1/uploads", headers=bearer(web)).json() == []
        assert client.delete(f"/api/v1/uploads/{begun.json()['id']}", headers=bearer(web)).status_code == 404
        assert len(controller.http.get("/api/v1/uploads").json()) == 1, "an operator sees all"
        assert [put(url, data).status_code for url, data in zip(urls[1:], (PARTS[1], MANIFEST), strict=True)] == [
            201
        ] * 2
        assert client.get("/api/v1/uploads", headers=bearer(ml)).json() == []
        assert put(urls[0], PARTS[0]).status_code == 403, "it is published: nothing more may come"
        client.post("/api/v1/uploads", content=MANIFEST, headers=bearer(web)).raise_for_status()
        assert client.delete(f"/api/v1/uploads/web:{ID}", headers=bearer(web)).status_code == 200
        assert client.get(urls[0], headers=bearer(ml)).content == PARTS[0]
    verbs = [line["verb"] for line in controller.http.get("/api/v1/audit").json()]
    assert (verbs.count("upload.begin"), verbs.count("upload.abort")) == (3, 2), "with those that were refused"
