"""Weights loaded into torch modules on the meta device: the same numbers as the module itself, nothing left without."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from torch import Tensor, nn

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.weights.computed_tensors import lacking_tensors
from tests.runner.late import late
from tests.runtime.saved_models import segment_of, segment_of_folder

transformers = late("transformers")

EXAMPLES = Path(__file__).parents[3] / "examples"
WIDTH, WORDS = 8, 12


def frequencies(width: int, base: float) -> Tensor:
    return 1.0 / base ** (torch.arange(0, width, 2) / width)


class Rotary(nn.Module):
    """Keeps its arguments, so that it can be built again."""

    def __init__(self, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.width, self.base = width, base
        self.inv_freq: Tensor
        self.register_buffer("inv_freq", frequencies(width, base), persistent=False)
        self.original = self.inv_freq


class Resetting(nn.Module):
    """As torch asks of modules that are built without memory: `reset_parameters` makes all that is its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(width))
        self.mask: Tensor
        self.register_buffer("mask", torch.empty(width, width, dtype=torch.bool), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        with torch.no_grad():
            self.mask.copy_(torch.ones_like(self.mask).triu(1))


class Tied(nn.Module):
    def __init__(self, base: float = 500_000.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.rotary = Rotary(WIDTH, base)
        self.layers = nn.ModuleList([Resetting(WIDTH) for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        angles = torch.cat([self.rotary.inv_freq, self.rotary.original])
        hidden = self.embed(tokens) * torch.cos(angles)
        for layer in self.layers:
            assert isinstance(layer, Resetting)
            hidden = hidden @ torch.eye(WIDTH).masked_fill(layer.mask, 0.5) * layer.scale
        found: Tensor = self.head(self.drop(self.norm(hidden)))
        return found


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `folder()` writes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(scope="module")
def trained() -> Tied:
    torch.manual_seed(0)
    model = Tied()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    model(torch.randint(0, WORDS, (16,)))  # the batch norm's statistics
    return model.eval()


TOKENS = torch.tensor([3, 1, 4, 1, 5])


def on_meta(make: Any = Tied) -> Any:
    with torch.device("meta"):
        return make()


def test_a_model_on_the_meta_device_computes_the_same(trained: Tied) -> None:
    weights = segment_of(trained.state_dict()).attach()
    state = torch.random.get_rng_state()
    model = weights.load_into(on_meta())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not lacking_tensors(model)
    assert not model.training
    with torch.inference_mode():
        assert torch.equal(model(TOKENS), trained(TOKENS))


def test_nothing_is_copied_and_ties_stay(trained: Tied) -> None:
    weights = segment_of(trained.state_dict()).attach()
    model = weights.load_into(on_meta())
    assert model.head.weight is model.embed.weight
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == weights[name].data_ptr()


@pytest.mark.parametrize("name", ["head.weight", "embed.weight"])
def test_one_name_of_a_tied_parameter_is_enough(trained: Tied, name: str) -> None:
    tensors = {key: value for key, value in trained.state_dict().items() if key != name}
    model = segment_of(tensors).attach().load_into(on_meta())
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(TOKENS), trained(TOKENS))


def test_two_tensors_of_one_tied_parameter_are_refused(trained: Tied) -> None:
    weights = segment_of(trained.state_dict() | {"head.weight": torch.zeros(WORDS, WIDTH)}).attach()
    with pytest.raises(CheckpointInvalid, match=r"ties embed\.weight and head\.weight"):
        weights.load_into(on_meta())


def test_what_is_left_over_and_what_is_missing_is_named(trained: Tied) -> None:
    tensors = dict(trained.state_dict())
    del tensors["norm.bias"]
    weights = segment_of(tensors | {"extra.a": torch.zeros(1), "extra.b": torch.zeros(1)}).attach()
    with pytest.raises(CheckpointInvalid, match=r"has no extra\.a, extra\.b; it needs norm\.bias"):
        weights.load_into(on_meta())


def test_what_a_model_does_not_need_can_be_named(trained: Tied) -> None:
    weights = segment_of({**trained.state_dict(), "extra.a": torch.zeros(1)}).attach()
    with pytest.raises(CheckpointInvalid) as refused:
        weights.load_into(on_meta())
    assert 'unused=["extra.a"]' in refused.value.hint
    weights.load_into(on_meta(), unused=["extra.*"])


def test_names_that_differ_by_a_prefix_are_explained(trained: Tied) -> None:
    weights = segment_of({f"model.{name}": value for name, value in trained.state_dict().items()}).attach()
    with pytest.raises(CheckpointInvalid) as refused:
        weights.load_into(on_meta())
    assert "begin with 'model.'" in refused.value.hint


def test_a_shape_that_differs_is_named(trained: Tied) -> None:
    weights = segment_of({**trained.state_dict(), "norm.weight": torch.zeros(3)}).attach()
    with pytest.raises(CheckpointInvalid, match=r"norm\.weight: Tied has shape \[8\], the checkpoint has \[3\]"):
        weights.load_into(on_meta())


def test_an_old_files_batch_norm_lacks_its_counter(trained: Tied) -> None:
    tensors = {name: value for name, value in trained.state_dict().items() if "num_batches" not in name}
    model = segment_of(tensors).attach().load_into(on_meta())
    assert torch.equal(model(TOKENS), trained(TOKENS))


def test_a_model_that_has_its_memory_gets_the_weights_all_the_same(trained: Tied) -> None:
    model = segment_of(trained.state_dict()).attach().load_into(Tied())
    assert torch.equal(model(TOKENS), trained(TOKENS))


class Forgetful(nn.Module):
    """Computes a buffer from an argument that it does not keep."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("table", frequencies(width, 10.0), persistent=False)


class Halving(Forgetful):
    """Keeps another value than it was given."""

    def __init__(self, width: int = 4) -> None:
        super().__init__(width)
        self.width = width // 2


class Drawn(nn.Module):
    """Has a buffer of random numbers, other ones each time that it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("table", torch.randn(2), persistent=False)


class Uninitialised(nn.Module):
    """Has a buffer that only its forward fills."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("table", torch.empty(2), persistent=False)


class Half(nn.Module):
    """Fills one half, and leaves the other as it was."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.register_buffer("table", torch.empty(width), persistent=False)

    def reset_parameters(self) -> None:
        self.get_buffer("table")[:2] = 0


@pytest.mark.parametrize("make", [Forgetful, lambda: Halving(8), Drawn, Uninitialised, Half])
def test_a_value_that_cannot_be_made_is_named_and_never_guessed(make: Any) -> None:
    weights = segment_of(nn.ModuleDict({"line": nn.Linear(2, 2)}).state_dict()).attach()
    with pytest.raises(CheckpointInvalid, match=r"no values for .*: table") as refused:
        weights.load_into(on_meta(make))
    assert 'device="cpu"' in refused.value.hint


def test_a_checkpoint_may_have_what_cannot_be_made() -> None:
    table = torch.arange(2.0)
    line = {"line.weight": torch.zeros(2, 2), "line.bias": torch.zeros(2)}
    weights = segment_of({**line, "table": table}).attach()
    model = weights.load_into(on_meta(lambda: Forgetful(4)))
    assert torch.equal(model.get_buffer("table"), table)


def test_an_initialiser_does_not_touch_what_was_loaded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Module()
            self.inner.line = nn.Linear(2, 2)
            self.inner.register_buffer("numbers", torch.arange(5), persistent=False)

        def _init_weights(self, module: Any) -> None:
            if hasattr(module, "numbers"):
                nn.init.zeros_(module.line.weight)
                module.numbers.copy_(torch.arange(5))

    weight = torch.full((2, 2), math.pi)
    model = (
        segment_of({"inner.line.weight": weight, "inner.line.bias": torch.zeros(2)}).attach().load_into(on_meta(Model))
    )
    assert torch.equal(model.inner.line.weight, weight)
    assert model.inner.numbers.tolist() == [0, 1, 2, 3, 4]


FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {}, "roberta": {"max_position_embeddings": 66, "pad_token_id": 1}, "distilbert": {"dim": 32, "n_heads": 2},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2}, "llama": {}, "qwen2": {}, "mistral": {},
    "gemma": {"head_dim": 16}, "gemma2": {"head_dim": 16}, "phi3": {"pad_token_id": 0},
    "t5": {"d_model": 32, "d_kv": 16, "num_heads": 2, "d_ff": 64},
    "modernbert": {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
}  # fmt: skip
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 64, "num_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_of_transformers_compute_what_they_compute_there(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **(SMALL | FAMILIES[family]))
    transformers.AutoModel.from_config(config).save_pretrained(tmp_path)
    plain = transformers.AutoModel.from_pretrained(tmp_path)
    weights = segment_of_folder(tmp_path).attach()
    config = transformers.AutoConfig.from_pretrained(weights.folder())
    model = weights.load_into(on_meta(lambda: transformers.AutoModel.from_config(config)))
    tokens = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 3, 2, 1]])}
    if family == "t5":
        tokens["decoder_input_ids"] = tokens["input_ids"]
    with torch.inference_mode():
        assert torch.equal(model(**tokens).last_hidden_state, plain(**tokens).last_hidden_state)


