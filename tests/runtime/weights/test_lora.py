"""A LoRA adapter over a base: the numbers that the adapted module computes, the base's memory, and clear refusals."""

from __future__ import annotations

import gc
import threading
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from fleetstart.runtime.contract.errors import CheckpointInvalid, ChecksumMismatch
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.weights import lora
from fleetstart.runtime.weights.lora import AdaptedWeights
from tests.runtime.segments import CHUNK, Segment
from tests.runtime.workers import Functions

IN, OUT, RANK = 24, 40, 4
P = "base_model.model."
DTYPES = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.uint8: "U8"}


def segment_of(tensors: dict[str, Tensor], files: dict[str, bytes] | None = None, **more: Any) -> Segment:
    shapes = {name: (DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items()}
    contents = {name: bytes(tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()}
    return Segment(shapes, files, contents, **more)


def noise(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * 0.2).to(dtype)


def base_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {
        "embed.weight": noise(16, IN, dtype=dtype),
        "layers.0.up.weight": noise(OUT, IN, dtype=dtype),
        "layers.0.up.bias": noise(OUT, dtype=dtype),
        "layers.0.down.weight": noise(IN, OUT, dtype=dtype),
        "norm.weight": noise(IN, dtype=dtype),
    }


def pair(module: str, inputs: int, outputs: int, rank: int = RANK) -> dict[str, Tensor]:
    return {
        f"{P}{module}.lora_A.weight": noise(rank, inputs, seed=1),
        f"{P}{module}.lora_B.weight": noise(outputs, rank, seed=2),
    }


TARGETS = ("up", "down", "0", "2", "norm", "head", "q_proj", "down_proj")


def config(**changes: Any) -> dict[str, bytes]:
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": [*TARGETS], "task_type": None}
    return {"adapter_config.json": msgspec.json.encode(fields | changes)}


UP = pair("layers.0.up", IN, OUT)
A, B = UP[f"{P}layers.0.up.lora_A.weight"], UP[f"{P}layers.0.up.lora_B.weight"]


def filled(segment: Segment) -> Segment:
    segment.fill(*segment.chunks)
    return segment


def adapted(adapter: dict[str, Tensor], base: dict[str, Tensor] | None = None, **changes: Any) -> AdaptedWeights:
    return AdaptedWeights(
        filled(segment_of(base or base_tensors(), {"config.json": b"{}"})).attach(),
        filled(segment_of(adapter, config(**changes))).attach(),
    )


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({}, 8 / 4),
        ({"use_rslora": True}, 8 / 2),
        ({"alpha_pattern": {"down": 100, "up": 3}}, 3 / 4),
        ({"r": 64, "rank_pattern": {"layers.0.up": RANK}}, 8 / 4),
        ({"alpha_pattern": {r"layers\.\d+\.up": 6}, "use_rslora": True}, 6 / 2),
        ({"alpha_pattern": {"p": 100, "ayers.0.up": 100}}, 8 / 4),
    ],
)
def test_a_matrix_is_the_bases_plus_its_scaled_delta(changes: dict[str, Any], scale: float) -> None:
    weights = adapted(UP, **changes)
    expected = base_tensors()["layers.0.up.weight"] + scale * (B @ A)
    torch.testing.assert_close(weights["layers.0.up.weight"], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_delta_is_computed_wide_and_rounded_once(dtype: torch.dtype) -> None:
    base = base_tensors(dtype)
    got = adapted(UP, base)["layers.0.up.weight"]
    assert got.dtype == dtype
    exact = base["layers.0.up.weight"].double() + 2.0 * (B.double() @ A.double())
    half_an_ulp = torch.finfo(dtype).eps / 2 if dtype != torch.float64 else 1e-12
    torch.testing.assert_close(got.double(), exact, rtol=half_an_ulp * 1.01, atol=1e-6)


def test_a_matrix_stored_in_out_gets_the_transposed_delta() -> None:
    base = {"layers.0.up.weight": noise(IN, OUT)}
    weights = adapted(UP, base, fan_in_fan_out=True)
    expected = base["layers.0.up.weight"] + 2.0 * (B @ A).T
    torch.testing.assert_close(weights["layers.0.up.weight"], expected)
    torch.testing.assert_close(weights.get_slice("layers.0.up.weight")[3:9, ::2], expected[3:9, ::2])


class LoraLinear(nn.Module):
    """The reference: a layer that runs the two small matrices beside the large one."""

    def __init__(self, linear: nn.Module, scale: float, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.linear, self.scale, self.a, self.b = linear, scale, a, b

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.linear(rows) + self.scale * (rows @ self.a.T @ self.b.T)
        return out


def test_a_real_module_computes_what_its_adapted_layers_compute() -> None:
    def layers() -> nn.Sequential:
        return nn.Sequential(nn.Linear(IN, OUT), nn.GELU(), nn.Linear(OUT, IN, bias=False), nn.LayerNorm(IN))

    torch.manual_seed(3)
    plain = layers()
    up, down = pair("0", IN, OUT), pair("2", OUT, IN, rank=2)
    adapter = {**up, **down, f"{P}3.weight": noise(IN, seed=7), f"{P}0.base_layer.bias": noise(OUT, seed=9)}
    settings = {"rank_pattern": {"2": 2}, "modules_to_save": ["3"], "bias": "lora_only"}
    weights = adapted(adapter, plain.state_dict(), **settings)
    with torch.device("meta"):
        loaded = layers()
    loaded.load_state_dict(weights, strict=True, assign=True)

    plain[3].weight.data = adapter[f"{P}3.weight"]
    plain[0].bias.data = adapter[f"{P}0.base_layer.bias"]
    plain[0] = LoraLinear(plain[0], 8 / 4, up[f"{P}0.lora_A.weight"], up[f"{P}0.lora_B.weight"])
    plain[2] = LoraLinear(plain[2], 8 / 2, down[f"{P}2.lora_A.weight"], down[f"{P}2.lora_B.weight"])
    rows = noise(10, IN, seed=11)
    torch.testing.assert_close(loaded(rows), plain(rows))


def test_a_head_may_be_saved_whole_and_adapted_too() -> None:
    weights = adapted({**UP, f"{P}layers.0.up.base_layer.weight": noise(OUT, IN, seed=20)})
    expected = noise(OUT, IN, seed=20) + 2.0 * (B @ A)
    torch.testing.assert_close(weights["layers.0.up.weight"], expected)


@pytest.mark.slow
def test_only_what_is_changed_is_memory_of_the_worker() -> None:
    weights = adapted({**UP, f"{P}norm.weight": torch.ones(IN)}, modules_to_save=["norm"])
    for name in ("embed.weight", "layers.0.down.weight", "layers.0.up.bias"):
        assert weights[name].data_ptr() == weights.base[name].data_ptr()
    assert weights["norm.weight"].data_ptr() == weights.adapter[f"{P}norm.weight"].data_ptr()
    assert weights.changed == {"layers.0.up.weight", "norm.weight"}
    assert torch.equal(weights.base["layers.0.up.weight"], base_tensors()["layers.0.up.weight"])
    first = weights["layers.0.up.weight"]
    assert weights["layers.0.up.weight"] is first
    del first
    gc.collect()
    assert not weights._computed


def test_it_is_a_mapping_in_the_bases_order_with_the_bases_files() -> None:
    extra = {f"{P}classifier.weight": noise(2, IN), f"{P}classifier.bias": noise(2)}
    weights = adapted({**UP, **extra}, modules_to_save=["classifier"])
    assert list(weights) == [*base_tensors(), "classifier.weight", "classifier.bias"]
    assert len(weights) == 7
    assert "classifier.bias" in weights
    assert "classifier.lora_A.weight" not in weights
    assert weights.files == ("config.json",)
    assert weights.file("config.json") == b"{}"
    assert weights.get_slice("classifier.weight").get_shape() == [2, IN]
    assert weights.get_slice("layers.0.up.weight").get_dtype() == "F32"
    assert torch.equal(weights.get_slice("classifier.weight")[1:], extra[f"{P}classifier.weight"][1:])
    with pytest.raises(KeyError, match=r"no tensor 'layers.0.upp.weight'; it has 7, .* 'layers.0.up.weight'"):
        weights["layers.0.upp.weight"]


def test_numpy_arrays_have_the_addend_too() -> None:
    weights = adapted(UP)
    arrays = weights.numpy()
    assert list(arrays) == list(weights)
    for name, array in arrays.items():
        assert torch.equal(torch.tensor(array), weights[name])
        assert not array.flags.writeable


def test_a_slice_of_a_changed_matrix_is_a_slice_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora, "SCRATCH_BYTES", 4 * IN * 7)  # seven rows at a time
    weights = adapted(UP)
    whole = base_tensors()["layers.0.up.weight"] + 2.0 * (B @ A)
    part = weights.get_slice("layers.0.up.weight")
    torch.testing.assert_close(weights["layers.0.up.weight"], whole)
    torch.testing.assert_close(part[5:30:3, 2:], whole[5:30:3, 2:])
    torch.testing.assert_close(part[-1], whole[-1])


def test_a_tied_name_is_changed_alone() -> None:
    base = segment_of({"embed.weight": noise(16, IN)}, aliases={"head.weight": "embed.weight"})
    adapter = filled(segment_of(pair("head", IN, 16), config()))
    weights = AdaptedWeights(filled(base).attach(), adapter.attach())
    assert torch.equal(weights["embed.weight"], noise(16, IN))
    assert not torch.equal(weights["head.weight"], weights["embed.weight"])


def test_a_tensor_waits_for_its_three_matrices_and_for_no_others() -> None:
    base, adapter = segment_of(base_tensors()), filled(segment_of(UP, config()))
    up, down = (base.entries[f"layers.0.{name}.weight"] for name in ("up", "down"))
    assert up.offset < CHUNK < up.offset + up.size_bytes <= 2 * CHUNK < down.offset + down.size_bytes
    weights = AdaptedWeights(base.attach(), adapter.attach())
    base.fill(0)
    assert torch.equal(weights["embed.weight"], base_tensors()["embed.weight"])
    got: list[Tensor] = []
    reader = threading.Thread(target=lambda: got.append(weights["layers.0.up.weight"]))
    reader.start()
    assert not got
    base.fill(1)
    reader.join(30)
    torch.testing.assert_close(got[0], base_tensors()["layers.0.up.weight"] + 2.0 * (B @ A))
    assert not base.control.is_ready(2)


def test_an_adapter_that_fails_to_arrive_raises_its_own_error() -> None:
    adapter = segment_of(UP, config())
    adapter.control.fail("checksum_mismatch", "chunk 0 of the adapter")
    with pytest.raises(ChecksumMismatch, match="chunk 0 of the adapter"):
        AdaptedWeights(filled(segment_of(base_tensors())).attach(), adapter.attach())


@pytest.mark.parametrize(
    ("adapter", "changes", "message"),
    [
        (
            pair("layers.7.up", IN, OUT),
            {},
            r"changes module layers\.7\.up, and .* the nearest .* 'layers\.0\.up\.weight'",
        ),
        (pair("layers.0.up", OUT, IN), {}, r"makes \[24, 40\] for module .*, and layers\.0\.up\.weight is \[40, 24\]"),
        (pair("layers.0.up", IN, OUT, rank=3), {}, r"layers\.0\.up of the adapter has rank 3, .* says 4"),
        (pair("norm", IN, OUT), {}, r"norm\.weight is \[24\]"),
        ({name: tensor for name, tensor in UP.items() if "_A" in name}, {}, "has no lora_B.weight"),
        ({f"{P}embed.lora_embedding_A": noise(4, 16)}, {}, "embed.lora_embedding_A' of the adapter is of a kind"),
        (
            {**UP, f"{P}layers.0.up.lora_magnitude_vector": noise(OUT)},
            {},
            "lora_magnitude_vector' of the adapter is of a kind",
        ),
        ({**UP, f"{P}other.weight": noise(3)}, {}, r"replaces other\.weight, and the base has no other"),
        ({**UP, f"{P}norm.weight": noise(3)}, {}, r"replaces norm\.weight by \[3\], that of the base is \[24\]"),
        (UP, {"target_modules": ["down"]}, r"target_modules do not name layers\.0\.up"),
        (UP, {"use_dora": True}, "use_dora is not applied"),
        (UP, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (UP, {"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4' belongs to a base with other weights"),
        (UP, {"r": "four"}, "not a LoRA adapter's"),
        (UP, {"rank_pattern": {"up": 0}}, "a rank must be at least 1"),
        (UP, {"rank_pattern": {"(": 4}}, "is no regular expression"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_name(
    adapter: dict[str, Tensor], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointInvalid, match=message):
        adapted(adapter, **changes)


def test_a_base_in_eight_bits_is_refused() -> None:
    with pytest.raises(CheckpointInvalid, match=r"layers\.0\.up\.weight, which is stored as U8"):
        adapted(UP, {"layers.0.up.weight": torch.zeros(OUT, IN, dtype=torch.uint8)})


def test_a_checkpoint_that_is_no_adapter_is_refused() -> None:
    plain = filled(segment_of(base_tensors())).attach()
    with pytest.raises(CheckpointInvalid, match=r"no adapter_config\.json"):
        AdaptedWeights(plain, plain)


def test_a_worker_gets_its_base_with_the_adapter_applied(torch_functions: Functions) -> None:
    base, adapter = segment_of(base_tensors()), segment_of(UP, config())
    for segment in (base, adapter):
        segment.fill(*segment.chunks)
    worker = torch_functions.assigned(
        """
        class f:
            def load(self, weights):
                self.sums = {name: tensor.sum().item() for name, tensor in weights.items()}
            def __call__(self):
                return self.sums
        """,
        profile="torch",
        weights=CheckpointId("0" * 64),
        adapter=CheckpointId("1" * 64),
        segment=base.fds,
        adapter_segment=adapter.fds,
    )
    worker.ready()
    expected = {name: tensor.sum().item() for name, tensor in base_tensors().items()}
    delta = 2.0 * UP[f"{P}layers.0.up.lora_B.weight"] @ UP[f"{P}layers.0.up.lora_A.weight"]
    expected["layers.0.up.weight"] += delta.sum().item()
    assert worker.post().json() == pytest.approx(expected, abs=1e-3)


def test_an_adapter_that_fails_to_come_fails_the_start_with_its_own_error(torch_functions: Functions) -> None:
    base, adapter = segment_of(base_tensors()), segment_of(UP, config())
    base.fill(*base.chunks)
    adapter.control.fail("checksum_mismatch", "chunk 0 of the adapter")
    worker = torch_functions.assigned(
        "class f:\n    def load(self, weights): dict(weights)\n    def __call__(self): pass",
        profile="torch",
        weights=CheckpointId("0" * 64),
        adapter=CheckpointId("1" * 64),
        segment=base.fds,
        adapter_segment=adapter.fds,
    )
    assert worker.start_error().code == "checksum_mismatch"
