"""Matrices in int8 with a factor for each row, as compressed-tensors stores them ("int-quantized", by channel)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """Whole numbers, and what each row of them is multiplied by.

    Shapes:  weight [out, in] in int8; scale [out] in fp32.
    """

    weight: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scale.nbytes

    def dequantized(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The matrix as decoders in torch multiply with it: twice the memory in 16 bits."""
        weight, scale = (one.to(device=device, non_blocking=True) for one in (self.weight, self.scale))
        return (weight * scale[:, None]).to(dtype)


Matrix = Tensor | Int8Matrix
