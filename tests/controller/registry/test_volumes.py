"""Volumes at a controller: put and got back by `fs`'s own code, compare-and-set, projects, users, and the sweep."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import chdir
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fleetstart.controller.cli.api_client import ApiClient
from fleetstart.controller.cli.output import FAILED
from fleetstart.controller.cli.root import run
from fleetstart.controller.cli.volumes.get import get_version
from fleetstart.controller.cli.volumes.put import PutVersion, put_folder
from fleetstart.controller.registry.volumes import UNUSED_MS, Volumes, split_pruned
from fleetstart.controller.scheduler.volume_mounts import mounts_of, volume_trees
from fleetstart.controller.state.access_table import read_table
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.controller.storage.folder_store import FolderStore
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import ChecksumMismatch, Conflict, FleetError, InvalidInput, NotFound
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.function.volume import VolumeRecord, VolumeVersion
from fleetstart.runtime.contract.ids import BundleId, FunctionName, LayerId
from tests.controller.auth.test_keys import bearer, lock, make
from tests.controller.conftest import ControllerProcess
from tests.servers import RedisServer


def folder(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def put(controller: ControllerProcess, path: Path, name: str = "index") -> PutVersion:
    with ApiClient(controller.url) as server:
        return put_folder(server, name, path, lambda *_: None)


def get(controller: ControllerProcess, put: PutVersion, target: Path) -> dict[str, bytes]:
    with ApiClient(controller.url) as server:
        get_version(server, put.version, target, lambda *_: None)
    return {path.relative_to(target).as_posix(): path.read_bytes() for path in target.rglob("*") if path.is_file()}


def refused(answer: httpx.Response) -> tuple[int, dict[str, Any]]:
    return answer.status_code, dict(answer.json()["error"])


# ── over HTTP ──────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_folder_stays_the_same_and_nothing_beside_it_is_removed(
    controller: ControllerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {"a/b": b"1", ".partial": b"2"}
    version = put(controller, folder(tmp_path / "source", files))
    here = tmp_path / "here"
    here.mkdir()
    with chdir(here):
        assert get(controller, version, Path()) == files
    mine = folder(tmp_path / "new.partial", {"mine": b"3"})
    with pytest.raises(InvalidInput, match=r"new\.partial exists"):
        get(controller, version, tmp_path / "new")
    assert (mine / "mine").read_bytes() == b"3"
    nowhere = tmp_path / "source" / ".partial" / "below-a-file"
    assert run(["volume", "get", "index", str(nowhere), "--url", controller.url]) == FAILED
    told = capsys.readouterr().err
    assert "below-a-file.partial: Not a directory" in told
    assert "hint: " in told
    assert not (tmp_path / "new").exists()


def test_a_folder_is_got_back_and_the_next_version_sends_what_is_new(
    controller: ControllerProcess, tmp_path: Path
) -> None:
    files = {"large.bin": os.urandom(9 << 20), "small/one": b"1", "small/empty": b"", "tool": b"#!"}
    source = folder(tmp_path / "source", files)
    (source / "tool").chmod(0o755)
    first = put(controller, source)
    assert (first.version.number, first.version.new_bytes) == (1, sum(map(len, files.values())))
    assert get(controller, first, tmp_path / "got") == files
    assert os.access(tmp_path / "got" / "tool", os.X_OK)
    (source / "small" / "one").write_bytes(b"22")
    second = put(controller, source)
    assert (second.version.number, second.version.new_bytes) == (2, 4)
    assert second.sent_bytes < 2000
    same = put(controller, source)
    assert (same.made, same.version.number) == (False, 2)
    assert get(controller, first, tmp_path / "again") == files


def test_a_got_folder_must_be_new_and_a_damaged_part_leaves_nothing(
    controller: ControllerProcess, tmp_path: Path
) -> None:
    done = put(controller, folder(tmp_path / "source", {"a": b"abc"}))
    with pytest.raises(InvalidInput, match="not empty"):
        get(controller, done, tmp_path / "source")
    (part,) = (controller.home / "store" / "parts").iterdir()
    part.write_bytes(b"abd")
    with pytest.raises(ChecksumMismatch):
        get(controller, done, tmp_path / "got")
    assert sorted(path.name for path in tmp_path.iterdir() if "got" in path.name) == []


def test_a_version_on_an_old_base_or_without_its_files_is_refused(
    controller: ControllerProcess, tmp_path: Path
) -> None:
    first = put(controller, folder(tmp_path / "one", {"a": b"1"}))
    second = put(controller, folder(tmp_path / "two", {"a": b"2"}))
    url = "/api/v1/volumes/index/versions"
    status, error = refused(controller.http.post(url, json={"tree": first.version.tree, "base": 1}))
    assert (status, error["code"]) == (409, Conflict.code)
    assert "version 2 is the newest" in error["message"]
    status, error = refused(controller.http.post(url, json={"tree": "0" * 64, "base": 2}))
    assert (status, error["code"]) == (400, "layer_invalid")
    status, error = refused(controller.http.post(url, json={"tree": "../x", "base": 2}))
    assert status == 400
    for part in (controller.home / "store" / "parts").iterdir():
        part.unlink()
    status, error = refused(controller.http.post(url, json={"tree": first.version.tree, "base": 2}))
    assert "is not in the store" in error["message"]
    answer = controller.http.post(url, json={"tree": second.version.tree, "base": 2})
    assert answer.status_code == 400, "its parts are gone as well"


@pytest.mark.parametrize("name", ["Index", "-x", "x" * 64, "a%00b"])
def test_names_that_are_none_are_refused(controller: ControllerProcess, name: str) -> None:
    assert controller.http.put(f"/api/v1/volumes/{name}").status_code == 400


def test_objects_of_volumes_must_be_what_their_keys_say(controller: ControllerProcess) -> None:
    digest = "0" * 64
    for key in (f"parts/{digest}", f"volumes/{digest}/manifest.json", f"volumes/{digest}/other", "parts/x"):
        assert controller.http.put(f"/api/v1/objects/{key}", content=b"{}").status_code == 400
    assert controller.http.get(f"/api/v1/objects/parts/{digest}").status_code == 404


def test_a_key_of_a_project_sees_only_its_volumes(controller: ControllerProcess, tmp_path: Path) -> None:
    controller.http.put("/api/v1/projects/search", json={}).raise_for_status()
    source = folder(tmp_path / "source", {"a": b"1"})
    put(controller, source, "shared")
    put(controller, source, "search.index")
    lock(controller)
    key = make(controller, "search", ["deploy"], project="search")
    of_functions = make(controller, "limited", ["deploy"], project="search", functions=["find"])
    reader = make(controller, "reader", ["read"], project="search")
    with httpx.Client(base_url=controller.url, headers=bearer(key)) as client:
        assert [one["name"] for one in client.get("/api/v1/volumes").json()] == ["search.index"]
        assert client.get("/api/v1/volumes/default.shared").status_code == 404
        assert client.put("/api/v1/volumes/default.mine").status_code == 404
        assert client.delete("/api/v1/volumes/default.shared").status_code == 404
        assert client.put("/api/v1/volumes/mine").status_code == 200
    with httpx.Client(base_url=controller.url, headers=bearer(of_functions)) as client:
        assert client.put("/api/v1/volumes/other").status_code == 403
    with httpx.Client(base_url=controller.url, headers=bearer(reader)) as client:
        assert client.get("/api/v1/volumes/search.index").status_code == 200
        assert client.delete("/api/v1/volumes/search.index").status_code == 403
    status, error = refused(controller.http.delete("/api/v1/projects/search"))
    assert (status, "has volumes: search.index, search.mine" in error["message"]) == (400, True)


def test_a_deploy_needs_its_volumes_and_a_volume_in_use_stays(controller: ControllerProcess, tmp_path: Path) -> None:
    def deploy(name: str, *volumes: str) -> dict[str, Any]:
        return controller.deploy(name, volumes=list(volumes))

    with pytest.raises(AssertionError, match="has no volume index"):
        deploy("reads", "index")
    controller.http.put("/api/v1/volumes/index").raise_for_status()
    with pytest.raises(AssertionError, match="no version yet"):
        deploy("reads", "index")
    deploy("writes", "index:rw")
    for number in range(3):
        put(controller, folder(tmp_path / str(number), {"a": str(number).encode()}))
    deploy("reads", "index@1")
    with pytest.raises(AssertionError, match="no version 9"):
        deploy("later", "index@9")
    assert controller.http.get("/api/v1/volumes/index").json()["used_by"] == ["reads", "writes"]
    status, error = refused(controller.http.delete("/api/v1/volumes/index"))
    assert (status, error["message"]) == (400, "volume index is used by reads, writes")
    pruned = controller.http.post("/api/v1/volumes/index/prune", json={"keep": 1}).json()
    assert [one["number"] for one in pruned["removed"]] == [2]
    assert pruned["kept_for"] == {"1": "reads"}
    assert controller.http.post("/api/v1/volumes/index/prune", json={"keep": 0}).status_code == 400
    for name in ("reads", "writes"):
        controller.http.delete(f"/api/v1/functions/{name}").raise_for_status()
    controller.http.delete("/api/v1/volumes/index").raise_for_status()
    assert controller.http.get("/api/v1/volumes").json() == []


# ── decisions ──────────────────────────────────────────────────────────────────────────────────────


def version(number: int) -> VolumeVersion:
    return VolumeVersion(
        number=number, tree=LayerId(f"{number:064x}"), size_bytes=1, files=1, new_bytes=1, created_unix_ms=1,
        created_by="local",
    )  # fmt: skip


def test_the_newest_and_the_pinned_stay() -> None:
    versions = [version(number) for number in (1, 2, 3, 4)]
    kept, removed = split_pruned(versions, 2, {1})
    assert [one.number for one in kept] == [1, 3, 4]
    assert [one.number for one in removed] == [2]


def test_a_worker_gets_the_newest_version_the_pinned_one_or_the_reason() -> None:
    def spec_of(*volumes: str, project: str = "") -> FunctionSpec:
        return FunctionSpec(
            name=FunctionName("f"), bundle=BundleId("b"), entry="h:f", volumes=list(volumes), project=project
        )

    def mounted(*volumes: str, project: str = "") -> Any:
        mounts = mounts_of(table, spec_of(*volumes, project=project))
        return mounts.error or [(one.name, one.number, one.write) for one in mounts.volumes]

    full = VolumeRecord(
        name="index", project="default", versions=[version(1), version(4)], last=4, created_unix_ms=1, created_by=""
    )
    empty = VolumeRecord(name="cache", project="default", created_unix_ms=1, created_by="")
    records = {one.full_name.encode(): msgspec.json.encode(one) for one in (full, empty)}
    table = read_table({}, {}, {}, records)
    assert mounted("index", "cache:rw") == [("index", 4, False), ("cache", 0, True)]
    assert mounted("index@1") == [("index", 1, False)]
    assert "no version 2" in mounted("index@2")
    assert "no version yet" in mounted("cache")
    assert "was removed" in mounted("gone")
    assert "project search" in mounted("index", project="search")
    planned = volume_trees(table, spec_of("index@1", "cache:rw", "gone"))
    assert planned == [(version(1).tree, 1)], "the planner counts what a node would fetch"
    assert volume_trees(table, spec_of("index")) == [(version(4).tree, 1)]


# ── the sweep ──────────────────────────────────────────────────────────────────────────────────────


def sweep(controller: ControllerProcess, redis_server: RedisServer, after_s: float) -> int:
    """Sweeps as if so many seconds had passed; returns the number of objects that were deleted."""

    async def swept() -> int:
        client = connect(redis_server.url)
        try:
            volumes = Volumes(StateSync(client, View()), FolderStore(controller.home / "store"))
            return await volumes.sweep(int((time.time() + after_s) * 1000))
        finally:
            await client.aclose()

    return asyncio.run(swept())


def prune(controller: ControllerProcess) -> None:
    controller.http.post("/api/v1/volumes/index/prune", json={"keep": 1}).raise_for_status()


DAY_S = UNUSED_MS / 1000


def test_files_of_removed_versions_are_swept_a_day_later_and_shared_parts_stay(
    controller: ControllerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    store = controller.home / "store"
    shared = os.urandom(5 << 20)
    first = put(controller, folder(tmp_path / "one", {"shared": shared, "gone": b"1"}))
    second = put(controller, folder(tmp_path / "two", {"shared": shared, "kept": b"2"}))
    (store / "parts" / ("f" * 64)).write_bytes(b"an upload that broke")
    for path in store.rglob("*"):
        os.utime(path, (0, 0))  # however long ago they were written
    prune(controller)
    assert sweep(controller, redis_server, 0) == 0
    assert sweep(controller, redis_server, DAY_S - 60) == 0
    assert get(controller, first, tmp_path / "still") == {"shared": shared, "gone": b"1"}
    assert sweep(controller, redis_server, DAY_S + 60) == 3
    with pytest.raises(FleetError):
        get(controller, first, tmp_path / "gone")
    assert get(controller, second, tmp_path / "got") == {"shared": shared, "kept": b"2"}
    with redis_server.client() as client:
        assert not client.exists(keys.VOLUMES_UNUSED)
    with pytest.raises(NotFound):
        put(controller, tmp_path / "nothing")


def test_files_that_a_version_needs_again_start_their_day_anew(
    controller: ControllerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    one, two = folder(tmp_path / "one", {"a": b"1"}), folder(tmp_path / "two", {"a": b"2"})
    put(controller, one)
    put(controller, two)
    prune(controller)
    assert sweep(controller, redis_server, 0) == 0
    again = put(controller, one)
    assert sweep(controller, redis_server, DAY_S + 60) == 0
    put(controller, two)
    prune(controller)
    assert sweep(controller, redis_server, DAY_S + 120) == 0
    assert get(controller, again, tmp_path / "got") == {"a": b"1"}


def test_a_part_stays_as_long_as_a_manifest_that_no_version_has_yet(
    controller: ControllerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    """A commit may have found the part in the store, written its manifest, and not be in the record yet."""
    done = put(controller, folder(tmp_path / "one", {"a": b"1"}))
    manifest = controller.home / "store" / "volumes" / done.version.tree / "manifest.json"
    data = manifest.read_bytes()
    manifest.unlink()
    controller.http.delete("/api/v1/volumes/index").raise_for_status()
    assert sweep(controller, redis_server, 0) == 0
    manifest.write_bytes(data)
    assert sweep(controller, redis_server, DAY_S + 60) == 0
    assert sweep(controller, redis_server, 2 * DAY_S + 120) == 2
