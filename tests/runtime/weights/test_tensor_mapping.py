"""Weights read as other libraries read them: as `safetensors.safe_open` does, and by torch's own modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.runtime.segments import CHUNK, Segment

ROWS, WIDTH = 6, CHUNK // 8
"""A row of fp32 is half a chunk."""


@pytest.fixture(scope="module")
def values() -> dict[str, Tensor]:
    noise = torch.Generator().manual_seed(0)
    return {
        "table": torch.randn(ROWS, WIDTH, generator=noise),
        "deep": torch.randn(3, 4, 5, generator=noise),
        "scalar": torch.tensor(7.0),
        "none": torch.zeros(0, 4),
    }


def segment_of(values: dict[str, Tensor], **more: Any) -> Segment:
    shapes = {name: ("F32", tuple(value.shape)) for name, value in values.items()}
    contents = {name: value.numpy().tobytes() for name, value in values.items()}
    return Segment(shapes, contents=contents, **more)


@pytest.fixture(scope="module")
def opened(values: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The same tensors as safetensors reads them."""
    path: Path = tmp_path_factory.mktemp("safetensors") / "model.safetensors"
    save_file(values, path, {"format": "pt"})
    with safetensors.safe_open(path, "pt") as file:
        yield file


def test_every_method_of_safe_open_is_there_and_answers_alike(values: dict[str, Tensor], opened: Any) -> None:
    segment = segment_of(values)
    segment.fill(*segment.chunks)
    with segment.attach() as weights:
        public = {name for name in dir(opened) if not name.startswith("_")}
        assert public <= set(dir(weights))
        assert sorted(weights.keys()) == sorted(opened.keys())
        assert weights.offset_keys() == list(values)
        assert weights.metadata() == opened.metadata()
        assert {name: tensor.tolist() for name, tensor in weights.get_tensors().items()} == {
            name: tensor.tolist() for name, tensor in opened.get_tensors().items()
        }
        for name in opened.keys():  # noqa: SIM118  (it has no __iter__)
            assert torch.equal(weights.get_tensor(name), opened.get_tensor(name))
            ours, theirs = weights.get_slice(name), opened.get_slice(name)
            assert (ours.get_shape(), ours.get_dtype()) == (theirs.get_shape(), theirs.get_dtype())
        with pytest.raises(KeyError, match="no tensor 'tabel'"):
            weights.get_slice("tabel")


bounds = st.none() | st.integers(-8, 8)
slices = st.builds(slice, bounds, bounds, st.none() | st.integers(1, 3))
one_index = slices | st.integers(-8, 8) | st.just(Ellipsis) | st.lists(st.integers(0, 2), min_size=1, max_size=3)
indices = one_index | st.lists(slices | st.integers(-4, 4), max_size=3).map(tuple)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(["table", "deep", "scalar", "none"]), index=indices)
def test_a_slice_is_what_torch_gives_for_the_same_index(values: dict[str, Tensor], name: str, index: Any) -> None:
    segment = segment_of(values)
    segment.fill(*segment.chunks)
    part = segment.attach().get_slice(name)
    try:
        expected = values[name][index]
    except IndexError:
        with pytest.raises(IndexError):
            part[index]
        return
    assert torch.equal(part[index], expected)


def test_slices_are_views_and_refuse_what_torch_refuses(values: dict[str, Tensor]) -> None:
    segment = segment_of(values)
    segment.fill(*segment.chunks)
    weights = segment.attach()
    part = weights.get_slice("table")
    assert part[2].data_ptr() == weights["table"][2].data_ptr()
    with pytest.raises(ValueError, match="step must be greater than zero"):
        part[::-1]
    with pytest.raises(IndexError, match=r"out of (range|bounds)"):
        part[ROWS]


def test_a_slice_waits_for_its_rows_alone(values: dict[str, Tensor]) -> None:
    segment = segment_of(values)
    part = segment.attach(timeout_s=60).get_slice("table")
    assert part.get_shape() == [ROWS, WIDTH]
    assert part[3:3].shape == (0, WIDTH)
    segment.fill(1)
    assert torch.equal(part[2:4, :7], values["table"][2:4, :7])
    assert torch.equal(part[-3], values["table"][-3])
    got: list[Tensor] = []
    reader = threading.Thread(target=lambda: got.append(part[1:3]))
    reader.start()
    assert not got
    segment.fill(0)
    reader.join(30)
    assert torch.equal(got[0], values["table"][1:3])


