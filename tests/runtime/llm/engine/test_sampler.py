"""Draws follow the distribution that was asked for, and nothing but the sequence's own seed."""

from __future__ import annotations

import math
import warnings
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.llm.engine.sampler import SamplerState, SamplingParams, begin_draw, sample

DRAWS = 4000


def shares(logits: Tensor, params: SamplingParams) -> dict[int, float]:
    state = SamplerState(params)
    counts: Counter[int] = Counter()
    for _ in range(DRAWS):
        counts.update(sample(logits[None], [state]))
        state.counts.clear()
    return {token: count / DRAWS for token, count in counts.items()}


def test_zero_temperature_and_top_k_one_take_the_best() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    states = [SamplerState(SamplingParams(temperature=0)), SamplerState(SamplingParams(top_k=1))]
    assert sample(logits, states) == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_shares_are_those_of_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    wanted = torch.softmax(logits / temperature, 0)
    got = shares(logits, SamplingParams(temperature=temperature, seed=5))
    for token, share in enumerate(wanted.tolist()):
        # Five standard deviations of a binomial.
        assert abs(got.get(token, 0.0) - share) < 5 * math.sqrt(share * (1 - share) / DRAWS)


@pytest.mark.slow
def test_top_p_keeps_the_smallest_set_that_reaches_it_in_its_own_proportions() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.05, 0.35]))
    got = shares(logits, SamplingParams(top_p=0.8, seed=2))
    assert set(got) == {1, 3}
    assert abs(got[1] - 0.5 / 0.85) < 0.05
    assert set(shares(logits, SamplingParams(top_p=0.01, seed=2))) == {1}
    assert set(shares(logits, SamplingParams(top_p=0.9999999, seed=2))) == {0, 1, 2, 3}


@pytest.mark.slow
def test_top_p_is_exact_also_where_many_tokens_are_needed() -> None:
    logits = torch.zeros(3000)
    logits[0] = 8.0
    assert len(shares(logits, SamplingParams(top_p=0.2, seed=1))) == 1
    many = shares(logits, SamplingParams(top_p=0.9, seed=1))
    assert len(many) > 512


@pytest.mark.slow
def test_top_k_keeps_k() -> None:
    logits = torch.tensor([1.0, 4.0, 2.0, 3.0])
    assert set(shares(logits, SamplingParams(temperature=2.0, top_k=2, seed=0))) == {1, 3}
    assert set(shares(logits, SamplingParams(temperature=2.0, top_k=99, seed=0))) == {0, 1, 2, 3}
    assert set(shares(logits, SamplingParams(temperature=2.0, top_k=3, top_p=0.5, seed=0))) <= {1, 3}


def test_top_p_is_applied_once() -> None:
    """Of a hundred equal tokens, 89.5% are ninety: applied again to these, it would leave eighty-one."""
    assert len(shares(torch.zeros(100), SamplingParams(top_p=0.895, seed=3))) == 90


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-4, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 40, 5000]),
    top_p=st.sampled_from([1.0, 1.0, 0.01, 0.5, 0.95, 0.9999]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    logit_bias=st.sampled_from([(), ((3, 4.0),)]),
    seed=st.integers(0, 1000),
)


