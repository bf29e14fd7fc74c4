"""Matrices that multiply the same input: one product where they lie one behind the other, as checkpoints have them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


class Projections:
    """Linear maps of one input, computed as one product where they can be: with few rows a device spends as long on the
    launch of a small one as on its arithmetic."""

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        """Shapes: weights [out, in] each, with its bias [out]."""
        self._weights, self._biases = list(weights), list(biases)
        self._order = sorted(range(len(weights)), key=lambda index: weights[index].data_ptr())
        self._heights = [weights[index].shape[0] for index in self._order]
        there = [bias for index in self._order if (bias := biases[index]) is not None]
        whole = adjacent([weights[index] for index in self._order])
        self._whole = whole if len(there) in (0, len(weights)) else None
        self._bias = torch.cat(there) if there and self._whole is not None else None

    @property
    def joined(self) -> bool:
        """True if they are one product."""
        return self._whole is not None

    def __call__(self, rows: Tensor) -> list[Tensor]:
        """Shapes: rows [n, in]. Returns [n, out] of each, which are parts of wider rows if they are `joined`."""
        if self._whole is None:
            pairs = zip(self._weights, self._biases, strict=True)
            return [functional.linear(rows, weight, bias) for weight, bias in pairs]
        parts = torch.split(functional.linear(rows, self._whole, self._bias), self._heights, dim=-1)
        return [part for _, part in sorted(zip(self._order, parts, strict=True), key=lambda pair: pair[0])]


def adjacent(matrices: Sequence[Tensor]) -> Tensor | None:
    """A view of matrices that lie one behind the other in one storage, as one matrix; None if they do not.

    Shapes:  [rows, width] each. Returns [all rows, width].
    """
    first = matrices[0]
    for before, after in itertools.pairwise(matrices):
        if (
            not (before.is_contiguous() and after.is_contiguous())
            or (before.dtype, before.shape[1]) != (after.dtype, after.shape[1])
            or before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr()
            or before.data_ptr() + before.nbytes != after.data_ptr()
        ):
            return None
    rows = sum(matrix.shape[0] for matrix in matrices)
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
