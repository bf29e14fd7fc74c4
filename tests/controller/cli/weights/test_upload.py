"""An upload that breaks goes on with what is missing: over kills of the client, of the controller, and of both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from fleetstart.controller.cli.api_client import ApiClient
from fleetstart.controller.cli.output import ConnectionCut, Unreachable
from fleetstart.controller.cli.weights.publish import Progress, Published, publish_source
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.controller.cli.weights.upload import UPLOADS, UploadObject, upload
from fleetstart.runtime.contract.errors import FleetError, StoreFailed, Unavailable
from tests.controller.cli.checkpoints import MemoryStore, Tensor, no_progress, write_model
from tests.controller.conftest import ControllerProcess
from tests.servers import wait_until

PART_BYTES = 1 << 20
PARTS = 12


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """One tensor a part, with parts that are as small as a test likes them."""
    tensors: dict[str, Tensor] = {
        f"layers.{layer}.w": ("U8", (PART_BYTES,), os.urandom(PART_BYTES)) for layer in range(PARTS)
    }
    return write_model(tmp_path / "weights", tensors)


class Counting(ApiClient):
    """Counts what goes over the wire for parts, and can be told to break at some byte."""

    def __init__(self, url: str, *, breaks_at: int = 1 << 60) -> None:
        super().__init__(url)
        self.sent = 0
        self.breaks_at = breaks_at

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
        super().put_object(key, content if isinstance(content, bytes) else self._counted(key, content), size_bytes)

    def _counted(self, key: str, content: Iterator[bytes]) -> Iterator[bytes]:
        for block in content:
            self.sent += len(block) if "part-" in key else 0
            if self.sent > self.breaks_at:
                raise KeyboardInterrupt
            yield block


def put(weights: Path, server: ApiClient, cache: Path, progress: Progress = no_progress) -> Published:
    source = read_source(weights)
    return publish_source(source, server, cache=cache, progress=progress, part_max_bytes=PART_BYTES)


def stored_parts(controller: ControllerProcess) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (controller.home / "store").rglob("part-*")}


def listed(controller: ControllerProcess) -> int:
    return len(controller.http.get("/api/v1/checkpoints").json())


def incoming(controller: ControllerProcess) -> list[Path]:
    return list((controller.home / "store" / ".incoming").iterdir())


def test_only_what_is_missing_is_sent_after_a_break(
    controller: ControllerProcess, weights: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    with Counting(controller.url, breaks_at=7 * PART_BYTES) as breaking, pytest.raises(KeyboardInterrupt):
        put(weights, breaking, cache)
    wait_until(lambda: not incoming(controller), what="half an upload to be thrown away")
    assert listed(controller) == 0
    there = stored_parts(controller)
    assert 0 < len(there) < PARTS
    passes: set[str] = set()
    with Counting(controller.url) as server:
        put(weights, server, cache, lambda what, *_: passes.add(what))
    whole = stored_parts(controller)
    assert len(whole) == PARTS + 1, "one has the small files alone"
    assert server.sent == sum(whole.values()) - sum(there.values())
    assert passes == {"upload"}, "the first pass is remembered"
    assert listed(controller) == 1


def test_a_controller_that_is_killed_under_an_upload_is_waited_for(
    controller: ControllerProcess, weights: Path, tmp_path: Path
) -> None:
    halfway, killed = threading.Event(), threading.Event()

    def kill(what: str, done: int, total: int) -> None:
        if what == "upload" and done > total // 2:
            halfway.set()
            killed.wait(20)

    with Counting(controller.url) as server, ThreadPoolExecutor() as pool:
        pushed = pool.submit(put, weights, server, tmp_path / "cache", kill)
        assert halfway.wait(60)
        controller.kill()
        controller.spawn()
        killed.set()
        published = pushed.result()
    wait_until(lambda: controller.answers("/api/v1/checkpoints"), 20, what="controller")
    (info,) = controller.http.get("/api/v1/checkpoints").json()
    assert (info["id"], info["complete"]) == (published.id, True)


def test_a_client_that_is_killed_leaves_nothing_half_published(controller: ControllerProcess, tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {f"layers.{n}.w": ("U8", (32 << 20,), os.urandom(32 << 20)) for n in range(6)}
    weights = write_model(tmp_path / "weights", tensors)
    command = [sys.executable, "-m", "fleetstart.controller.cli", "weights", "push", str(weights)]
    environment = {**os.environ, "FS_HOME": str(tmp_path / "client"), "FS_URL": controller.url}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: incoming(controller), 60, what="an upload under way")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    wait_until(lambda: not incoming(controller), what="half an upload to be thrown away")
    assert listed(controller) == 0
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (info,) = controller.http.get("/api/v1/checkpoints").json()
    assert info["id"] == done.stdout.strip()
    assert info["complete"]


# ── decisions ──────────────────────────────────────────────────────────────────────────────────────


def items(count: int) -> list[UploadObject]:
    return [UploadObject.of(f"part-{number}", bytes([number]) * 10) for number in range(count)]


class Cutting(MemoryStore):
    """Each object's first upload is cut."""

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
        data = content if isinstance(content, bytes) else b"".join(content)
        if key not in self.puts:
            self.puts.append(key)
            raise ConnectionCut("the connection broke")
        super().put_object(key, data, size_bytes)


