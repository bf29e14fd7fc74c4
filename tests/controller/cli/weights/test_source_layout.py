"""The layout that an export follows: kept from the first push, believed only where it fits the manifest."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetstart.controller.cli.weights.export import file_spans, new_files
from fleetstart.controller.cli.weights.publish import publish
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.controller.cli.weights.source_layout import ShardLayout, encode_layout, read_layout
from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.object_keys import LAYOUT_OBJECT
from fleetstart.runtime.contract.weights.manifest import Manifest, read_manifest
from tests.controller.cli.checkpoints import MemoryStore, encode, model, no_progress, tensor, write_model


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    store = MemoryStore()
    publish(write_model(tmp_path / "w", model(1)), store, cache=tmp_path / "cache", progress=no_progress)
    return read_manifest(next(data for key, data in store.objects.items() if key.endswith("manifest.json")))


def header(tensors: Any) -> str:
    data = encode(tensors)
    return data[8 : 8 + int.from_bytes(data[:8], "little")].decode()


def zipped(data: bytes) -> bytes:
    return gzip.compress(data, mtime=0)


def packed(*files: tuple[str, str], **fields: Any) -> bytes:
    rows = [{"name": name, "header": text} for name, text in files]
    return zipped(msgspec.json.encode({"format": "fleetstart-layout/1", "files": rows, **fields}))


def test_a_layout_is_the_headers_as_they_stood(tmp_path: Path, manifest: Manifest) -> None:
    folder = write_model(tmp_path / "sharded", model(1), shards=2)
    data = encode_layout(read_source(folder))
    assert data is not None
    assert data == encode_layout(read_source(folder)), "no time stands in it"
    layout, tensors = read_layout(data, manifest)
    for file, stored in zip(layout.files, tensors, strict=True):
        content = (folder / file.name).read_bytes()
        assert content[8 : 8 + len(file.header)].decode() == file.header
        for one in stored:
            assert content[one.offset : one.offset + one.size_bytes] == model(1)[one.name][2]
    assert layout.index == (folder / "model.safetensors.index.json").read_text()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "not readable"),
        (b"junk", "not readable"),
        (zipped(b"[]"), "not readable"),
        (zipped(b"{}")[:-4], "not readable"),
        (packed(format="other"), "format 'other'"),
        (packed(more=1), "not readable"),
        (packed(), "lacks tensor 'lm_head.weight'"),
        (packed(("../x.safetensors", "{}")), "cannot be named '../x.safetensors'"),
        (packed((".hidden", "{}")), "cannot be named"),
        (packed(("config.json", "{}")), "cannot be named"),
        (packed(("a\\b", "{}")), "cannot be named"),
        (packed(("a", "{}"), ("a", "{}")), "cannot be named 'a'"),
        (packed(("a", "{")), "not readable"),
        (packed(("a", header({"other": tensor(3)}))), "'other' is not that of the manifest"),
        (packed(("a", header({"lm_head.weight": tensor(3)}))), "'lm_head.weight' is not that of the manifest"),
    ],
    ids=range(15),
)
def test_a_layout_that_lies_is_refused(manifest: Manifest, data: bytes, says: str) -> None:
    with pytest.raises(CheckpointInvalid) as error:
        read_layout(data, manifest)
    assert says in error.value.message


def test_a_layout_that_unpacks_to_more_than_it_may_is_not_unpacked(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleetstart.controller.cli.weights.source_layout.LAYOUT_MAX_BYTES", 1 << 20)
    with pytest.raises(CheckpointInvalid, match="bytes unpacked"):
        read_layout(gzip.compress(bytes(100 << 20)), manifest)


def test_files_whose_tensors_are_not_all_stored_have_no_layout(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model(1), shards=2)
    shard = folder / "model-00001-of-00002.safetensors"
    more = {**model(1), "lm_head.weight": tensor(2)}
    shard.write_bytes(encode({name: more[name] for name in more}))
    assert encode_layout(read_source(folder)) is None


def test_the_layout_lies_beside_the_parts(tmp_path: Path) -> None:
    store = MemoryStore()
    published = publish(write_model(tmp_path / "w", model()), store, cache=tmp_path / "cache", progress=no_progress)
    manifest = read_manifest(store.objects[f"checkpoints/{published.id}/manifest.json"])
    assert LAYOUT_OBJECT not in {part.object for part in manifest.parts}
    assert isinstance(
        read_layout(store.objects[f"checkpoints/{published.id}/{LAYOUT_OBJECT}"], manifest)[0], ShardLayout
    )


@pytest.mark.parametrize("limit", [1, 300, 1 << 40])
def test_files_made_anew_hold_every_tensor_once(manifest: Manifest, limit: int) -> None:
    files = new_files(manifest, limit)
    shards = [file for file in files if file.places]
    assert len(files) == (1 if len(shards) == 1 else len(shards) + 1)
    entries = [entry for file in shards for _, entry in file.places]
    assert sorted(entry.offset for entry in entries) == sorted(entry.offset for entry in manifest.tensors.values())
    spans = file_spans(manifest, files)
    assert [span.begin for span in spans] == sorted(span.begin for span in spans)
