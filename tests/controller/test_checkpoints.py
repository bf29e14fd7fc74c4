"""Checkpoints in the store: listed, read by ranges, removed only when nobody needs them, whoever asks at once."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.checkpoints import UNFINISHED_S, Checkpoints, grouped, litter, missing_of
from fleetstart.controller.folder_store import FolderStore
from fleetstart.controller.objects import StoredObject, Upload
from fleetstart.controller.ranges import NotSatisfiable, parse_range
from fleetstart.controller.redis_client import connect
from fleetstart.controller.registry import Registry
from fleetstart.controller.removals import FORGET_MS, STALE_MS, Removals
from fleetstart.controller.state import State
from fleetstart.controller.view import View
from fleetstart.runtime.contract.errors import FleetError, NotFound, Refused, Unavailable, WeightsMissing
from fleetstart.runtime.contract.function import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName
from fleetstart.runtime.contract.manifest import FileEntry, Manifest, Part, TensorEntry, checkpoint_id, manifest_bytes
from fleetstart.runtime.contract.stage import Layout
from tests.controller.conftest import BUNDLE, BUNDLE_ID, ControllerProcess

PART = b"h" * 64 + b"d" * 4096
NOW_MS = 1_800_000_000_000


def manifest(seed: int = 1, **fields: Any) -> Manifest:
    return Manifest(
        chunk_bytes=4096,
        total_bytes=4096,
        parts=[Part("part-0", 64, 4096, 0)],
        chunks=[seed],
        **{"tensors": {"w": TensorEntry(0, 4032, "U8", (4032,), 0)}, **fields},
    )


def objects_of(data: bytes) -> dict[str, bytes]:
    """What is uploaded for a manifest, itself last."""
    folder = f"checkpoints/{checkpoint_id(data)}"
    return {f"{folder}/part-0": PART, f"{folder}/manifest.json": data}


def push(controller: ControllerProcess, data: bytes) -> CheckpointId:
    for key, content in objects_of(data).items():
        controller.http.put(f"/api/v1/objects/{key}", content=content).raise_for_status()
    return checkpoint_id(data)


def listed(controller: ControllerProcess, query: str = "") -> list[dict[str, Any]]:
    return list(controller.http.get(f"/api/v1/checkpoints{query}").raise_for_status().json())


# ── over HTTP ──────────────────────────────────────────────────────────────────────────────────────


def test_a_list_tells_what_is_there_and_who_uses_it(controller: ControllerProcess) -> None:
    assert listed(controller) == []
    model = push(controller, manifest_bytes(manifest()))
    adapter = push(controller, manifest_bytes(manifest(2, files={"adapter_config.json": FileEntry(4032, 4)})))
    controller.deploy("a", weights=model)
    controller.deploy("a", weights=model, env={"N": "2"})
    controller.deploy("b", weights=model)
    controller.http.delete("/api/v1/functions/b")
    infos = {info["id"]: info for info in listed(controller)}
    assert infos[model]["used_by"] == ["a@1", "a@2"]
    assert (infos[adapter]["adapter"], infos[adapter]["files"], infos[adapter]["used_by"]) == (True, 1, [])
    assert (infos[model]["weight_bytes"], infos[model]["tensors"], infos[model]["parts"]) == (4032, 1, 1)
    assert infos[model]["object_bytes"] == len(PART) + len(manifest_bytes(manifest()))
    assert infos[model]["complete"]


def test_what_has_no_manifest_is_not_listed_unless_asked_for(controller: ControllerProcess) -> None:
    key = f"checkpoints/{'a' * 64}/part-0"
    controller.http.put(f"/api/v1/objects/{key}", content=PART).raise_for_status()
    assert listed(controller) == []
    (info,) = listed(controller, "?unfinished=1")
    assert (info["complete"], info["problem"]) == (False, "its upload has not ended")
    assert controller.http.delete(f"/api/v1/checkpoints/{'a' * 64}").status_code == 200
    assert listed(controller, "?unfinished=1") == []


def test_a_manifest_comes_after_its_parts_or_not_at_all(controller: ControllerProcess) -> None:
    (part, content), (key, data) = objects_of(manifest_bytes(manifest())).items()
    for problem, found in [("part-0 is missing", None), ("part-0 has 4,159 bytes", content[:-1])]:
        if found is not None:
            controller.http.put(f"/api/v1/objects/{part}", content=found).raise_for_status()
        answer = controller.http.put(f"/api/v1/objects/{key}", content=data)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "checkpoint_invalid")
        assert problem in answer.json()["error"]["message"]
        assert listed(controller) == []
    push(controller, data)
    assert len(listed(controller)) == 1


def test_a_damaged_checkpoint_says_what_it_lacks(controller: ControllerProcess) -> None:
    checkpoint = push(controller, manifest_bytes(manifest()))
    folder = controller.home / "store" / "checkpoints" / checkpoint
    (folder / "part-0").write_bytes(PART[:-1])
    (info,) = listed(controller)
    assert info["problem"] == "part-0 has 4,159 bytes, its manifest says 4,160"
    (folder / "part-0").unlink()
    assert listed(controller)[0]["problem"] == "part-0 is missing"


def test_a_manifest_that_lies_is_shown_and_can_be_removed(controller: ControllerProcess) -> None:
    folder = controller.home / "store" / "checkpoints" / ("b" * 64)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(manifest_bytes(manifest()))
    (info,) = listed(controller)
    assert "not the bytes that were published" in info["problem"]
    assert not info["complete"]
    assert controller.http.delete(f"/api/v1/checkpoints/{'b' * 64}").status_code == 200
    assert not folder.exists()


def test_a_manifest_is_given_back_as_the_bytes_that_it_was(controller: ControllerProcess) -> None:
    data = manifest_bytes(manifest())
    checkpoint = push(controller, data)
    assert controller.http.get(f"/api/v1/checkpoints/{checkpoint}").content == data


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize(
    ("text", "status"),
    [("a" * 64, 404), ("a" * 63, 400), ("A" * 64, 400), ("..", 404), ("%2e%2e%2fx", 404), ("é", 400)],
)
def test_what_is_no_checkpoint(controller: ControllerProcess, method: str, text: str, status: int) -> None:
    answer = controller.http.request(method, f"/api/v1/checkpoints/{text}")
    assert answer.status_code == status
    assert answer.json()["error"]["hint"]


def test_what_a_function_uses_is_not_removed(controller: ControllerProcess) -> None:
    checkpoint = push(controller, manifest_bytes(manifest()))
    controller.deploy("a", weights=checkpoint)
    controller.deploy("a")  # its live version needs no weights, an older one does
    answer = controller.http.delete(f"/api/v1/checkpoints/{checkpoint}")
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].endswith("is used by a@1")
    assert answer.json()["error"]["hint"].endswith("fs rm a")
    assert len(listed(controller)) == 1
    controller.http.delete("/api/v1/functions/a")
    assert controller.http.delete(f"/api/v1/checkpoints/{checkpoint}").json()["id"] == checkpoint
    assert not (controller.home / "store" / "checkpoints" / checkpoint).exists()
    push(controller, manifest_bytes(manifest()))
    controller.deploy("a", weights=checkpoint)


def test_an_object_is_read_by_ranges(controller: ControllerProcess) -> None:
    checkpoint = push(controller, manifest_bytes(manifest()))
    url = f"/api/v1/objects/checkpoints/{checkpoint}/part-0"
    whole = controller.http.get(url)
    assert (whole.status_code, whole.content, whole.headers["accept-ranges"]) == (200, PART, "bytes")
    for text, begin, end in [("60-70", 60, 71), ("4100-", 4100, 4160), ("-5", 4155, 4160), ("0-99999", 0, 4160)]:
        answer = controller.http.get(url, headers={"range": f"bytes={text}"})
        assert (answer.status_code, answer.content) == (206, PART[begin:end])
        assert answer.headers["content-range"] == f"bytes {begin}-{end - 1}/4160"
    for text in ["4160-", "5-4", "-0", "0-1,3-4", "x", "--1", "9" * 30 + "-"]:
        answer = controller.http.get(url, headers={"range": f"bytes={text}"})
        assert (answer.status_code, answer.headers["content-range"]) == (416, "bytes */4160")
        assert answer.json()["error"]["code"] == "invalid_input"
    assert controller.http.get(url + "1").status_code == 404
    assert controller.http.get("/api/v1/objects/..%2f..%2fetc%2fpasswd").status_code in (400, 404)


def test_an_empty_object_has_no_range(controller: ControllerProcess) -> None:
    key = f"/api/v1/objects/checkpoints/{'c' * 64}/empty"
    controller.http.put(key, content=b"").raise_for_status()
    assert controller.http.get(key).content == b""
    assert controller.http.get(key, headers={"range": "bytes=0-"}).status_code == 416


# ── decisions ──────────────────────────────────────────────────────────────────────────────────────


def stored(checkpoint: str, name: str, *, size_bytes: int = 1, at_ms: int = NOW_MS) -> StoredObject:
    return StoredObject(key=f"checkpoints/{checkpoint}/{name}", size_bytes=size_bytes, modified_unix_ms=at_ms)


def test_only_uploads_that_nobody_goes_on_with_are_litter() -> None:
    old_ms = NOW_MS - round(UNFINISHED_S * 1000) - 1
    left, resumed, whole = "a" * 64, "b" * 64, "c" * 64
    groups = grouped(
        [
            stored(left, "part-1", at_ms=old_ms),
            stored(resumed, "part-1", at_ms=old_ms),
            stored(resumed, "part-2"),
            stored(whole, "part-1", at_ms=old_ms),
            stored(whole, "manifest.json", at_ms=old_ms),
            stored("of somebody else's", "part-1", at_ms=old_ms),
            StoredObject(key="checkpoints/file", size_bytes=1, modified_unix_ms=old_ms),
        ]
    )
    assert groups.keys() == {left, resumed, whole}
    assert litter(groups, NOW_MS) == [left]


def test_what_is_missing_is_named() -> None:
    found = [stored("c", "a"), stored("c", "b", size_bytes=7)]
    assert missing_of({"a": 1, "b": 7}, found) == ""
    assert missing_of({"a": 1, "c": 1}, found) == "c is missing"
    assert missing_of({"b": 8}, found) == "b has 7 bytes, its manifest says 8"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("bytes=0-0", (0, 1)),
        ("bytes=2-", (2, 8)),
        ("bytes=-3", (7, 3)),
        ("bytes=-30", (0, 10)),
        ("bytes=9-100", (9, 1)),
    ],
)
def test_ranges_of_ten_bytes(text: str | None, expected: tuple[int, int] | None) -> None:
    assert parse_range(text, 10) == expected


@pytest.mark.parametrize("text", ["", "bytes", "bytes=", "bytes=-", "bytes=10-", "bytes=3-2", "bytes=-0", "items=0-1"])
def test_ranges_that_cannot_be_had(text: str) -> None:
    with pytest.raises(NotSatisfiable):
        parse_range(text, 10)


# ── races ──────────────────────────────────────────────────────────────────────────────────────────


class Gate(FolderStore):
    """A folder that stops, when it is told to, before it lists: in the middle of a removal."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reached = asyncio.Event()
        self.passed = asyncio.Event()
        self.passed.set()

    async def list(self, prefix: str) -> list[StoredObject]:
        self.reached.set()
        await self.passed.wait()
        return await super().list(prefix)


