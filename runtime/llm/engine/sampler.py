"""Sampler: chooses the next token from logits, greedily or with temperature, top-k, top-p, penalties,
biases and grammars.

A draw uses one uniform number of the sequence's own generator, and depends on nothing else in the batch:
the same seed gives the same text, alone or among others, and after a preemption.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .constraint import Constraint, TokenMatcher, masked

TOP_CANDIDATES = 512
"""Logits sorted at first for top-p; a full sort of a vocabulary costs milliseconds and is rarely needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 keep every token."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and what is added to its logit."""
    seed: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1


@dataclass(slots=True)
class SamplerState:
    """Sampling state of one sequence: token counts and random generator."""

    params: SamplingParams
    counts: Counter[int] = field(default_factory=Counter)
    """Count of each output token, without the prompt."""
    matcher: TokenMatcher | None = None
    """Set if the output must follow a grammar."""
    generator: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.generator = random.Random(self.params.seed)

    @classmethod
    def resumed(cls, params: SamplingParams, outputs: list[int], constraint: Constraint | None = None) -> SamplerState:
        """State after these output tokens: the next draw is the one that would have followed."""
        state = cls(params, Counter(outputs), None if constraint is None else constraint.matcher(outputs))
        if not params.greedy:
            for _ in outputs:
                state.generator.random()
        return state

    @property
    def failure(self) -> str:
        """Why the output cannot follow its grammar any further; empty as long as it can."""
        return "" if self.matcher is None else self.matcher.failure

    @property
    def penalised(self) -> bool:
        return bool(self.counts) and (self.params.presence_penalty != 0.0 or self.params.frequency_penalty != 0.0)


def sample(logits: Tensor, states: list[SamplerState]) -> list[int]:
    """Samples one token a row, and counts it in the row's state.

    Shapes:  logits [len(states), vocab], float; not changed.
    """
    logits = _adjusted(logits, states)
    best: list[int] = logits.argmax(dim=-1).tolist()
    chosen = [
        token if state.params.greedy and not state.penalised else _sample_row(logits[row], state)
        for row, (token, state) in enumerate(zip(best, states, strict=True))
    ]
    for token, state in zip(chosen, states, strict=True):
        state.counts[token] += 1
        if state.matcher is not None and not state.matcher.failure:
            state.matcher.consume(token)
    return chosen


def _adjusted(logits: Tensor, states: list[SamplerState]) -> Tensor:
    """Logits with the biases and masks of the rows that have some; a copy if there are any."""
    biased = [(row, state.params.logit_bias) for row, state in enumerate(states) if state.params.logit_bias]
    matched = [(row, state.matcher) for row, state in enumerate(states) if state.matcher is not None]
    if not biased and not matched:
        return logits
    logits = logits.clone()
    for row, bias in biased:
        tokens = torch.tensor([token for token, _ in bias], device=logits.device)
        values = torch.tensor([value for _, value in bias], dtype=logits.dtype, device=logits.device)
        logits[row].index_add_(0, tokens, values)
    return masked(logits, [row for row, _ in matched], [matcher for _, matcher in matched])


def _sample_row(logits: Tensor, state: SamplerState) -> int:
    params = state.params
    row = logits.float()
    if state.penalised:
        row = _penalise(row, state)
    if params.greedy:
        return int(row.argmax())
    uniform = state.generator.random()
    values, tokens = _candidates(row, params)
    if state.matcher is not None:  # no rounding of the draw may reach a forbidden token
        allowed = values > float("-inf")
        values, tokens = values[allowed], tokens[allowed]
    # Scaled before the exponent and shifted by the largest: tiny temperatures stay finite.
    weights = torch.exp((values.double() - values.max().double()) / params.temperature)
    if params.top_p < 1.0:
        mass = torch.cumsum(weights, 0)
        # The smallest set whose mass reaches top_p; the token that crosses the line belongs to it.
        kept = int(torch.searchsorted(mass, params.top_p * mass[-1])) + 1
        weights, tokens = weights[:kept], tokens[:kept]
    mass = torch.cumsum(weights, 0)
    index = int(torch.searchsorted(mass, uniform * float(mass[-1]), right=True))
    return int(tokens[min(index, len(tokens) - 1)])


def _penalise(row: Tensor, state: SamplerState) -> Tensor:
    seen = torch.tensor(list(state.counts), device=row.device)
    counts = torch.tensor(list(state.counts.values()), dtype=row.dtype, device=row.device)
    penalties = state.params.presence_penalty + state.params.frequency_penalty * counts
    return row.index_add(0, seen, -penalties)


def _candidates(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """Candidate logits and token ids: all by id, or the best ones in descending order."""
    vocab = row.shape[0]
    if params.top_k:
        best = torch.topk(row, min(params.top_k, vocab))
        return best.values, best.indices
    if params.top_p >= 1.0:
        return row, torch.arange(vocab, device=row.device)
    best = torch.topk(row, min(TOP_CANDIDATES, vocab))
    total = torch.exp((row.double() - best.values[0].double()) / params.temperature).sum()
    covered = torch.exp((best.values.double() - best.values[0].double()) / params.temperature).sum()
    if math.isclose(params.top_p, 1.0) or float(covered) < params.top_p * float(total):
        best = torch.sort(row, descending=True)  # type: ignore[assignment]
        return best.values, best.indices
    # top_p is a share of the whole, the caller's of what it is given: cut here, exactly.
    weights = torch.exp((best.values.double() - best.values[0].double()) / params.temperature)
    kept = int(torch.searchsorted(torch.cumsum(weights, 0), params.top_p * float(total))) + 1
    return best.values[:kept], best.indices[:kept]