def test_items_and_values_follow_the_stream(values: dict[str, Tensor]) -> None:
    segment = segment_of(values)
    segment.fill(0, 1, 2)
    items = iter(segment.attach(timeout_s=60).items())
    assert torch.equal(next(items)[1], values["table"])
    segment.fill(*segment.chunks)
    assert [name for name, _ in items] == ["deep", "scalar", "none"]


def test_aliases_are_tensors_that_share_memory(values: dict[str, Tensor]) -> None:
    segment = segment_of(values, aliases={"a.tied": "deep", "z.tied": "table"})
    segment.fill(*segment.chunks)
    weights = segment.attach()
    assert list(weights) == ["table", "z.tied", "deep", "a.tied", "scalar", "none"]
    assert len(weights) == 6
    assert "a.tied" in weights
    assert weights["z.tied"].data_ptr() == weights["table"].data_ptr()
    assert torch.equal(weights.get_slice("a.tied")[1], values["deep"][1])


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = rows + torch.relu(self.linear(self.norm(rows)))
        return out


class Model(nn.Module):
    """Parameters, buffers (an integer without a dimension among them), and a head tied to the embedding."""

    def __init__(self, vocabulary: int = 40, width: int = 24, layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.embedding(tokens)
        for layer in self.layers:
            rows = layer(rows)
        out: Tensor = self.head(rows)
        return out


def as_segment(model: nn.Module) -> Segment:
    """The model's state in the order of its layers, what is tied stored once."""
    dtypes = {torch.float32: "F32", torch.int64: "I64"}
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {}
    contents: dict[str, bytes] = {}
    aliases: dict[str, str] = {}
    holders: dict[int, str] = {}
    for name, value in model.state_dict().items():
        holder = holders.setdefault(value.data_ptr(), name)
        if holder != name:
            aliases[name] = holder
            continue
        shapes[name] = (dtypes[value.dtype], tuple(value.shape))
        contents[name] = value.numpy().tobytes()
    return Segment(shapes, contents=contents, aliases=aliases)


def trained() -> Model:
    torch.manual_seed(5)
    model = Model()
    model(torch.arange(40))  # the norms' buffers move
    return model.eval()


def test_a_real_module_built_on_meta_loads_strictly_and_computes_the_same() -> None:
    model = trained()
    segment = as_segment(model)
    segment.fill(*segment.chunks)
    weights = segment.attach()
    with torch.device("meta"):
        loaded = Model().eval()
    loaded.load_state_dict(weights, strict=True, assign=True)
    tokens = torch.arange(40)
    assert torch.equal(loaded(tokens), model(tokens))
    assert loaded.head.weight.data_ptr() == loaded.embedding.weight.data_ptr() == weights["head.weight"].data_ptr()
    assert all(not tensor.is_meta for tensor in loaded.state_dict().values())
    assert loaded.state_dict()["layers.0.norm.num_batches_tracked"] == 1


def test_loading_a_module_reads_in_the_order_of_arrival() -> None:
    """torch copies the mapping into a dict of its own first: that asks for each tensor once, as they lie."""
    segment = as_segment(trained())
    weights = segment.attach(timeout_s=60)
    with torch.device("meta"):
        loaded = Model()
    thread = threading.Thread(target=lambda: loaded.load_state_dict(weights, assign=True))
    thread.start()
    for chunk in segment.chunks:
        segment.fill(chunk)
    thread.join(30)
    assert not any(tensor.is_meta for tensor in loaded.state_dict().values())


def test_strict_loading_names_what_is_missing_and_what_is_too_much(values: dict[str, Tensor]) -> None:
    segment = segment_of(values)
    segment.fill(*segment.chunks)
    with pytest.raises(RuntimeError, match=r"Missing key.*head.weight(.|\n)*Unexpected key.*table"):
        Model().load_state_dict(segment.attach(), assign=True)
