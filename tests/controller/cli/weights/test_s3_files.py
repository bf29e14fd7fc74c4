"""Weights in a real S3 server: the same checkpoint as from a folder, and a change in the middle is noticed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.output import OK, USAGE
from fleetstart.controller.cli.root import run
from fleetstart.controller.cli.weights.local_files import read_all, read_at
from fleetstart.controller.cli.weights.publish import Published, publish, publish_source
from fleetstart.controller.cli.weights.s3_files import WINDOW_BYTES, Bucket, read_s3
from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, InvalidInput, StoreFailed, WeightsMissing
from tests.controller.cli.checkpoints import MemoryStore, Tensor, encode, model, no_progress, write_model
from tests.controller.conftest import ControllerProcess
from tests.prefetcher.conftest import aws, s3_server, store  # noqa: F401
from tests.prefetcher.nodes import S3Server, Store


@pytest.fixture(autouse=True)
def endpoint(s3_server: S3Server, aws: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)


@pytest.fixture
def folder(store: Store) -> Path:  # noqa: F811
    """The bucket's folder "model": what is written there is in the bucket."""
    large: dict[str, Tensor] = {"layers.7.w": ("U8", (9 << 20,), os.urandom(9 << 20))}
    return write_model(
        store.folder / "model", {**model(), **large}, shards=2, files={"config.json": "{}", "a.bin": "x"}
    )


def put(url: str, tmp_path: Path, progress: Callable[[str, int, int], None] = no_progress) -> Published:
    return publish_source(read_s3(url), MemoryStore(), cache=tmp_path / "cache", progress=progress)


def test_a_prefix_gives_the_checkpoint_of_the_same_folder(folder: Path, tmp_path: Path) -> None:
    there, here = MemoryStore(), MemoryStore()
    source = read_s3("s3://weights/model/")
    one = publish_source(source, there, cache=tmp_path / "cache", progress=no_progress)
    other = publish(folder, here, cache=tmp_path / "other", progress=no_progress)
    assert one.id == other.id
    assert there.objects == here.objects


def test_one_object_is_weights_too(store: Store, tmp_path: Path) -> None:  # noqa: F811
    store.put("deep/m.safetensors", encode(model()))
    file = tmp_path / "m.safetensors"
    file.write_bytes(encode(model()))
    local = publish(file, MemoryStore(), cache=tmp_path / "other", progress=no_progress)
    assert put("s3://weights/deep/m.safetensors", tmp_path).id == local.id


def test_any_range_is_what_the_object_has_there(store: Store) -> None:  # noqa: F811
    data = os.urandom(2 * WINDOW_BYTES + 1000)
    store.put("x", data)
    origin = Bucket("weights").object("x")
    assert read_all(origin) == data
    for offset, size in [(0, 1), (WINDOW_BYTES - 5, 10), (len(data) - 1, 1), (7, WINDOW_BYTES), (3, 0)]:
        assert read_at(origin, offset, size) == data[offset : offset + size]


def test_what_is_unchanged_is_not_read_again(folder: Path, tmp_path: Path) -> None:
    passes: list[str] = []
    first = put("s3://weights/model", tmp_path)
    again = put("s3://weights/model", tmp_path, lambda what, *_: passes.append(what))
    assert again.id == first.id
    assert "checksums" not in passes


@pytest.mark.parametrize("size_changes", [False, True])
def test_an_object_that_is_replaced_between_the_passes_is_noticed(
    folder: Path, tmp_path: Path, size_changes: bool
) -> None:
    shard = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)

    def replace(what: str, done: int, total: int) -> None:
        if what == "checksums" and done == total:
            shard.write_bytes(bytes(shard.stat().st_size + size_changes))

    with pytest.raises(CheckpointInvalid, match="changed while it was read"):
        put("s3://weights/model", tmp_path, replace)


@pytest.mark.parametrize(
    ("url", "error", "says"),
    [
        ("s3://", InvalidInput, "names no bucket"),
        ("s3://nobucket/model", WeightsMissing, "no bucket 'nobucket'"),
        ("s3://weights/nothing", WeightsMissing, "has no objects"),
        ("s3://weights/no.safetensors", WeightsMissing, "does not exist"),
        ("s3://No_Bucket!/x", FleetError, "No_Bucket"),
    ],
)
def test_what_is_not_there_is_named(url: str, error: type[FleetError], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        put(url, tmp_path)


def test_a_store_that_is_away_is_said_so(s3_server: S3Server, tmp_path: Path, monkeypatch: Any) -> None:  # noqa: F811
    s3_server.kill()
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    with pytest.raises(StoreFailed, match="Could not connect"):
        put("s3://weights/model", tmp_path)


def test_the_command_line_takes_weights_from_s3(
    folder: Path, tmp_path: Path, controller: ControllerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--home", str(tmp_path / "client")]
    assert run([*home, "weights", "push", "s3://weights/model", "--url", controller.url]) == OK
    checkpoint = capsys.readouterr().out.strip()
    handler = tmp_path / "handler.py"
    handler.write_text(
        'from fleetstart.runtime import function\n@function(weights="s3://weights/model")\ndef weighty(): ...\n'
    )
    assert run([*home, "deploy", str(handler), "--no-probe", "--url", controller.url]) == OK
    assert "in the store already" in capsys.readouterr().err
    (info,) = controller.http.get("/api/v1/checkpoints").json()
    assert (info["id"], info["used_by"]) == (checkpoint, ["weighty@1"])
    assert run([*home, "weights", "push", "s3://weights/model", "x", "--url", controller.url]) == USAGE
    assert "is pushed alone" in capsys.readouterr().err
