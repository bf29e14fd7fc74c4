"""Matrices in int8: the native decoder multiplies by them where they lie, those in torch by what they stand for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.llm.model.int8_matrix import Int8Matrix
from fleetstart.runtime.llm.model.layers import gather
from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from fleetstart.runtime.llm.model.shard import Shard
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.batches import ISAS, batch_of, some_tokens, steps, table
from tests.runtime.llm.models import (
    ROOT,
    Checkpoint,
    config_of,
    in_int8,
    native,
    plain,
    real_model,
    stage_of,
    tiny,
)


def widened(weights: Checkpoint) -> Checkpoint:
    """The checkpoint with the matrices that those in int8 stand for."""
    tensors: dict[str, Tensor] = {name: tensor for name, tensor in weights.items() if not name.endswith("_scale")}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.int8:
            tensors[name] = tensor.float() * weights[name + "_scale"].float()
    files = {name: weights.file(name) for name in weights.names()}
    config = msgspec.json.decode(files["config.json"])
    config.pop("quantization_config")
    return Checkpoint(tensors, files | {"config.json": msgspec.json.encode(config)})


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 48},
        {"hidden_size": 1552, "intermediate_size": 1600, "num_hidden_layers": 1},
    ],
    ids=["tiny", "one kv head", "long rows"],
)
def test_the_native_decoder_multiplies_by_what_they_stand_for(isa: str, changes: dict[str, Any]) -> None:
    weights = in_int8(tiny(dtype=torch.float32, **changes))
    wide = changes.get("hidden_size", 64) > 1000
    for got, wanted in zip(steps(native(weights, isa=isa)), steps(plain(widened(weights))), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3 if wide else 2e-4, atol=2e-2 if wide else 2e-4)


def test_a_decoder_in_torch_widens_them() -> None:
    weights = in_int8(tiny(dtype=torch.float32))
    for got, wanted in zip(steps(plain(weights)), steps(plain(widened(weights))), strict=True):
        torch.testing.assert_close(got, wanted)


def test_two_stages_give_the_bits_of_the_whole_model() -> None:
    weights = in_int8(tiny())
    batch = batch_of([(some_tokens(40), 0, table(0, 40))], every_row=True)
    first, last = (
        NativeDecoder(
            config_of(weights),
            stage_of(weights, begin, end),
            kv_dtype="fp32",
            block_count=8,
            block_tokens=16,
            threads=1,
        )
        for begin, end in ((0, 2), (2, 3))
    )
    assert torch.equal(first.logits(last.forward(batch, first.forward(batch))), native(weights).forward(batch))


def test_a_shard_has_its_part_of_them() -> None:
    """Rows with their factors; of matrices that are split by columns all factors."""
    weights = in_int8(tiny())
    whole = stage_of(weights).layers[0]
    config = config_of(weights)
    parts = [gather(weights, config, 0, config.layer_count, Shard(rank, 2)).layers[0] for rank in range(2)]
    for name, by_columns in (("q", False), ("up", False), ("o", True), ("down", True)):
        wanted, got = getattr(whole, name), [getattr(part, name) for part in parts]
        assert all(isinstance(one, Int8Matrix) for one in (wanted, *got))
        assert torch.equal(torch.cat([one.weight for one in got], int(by_columns)), wanted.weight)
        scales = got[0].scale if by_columns else torch.cat([one.scale for one in got])
        assert torch.equal(scales, wanted.scale)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda one: one.pop("model.layers.1.mlp.up_proj.weight_scale"), r"no tensor .*up_proj.weight_scale"),
        (
            lambda one: one.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
            r"up_proj.weight_scale has shape \[1\], config.json requires \[96, 1\]",
        ),
        (
            lambda one: one.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            "model.norm.weight is torch.int8",
        ),
    ],
    ids=["no factors", "factors of another shape", "a norm"],
)
def test_what_does_not_fit_is_refused_by_name(spoil: Any, said: str) -> None:
    weights = in_int8(tiny())
    spoil(weights)
    with pytest.raises(CheckpointInvalid, match=said):
        stage_of(weights)


def test_int8_that_config_json_does_not_declare_is_refused() -> None:
    weights = in_int8(tiny())
    files = {name: weights.file(name) for name in weights.names()}
    with pytest.raises(CheckpointInvalid, match=r"q_proj\.weight is torch\.int8: store fp16, bf16 or fp32"):
        stage_of(Checkpoint(dict(weights), files | {"config.json": tiny().file("config.json")}))


@pytest.mark.slow
def test_the_real_model_still_says_nearly_the_same() -> None:
    weights = real_model()
    text, tokenizer = (ROOT / "README.md").read_text()[:1000], Tokenizer(weights.file("tokenizer.json"))
    tokens = tokenizer.encode(text, add_special_tokens=False)[:200]
    batch = batch_of([(tokens, 0, table(0, len(tokens)))], every_row=True)
    wanted = native(weights).forward(batch).clone()
    got = native(in_int8(weights)).forward(batch)
    assert (got.argmax(-1) == wanted.argmax(-1)).float().mean() > 0.9
    targets = torch.tensor(tokens[1:])
    got_nats, wanted_nats = (functional.cross_entropy(logits[:-1], targets) for logits in (got, wanted))
    assert abs(float(got_nats - wanted_nats)) < 0.05
