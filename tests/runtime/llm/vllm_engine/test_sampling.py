"""The platform's sampler in vLLM's batch: what was drawn stays drawn, and what vLLM discarded was not."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplerState, SamplingParams, sample
from fleetstart.runtime.llm.vllm_engine.sampling import RequestSampler, is_plain

DRAWN = SamplingParams(temperature=0.8, top_k=20, presence_penalty=0.4, seed=3)


def request(sampling: SamplingParams) -> Request:
    return Request(tokens=[1, 2], max_new_tokens=30, sampling=sampling)


def logits(step: int) -> torch.Tensor:
    return torch.randn(1, 50, generator=torch.Generator().manual_seed(step))


@given(before=st.integers(0, 5), discarded=st.lists(st.booleans(), min_size=8, max_size=8))
def test_tokens_are_those_of_one_uninterrupted_run(before: int, discarded: list[bool]) -> None:
    """The first `before` tokens come from another engine; after each True vLLM computes the step once more."""
    alone = SamplerState(DRAWN)
    wanted = [sample(logits(step), [alone])[0] for step in range(before + len(discarded))]
    sampler, outputs = RequestSampler.of(request(DRAWN), wanted[:before]), list[int]()
    for step, again in enumerate(discarded, before):
        if again:
            sample(logits(100 + step), [sampler.after(outputs)])
        outputs += sample(logits(step), [sampler.after(outputs)])
    assert outputs == wanted[before:]


@pytest.mark.parametrize(
    ("sampling", "plain"),
    [
        (SamplingParams(temperature=0.0), True),
        (SamplingParams(temperature=0.7, top_k=1), True),
        (SamplingParams(temperature=0.7), False),
        (SamplingParams(temperature=0.0, frequency_penalty=0.1), False),
        (SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)), False),
    ],
)
def test_vllm_takes_the_largest_logit_by_itself(sampling: SamplingParams, plain: bool) -> None:
    assert is_plain(request(sampling)) == plain
