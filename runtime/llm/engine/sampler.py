"""Sampler: chooses the next token from logits, greedily or with temperature, top-k, top-p, penalties,
biases and grammars.

A draw uses one uniform number of the sequence's own generator, and depends on nothing else in the batch:
the same seed gives the same text, alone or among others, and after a preemption.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .constraint import Constraint, TokenMatcher, masked

SEEDS = 1 << 64
"""Number of seeds: others are taken modulo it, so that -1 is not 1."""
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

    @property
    def ordered(self) -> bool:
        """True if only the most likely tokens are drawn from."""
        return bool(self.top_k) or self.top_p < 1.0


@dataclass(slots=True)
class SamplerState:
    """Sampling state of one sequence: token counts and random generator."""

    params: SamplingParams
    counts: Counter[int] = field(default_factory=Counter)
    """Count of each output token, without the prompt."""
    matcher: TokenMatcher | None = None
    """Set if the output must follow a grammar."""
    broken: bool = False
    """True once its logits were no numbers, by which nothing can be chosen. Seen where the host chooses: it would have
    to wait for a device, and logits of a step that another one follows are gone."""
    generator: random.Random = field(init=False)

    def __post_init__(self) -> None:
        seed = self.params.seed
        self.generator = random.Random(None if seed is None else seed % SEEDS)

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
        """Why no further token can be chosen, or none that follows the grammar; empty as long as one can."""
        if self.broken:
            return "the model's logits are no numbers"
        return "" if self.matcher is None else self.matcher.failure

    @property
    def penalised(self) -> bool:
        return bool(self.counts) and (self.params.presence_penalty != 0.0 or self.params.frequency_penalty != 0.0)


def sample(logits: Tensor, states: list[SamplerState]) -> list[int]:
    """Samples one token a row, and counts it in the row's state.

    Shapes:  logits [len(states), vocab], float; not changed.
    """
    return begin_draw(logits, states, on_device=logits.device.type == "cuda").finish()


@dataclass(slots=True)
class Draw:
    """One token a row, chosen but not yet known to the host."""

    logits: Tensor
    states: list[SamplerState]
    tokens: Tensor | None
    """Tokens [rows] on the device of the logits; None if the host chooses some of them."""
    found: Tensor | None
    """Tokens [rows] in host memory after `copied`; those of rows that need the host mean nothing. None if the host
    chooses all."""
    copied: torch.cuda.Event | None

    def finish(self) -> list[int]:
        """The tokens, counted in their rows' states. Waits for a device. Called once."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.found is None:
            chosen = sample_on_host(self.logits, self.states)
            for row in _without_numbers(self.logits):
                self.states[row].broken = True
        else:
            chosen = _with_those_of_the_host(self.found.tolist(), self.logits, self.states)
        for token, state in zip(chosen, self.states, strict=True):
            state.counts[token] += 1
            if state.matcher is not None and not state.failure:
                state.matcher.consume(token)
        return chosen


def begin_draw(logits: Tensor, states: list[SamplerState], *, on_device: bool) -> Draw:
    """Begins to choose one token a row: with `on_device` without a wait of the host, but for grammars; without, the
    draw is made when it finishes.

    Shapes:  logits [len(states), vocab], float; not changed. A draw without `tokens` reads them until it finishes.
    """
    logits = _adjusted(logits, states)
    if not on_device:
        return Draw(logits, states, None, None, None)
    tokens = _tokens_on_device(logits, states)
    alone = None if any(map(_needs_the_host, states)) else tokens
    if not tokens.is_cuda:
        return Draw(logits, states, alone, tokens, None)
    found = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tokens.device))
    return Draw(logits, states, alone, found, copied)


def _without_numbers(logits: Tensor) -> list[int]:
    """Rows with NaN or infinity."""
    broken = ~(logits.amax(dim=-1) < math.inf)
    return broken.nonzero()[:, 0].tolist() if bool(broken.any()) else []


def sample_on_host(logits: Tensor, states: list[SamplerState]) -> list[int]:
    best: list[int] = logits.argmax(dim=-1).tolist()
    return [
        token if state.params.greedy and not state.penalised else _sample_row(logits[row], state)
        for row, (token, state) in enumerate(zip(best, states, strict=True))
    ]


