"""Products of the native decoder in bf16: numbers are rounded to it and summed in fp32, for models stored in it."""

from __future__ import annotations

from typing import Literal

import msgspec
import pytest
import torch
from torch import Tensor

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.llm.model.layers import rms_norm
from fleetstart.runtime.llm.model.loader import decoder_builder
from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from tests.runtime.llm.batches import HAS_AMX, batch_of, some_tokens, table
from tests.runtime.llm.families import FAMILIES, family_model
from tests.runtime.llm.models import Checkpoint, native, tiny

needs_amx = pytest.mark.skipif(not HAS_AMX, reason="needs AMX")


def stored_in(weights: Checkpoint, dtype: torch.dtype, name: str) -> Checkpoint:
    """The same weights, rounded and declared."""
    fields = msgspec.json.decode(weights.file("config.json")) | {"torch_dtype": name}
    files = {**weights._files, "config.json": msgspec.json.encode(fields)}
    return Checkpoint({key: tensor.to(dtype) for key, tensor in weights.items()}, files)


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [n, k] times matrix [m, k], both rounded to bf16, exactly."""
    return (rows.bfloat16().double() @ matrix.bfloat16().double().T).float()


@needs_amx
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden_size", [64, 112, 2080, 4096 + 48], ids=lambda width: f"width {width}")
@pytest.mark.parametrize("rows", [1, 16, 33, 300], ids=lambda rows: f"{rows} rows")
def test_products_are_those_of_rounded_numbers(dtype: torch.dtype, hidden_size: int, rows: int) -> None:
    weights = tiny(dtype=dtype, hidden_size=hidden_size, num_hidden_layers=1, intermediate_size=96, vocab_size=301)
    hidden = torch.randn(rows, hidden_size, generator=torch.Generator().manual_seed(rows))
    got = native(weights, isa="amx", threads=2).logits(hidden)
    normed = rms_norm(hidden, weights["model.norm.weight"].float(), 1e-5)
    wanted = product(normed, weights["model.embed_tokens.weight"])
    # The norm's last bit can round to another number in bf16, here and there.
    assert (got - wanted).abs().mean() < 2e-4 * wanted.std()
    assert (got - wanted).abs().max() < 0.02 * wanted.std()


@needs_amx
@pytest.mark.parametrize("case", FAMILIES)
def test_logits_stay_close_to_those_in_fp32(case: str) -> None:
    weights = stored_in(family_model(case).weights, torch.bfloat16, "bfloat16")
    batch = batch_of([(some_tokens(40), 0, table(0, 40))], every_row=True)
    wanted = native(weights).forward(batch)
    got = native(weights, isa="amx").forward(batch)
    assert (got - wanted).abs().mean() < 0.03 * wanted.std()


@pytest.mark.parametrize(
    ("stored", "dtype", "in_bf16"),
    [("bfloat16", "bf16", True), ("bfloat16", "auto", True), ("bfloat16", "fp32", False), ("float16", "bf16", False)],
)
def test_only_weights_that_are_stored_in_bf16_are_multiplied_in_it(
    stored: str, dtype: Literal["fp32", "bf16", "auto"], in_bf16: bool
) -> None:
    weights = stored_in(tiny(), getattr(torch, stored), stored)
    settings = LLMSettings(dtype=dtype, kv_memory_bytes=MIB, max_context_tokens=64)
    decoder = decoder_builder(weights, settings, threads=1, device="cpu").whole()
    assert isinstance(decoder, NativeDecoder)
    assert (decoder.isa == "amx") is (in_bf16 and HAS_AMX)
