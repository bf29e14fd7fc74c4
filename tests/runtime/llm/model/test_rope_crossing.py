"""Streams that cross the model's original context: the frequencies of the deployment's context, from the first token to
the last.

transformers changes the frequencies when a sequence crosses it, and keeps keys that were cached with the others; its
numbers before the crossing are those of shorter contexts. A model whose frequencies are fixed at those of the long
context is the reference: the whole stream is equal to it, token for token, and past the crossing to transformers' own
model when that computes all of the sequence anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from tests.runtime.llm.batches import batch_of, some_tokens, table
from tests.runtime.llm.families import CASES, SHAPE, family_model
from tests.runtime.llm.models import engine, native, plain, run, tokens_of

HEAD_DIM = SHAPE["hidden_size"] // SHAPE["num_attention_heads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    case: str
    original: int
    """Positions before the scaling."""
    context: int
    """Of the deployment."""
    prompt: int
    tokens: int
    fixed: dict[str, Any]
    """Rotary settings that give the frequencies of that context at any length."""


def _stretched(theta: float, factor: float, growth: float) -> float:
    return float(theta * (factor * growth - (factor - 1)) ** (HEAD_DIM / (HEAD_DIM - 2)))


_LONG = CASES["phi3, longrope"]["rope_parameters"]
CROSSINGS = [
    Crossing(
        case="phi3, longrope", original=32, context=512, prompt=20, tokens=40,
        fixed=_LONG | {"short_factor": _LONG["long_factor"]},
    ),
    Crossing(
        case="llama, dynamic", original=512, context=600, prompt=500, tokens=40,
        fixed={"rope_type": "default", "rope_theta": _stretched(10000.0, 2.0, 600 / 512)},
    ),
]  # fmt: skip


def fixed_model(crossing: Crossing) -> Any:
    """transformers' model with the same weights, and frequencies that do not depend on the length."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**(SHAPE | CASES[crossing.case] | {"rope_parameters": crossing.fixed}))
    config._attn_implementation = "eager"
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(family_model(crossing.case).theirs.state_dict())
    return model


@pytest.mark.parametrize("decoder", [native, plain])
@pytest.mark.parametrize("crossing", CROSSINGS, ids=[crossing.case for crossing in CROSSINGS])
def test_a_stream_keeps_its_frequencies_across_the_original_context(crossing: Crossing, decoder: Any) -> None:
    model, prompt = family_model(crossing.case), some_tokens(crossing.prompt)
    assert crossing.prompt < crossing.original < crossing.prompt + crossing.tokens
    asked = Request(
        tokens=prompt, max_new_tokens=crossing.tokens, sampling=SamplingParams(temperature=0), ignore_eos=True
    )
    subject = engine(model.weights, decoder(model.weights, context=crossing.context), context_tokens=crossing.context)
    got = tokens_of(run(subject, [asked])[0])
    with torch.inference_mode():
        logits = fixed_model(crossing)(torch.tensor([prompt + got[:-1]]), use_cache=False).logits[0]
    assert got == logits[-crossing.tokens :].argmax(-1).tolist()


@pytest.mark.parametrize("crossing", CROSSINGS, ids=[crossing.case for crossing in CROSSINGS])
def test_transformers_computes_with_other_frequencies_before_the_crossing_and_with_these_after_it(
    crossing: Crossing,
) -> None:
    """The difference that docs/models.md states: a sequence within the original context, in a deployment for more."""
    model = family_model(crossing.case)
    for length, same in ((crossing.prompt, False), (crossing.context, True)):
        tokens = some_tokens(length)
        with torch.inference_mode():
            theirs = model.theirs(torch.tensor([tokens]), use_cache=False).logits[0, -1:]
        subject = native(model.weights, context=crossing.context)
        ours = subject.forward(batch_of([(tokens, 0, table(0, length))]))
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4) is same
