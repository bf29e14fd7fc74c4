"""Projections of one input are one product where their matrices lie one behind the other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from fleetstart.runtime.llm.model.projections import Projections, adjacent

WIDTH = 16


def matrices(heights: list[int], *, gap: int = 0, width: int = WIDTH) -> list[Tensor]:
    """Matrices of one storage, each `gap` numbers behind the one before."""
    size = sum(height * width + gap for height in heights)
    memory = torch.randn(size, generator=torch.Generator().manual_seed(1))
    ends = list(itertools.accumulate((height * width + gap for height in heights), initial=0))
    return [memory[begin : begin + height * width].view(height, width)
            for begin, height in zip(ends, heights, strict=False)]  # fmt: skip


@given(
    heights=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    biased=st.booleans(),
)
def test_results_are_in_the_order_of_the_matrices(heights: list[int], order: random.Random, biased: bool) -> None:
    weights = matrices(heights)
    order.shuffle(weights)
    biases = [torch.randn(len(weight)) if biased else None for weight in weights]
    subject, rows = Projections(weights, biases), torch.randn(3, WIDTH)
    assert subject.joined
    for got, weight, bias in zip(subject(rows), weights, biases, strict=True):
        torch.testing.assert_close(got, functional.linear(rows, weight, bias))


def test_a_joined_matrix_is_no_copy() -> None:
    first, second = matrices([4, 2])
    whole = adjacent([first, second])
    assert whole is not None
    assert whole.shape == (6, WIDTH)
    assert whole.data_ptr() == first.data_ptr()
    second.fill_(7.0)
    assert (whole[4:] == 7.0).all()


@pytest.mark.parametrize(
    "apart",
    [
        matrices([4, 2], gap=1),
        [torch.zeros(4, WIDTH), torch.zeros(2, WIDTH)],
        [matrices([4, 2])[0], matrices([4, 2])[1].half()],
        [matrices([4])[0][:2], matrices([4], width=2 * WIDTH)[0][2:]],
        [matrices([4, 4])[0], matrices([4, 4])[1].t()],
        list(reversed(matrices([4, 2]))),
    ],
    ids=["gap", "storages", "dtypes", "widths", "transposed", "order"],
)
def test_others_are_not_joined(apart: list[Tensor]) -> None:
    assert adjacent(apart) is None


def test_matrices_of_which_one_has_a_bias_stay_apart() -> None:
    weights, rows = matrices([4, 2]), torch.randn(3, WIDTH)
    subject = Projections(weights, [torch.ones(4), None])
    assert not subject.joined
    torch.testing.assert_close(subject(rows)[0], functional.linear(rows, weights[0]) + 1)
