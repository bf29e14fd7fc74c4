"""Checkpoints in the store: listed, read by ranges, removed only when nobody needs them, whoever asks at once."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from fleetstart.controller.http.byte_range import NotSatisfiable, parse_range
from fleetstart.controller.registry.checkpoints import (
    UNFINISHED_S,
    first_missing_part,
    group_by_checkpoint,
    orphaned_uploads,
    summary_in,
)
from fleetstart.controller.storage.object_store import StoredObject
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.weights.manifest import FileEntry, checkpoint_id, manifest_bytes
from tests.controller.conftest import ControllerProcess
from tests.controller.manifests import NOW_MS, PART, manifest, objects_of


def push(controller: ControllerProcess, data: bytes) -> CheckpointId:
    for key, content in objects_of(data).items():
        controller.http.put(f"/api/v1/objects/{key}", content=content).raise_for_status()
    return checkpoint_id(data)


def listed(controller: ControllerProcess, query: str = "") -> list[dict[str, Any]]:
    return list(controller.http.get(f"/api/v1/checkpoints{query}").raise_for_status().json())


def test_a_large_manifest_gives_the_loop_its_turns() -> None:
    many = msgspec.structs.replace(manifest(), aliases={f"tied.{number}": "w" for number in range(20_000)})
    data = manifest_bytes(many)

    async def scenario() -> None:
        turns = 0
        reading = asyncio.create_task(summary_in(data, checkpoint_id(data)))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        assert (await reading).tensors == 20_001
        assert turns > 1, "leases are renewed meanwhile"

    asyncio.run(scenario())


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
    assert (info["complete"], info["problem"]) == (False, "its upload is not complete")
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
    controller.http.delete(f"/api/v1/checkpoints/{checkpoint_id(data)}/parts/part-0").raise_for_status()
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
    groups = group_by_checkpoint(
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
    assert orphaned_uploads(groups, NOW_MS) == [left]


def test_what_is_missing_is_named() -> None:
    found = [stored("c", "a"), stored("c", "b", size_bytes=7)]
    assert first_missing_part({"a": 1, "b": 7}, found) == ""
    assert first_missing_part({"a": 1, "c": 1}, found) == "c is missing"
    assert first_missing_part({"b": 8}, found) == "b has 7 bytes, its manifest says 8"


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