class Room:
    """A registry and the checkpoints, over a real Redis and a folder."""

    def __init__(self, redis_url: str, folder: Path) -> None:
        self.client = connect(redis_url)
        self.store = Gate(folder)
        self.registry = Registry(State(self.client, View()), self.store)
        self.checkpoints = Checkpoints(self.store, self.registry)

    async def put(self, key: str, data: bytes) -> None:
        async def chunks() -> AsyncGenerator[bytes, None]:
            yield data

        await self.store.put(key, Upload(key, chunks()))

    async def push(self, data: bytes) -> CheckpointId:
        await self.put(f"bundles/{BUNDLE_ID}", BUNDLE)
        for key, content in objects_of(data).items():
            await self.put(key, content)
        return checkpoint_id(data)

    async def deploy(self, name: str, weights: CheckpointId) -> None:
        spec = FunctionSpec(name=FunctionName(name), bundle=BundleId(BUNDLE_ID), entry="handler:run", weights=weights)
        await self.registry.deploy(spec, NOW_MS)


def test_a_deploy_in_the_middle_of_a_removal_is_told_to_wait(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        room.store.passed.clear()
        removal = asyncio.create_task(room.checkpoints.remove(checkpoint, NOW_MS))
        await room.store.reached.wait()
        with pytest.raises(Unavailable, match="being removed"):
            await room.deploy("f", checkpoint)
        room.store.passed.set()
        await removal
        with pytest.raises(WeightsMissing):
            await room.deploy("f", checkpoint)
        await room.push(manifest_bytes(manifest()))
        await room.deploy("f", checkpoint)
        await room.client.aclose()

    asyncio.run(scenario())


def test_a_removal_behind_the_back_of_a_deploy_makes_it_look_again(redis_url: str, tmp_path: Path) -> None:
    """The deploy has seen its weights in the store, and is about to write its record."""

    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        require = room.registry._require_weights

        async def then_removed(spec: FunctionSpec) -> tuple[int, Layout | None]:
            found = await require(spec)
            await room.checkpoints.remove(checkpoint, NOW_MS)
            return found

        room.registry._require_weights = then_removed  # type: ignore[method-assign]
        with pytest.raises(WeightsMissing):
            await room.deploy("f", checkpoint)
        assert await room.registry.uses() == {}
        await room.client.aclose()

    asyncio.run(scenario())


def test_deploys_and_removals_at_once_never_leave_a_function_without_weights(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        outcomes: set[str] = set()

        async def attempt(work: Any, turns_late: int) -> None:
            for _ in range(turns_late):
                await asyncio.sleep(0)
            try:
                await work
                outcomes.add("done")
            except FleetError as error:
                outcomes.add(error.code)

        for turn in range(30):
            checkpoint = await room.push(manifest_bytes(manifest()))
            deploy = attempt(room.deploy(f"f{turn}", checkpoint), 0)
            removals = [attempt(room.checkpoints.remove(checkpoint, NOW_MS), late) for late in (10 * turn, 20 * turn)]
            await asyncio.gather(deploy, *removals)
            whole = (tmp_path / "checkpoints" / checkpoint / "manifest.json").exists()
            assert whole == (checkpoint in await room.registry.uses())
            with contextlib.suppress(NotFound):
                await room.registry.delete(FunctionName(f"f{turn}"))
        assert "done" in outcomes
        await room.client.aclose()

    asyncio.run(scenario())


def test_a_sweep_takes_what_was_left_a_day_ago_and_nothing_else(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        await room.put(f"checkpoints/{'a' * 64}/part-0", PART)
        now_ms = time.time_ns() // 1_000_000
        assert await room.checkpoints.sweep(now_ms) == 0
        assert await room.checkpoints.sweep(now_ms + round(UNFINISHED_S * 1000) + 1000) == 1
        assert [info.id for info in await room.checkpoints.list(unfinished=True)] == [checkpoint]
        await room.client.aclose()

    asyncio.run(scenario())


def test_a_removal_that_died_stands_in_nobodys_way_for_long(redis_url: str) -> None:
    async def scenario() -> None:
        client = connect(redis_url)
        removals, checkpoint = Removals(client), CheckpointId("a" * 64)
        await removals.begin(checkpoint, NOW_MS)
        with pytest.raises(Unavailable):
            await removals.marks([checkpoint], NOW_MS + STALE_MS - 1)
        (mark,) = await removals.marks([checkpoint], NOW_MS + STALE_MS)
        assert mark.startswith("removing:")
        token = await removals.begin(CheckpointId("b" * 64), NOW_MS + FORGET_MS + 1)
        assert await removals.marks([checkpoint], NOW_MS) == [""]
        await removals.begin(CheckpointId("b" * 64), NOW_MS + FORGET_MS + 2)
        await removals.end(CheckpointId("b" * 64), token)
        with pytest.raises(Unavailable):
            await removals.marks([CheckpointId("b" * 64)], NOW_MS + FORGET_MS + 3)
        await client.aclose()

    asyncio.run(scenario())


def test_a_refusal_changes_nothing(redis_url: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        room = Room(redis_url, tmp_path)
        checkpoint = await room.push(manifest_bytes(manifest()))
        await room.deploy("f", checkpoint)
        with pytest.raises(Refused, match="used by f@1"):
            await room.checkpoints.remove(checkpoint, NOW_MS)
        await room.deploy("g", checkpoint)
        with pytest.raises(NotFound):
            await room.checkpoints.remove(CheckpointId(hashlib.sha256().hexdigest()), NOW_MS)
        await room.client.aclose()

    asyncio.run(scenario())
