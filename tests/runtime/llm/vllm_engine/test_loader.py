"""A start with vLLM says why it does not run a model or setting, and has the context that it says where it does."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidSpec
from fleetstart.runtime.llm.vllm_engine import loader
from fleetstart.runtime.llm.vllm_engine.engine import VllmEngine
from fleetstart.runtime.llm.vllm_engine.load_format import required_shape
from tests.runtime.llm.engine.test_inference_engine import SHAPE, alone, load, request
from tests.runtime.llm.models import Checkpoint, tiny, tokens_of

VLLM = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test"),
]


def with_config(weights: Checkpoint, **fields: Any) -> Checkpoint:
    """The model with these fields in its config.json; None: without the field."""
    config = msgspec.json.decode(weights.file("config.json")) | fields
    config = {name: value for name, value in config.items() if value is not None}
    return Checkpoint(dict(weights), weights._files | {"config.json": msgspec.json.encode(config)})


def phi3_of_long_contexts() -> Checkpoint:
    """Phi-3 that has learned 32 positions, and reaches 200 by its factors."""
    fused = dict(tiny(**SHAPE))
    for layer in range(SHAPE["num_hidden_layers"]):
        for name, parts in (
            ("self_attn.qkv", "self_attn.q self_attn.k self_attn.v"),
            ("mlp.gate_up", "mlp.gate mlp.up"),
        ):
            own = [fused.pop(f"model.layers.{layer}.{part}_proj.weight") for part in parts.split()]
            fused[f"model.layers.{layer}.{name}_proj.weight"] = torch.cat(own)
    rope = {"type": "longrope", "short_factor": [1.0] * 16, "long_factor": [1 + place / 8 for place in range(16)]}
    return with_config(
        Checkpoint(fused, tiny(**SHAPE)._files),
        model_type="phi3",
        architectures=["Phi3ForCausalLM"],
        max_position_embeddings=200,
        original_max_position_embeddings=32,
        rope_scaling=rope,
        pad_token_id=0,
    )


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 512, "seq_length": 128}, 128),
        ({"text_config": {"max_position_embeddings": 4096}}, 4096),
        ({"max_position_embeddings": None, "text_config": None}, None),
    ],
)
def test_positions_are_the_fewest_that_a_config_names(config: dict[str, Any], positions: int | None) -> None:
    assert loader.model_positions(config) == positions


@pytest.mark.parametrize("model", ["longrope", "two names"])
class TestContext:
    pytestmark = VLLM

    def test_an_answer_may_fill_the_context_of_a_model_that_has_less_than_the_function(self, model: str) -> None:
        """vLLM by itself has another context for them, at whose end it gave no token more, and the answer no end."""
        weights = phi3_of_long_contexts() if model == "longrope" else with_config(tiny(**SHAPE), seq_length=200)
        engine = load("vllm", weights, max_context_tokens=100_000).engine
        assert isinstance(engine, VllmEngine)
        assert engine.context_tokens == engine._vllm.model_config.max_model_len == 200
        deltas = alone(engine, request(140, 60))
        assert (len(tokens_of(deltas)), deltas[-1].finish) == (60, "length")
        if model == "longrope":
            native = load("native", weights, max_context_tokens=100_000).engine
            assert tokens_of(deltas) == tokens_of(alone(native, request(140, 60)))
        engine.close()


class Packed(torch.nn.Module):
    """A model as vLLM builds it: its vocabulary is padded, and q, k and v are one parameter."""

    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        embed: Any = torch.nn.Embedding(64, 8)
        embed.org_vocab_size = 60
        qkv_proj: Any = torch.nn.Linear(8, 16)
        qkv_proj.output_sizes = [8, 4, 4]
        self.embed, self.qkv_proj = embed, qkv_proj


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("embed.weight", (60, 8)),
        ("qkv_proj.weight", (16, 8)),
        ("k_proj.weight", (4, 8)),
        ("q_proj.bias", (8,)),
        ("o_proj.weight", None),
        ("qkv_proj.scale", None),
    ],
)
def test_the_shape_that_a_tensor_must_have_is_that_of_its_part(name: str, shape: tuple[int, ...] | None) -> None:
    for prefix in ("", "model."):
        model: Any = torch.nn.ModuleDict({"model": Packed()}) if prefix else Packed()
        model.packed_modules_mapping = Packed.packed_modules_mapping
        assert required_shape(model, prefix + name) == shape


class TestRefusals:
    pytestmark = VLLM

    def test_an_architecture_that_vllm_does_not_know_is_named(self) -> None:
        """Without the three hundred that it knows."""
        with pytest.raises(CheckpointInvalid, match=r"does not run this model: .*FooForCausalLM") as error:
            load("vllm", with_config(tiny(**SHAPE), architectures=["FooForCausalLM"]))
        assert len(error.value.message) < 400

    def test_a_model_type_that_transformers_does_not_know_is_named(self) -> None:
        with pytest.raises(CheckpointInvalid, match=r"does not run this model: .*model type `foo`"):
            load("vllm", with_config(tiny(**SHAPE), model_type="foo"))

    def test_a_context_beyond_the_one_that_vllm_derives_is_one_of_the_settings(self) -> None:
        weights = with_config(tiny(**SHAPE), max_position_embeddings=None)
        with pytest.raises(InvalidSpec, match="2048") as error:  # transformers' own default for a Llama
            load("vllm", weights, max_context_tokens=3000)
        assert error.value.hint == "change kv_memory or max_context"

    @pytest.mark.parametrize(
        ("name", "shape", "required"),
        [
            ("model.embed_tokens.weight", (266, 96), (258, 96)),
            ("model.layers.0.self_attn.k_proj.weight", (40, 96), (32, 96)),
            ("model.layers.0.self_attn.k_proj.weight", (24, 96), (32, 96)),
            ("model.layers.1.self_attn.o_proj.weight", (96, 104), (96, 96)),
            ("model.layers.1.mlp.up_proj.weight", (104, 96), (96, 96)),
            ("model.norm.weight", (97,), (96,)),
        ],
    )
    def test_a_tensor_of_another_shape_is_named_with_both_shapes(
        self, name: str, shape: tuple[int, ...], required: tuple[int, ...]
    ) -> None:
        """By itself vLLM leaves out rows of a k_proj and columns of an o_proj that are too many."""
        weights = tiny(**SHAPE)
        weights[name] = torch.zeros(shape, dtype=weights[name].dtype)
        with pytest.raises(CheckpointInvalid) as error:
            load("vllm", weights)
        assert error.value.message == f"tensor {name} has shape {list(shape)}, config.json requires {list(required)}"

    @pytest.mark.skipif(torch.cuda.is_available(), reason="GPUs have kernels for such heads")
    def test_heads_that_vllm_has_no_kernel_for_are_refused_at_the_start(self) -> None:
        """By itself it says so in a step: each call failed, and with `first` the native engine's streams."""
        with pytest.raises(CheckpointInvalid, match="it has heads of 16, and attention for 32, 64, "):
            load("vllm", tiny(**(SHAPE | {"num_attention_heads": 6, "head_dim": 16})))

    @pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.self_attn.o_proj.weight"])
    def test_a_checkpoint_without_a_tensor_is_refused_with_its_name(self, name: str) -> None:
        """vLLM would compute with what memory holds there."""
        weights = tiny(**SHAPE)
        del weights[name]
        with pytest.raises(CheckpointInvalid, match=f"does not fill LlamaForCausalLM; it lacks {name}"):
            load("vllm", weights)
