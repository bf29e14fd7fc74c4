"""First steps on a GPU, taken while most of the weights are still on their way.

A process's first steps load the kernels of its libraries one by one, which takes half a second on an H200. The first
layer and both ends of the model come first and launch the same kernels as a whole step.
"""

from __future__ import annotations

import torch

from ..engine.runner import Batch
from ..engine.sampler import SamplerState, SamplingParams, sample
from .torch_decoder import TorchDecoder

PROMPT_TOKENS = 40
"""Rows of the prompt's step: libraries choose a kernel by this number, and here it stands for short prompts."""
BLOCKS = 4
"""Blocks that the two steps need, of 16 tokens or more."""


@torch.inference_mode()
def take_first_steps(stage: TorchDecoder) -> None:
    """Computes a prompt and a token with a first stage, which has at least BLOCKS blocks, and samples greedily."""
    table = [list(range(BLOCKS))]
    steps = (
        Batch(
            tokens=[0] * PROMPT_TOKENS,
            positions=list(range(PROMPT_TOKENS)),
            starts=[0, PROMPT_TOKENS],
            tables=table,
            logits_rows=[],
        ),
        Batch(tokens=[0], positions=[PROMPT_TOKENS], starts=[0, 1], tables=table, logits_rows=[]),
    )
    for batch in steps:
        hidden = stage.forward(batch)
        sample(stage.logits(hidden[-1:]), [SamplerState(SamplingParams(temperature=0))])