def test_a_cut_connection_is_tried_again_and_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetstart.controller.cli.weights.upload.PAUSE_S", 0.001)
    store, seen = Cutting(), []
    store.puts.append("last")
    assert (
        upload(items(6), UploadObject.of("last", b"x"), store, lambda _, done, total: seen.append((done, total))) == 61
    )
    assert store.objects.keys() == {*(f"part-{n}" for n in range(6)), "last"}
    assert max(seen) == seen[-1] == (61, 61)


@pytest.mark.parametrize(
    "later",
    [
        Unreachable("connection refused"),
        StoreFailed("SlowDown", retry_after_s=1),
        Unavailable("later", retry_after_s=1),
    ],
)
def test_what_may_be_over_in_a_moment_is_waited_for(monkeypatch: pytest.MonkeyPatch, later: FleetError) -> None:
    """A controller without a supervisor refuses connections between its end and its start."""
    monkeypatch.setattr("fleetstart.controller.cli.weights.upload.PAUSE_S", 0.001)
    errors: list[FleetError] = [ConnectionCut("the connection broke"), later, later]

    class Restarted(MemoryStore):
        def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
            data = content if isinstance(content, bytes) else b"".join(content)
            if errors:
                raise errors.pop(0)
            super().put_object(key, data, size_bytes)

    store = Restarted()
    assert upload(items(1), UploadObject.of("last", b"x"), store, no_progress) == 11
    assert store.objects == {"part-0": bytes(10), "last": b"x"}


@pytest.mark.parametrize("final", [Unreachable("connection refused"), StoreFailed("no space left on device")])
def test_what_stays_as_it_is_is_an_error_at_once(final: FleetError) -> None:
    class Dead(MemoryStore):
        def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
            raise final

    with pytest.raises(type(final)):
        upload(items(1), UploadObject.of("last", b"x"), Dead(), no_progress)


def test_a_cut_that_does_not_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetstart.controller.cli.weights.upload.PAUSE_S", 0.001)
    monkeypatch.setattr("fleetstart.controller.cli.weights.upload.RETRY_S", 0.01)

    class Dead(MemoryStore):
        def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
            raise ConnectionCut("the connection broke")

    with pytest.raises(ConnectionCut):
        upload(items(3), UploadObject.of("last", b"x"), Dead(), no_progress)


def test_the_first_failure_stops_the_others() -> None:
    failed = threading.Event()

    class Failing(MemoryStore):
        def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
            if key == "part-0":
                failed.set()
                raise StoreFailed("no room")
            failed.wait(10)
            super().put_object(key, content, size_bytes)

    store = Failing()
    with pytest.raises(StoreFailed, match="no room"):
        upload(items(40), UploadObject.of("last", b"x"), store, no_progress)
    assert "last" not in store.objects
    assert len(store.objects) < UPLOADS


def test_a_refused_connection_is_final(tmp_path: Path) -> None:
    with ApiClient("http://127.0.0.1:1") as server, pytest.raises(Exception, match="does not answer") as error:
        server.put_object("bundles/x", b"", 0)
    assert not isinstance(error.value, ConnectionCut)
    assert isinstance(error.value.__cause__, httpx.ConnectError)