@pytest.mark.slow
def test_the_embed_examples_model_has_transformers_numbers() -> None:
    folder = EXAMPLES / "embed" / "weights"
    if not (folder / "model.safetensors").exists():
        pytest.skip("no weights: make models")
    weights = segment_of_folder(folder).attach()
    config = transformers.AutoConfig.from_pretrained(weights.folder())
    model = weights.load_into(on_meta(lambda: transformers.AutoModel.from_config(config)))
    plain = transformers.AutoModel.from_pretrained(folder)
    texts = transformers.AutoTokenizer.from_pretrained(weights.folder())(
        ["a cat on a mat", "the derivative of a sine"], padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        difference = model(**texts).last_hidden_state - plain(**texts).last_hidden_state
    assert difference.abs().max() <= 1e-6


@pytest.mark.slow
def test_the_chat_examples_model_has_transformers_numbers_and_its_tie() -> None:
    folder = EXAMPLES / "chat" / "weights"
    if not (folder / "model.safetensors").exists():
        pytest.skip("no weights: make models")
    weights = segment_of_folder(folder).attach()
    config = transformers.AutoConfig.from_pretrained(weights.folder())
    model = weights.load_into(on_meta(lambda: transformers.AutoModelForCausalLM.from_config(config)))
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    tokens = torch.tensor([[1, 72, 1002, 31, 7]])
    with torch.inference_mode():
        assert (model(tokens).logits - plain(tokens).logits).abs().max() <= 1e-6
    assert model.lm_head.weight is model.model.embed_tokens.weight