def _tokens_on_device(logits: Tensor, states: list[SamplerState]) -> Tensor:
    """`sample_on_host` for a device: draws of all rows at once, and no wait.

    Returns [rows], of which those of rows with penalties or a grammar, which need the host, mean nothing.

    The draws are those of `_sample_row`, except within the rounding of a sum over a vocabulary.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, state in enumerate(states) if _draws_plainly(state)]
    for chosen, draw in (([row for row in drawn if states[row].params.ordered], _draw_ordered),
                         ([row for row in drawn if not states[row].params.ordered], _draw_by_token)):  # fmt: skip
        if chosen:
            rows = torch.tensor(chosen).to(logits.device, non_blocking=True)
            tokens[rows] = draw(logits[rows].double(), [states[row] for row in chosen])
    return tokens


def _with_those_of_the_host(found: list[int], logits: Tensor, states: list[SamplerState]) -> list[int]:
    return [
        _sample_row(logits[row], state) if _needs_the_host(state) else found[row] for row, state in enumerate(states)
    ]


def _needs_the_host(state: SamplerState) -> bool:
    return state.penalised or (state.matcher is not None and not state.params.greedy)


def _draws_plainly(state: SamplerState) -> bool:
    return not (state.params.greedy or state.penalised or state.matcher is not None)


def _draw_by_token(logits: Tensor, states: list[SamplerState]) -> Tensor:
    """Tokens [rows] drawn from all of the vocabulary, in the order of its numbers."""
    weights = _weights(logits, logits.amax(1, keepdim=True), states)
    return _drawn(weights.cumsum(1), states)


def _draw_ordered(logits: Tensor, states: list[SamplerState]) -> Tensor:
    """Tokens [rows] drawn from the most likely ones of each row: its top_k, and of these the smallest set that has
    top_p of their mass."""
    values, order = logits.sort(dim=1, descending=True, stable=True)
    weights = _weights(values, values[:, :1], states)
    places = torch.arange(values.shape[1], device=logits.device)
    most = _column([state.params.top_k or values.shape[1] for state in states], logits.device)
    weights = weights.masked_fill(places >= most, 0.0)
    mass = weights.cumsum(1)
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=1)
    top_p = _column([state.params.top_p for state in states], logits.device)
    # The token that crosses the line belongs to the set: those before which less than top_p is.
    weights = weights.masked_fill((before >= top_p * mass[:, -1:]) & (top_p < 1.0), 0.0)
    return order.gather(1, _drawn(weights.cumsum(1), states)[:, None])[:, 0]


def _weights(values: Tensor, largest: Tensor, states: list[SamplerState]) -> Tensor:
    return ((values - largest) / _column([state.params.temperature for state in states], values.device)).exp()


def _drawn(mass: Tensor, states: list[SamplerState]) -> Tensor:
    """Places [rows] at which each row's next uniform number falls into its running sums [rows, places]."""
    uniform = _column([state.generator.random() for state in states], mass.device)
    places = torch.searchsorted(mass, uniform * mass[:, -1:], right=True)[:, 0]
    # No rounding may reach a place without mass, behind the last one that has some.
    last = (mass < mass[:, -1:]).sum(1)
    return torch.minimum(places, last)


def _column(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).to(device, non_blocking=True)[:, None]


def _adjusted(logits: Tensor, states: list[SamplerState]) -> Tensor:
    """Logits with the biases and masks of the rows that have some; a copy if there are any."""
    biased = [(row, state.params.logit_bias) for row, state in enumerate(states) if state.params.logit_bias]
    matched = [(row, state.matcher) for row, state in enumerate(states) if state.matcher is not None]
    if not biased and not matched:
        return logits
    logits = logits.clone()
    for row, bias in biased:
        tokens = torch.tensor([token for token, _ in bias]).to(logits.device, non_blocking=True)
        values = torch.tensor([value for _, value in bias], dtype=logits.dtype).to(logits.device, non_blocking=True)
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
    values, tokens, whole = _candidates(row, params)
    if state.matcher is not None:  # no rounding of the draw may reach a forbidden token
        allowed = (values > float("-inf")).nonzero()[:, 0]
        values, tokens = values[allowed], tokens[allowed]
    # Scaled before the exponent and shifted by the largest: tiny temperatures stay finite.
    weights = torch.exp((values.double() - values.max().double()) / params.temperature)
    if params.top_p < 1.0:
        mass = torch.cumsum(weights, 0)
        # The smallest set whose mass reaches top_p; the token that crosses the line belongs to it.
        kept = int(torch.searchsorted(mass, params.top_p * (mass[-1] if whole is None else whole))) + 1
        weights, tokens = weights[:kept], tokens[:kept]
    mass = torch.cumsum(weights, 0)
    index = int(torch.searchsorted(mass, uniform * float(mass[-1]), right=True))
    return int(tokens[min(index, len(tokens) - 1)])


def _penalise(row: Tensor, state: SamplerState) -> Tensor:
    seen = torch.tensor(list(state.counts), device=row.device)
    counts = torch.tensor(list(state.counts.values()), dtype=row.dtype, device=row.device)
    penalties = state.params.presence_penalty + state.params.frequency_penalty * counts
    return row.index_add(0, seen, -penalties)


def _candidates(row: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor, Tensor | None]:
    """Candidate logits and token ids: all by id, or the best ones in descending order; for top-p also the mass of the
    whole row, of which it is a share, where these have not all of it."""
    vocab = row.shape[0]
    if params.top_k:
        best = torch.topk(row, min(params.top_k, vocab))
        return best.values, best.indices, None
    if params.top_p >= 1.0:
        return row, torch.arange(vocab, device=row.device), None
    best = torch.topk(row, min(TOP_CANDIDATES, vocab))
    total = torch.exp((row.double() - best.values[0].double()) / params.temperature).sum()
    covered = torch.exp((best.values.double() - best.values[0].double()) / params.temperature).sum()
    if math.isclose(params.top_p, 1.0) or float(covered) < params.top_p * float(total):
        best = torch.sort(row, descending=True)  # type: ignore[assignment]
        return best.values, best.indices, None
    return best.values, best.indices, total
