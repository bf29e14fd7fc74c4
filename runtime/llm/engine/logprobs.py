"""Log probabilities of sampled tokens and of their best alternatives.

They are those of the model: of its logits before temperature, penalties, bias and constraints. So they are finite, and
the same for every way to sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log probability of one token of the output."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens with theirs, best first."""


def token_logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Log probability of a token and of the `top` likeliest.

    Shapes:  logits [vocab].
    """
    logprobs = torch.log_softmax(logits.double(), dim=0)
    best = torch.topk(logprobs, min(top, len(logprobs)))
    alternatives = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return TokenLogprob(token, float(logprobs[token]), tuple(alternatives))
