"""`fs weights` against a real system: what goes in comes out the same, damage is found, nothing in use is lost."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.controller.cli.api_client import ApiClient, find_server
from fleetstart.controller.cli.output import FAILED, NOT_FOUND, OK, USAGE
from fleetstart.controller.cli.weights.publish import publish_source
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.runtime.contract.errors import StoreFailed
from tests.controller.cli.adapters import adapter, write_adapter
from tests.controller.cli.checkpoints import Tensor, encode, model, write_model
from tests.controller.cli.system import System

pytestmark = pytest.mark.e2e

FILES = {"config.json": '{"model_type": "test"}', "generation_config.json": "{}"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(tmp_path_factory.mktemp("system") / "home")
    system.up()
    try:
        yield system
    finally:
        system.down()
    system.assert_gone()


@pytest.fixture
def fresh(system: System) -> Iterator[System]:
    """With nothing in its store."""
    yield system
    for info in json.loads(system.fs("ls", "--json").stdout):
        system.fs("rm", info["name"], "--yes")
    for info in json.loads(system.fs("weights", "ls", "--all", "--json").stdout):
        system.fs("weights", "rm", info["id"], "--yes")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def push(system: System, *sources: Path | str) -> str:
    return system.fs("weights", "push", *sources).stdout.strip()


@pytest.mark.parametrize("shards", [1, 3])
def test_an_export_is_what_was_pushed_byte_for_byte(fresh: System, tmp_path: Path, shards: int) -> None:
    folder = write_model(tmp_path / "model", model(), shards=shards, files=FILES)
    checkpoint = push(fresh, folder)
    assert len(checkpoint) == 64
    files = fresh.fs("weights", "export", checkpoint[:6], tmp_path / "out").stdout.split()
    assert sorted(Path(file).name for file in files) == sorted(contents(folder))
    assert contents(tmp_path / "out") == contents(folder)
    refused = fresh.fs("weights", "export", checkpoint, tmp_path / "out", code=FAILED)
    assert "is not empty" in refused.stderr


def test_files_made_anew_hold_the_same_tensors(fresh: System, tmp_path: Path) -> None:
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {
        **model(),
        "model.embed_tokens.weight": ("F32", (512, 1024), os.urandom(1 << 21)),
    }
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    folder = write_model(tmp_path / "model", tensors, files=FILES)
    checkpoint = push(fresh, folder)
    (info,) = json.loads(fresh.fs("weights", "ls", "--json").stdout)
    assert info["weight_bytes"] == sum(len(content) for _, _, content in tensors.values()) - (1 << 21)
    fresh.fs("weights", "export", checkpoint, tmp_path / "out", "--max-shard-size", "2MiB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert index["weight_map"].keys() == tensors.keys()
    for name, shard in index["weight_map"].items():
        with safe_open(tmp_path / "out" / shard, "numpy") as file:
            found = file.get_tensor(name)
        assert (found.shape, found.tobytes()) == tensors[name][1:], name
    again = push(fresh, tmp_path / "out")
    assert again == checkpoint, "equal weights are equal, however they are stored"
    fresh.fs("weights", "export", checkpoint, tmp_path / "first")
    assert contents(tmp_path / "first") == contents(folder), "the first push's files stay"


def test_a_second_push_sends_nothing_and_says_so(fresh: System, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", model())
    first = json.loads(fresh.fs("weights", "push", folder, "--json").stdout)
    assert first["uploaded_bytes"] > first["weight_bytes"] > 0
    again = fresh.fs("weights", "push", folder, "--json")
    assert json.loads(again.stdout) == {**first, "uploaded_bytes": 0}
    assert "in the store already" in again.stderr


def test_a_push_that_broke_is_listed_gone_on_with_and_aborted(fresh: System, tmp_path: Path) -> None:
    first, stored = threading.Lock(), threading.Event()

    class Breaking(ApiClient):
        """Its line is cut as soon as the first of the parts, which are sent side by side, is stored."""

        def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
            if first.acquire(blocking=False):
                super().put_object(key, content, size_bytes)
                stored.set()
            else:
                assert stored.wait(60)
                raise StoreFailed("the line is cut")

    source = read_source(write_model(tmp_path / "model", model(4), files={}))

    def push_in_parts(server: ApiClient) -> str:
        return publish_source(
            source, server, cache=tmp_path / "cache", progress=lambda *_: None, part_max_bytes=1 << 20
        ).id  # fmt: skip

    address = find_server(None, fresh.home)
    with Breaking(address) as cut, pytest.raises(StoreFailed):
        push_in_parts(cut)
    (info,) = json.loads(fresh.fs("weights", "uploads", "--json").stdout)
    assert (info["project"], info["stored"] >= 1, info["stored"] < info["objects"]) == ("default", True, True)
    assert info["checkpoint"][:12] in fresh.fs("weights", "uploads").stdout
    with ApiClient(address) as server:
        assert push_in_parts(server) == info["checkpoint"]
    assert json.loads(fresh.fs("weights", "uploads", "--json").stdout) == []
    fresh.fs("weights", "rm", info["checkpoint"], "--yes")
    with Breaking(address) as cut, pytest.raises(StoreFailed):
        push_in_parts(cut)
    assert "is aborted" in fresh.fs("weights", "abort", info["checkpoint"][:8]).stderr
    assert "no upload is open" in fresh.fs("weights", "uploads").stderr
    assert json.loads(fresh.fs("weights", "ls", "--all", "--json").stdout) == [], "what had come is gone"
    assert "no upload 'abcd' is open" in fresh.fs("weights", "abort", "abcd", code=NOT_FOUND).stderr


def test_single_files_are_pushed_as_one_model(fresh: System, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", model(), shards=2, files=FILES)
    checkpoint = push(fresh, folder)
    assert push(fresh, *sorted(folder.iterdir())) == checkpoint
    (tmp_path / "one.safetensors").write_bytes(encode(model()))
    assert push(fresh, tmp_path / "one.safetensors") != checkpoint, "without its small files"
    shard = next(folder.glob("*.safetensors"))
    assert "do not exist" in fresh.fs("weights", "push", tmp_path / "no", code=FAILED).stderr
    assert "is a folder" in fresh.fs("weights", "push", shard, folder, code=FAILED).stderr
    assert "same name" in fresh.fs("weights", "push", shard, folder / ".." / "model" / shard.name, code=FAILED).stderr


def test_damage_is_found_and_told_by_its_place(fresh: System, tmp_path: Path) -> None:
    whole = push(fresh, write_model(tmp_path / "whole", model(2)))
    big: Tensor = ("U8", (9 << 20,), os.urandom(9 << 20))
    checkpoint = push(fresh, write_model(tmp_path / "model", {"layers.0.w": big, **model()}))
    assert "is whole" in fresh.fs("weights", "verify", "all").stdout
    assert [one["ok"] for one in json.loads(fresh.fs("weights", "verify", "all", "--json").stdout)] == [True, True]
    (part,) = (fresh.home / "store" / "checkpoints" / checkpoint).glob("part-*")
    data = bytearray(part.read_bytes())
    data[5 << 20] ^= 1
    part.write_bytes(data)
    result = fresh.fs("weights", "verify", checkpoint[:8], "--json", code=FAILED)
    (bad,) = json.loads(result.stdout)[0]["bad"]
    assert bad["object"] == part.name
    assert bad["offset"] <= 5 << 20 < bad["offset"] + bad["size_bytes"]
    assert bad["expected"] != bad["found"]
    assert f"{part.name} bytes {bad['offset']:,} to" in result.stderr
    assert fresh.fs("weights", "verify", whole).returncode == OK
    assert f"{whole[:12]} is whole" in fresh.fs("weights", "verify", "all", code=FAILED).stdout
    export = fresh.fs("weights", "export", checkpoint, tmp_path / "out", code=FAILED)
    assert "push the weights again" in export.stderr
    assert list((tmp_path / "out").iterdir()) == []
    part.write_bytes(data[:-1])
    assert "bytes, found" in fresh.fs("weights", "verify", checkpoint, code=FAILED).stderr
    part.unlink()
    assert "no such object" in fresh.fs("weights", "verify", checkpoint, code=FAILED).stderr
    assert "is missing" in fresh.fs("weights", "ls").stdout
    push(fresh, tmp_path / "model")
    part.write_bytes(data)
    assert (
        "now push the same weights again" in fresh.fs("weights", "verify", checkpoint, "--repair", code=FAILED).stderr
    )
    push(fresh, tmp_path / "model")
    assert fresh.fs("weights", "verify", checkpoint).returncode == OK


def test_a_parts_header_that_other_tools_would_read_is_checked_too(fresh: System, tmp_path: Path) -> None:
    checkpoint = push(fresh, write_model(tmp_path / "model", model()))
    (part,) = (fresh.home / "store" / "checkpoints" / checkpoint).glob("part-*")
    part.write_bytes(part.read_bytes().replace(b'"lm_head.weight"', b'"lm_tail.weight"', 1))
    assert "another tensor 'lm_head.weight'" in fresh.fs("weights", "verify", checkpoint, code=FAILED).stderr


def test_what_a_function_uses_stays(fresh: System, tmp_path: Path) -> None:
    write_model(tmp_path / "w", model())
    (tmp_path / "handler.py").write_text(
        'from fleetstart.runtime import function\n@function(weights="./w")\ndef weighty(): ...\n'
    )
    fresh.fs("deploy", tmp_path / "handler.py")
    table = fresh.fs("weights", "ls").stdout
    assert "weighty@1" in table
    (info,) = json.loads(fresh.fs("weights", "ls", "--json").stdout)
    for name in ("weighty", info["id"][:4]):
        refused = fresh.fs("weights", "rm", name, "--yes", code=FAILED)
        assert "is used by weighty@1" in refused.stderr
        assert "fs rm weighty" in refused.stderr
    assert "is whole" in fresh.fs("weights", "verify", "weighty").stdout
    fresh.fs("rm", "weighty", "--yes")
    assert "--yes" in fresh.fs("weights", "rm", info["id"], code=USAGE).stderr
    assert "freed" in fresh.fs("weights", "rm", info["id"], "--yes").stderr
    assert fresh.fs("weights", "ls").stdout == ""


def test_what_there_is_not_is_said_with_the_nearest(fresh: System, tmp_path: Path) -> None:
    checkpoint = push(fresh, write_model(tmp_path / "model", model()))
    for verb in (("verify",), ("rm", "--yes"), ("export",)):
        more = (tmp_path / "out",) if verb == ("export",) else ()
        wrong = "0" if checkpoint[7] != "0" else "1"
        result = fresh.fs("weights", *verb, checkpoint[:7] + wrong, *more, code=NOT_FOUND)
        assert f"did you mean '{checkpoint[:12]}'?" in result.stderr
    assert "too short for an id" in fresh.fs("weights", "verify", checkpoint[:3], code=FAILED).stderr
    assert "did you mean `fs weights verify`?" in fresh.fs("weights", "verfy", code=USAGE).stderr


def test_an_adapter_is_recognised_and_deployed_on_its_base(fresh: System, tmp_path: Path) -> None:
    write_model(tmp_path / "base", {"model.layers.0.q.weight": ("F32", (6, 4), bytes(96))})
    write_adapter(tmp_path / "lora", adapter(rank=2, into=4, out=6, module="model.layers.0.q"))
    result = fresh.fs("weights", "push", tmp_path / "lora")
    assert "a LoRA adapter" in result.stderr
    assert " adapter " in fresh.fs("weights", "ls").stdout
    fresh.fs("weights", "export", result.stdout.strip(), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "lora")
    text = (
        "from fleetstart.runtime import function\n"
        '@function(weights="./base", adapter="./lora")\nclass Tuned:\n    def __call__(self): ...\n'
    )
    (tmp_path / "handler.py").write_text(text)
    fresh.fs("deploy", tmp_path / "handler.py")
    infos = {info["adapter"]: info for info in json.loads(fresh.fs("weights", "ls", "--json").stdout)}
    assert infos[True]["used_by"] == infos[False]["used_by"] == ["tuned@1"]
    write_model(tmp_path / "base", {"model.layers.0.q.weight": ("F32", (6, 5), bytes(120))})
    refused = fresh.fs("deploy", tmp_path / "handler.py", code=FAILED)
    assert "the adapter makes [6, 4] for module model.layers.0.q" in refused.stderr
    assert "is [6, 5]" in refused.stderr
