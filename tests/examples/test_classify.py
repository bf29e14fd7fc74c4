"""The classify example: the package's own answers, whole and along pipelines, to a picture in any form."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.controller.cli.handler.source.declarations import read_declarations
from fleetstart.controller.cli.handler.source.layered import with_layer_names
from fleetstart.controller.cli.handler.spec import layer_pattern_of
from fleetstart.controller.cli.weights.source import read_source
from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.layered.stages import whole_app
from tests.runtime.layered.models import answer, parts_of, pipeline

pytest.importorskip("PIL")

EXAMPLE = Path(__file__).parents[2] / "examples" / "classify"
LAYERS = 16
PICTURE = (EXAMPLE / "hopper.jpg").read_bytes()

# Of the picture, computed with efficientnet-lite-pytorch 0.1.0 on the same weights and the same pixels.
BEST = [
    ("academic gown", 0.3208),
    ("graduation cap", 0.2197),
    ("military uniform", 0.1277),
    ("vestment", 0.0548),
    ("Windsor tie", 0.0317),
]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("example_classify", EXAMPLE / "handler.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def weights() -> Any:
    folder = EXAMPLE / "weights"
    if not (folder / "model.safetensors").exists():
        pytest.skip("no weights: make models")
    from safetensors.torch import load_file

    class Weights(dict[str, torch.Tensor]):
        def file(self, name: str) -> bytes:
            return (folder / name).read_bytes()

    return Weights(load_file(folder / "model.safetensors"))


def asked(app: Any, body: bytes = PICTURE) -> Any:
    status, found = asyncio.run(answer(app, body))
    assert status == 200
    return found


def parts(example: ModuleType, weights: Any) -> Any:
    return parts_of(example.Classify(), weights, LAYERS)


def test_it_is_declared_in_layers_that_its_weights_have() -> None:
    (found,) = read_declarations(EXAMPLE / "handler.py")
    assert (found.attribute, found.kind, layer_pattern_of(found)) == ("Classify", "layered", "_blocks.{}")
    if not (EXAMPLE / "weights" / "model.safetensors").exists():
        pytest.skip("no weights: make models")
    assert with_layer_names(read_source(EXAMPLE / "weights"), layer_pattern_of(found), "").layers == "_blocks.{}"


def test_the_whole_model_answers_as_the_package_does(example: ModuleType, weights: Any) -> None:
    model = example.Classify()
    model.load(weights)
    with torch.no_grad():
        activations = model.before(PICTURE)
        for index in range(LAYERS):
            activations = model.layer(weights, index)(activations)
        found = model.after(activations)["labels"]
    assert [one["label"] for one in found] == [label for label, _ in BEST]
    assert [one["score"] for one in found] == pytest.approx([score for _, score in BEST], abs=2e-4)
    assert asked(whole_app(parts(example, weights)))["labels"] == found


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(bounds=st.lists(st.integers(1, LAYERS - 1), min_size=1, max_size=3, unique=True).map(sorted))
def test_every_pipeline_answers_as_the_whole_model(example: ModuleType, weights: Any, bounds: list[int]) -> None:
    cuts = list(itertools.pairwise([0, *bounds, LAYERS]))
    with pipeline(cuts, model=lambda index: example.Classify(), weights=weights) as stages:
        assert asked(stages.first.app) == asked(whole_app(parts(example, weights)))


def test_a_picture_may_come_in_base64(example: ModuleType, weights: Any) -> None:
    app = whole_app(parts(example, weights))
    assert asked(app, base64.encodebytes(PICTURE).replace(b"\n", b"")) == asked(app)


@pytest.mark.parametrize(
    "body", [b"", b"no picture", b"bm90IG9uZQ==", PICTURE[:200], b"\x89PNG\r\n\x1a\n", b"\xff" * 99]
)
def test_what_is_no_picture_is_said_to_be_none(example: ModuleType, body: bytes) -> None:
    with pytest.raises(InvalidInput, match="no picture"):
        example.read(body)