@settings(max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=8), st.sampled_from([5, 700]), st.integers(0, 100))
def test_a_device_draws_all_rows_at_once_and_as_the_host_does(
    params: list[SamplingParams], vocab: int, seed: int
) -> None:
    noise = torch.Generator().manual_seed(seed)
    ours, theirs = ([SamplerState(one) for one in params] for _ in range(2))
    for _ in range(4):
        logits = torch.randn(len(params), vocab, generator=noise) * 3
        needs_host = any(state.penalised for state in ours)
        draw = begin_draw(logits, ours, on_device=True)
        got = draw.finish()
        assert got == sample(logits, theirs)
        assert (draw.tokens is None) is needs_host
        assert draw.tokens is None or draw.tokens.tolist() == got


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_waits_for_no_draw_before_it_finishes() -> None:
    params = [SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(seed=2, top_p=0.9, top_k=40)]
    logits = torch.randn(len(params), 700, generator=torch.Generator().manual_seed(1)).cuda()
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, as torch says
            torch.cuda.set_sync_debug_mode("error")
        draw = begin_draw(logits, [SamplerState(one) for one in params], on_device=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert draw.tokens is not None
    assert draw.finish() == sample(logits.cpu(), [SamplerState(one) for one in params])


def test_penalties_push_down_what_was_said() -> None:
    logits = torch.tensor([[2.0, 1.9, 0.0]])
    state = SamplerState(SamplingParams(temperature=0, presence_penalty=0.5))
    assert [sample(logits, [state])[0] for _ in range(4)] == [0, 1, 0, 0]
    state = SamplerState(SamplingParams(temperature=0, frequency_penalty=0.5))
    assert [sample(logits, [state])[0] for _ in range(4)] == [0, 1, 0, 1]
    state = SamplerState(SamplingParams(temperature=0, presence_penalty=-2.0))
    assert [sample(torch.tensor([[2.0, 1.9, 0.0]]), [state])[0] for _ in range(3)] == [0, 0, 0]


@settings(max_examples=50, deadline=None)
@given(
    temperature=st.floats(0.01, 2.0),
    top_p=st.floats(0.05, 1.0),
    top_k=st.integers(0, 20),
    seed=st.integers(0, 2**63),
    neighbours=st.integers(0, 3),
)
def test_a_seed_gives_the_same_draws_whatever_is_beside(
    temperature: float, top_p: float, top_k: int, seed: int, neighbours: int
) -> None:
    logits = torch.randn(neighbours + 1, 50, generator=torch.Generator().manual_seed(seed % 1000)) * 3
    before = logits.clone()
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    alone, beside = SamplerState(params), SamplerState(params)
    others = [SamplerState(SamplingParams(temperature=1.3)) for _ in range(neighbours)]
    for _ in range(8):
        assert sample(logits[:1], [alone])[0] == sample(logits, [beside, *others])[0]
    assert torch.equal(logits, before)


def test_tiny_temperatures_and_great_logits_stay_finite() -> None:
    logits = torch.tensor([[1e4, -1e4, 9.9e3]])
    for top_p in (1.0, 0.9):
        assert sample(logits, [SamplerState(SamplingParams(temperature=1e-6, top_p=top_p))]) == [0]


def test_negative_seeds_are_seeds_of_their_own() -> None:
    draws = {seed: SamplerState(SamplingParams(seed=seed)).generator.random() for seed in (-7, -1, 0, 1, 7)}
    assert len(set(draws.values())) == 5


def test_unseeded_sequences_differ() -> None:
    logits = torch.zeros(1, 1000)
    first, second = (SamplerState(SamplingParams()) for _ in range(2))
    assert [sample(logits, [first])[0] for _ in range(8)] != [sample(logits, [second])[0] for _ in range(8)]


def test_a_bias_is_added_to_its_own_row_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [0.0, 3.0, 1.0]])
    before = logits.clone()
    biased = SamplingParams(temperature=0, logit_bias=((1, -100.0), (2, 1.5)))
    assert sample(logits, [SamplerState(SamplingParams(temperature=0)), SamplerState(biased)]) == [1, 2]
    assert torch.equal(logits, before)


def test_a_bias_moves_the_shares() -> None:
    logits = torch.tensor([1.0, 0.0, -1.0])
    wanted = torch.softmax(torch.tensor([1.0, 2.0, -101.0]), 0)
    got = shares(logits, SamplingParams(seed=5, logit_bias=((1, 2.0), (2, -100.0))))
    assert 2 not in got
    assert abs(got[1] - float(wanted[1])) < 0.05
