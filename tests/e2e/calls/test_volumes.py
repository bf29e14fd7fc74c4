"""Volumes, from a folder to a handler that reads them, and from a handler's commit to the next worker."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.systems import System, running
from tests.servers import wait_until

READS = """
from fleetstart.runtime import Scale, function, volume

@function(memory="64MiB", volumes=["index"], scale=Scale(keep_alive_s=600))
def reads():
    index = volume("index")
    try:
        (index.path / "titles.txt").write_text("mine")
        writable = True
    except OSError:
        writable = False
    return {
        "version": index.version,
        "titles": (index.path / "titles.txt").read_text(),
        "files": sorted(path.relative_to(index.path).as_posix() for path in index.path.rglob("*") if path.is_file()),
        "writable": writable,
        "path": str(index.path),
    }
"""
WRITES = """
import os, time
from fleetstart.runtime import Scale, VolumeConflict, VolumeError, function, volume

@function(memory="128MiB", volumes=["cache:rw"], concurrency=4, scale=Scale(max=4, keep_alive_s=600))
def writes(text: str = "", name: str = "note.txt", link: str = "", hold: bool = False, reload: bool = False):
    cache = volume("cache")
    if reload:
        cache.reload()
    before = cache.version
    if not text:
        return {"version": before, "files": {p.name: p.read_text() for p in cache.path.iterdir()}}
    try:
        with cache.writable() as folder:
            (folder / name).write_text(text)
            if link:
                os.symlink(link, folder / "link")
            if hold:
                (folder / "large").write_bytes(os.urandom(8 << 20))
                print("holding", flush=True)
                while True:
                    time.sleep(0.1)
            number = cache.commit()
    except VolumeConflict as error:
        return {"conflict": str(error), "version": cache.version}
    except VolumeError as error:
        return {"error": str(error), "version": cache.version}
    return {"version": number, "now": cache.version, "files": sorted(p.name for p in cache.path.iterdir())}
