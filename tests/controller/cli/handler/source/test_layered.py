"""Models in layers at a deploy: classes that are known by their bases, weights whose names tell of layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from fleetstart.controller.cli.handler.source.declarations import LAYERED_SETTINGS, Declaration, read_declarations
from fleetstart.controller.cli.handler.source.layered import with_layer_names
from fleetstart.controller.cli.handler.spec import LAYERED_CONCURRENCY, build_spec, layer_pattern_of
from fleetstart.controller.cli.weights.publish import checksums, publish_source
from fleetstart.controller.cli.weights.publish_layout import layer_numbers, layer_of_tensors, plan_checkpoint
from fleetstart.controller.cli.weights.source import Source, read_source
from fleetstart.runtime.contract.errors import InvalidSpec, NoHandler
from fleetstart.runtime.contract.ids import BundleId, CheckpointId
from fleetstart.runtime.contract.weights.manifest import LAYER_BEFORE, manifest_bytes, read_manifest
from fleetstart.runtime.contract.weights.stage import cut, layer_count, layout_of, stage_chunks
from fleetstart.runtime.sdk import declarations

np = pytest.importorskip("numpy")

HEAD = "from fleetstart.runtime import Layered, function\n"
PARTS = "\n    def before(self, x): ...\n    def layer(self, weights, index): ..."


def read(tmp_path: Path, source: str) -> list[Declaration]:
    path = tmp_path / "handler.py"
    path.write_text(source)
    return read_declarations(path)


def test_settings_are_those_of_the_runtime() -> None:
    assert set(LAYERED_SETTINGS) == {*declarations.GENERAL, *declarations.OF_CODE, *declarations.OF_LAYERED}


@pytest.mark.parametrize(
    "source",
    [
        HEAD + "@function(weights='./w')\nclass M(Layered):" + PARTS,
        "import fleetstart.runtime as fs\n@fs.function(weights='./w')\nclass M(fs.Layered):" + PARTS,
        "from fleetstart.runtime import *\n@function(weights='./w')\nclass M(Layered):" + PARTS,
        HEAD + "class Base(Layered):" + PARTS + "\n@function(weights='./w')\nclass M(Base): ...",
        HEAD + "class M(Layered):" + PARTS + "\nM = function(weights='./w')(M)",
        # A base that the file does not show may have all parts: that is for the worker's start to see.
        HEAD + "from more import Mixin\n@function(weights='./w')\nclass M(Mixin, Layered): ...",
        HEAD + "from more import one\n@function(weights='./w')\nclass M(Layered):\n    before = one\n    layer = one",
    ],
)
def test_a_layered_class_is_known_by_its_bases(tmp_path: Path, source: str) -> None:
    (found,) = read(tmp_path, source)
    assert (found.attribute, found.kind, found.settings) == ("M", "layered", {"weights": "./w"})


@pytest.mark.parametrize(
    "source",
    [
        "from fleetstart.runtime import function\nclass Layered: ...\n@function\nclass M(Layered): ...",
        HEAD + "Layered = object\n@function\nclass M(Layered): ...",
        HEAD + "class Base(Layered): ...\nclass Base: ...\n@function\nclass M(Base): ...",
    ],
)
def test_a_name_that_means_something_else_is_no_base(tmp_path: Path, source: str) -> None:
    (found,) = read(tmp_path, source)
    assert found.kind == "function"


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("...", "has no before"),
        ("\n    def before(self, x): ...", "has no layer"),
        ("\n    def layer(self, weights, index): ...", "has no before"),
        (PARTS + "\n    async def after(self, x): ...", "after.. of class M is asynchronous"),
        ("\n    def layer(self, w, i): ...\n    async def before(self, x): ...", "before.. of class M is asynchronous"),
    ],
)
def test_a_class_that_lacks_a_part_is_refused_with_its_line(tmp_path: Path, body: str, what: str) -> None:
    with pytest.raises(NoHandler, match=what) as caught:
        read(tmp_path, HEAD + f"@function(weights='./w')\nclass M(Layered): {body}")
    assert "handler.py:2" in caught.value.message
    assert "def " in caught.value.hint


def test_layers_are_of_layered_classes(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match=r"layers= is of a class that is Layered"):
        read(tmp_path, HEAD + "@function(layers='f.{}')\nclass M: ...")


def spec_of(**settings: Any) -> Any:
    declaration = Declaration(attribute="M", kind="layered", line=2, settings=settings)
    return build_spec(
        declaration,
        module="handler",
        bundle=BundleId("b" * 64),
        weights=CheckpointId("c" * 64),
        imports=set(),
        overrides={},
    )


def test_a_layered_model_has_torch_and_room_for_several_calls() -> None:
    spec = spec_of(weights="./w", layers="f.{}")
    assert (spec.layered, spec.in_layers, spec.profile, spec.concurrency) == (True, True, "torch", LAYERED_CONCURRENCY)
    assert spec_of(concurrency=2).concurrency == 2


@pytest.mark.parametrize("layers", [3, "features", "", None])
def test_a_pattern_without_a_place_for_the_number_is_refused(layers: Any) -> None:
    with pytest.raises(InvalidSpec, match="does not say how"):
        layer_pattern_of(Declaration(attribute="M", kind="layered", line=2, settings={"layers": layers}))


# ── names ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", {"blocks.0.conv.weight": 0, "blocks.3.conv.weight": 3, "stem.weight": None}),
        ("_blocks.{}", {"_blocks.0._bn0.weight": 0, "_blocks.10.w": 2, "_blocks.9.w": 1, "_bn0.weight": None}),
        ("layer{}.{}", {"layer1.0.w": 0, "layer1.1.w": 1, "layer2.0.w": 2, "layer2.0.b": 2, "conv1.weight": None}),
        ("features.{}", {"features.0.w": 0, "features.2.w": 1, "features.7.w": 2, "more.features.1.w": None}),
        ("layer{}", {"layer1.w": 0, "layer1x.w": None, "layer2": 1, "layer.w": None}),
        ("f[{}]+", {"f[0]+.w": 0, "f[3]+.w": 1, "ff.w": None}),
    ],
)
def test_layers_are_counted_in_the_order_of_their_numbers(pattern: str, names: dict[str, int | None]) -> None:
    assert layer_numbers(names, pattern) == names


@given(st.text(max_size=30), st.lists(st.text(max_size=30), max_size=5))
def test_any_pattern_is_understood_or_refused(pattern: str, names: list[str]) -> None:
    try:
        found = layer_numbers(names, pattern)
    except InvalidSpec:
        return
    assert found.keys() == set(names)
    numbers = {number for number in found.values() if number is not None}
    assert not pattern or numbers == set(range(len(numbers)))


def weights(folder: Path, *names: str) -> Source:
    """Of as many kilobytes as the name has letters; equal names, equal bytes."""
    folder.mkdir()
    save_file({name: np.full(256 * len(name), len(name), np.float32) for name in names}, folder / "model.safetensors")
    return read_source(folder)


NAMES = ["stem.w", "head.weight", "f.0.w", "f.2.longer", "f.10.w", "f.10.longest"]


def test_a_pattern_orders_the_checkpoint_and_counts_its_layers(tmp_path: Path) -> None:
    source = with_layer_names(weights(tmp_path / "w", *NAMES), "f.{}", "handler.py:2")
    plan = plan_checkpoint(source)
    manifest = read_manifest(manifest_bytes(plan.manifest(checksums(plan, lambda *_: None))))
    by_place = sorted(manifest.tensors, key=lambda name: manifest.tensors[name].offset)
    assert by_place == ["f.0.w", "f.2.longer", "f.10.longest", "f.10.w", "head.weight", "stem.w"]
    assert [manifest.tensors[name].layer for name in by_place] == [0, 1, 2, 2, 3, 3]
    assert layer_count(manifest) == 3
    layout = layout_of(manifest)
    assert layout.layer_bytes == [5 * 1024, 10 * 1024, 18 * 1024]
    assert layout.ends_bytes == 17 * 1024
    assert cut(layout, 3) == [(0, 1), (1, 2), (2, 3)]
    assert stage_chunks(manifest, 1, 2)


def test_without_a_pattern_a_manifest_is_what_it_was(tmp_path: Path) -> None:
    plan = plan_checkpoint(weights(tmp_path / "w", "blocks.0.w", "blocks.1.w", "embed.w"))
    assert b"layers" not in manifest_bytes(plan.manifest(checksums(plan, lambda *_: None)))
    assert layer_of_tensors(["embed.w"])["embed.w"] == LAYER_BEFORE


def test_one_folder_under_two_patterns_is_two_checkpoints(tmp_path: Path) -> None:
    class Store:
        def __init__(self) -> None:
            self.objects: dict[str, bytes] = {}

        def object_size(self, key: str) -> int | None:
            return len(self.objects[key]) if key in self.objects else None

        def put_object(self, key: str, data: Any, size_bytes: int) -> None:
            self.objects[key] = data if isinstance(data, bytes) else b"".join(data)

        def begin_upload(self, manifest: bytes) -> None:
            return

    source = weights(tmp_path / "w", *NAMES)
    ids = [
        publish_source(one, Store(), cache=tmp_path / "cache", progress=lambda *_: None).id
        for one in (source, with_layer_names(source, "f.{}", ""), with_layer_names(source, "f.{}", ""), source)
    ]
    assert ids[0] == ids[3] != ids[1] == ids[2]


@pytest.mark.parametrize(
    ("pattern", "what"),
    [("", "tensor names in the weights has a layer number: f.0.w, "), ("g.{}", "as layers='g.{}' says")],
)
def test_names_without_layers_are_shown(tmp_path: Path, pattern: str, what: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        with_layer_names(weights(tmp_path / "w", *NAMES), pattern, "handler.py:2")
    assert what in caught.value.message
    assert caught.value.message.startswith("handler.py:2: ")


def test_a_manifest_with_more_layers_than_tensors_is_refused(tmp_path: Path) -> None:
    import msgspec

    from fleetstart.runtime.contract.errors import CheckpointInvalid

    plan = plan_checkpoint(weights(tmp_path / "w", "f.0.w"))
    manifest = plan.manifest(checksums(plan, lambda *_: None))
    for layers in (-1, 2, 1 << 60):
        with pytest.raises(CheckpointInvalid, match="layers of 1 tensors"):
            read_manifest(manifest_bytes(msgspec.structs.replace(manifest, layers=layers)))
