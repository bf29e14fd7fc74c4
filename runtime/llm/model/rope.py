"""Rotary frequencies, in fp32 as in training."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...contract.weights.llama_config import LlamaConfig, RopeScaling


def inverse_frequencies(config: LlamaConfig) -> Tensor:
    """Inverse frequencies in radians a position, one for each pair of a head's numbers: [head_dim / 2], fp32."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    frequencies = 1.0 / (config.rope_theta**exponents)
    return frequencies if config.rope_scaling is None else _stretch(frequencies, config.rope_scaling)


def _stretch(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
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
