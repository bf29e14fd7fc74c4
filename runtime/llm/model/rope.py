"""Rotary frequencies, in fp32 as in training.

A deployment's context decides where a scaling depends on length (dynamic, longrope): so a sequence keeps its
frequencies while it grows, cached keys stay valid, and a stream that is resumed continues with the same.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...contract.weights.rope_config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
)


def inverse_frequencies(rope: Rope, context_tokens: int) -> Tensor:
    """Inverse frequencies in radians a position, one for each pair of rotated numbers: [rotary_dim / 2], fp32."""
    frequencies = _plain(rope.theta, rope.rotary_dim)
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case DynamicScaling() as scaling:
            return _plain(_dynamic_base(rope, scaling, context_tokens), rope.rotary_dim)
        case YarnScaling() as scaling:
            return _yarn(rope, scaling)
        case LongRopeScaling() as scaling:
            is_long = context_tokens > scaling.original_positions
            factors = torch.tensor(scaling.long_factors if is_long else scaling.short_factors)
            return 1.0 / (factors * rope.theta ** _exponents(rope.rotary_dim))
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling)


def _exponents(rotary_dim: int) -> Tensor:
    return torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim


def _plain(theta: float, rotary_dim: int) -> Tensor:
    return 1.0 / (theta ** _exponents(rotary_dim))


def _dynamic_base(rope: Rope, scaling: DynamicScaling, context_tokens: int) -> float:
    """Base for a context: that of training within it, and with it the longest wave stretched as far as needed."""
    growth = max(context_tokens, scaling.original_positions) / scaling.original_positions
    stretch = scaling.factor * growth - (scaling.factor - 1)
    return float(rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2)))


def _yarn(rope: Rope, scaling: YarnScaling) -> Tensor:
    """Frequencies divided by `factor` where a wave turns seldom in the original context, blended by a ramp."""

    def pair(turns: float) -> float:
        """Index of the pair whose wave turns that often in the original context."""
        waves = math.log(scaling.original_positions / (turns * 2 * math.pi))
        return rope.rotary_dim * waves / (2 * math.log(rope.theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001  # a step instead of a ramp
    ramp = torch.clamp((torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / width, 0, 1)
    waves = rope.theta ** _exponents(rope.rotary_dim)
    kept = 1 - ramp
    return 1.0 / (scaling.factor * waves) * (1 - kept) + 1.0 / waves * kept


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Scales frequencies as Llama 3.1: long waves by `factor`, short ones not, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = scaling.original_positions / scaling.low_freq_factor
    high_wavelength = scaling.original_positions / scaling.high_freq_factor
    blend = (scaling.original_positions / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    slowed = torch.where(wavelengths > low_wavelength, frequencies / scaling.factor, frequencies)
    between = (wavelengths >= high_wavelength) & (wavelengths <= low_wavelength)
    return torch.where(between, blended, slowed)
