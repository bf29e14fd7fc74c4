"""Isolations that a node reports: as configured, until its launcher has tried them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import psutil
import pytest

from tests.prefetcher.nodes import CHUNK_BYTES, HELLO, Node, Store, call, spec_of
from tests.servers import RedisServer, refusing_namespaces, wait_until


@pytest.mark.parametrize("limits", ["", "watched"])
def test_a_node_whose_sandboxes_do_not_start_takes_its_word_back(
    redis_server: RedisServer, store: Store, tmp_path: Path, limits: str
) -> None:
    """And without control groups, it never gives it: nothing would hold a sandbox to its memory."""
    program, go = tmp_path / "runsc", tmp_path / "go"
    os.mkfifo(go)
    program.write_text(f"#!/bin/sh\nread line < {go}\necho no such kernel >&2\nexit 1\n")
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {"PATH": path, "FS_PROFILES": "python,python+gvisor", "FS_LIMITS": limits}
    node = Node(redis_server, str(store.folder), tmp_path / "home", **env)
    try:
        node.start()
        report = node.report()
        assert report is not None
        if limits or report.limits == "watched":
            assert report.isolations == []
            return
        assert report.isolations == ["gvisor"]
        go.write_text("go\n")
        wait_until(lambda: (report := node.report()) and report.isolations == [], 30, what="its word taken back")
        assert "no such kernel" in node.log()
        worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO}), isolation="gvisor"))
        error = node.wait_for(worker, "failed").error
        assert error is not None
        assert "no such kernel" in error.message
    finally:
        node.close()


def test_a_node_whose_kernel_refuses_namespaces_says_so_and_runs_no_worker(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    node = Node(redis_server, str(store.folder), tmp_path / "home", FS_ISOLATION="")
    node.through = refusing_namespaces()
    try:
        node.start(wait=False)
        wait_until(lambda: (report := node.report()) and report.confines == "none", 30, what="its word")
        assert "unshare(CLONE_NEWNS)" in node.lease().isolation_refused
        assert node.lease().profiles == []
        worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))
        error = node.wait_for(worker, "failed").error
        assert error is not None
        assert error.code == "unavailable"
        assert "unshare(CLONE_NEWNS)" in error.message
        assert "FS_ISOLATION=best-effort" in error.hint
        assert "unshare(CLONE_NEWNS)" in node.log()
        assert "FS_ISOLATION=best-effort" in node.log()
    finally:
        node.close()


def test_where_plain_processes_are_allowed_a_list_is_not_taken_for_enforced(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    node = Node(redis_server, str(store.folder), tmp_path / "home", FS_ISOLATION="best-effort")
    node.through = refusing_namespaces()
    try:
        node.start()
        report = node.lease()
        assert (report.confines, report.isolation) == ("plain", "")
        assert "unshare(CLONE_NEWNS)" in report.isolation_refused
        bundle = store.put_bundle({"handler.py": HELLO})
        assert node.wait_for(node.order(spec_of(bundle)), "ready").isolation == ""
        error = node.wait_for(node.order(spec_of(bundle, network=["api.example.com"])), "failed").error
        assert error is not None
        assert error.code == "unavailable"
        assert "no network of their own" in error.message
    finally:
        node.close()


LEAVES = """
import subprocess
def hello():
    return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
"""


@pytest.mark.parametrize("end", ["of the worker", "of the node"])
def test_no_process_in_a_session_of_its_own_outlives_a_plain_worker(
    redis_server: RedisServer, store: Store, tmp_path: Path, end: str
) -> None:
    """Its control group tells where it is: neither a namespace ends it, nor the worker's process group."""
    node = Node(redis_server, str(store.folder), tmp_path / "home", FS_ISOLATION="best-effort")
    node.through = refusing_namespaces()
    try:
        node.start()
        has_groups = node.lease().limits != "watched"
        worker = node.order(spec_of(store.put_bundle({"handler.py": LEAVES})))
        left = psutil.Process(int(call(node.wait_for(worker, "ready"))[1]))
        assert left.is_running()
        if end == "of the worker":
            node.drain(worker)
            node.wait_for(worker, "gone")
        else:
            node.kill()
            node.start()
        if has_groups:
            wait_until(lambda: not left.is_running() or left.status() == psutil.STATUS_ZOMBIE, what="its end")
        left.kill()
    except psutil.NoSuchProcess:
        pass
    finally:
        node.close()


def test_a_sandbox_whose_weights_are_damaged_is_not_waited_for(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    """It takes seconds to begin, and has nothing to add."""
    program, hold = tmp_path / "runsc", tmp_path / "hold"
    program.write_text(f'#!/bin/sh\n[ -p {hold} ] && read line < {hold}\nexec {shutil.which("runsc")} "$@"\n')
    program.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    node = Node(redis_server, str(store.folder), tmp_path / "home", PATH=path, FS_PROFILES="python,python+gvisor")
    try:
        node.start()
        wait_until(lambda: '"isolation": "gvisor"' in node.log(), 30, what="a launcher of sandboxes")
        os.mkfifo(hold)
        checkpoint = store.put_checkpoint(os.urandom(3 * CHUNK_BYTES))
        part = store.path(f"checkpoints/{checkpoint}/part-00000.safetensors")
        part.write_bytes(part.read_bytes()[:-1] + b"?")
        spec = spec_of(store.put_bundle({"handler.py": HELLO}), isolation="gvisor", weights=checkpoint)
        error = node.wait_for(node.order(spec), "failed").error
        assert error is not None
        assert error.code == "checksum_mismatch"
    finally:
        node.close()