"""


@pytest.fixture(scope="module")
def volumes() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        yield system


def folder_of(system: System, name: str, files: dict[str, str | bytes]) -> Path:
    folder = system.root / name
    shutil.rmtree(folder, ignore_errors=True)
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def put(system: System, name: str, files: dict[str, str | bytes], *options: str) -> dict[str, Any]:
    ran = system.fs("volume", "put", name, str(folder_of(system, f"{name}-files", files)), *options, "--json")
    answer: dict[str, Any] = json.loads(ran.out)
    return answer


def versions(system: System, name: str) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(system.fs("volume", "versions", name, "--json").out)
    return listed


def restart_workers(system: System, name: str) -> None:
    """Ends the workers of a function, so that the next call has another one."""
    ended = {one.worker for one in system.live_workers() if one.function == name}
    for process in system.worker_processes(name):
        system.kill(process)
    wait_until(lambda: not ended & {one.worker for one in system.live_workers()}, 20, what="other workers")


def test_a_folder_that_was_put_is_read_by_a_function_and_its_next_version_by_new_workers(volumes: System) -> None:
    large = bytes(range(256)) * (20 << 10)
    first = put(volumes, "index", {"titles.txt": "one\n", "vectors/a.bin": large})
    assert (first["number"], first["files"], first["new_bytes"]) == (1, 2, len(large) + 4)
    volumes.deploy(READS, name="reads")
    answer = volumes.ok("reads")
    assert answer == {
        "version": 1,
        "titles": "one\n",
        "files": ["titles.txt", "vectors/a.bin"],
        "writable": False,
        "path": "/tmp/volumes/index",
    }
    second = put(volumes, "index", {"titles.txt": "two\n", "vectors/a.bin": large})
    assert (second["number"], second["new_bytes"]) == (2, 4)
    again = put(volumes, "index", {"titles.txt": "two\n", "vectors/a.bin": large})
    assert (again["number"], again["made"], again["sent_bytes"]) == (2, False, 0)
    assert volumes.ok("reads")["version"] == 1  # a worker keeps what it started with
    restart_workers(volumes, "reads")
    assert volumes.ok("reads")["titles"] == "two\n"
    text = READS.replace('["index"]', '["index@1"]').replace("def reads", "def pinned")
    volumes.deploy(text, name="pinned")
    assert volumes.ok("pinned")["titles"] == "one\n"


def test_versions_are_got_back_and_those_that_functions_name_stay(volumes: System) -> None:
    for number in range(1, 4):
        put(volumes, "kept", {"n.txt": f"{number}"})
    text = READS.replace('["index"]', '["kept@1"]').replace("titles.txt", "n.txt").replace("def reads", "def keeps")
    volumes.deploy(text, name="keeps")
    folder = volumes.root / "got"
    volumes.fs("volume", "get", "kept@2", str(folder))
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"n.txt": "2"}
    ran = volumes.fs("volume", "prune", "kept", "--keep", "1")
    assert "removed versions of kept: 2" in ran.err
    assert "kept@1 stays: function keeps names it" in ran.err
    assert [one["number"] for one in versions(volumes, "kept")] == [3, 1]
    ran = volumes.fs("volume", "rm", "kept", "--json", code=None)
    assert ran.error.message == "volume kept is used by keeps"
    volumes.fs("rm", "keeps", "--yes")
    volumes.fs("volume", "rm", "kept")
    assert "kept" not in volumes.fs("volume", "ls").out


def test_a_deploy_names_a_volume_that_there_is_not(volumes: System) -> None:
    put(volumes, "articles", {"a": "1"})
    error = volumes.refused(volumes.source(READS.replace('["index"]', '["article"]'), folder="lacks"))
    assert (error.message, error.hint) == (
        "function reads: project default has no volume article",
        "did you mean articles?",
    )


def test_a_commit_makes_a_version_that_the_next_worker_has(volumes: System) -> None:
    volumes.fs("volume", "create", "cache")
    volumes.deploy(WRITES, name="writes")
    assert volumes.ok("writes") == {"version": 0, "files": {}}
    assert volumes.ok("writes", {"text": "one"}) == {"version": 1, "now": 1, "files": ["note.txt"]}
    assert volumes.ok("writes", {"text": "two", "name": "other.txt"})["version"] == 2
    assert volumes.ok("writes") == {"version": 2, "files": {"note.txt": "one", "other.txt": "two"}}
    restart_workers(volumes, "writes")
    assert volumes.ok("writes") == {"version": 2, "files": {"note.txt": "one", "other.txt": "two"}}
    assert [one["created_by"] for one in versions(volumes, "cache")] == ["writes", "writes"]
    folder = volumes.root / "cache-got"
    volumes.fs("volume", "get", "cache", str(folder))
    assert (folder / "other.txt").read_text() == "two"


def test_a_commit_on_an_old_version_is_a_conflict_that_a_reload_solves(volumes: System) -> None:
    volumes.fs("volume", "create", "cache")
    volumes.deploy(WRITES, name="writes")
    volumes.ok("writes", {"text": "mine"})
    other = put(volumes, "cache", {"theirs.txt": "theirs"})
    answer = volumes.ok("writes", {"text": "lost"})
    assert f"version {other['number']} is the newest" in answer["conflict"]
    assert versions(volumes, "cache")[0]["number"] == other["number"]
    answer = volumes.ok("writes", {"text": "again", "reload": True})
    assert answer["files"] == ["note.txt", "theirs.txt"]
    assert versions(volumes, "cache")[0]["number"] == answer["version"] == other["number"] + 1


def test_what_is_no_file_and_links_out_of_the_folder_are_refused(volumes: System) -> None:
    volumes.fs("volume", "create", "cache")
    volumes.deploy(WRITES, name="writes")
    before = versions(volumes, "cache")
    answer = volumes.ok("writes", {"text": "x", "name": "linked.txt", "link": "/etc/passwd"})
    assert "link is a link out of the folder" in answer["error"]
    assert versions(volumes, "cache") == before
    assert volumes.ok("writes", {"text": "fine"})["version"] == answer["version"] + 1


@pytest.mark.parametrize("kind", ["worker", "node"])
def test_a_worker_or_a_node_killed_before_a_commit_changes_nothing(volumes: System, kind: str) -> None:
    volumes.fs("volume", "create", "cache")
    volumes.deploy(WRITES, name="writes")
    volumes.ok("writes", {"text": "kept"}, timeout_s=30)
    before = versions(volumes, "cache")
    held = [line for line in volumes.logs("writes") if "holding" in line.text]
    call = threading.Thread(target=lambda: volumes.call("writes", {"text": "half", "hold": True}))
    call.start()
    wait_until(
        lambda: len([line for line in volumes.logs("writes") if "holding" in line.text]) > len(held), 20, what="a copy"
    )
    for process in volumes.worker_processes("writes") if kind == "worker" else [volumes.one("node")]:
        volumes.kill(process)
    call.join(30)
    assert versions(volumes, "cache") == before
    assert volumes.ok("writes", timeout_s=30)["files"]["note.txt"] == "kept"


@pytest.mark.isolations("namespaces", why="the function names its own isolation")
@pytest.mark.skipif(shutil.which("runsc") is None, reason="runsc (gVisor) is not installed")
def test_a_sandbox_of_gvisor_reads_and_commits() -> None:
    with running(env={"FS_PROFILES": "python,python+gvisor"}) as system:
        wait_until(lambda: system.status().nodes[0].isolations, 30, what="a launcher of sandboxes")
        put(system, "cache", {"given.txt": "given"})
        system.deploy(WRITES.replace('memory="128MiB"', 'memory="128MiB", isolation="gvisor"'), name="sealed")
        assert system.ok("sealed") == {"version": 1, "files": {"given.txt": "given"}}
        assert system.ok("sealed", {"text": "more"})["version"] == 2
        assert system.ok("sealed")["files"] == {"given.txt": "given", "note.txt": "more"}
