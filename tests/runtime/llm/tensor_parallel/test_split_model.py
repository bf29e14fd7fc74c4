"""A model over two ranks: the tokens of one device, from each rank's part of the weights alone."""

from __future__ import annotations

import pytest
import torch

from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.shard import Shard
from tests.runtime.llm.batches import some_tokens
from tests.runtime.llm.families import FAMILIES, family_model
from tests.runtime.llm.model.test_adapters import adapted, adapter_of
from tests.runtime.llm.models import Checkpoint, engine, plain, run, tiny, tokens_of
from tests.runtime.llm.ranks import split_engine

PROMPTS = [some_tokens(3, 1), some_tokens(41, 2), some_tokens(17, 3)]
GREEDY = SamplingParams(temperature=0.0)
FUSED = {"qkv_proj": (64, 32, 32), "gate_up_proj": (96, 96)}
"""Heights of the matrices that Phi-3 stores as one."""


def requests(temperature: float) -> list[Request]:
    return [
        Request(tokens=prompt, max_new_tokens=20, sampling=SamplingParams(temperature=temperature, seed=index))
        for index, prompt in enumerate(PROMPTS)
    ]


def only_part(whole: Checkpoint, shard: Shard) -> Checkpoint:
    """The weights with every number outside the shard's part not a number: whatever reads one becomes none, too."""
    tensors = {}
    for name, tensor in whole.items():
        kind = name.split(".")[-2]
        kept = torch.zeros(tensor.shape, dtype=torch.bool)
        if kind in FUSED:
            begin = 0
            for height in FUSED[kind]:
                part = shard.part(height)
                kept[begin + part.start : begin + part.stop] = True
                begin += height
        elif "norm" in kind or (name.endswith("bias") and kind in ("o_proj", "down_proj")):
            kept[:] = True
        elif kind in ("o_proj", "down_proj"):
            kept[:, shard.part(tensor.shape[1])] = True
        else:
            kept[shard.part(tensor.shape[0])] = True
        tensors[name] = tensor.masked_fill(~kept, float("nan"))
    return Checkpoint(tensors, whole._files)


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "drawn"])
@pytest.mark.parametrize("case", [*FAMILIES, "llama, biased", "gemma3, softcaps"])
def test_tokens_are_those_of_one_device(case: str, temperature: float) -> None:
    weights = family_model(case).weights
    wanted = [tokens_of(one) for one in run(engine(weights, plain(weights), token_budget=24), requests(temperature))]
    with split_engine(lambda shard: only_part(weights, shard), 2) as split:
        assert [tokens_of(one) for one in run(split, requests(temperature))] == wanted
    assert all(wanted)


def test_a_prompts_beginning_is_kept_in_every_rank() -> None:
    weights = family_model("llama").weights
    head = some_tokens(64, 7)
    asked = [Request(tokens=head + some_tokens(5, seed), max_new_tokens=12, sampling=GREEDY) for seed in (8, 9)]
    wanted = [tokens_of(one) for one in run(engine(weights, plain(weights)), asked)]
    with split_engine(lambda shard: weights, 2) as split:
        got = [run(split, [one])[0] for one in asked]
    assert [tokens_of(one) for one in got] == wanted
    assert [max(delta.cached_tokens for delta in one) for one in got] == [0, 64]


def test_embeddings_are_those_of_one_device() -> None:
    weights = family_model("qwen3").weights
    asked = [Request(tokens=prompt, max_new_tokens=0, embeds=True) for prompt in PROMPTS]
    wanted = [one[-1].embedding for one in run(engine(weights, plain(weights)), asked)]
    with split_engine(lambda shard: only_part(weights, shard), 2) as split:
        got = [one[-1].embedding for one in run(split, asked)]
    torch.testing.assert_close(torch.tensor(got), torch.tensor(wanted), rtol=1e-4, atol=1e-4)


def test_an_adapter_gives_the_tokens_of_one_device() -> None:
    """Its matrices are computed, and each rank takes its part of them."""
    base = tiny()
    weights = adapted(base, adapter_of(base))
    wanted = [tokens_of(one) for one in run(engine(weights, plain(weights), token_budget=24), requests(0.0))]
    with split_engine(lambda shard: weights, 2) as split:
        assert [tokens_of(one) for one in run(split, requests(0.0))] == wanted
    assert wanted != [tokens_of(one) for one in run(engine(base, plain(base), token_budget=24), requests(0.0))]


def test_three_ranks_share_a_vocabulary_that_they_do_not_divide() -> None:
    weights = tiny(vocab_size=259, num_attention_heads=6, num_key_value_heads=3, tie_word_embeddings=False)
    wanted = [tokens_of(one) for one in run(engine(weights, plain(weights), token_budget=24), requests(0.0))]
    with split_engine(lambda shard: only_part(weights, shard), 3) as split:
        assert [tokens_of(one) for one in run(split, requests(0.0))] == wanted


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_arithmetic_gives_answers(dtype: str) -> None:
    """Rounding differs from one device's, as sums are of other parts: the tokens may, too."""
    weights = family_model("llama").weights
    with split_engine(lambda shard: weights, 2, dtype=dtype) as split:
        assert all(len(tokens_of(one)) > 0 for one in run(split, requests(0.0)))
