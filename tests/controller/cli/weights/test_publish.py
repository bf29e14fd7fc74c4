"""Publishing: what is sent, what is not sent again, and what is refused before anything is sent."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.controller.cli.weights.local_files import BLOCK_BYTES
from fleetstart.controller.cli.weights.publish import Published, publish
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.runtime.contract.errors import CheckpointInvalid, FleetError, PickleRefused, StoreFailed, WeightsMissing
from fleetstart.runtime.contract.weights.manifest import read_manifest
from tests.controller.cli.checkpoints import MemoryStore, encode, model, no_progress, tensor, write_model


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return write_model(tmp_path / "weights", model(), files={"config.json": "{}", "tokenizer.json": "[]", "a.md": "x"})


def put(weights: Path, store: MemoryStore, tmp_path: Path) -> Published:
    return publish(weights, store, cache=tmp_path / "cache", progress=no_progress)


def test_a_checkpoint_is_published_manifest_last(weights: Path, store: MemoryStore, tmp_path: Path) -> None:
    published = put(weights, store, tmp_path)
    assert store.puts[-1] == f"checkpoints/{published.id}/manifest.json"
    manifest = read_manifest(store.objects[store.puts[-1]], published.id)
    assert set(manifest.tensors) == set(model())
    assert set(manifest.files) == {"config.json", "tokenizer.json"}
    assert published.uploaded_bytes == sum(map(len, store.objects.values()))


def test_an_unchanged_redeploy_sends_and_reads_nothing(weights: Path, store: MemoryStore, tmp_path: Path) -> None:
    first = put(weights, store, tmp_path)
    store.puts.clear()
    passes: list[str] = []
    again = publish(weights, store, cache=tmp_path / "cache", progress=lambda what, *_: passes.append(what))
    assert (again.id, again.uploaded_bytes, store.puts, passes) == (first.id, 0, [], [])


def test_equal_weights_elsewhere_are_recognised(weights: Path, store: MemoryStore, tmp_path: Path) -> None:
    first = put(weights, store, tmp_path)
    sharded = write_model(tmp_path / "b", model(), shards=3, files={"config.json": "{}", "tokenizer.json": "[]"})
    again = publish(sharded, store, cache=tmp_path / "other", progress=no_progress)
    assert (again.id, again.uploaded_bytes) == (first.id, 0)


def test_a_changed_file_makes_another_checkpoint(weights: Path, store: MemoryStore, tmp_path: Path) -> None:
    first = put(weights, store, tmp_path)
    (weights / "config.json").write_text("[]")
    assert put(weights, store, tmp_path).id != first.id


def test_what_the_store_lost_is_sent_again(weights: Path, store: MemoryStore, tmp_path: Path) -> None:
    put(weights, store, tmp_path)
    whole = dict(store.objects)
    for lost in whole:
        store.objects = {key: data for key, data in whole.items() if key != lost}
        put(weights, store, tmp_path)
        assert store.objects == whole
    store.objects = {key: data[:-1] if "part" in key else data for key, data in whole.items()}
    put(weights, store, tmp_path)
    assert store.objects == whole


def test_an_upload_that_breaks_leaves_no_manifest(weights: Path, tmp_path: Path) -> None:
    class Breaking(MemoryStore):
        def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
            raise StoreFailed("gone")

    store = Breaking()
    with pytest.raises(StoreFailed):
        put(weights, store, tmp_path)
    assert store.objects == {}


def test_weights_that_change_between_the_passes_are_noticed(weights: Path, tmp_path: Path) -> None:
    file = weights / "model.safetensors"
    data = file.read_bytes()

    class Meddling(MemoryStore):
        def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
            with file.open("r+b") as stream:
                stream.seek(-1, os.SEEK_END)
                stream.write(bytes([data[-1] ^ 1]))
            super().put_object(key, content, size_bytes)

    store = Meddling()
    with pytest.raises(CheckpointInvalid, match="changed while"):
        put(weights, store, tmp_path)
    assert not any(key.endswith(("manifest.json", ".safetensors")) for key in store.objects)


def test_weights_that_shrink_while_they_are_read_are_noticed(weights: Path, store: MemoryStore, tmp_path: Path) -> None:
    file = weights / "model.safetensors"

    def cut(what: str, done: int, total: int) -> None:
        os.truncate(file, 900)

    with pytest.raises(CheckpointInvalid, match="became shorter"):
        publish(weights, store, cache=tmp_path / "cache", progress=cut)


def test_one_file_is_weights_too(tmp_path: Path, store: MemoryStore) -> None:
    file = tmp_path / "m.safetensors"
    file.write_bytes(encode(model()))
    published = put(file, store, tmp_path)
    assert published.weight_bytes == sum(len(content) for _, _, content in model().values())


def test_large_tensors_cross_blocks_and_chunks(tmp_path: Path, store: MemoryStore) -> None:
    tensors = {"embed": tensor(3), "layers.0.a": ("U8", (9 << 20,), os.urandom(9 << 20)), "norm": tensor(5)}
    folder = write_model(tmp_path / "w", tensors)
    published = put(folder, store, tmp_path)
    manifest = read_manifest(store.objects[f"checkpoints/{published.id}/manifest.json"])
    assert len(manifest.chunks) == 37
    assert manifest.chunk_bytes < BLOCK_BYTES


@pytest.mark.parametrize(
    ("names", "error", "says"),
    [
        ([], WeightsMissing, "has no *.safetensors"),
        (["config.json"], WeightsMissing, "has no *.safetensors"),
        (["pytorch_model.bin"], PickleRefused, "pytorch_model.bin is a pickle"),
        (["model.ckpt", "config.json"], PickleRefused, "model.ckpt is a pickle"),
    ],
)
def test_a_folder_without_safetensors(tmp_path: Path, names: list[str], error: type[FleetError], says: str) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"PK\x03\x04")
    with pytest.raises(error, match=re.escape(says)):
        read_source(tmp_path)


def test_missing_weights_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WeightsMissing) as error:
        read_source(tmp_path / "weights")
    assert "make models" in error.value.hint


def test_a_pickle_beside_safetensors_is_not_looked_at(weights: Path) -> None:
    (weights / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    assert len(read_source(weights).tensors) == len(model())


@pytest.mark.parametrize(
    ("index", "error"),
    [
        ("{", CheckpointInvalid),
        ("[]", CheckpointInvalid),
        ('{"weight_map": 3}', CheckpointInvalid),
        ('{"weight_map": {"a": "gone.safetensors"}}', WeightsMissing),
        ('{"weight_map": {"a": "../x.safetensors"}}', WeightsMissing),
        ('{"weight_map": {"a": 3}}', WeightsMissing),
        ('{"weight_map": {}}', CheckpointInvalid),
        ('{"weight_map": {"a": "/etc/passwd"}}', WeightsMissing),
        ('{"weight_map": {"a": "config.json"}}', WeightsMissing),
        ('{"weight_map": {"a": "x.bin"}}', WeightsMissing),
    ],
)
def test_an_index_that_cannot_be_used(weights: Path, index: str, error: type[FleetError]) -> None:
    (weights / "model.safetensors.index.json").write_text(index)
    with pytest.raises(error, match="index"):
        read_source(weights)


def test_an_index_that_names_a_tensor_of_another_shard_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model(), shards=2)
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    index.write_text(text.replace('"lm_head.weight": "model-00001', '"lm_head.weight": "model-00002'))
    with pytest.raises(CheckpointInvalid, match=r"says that tensor 'lm_head\.weight' is in model-00002"):
        read_source(folder)
    index.write_text(text.replace("lm_head.weight", "gone"))
    with pytest.raises(CheckpointInvalid, match="says that tensor 'gone' is in"):
        read_source(folder)


def test_the_index_decides_between_two_shards_with_one_tensor(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model(), shards=2)
    second = folder / "model-00002-of-00002.safetensors"
    names = list(model())[1::2]
    second.write_bytes(encode({**{name: model()[name] for name in names}, "lm_head.weight": tensor(2)}))
    found = {one.name: one for one in read_source(folder).tensors}
    assert found["lm_head.weight"].file.name == "model-00001-of-00002.safetensors"
    assert len(found) == len(model())


def test_a_shard_that_the_index_does_not_name_is_not_looked_at(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model(), shards=2)
    (folder / "consolidated.safetensors").write_bytes(b"of another format")
    assert len(read_source(folder).tensors) == len(model())


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model(), shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(WeightsMissing, match=r"names the shard 'model-00002-of-00002\.safetensors'") as error:
        read_source(folder)
    assert "download" in error.value.hint


def test_a_missing_shard_is_named_without_an_index_too(tmp_path: Path) -> None:
    folder = write_model(tmp_path, model(), shards=2)
    (folder / "model.safetensors.index.json").unlink()
    assert len(read_source(folder).tensors) == len(model())
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(WeightsMissing, match=r"some of 2 shards, and not 'model-00001-of-00002\.safetensors'"):
        read_source(folder)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(encode({"x": tensor(2)}))
    with pytest.raises(CheckpointInvalid, match=r"'x' is in .*a\.safetensors and in .*b\.safetensors"):
        read_source(tmp_path)


def test_a_file_beside_the_weights_has_a_limit(weights: Path) -> None:
    os.truncate(weights / "tokenizer.json", (64 << 20) + 1)
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json has 67108865 bytes"):
        read_source(weights)
