"""Sequences of the engine, and what a step computes of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .block_pool import BlockKey


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: its tokens, prompt first, and its block table."""

    id: int
    tokens: list[int]
    prompt_count: int
    max_new_tokens: int
    computed: int = 0
    """Tokens whose keys and values are in the blocks."""
    submitted: int = 0
    """`computed` after all steps in flight."""
    arrival: int = 0
    """Its number in the order in which sequences came to the scheduler."""
    table: list[int] = field(default_factory=list)
    admission: int = 0
    """How often its blocks were taken from it: what it has in a block is of the present admission alone."""
    held: bool = False
    """True if it is computed but not sampled, because more of its tokens come from another worker."""
    embeds: bool = False
    """True if the hidden state of its last token is wanted, and no next token."""

    keys: list[BlockKey] = field(default_factory=list)
    """Keys of its first full blocks, as far as they were asked for."""
    reused: int | None = None
    """Tokens that were in kept blocks when it was first admitted; None before."""

    @property
    def output_count(self) -> int:
        return len(self.tokens) - self.prompt_count

    def take_reused(self) -> int:
        """Prompt tokens that were in kept blocks, the first time that it is asked for; then 0."""
        reused, self.reused = min(self.reused or 0, self.prompt_count), 0
        return reused

    @property
    def pending(self) -> int:
        """Tokens that are in no step yet."""
        return len(self.tokens) - self.submitted

    @property
    def in_flight(self) -> bool:
        return self.submitted != self.computed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedChunk:
    """Tokens `[begin, end)` of one sequence; the last of them is sampled if it ends the sequence."""

    sequence: Sequence
    begin: int
    end: int
    follows: bool = False
    """True if its one token is what the step before samples, which only the device knows yet."""

    @property
    def samples(self) -> bool:
        return self.follows or (self.end == len(self.sequence.tokens) and not self.sequence.held)


class StepPlan:
    """Plan of a step: at most one chunk a sequence, for at most `most` sequences."""

    def __init__(self, budget: int, most: int) -> None:
        self.left = budget
        """Tokens that it may still have."""
        self._most = most
        self._chunks: dict[int, PlannedChunk] = {}

    @property
    def places(self) -> int:
        """Further sequences that it may have."""
        return self._most - len(self._chunks)

    def end_of(self, sequence: Sequence) -> int:
        """Tokens of a sequence that are computed after it."""
        chunk = self._chunks.get(sequence.id)
        return sequence.submitted if chunk is None else chunk.end

    def has(self, sequence: Sequence) -> bool:
        return sequence.id in self._chunks

    def put(self, sequence: Sequence, end: int, *, follows: bool = False) -> None:
        """Has it compute a sequence up to this token."""
        self.left -= end - self.end_of(sequence)
        self._chunks[sequence.id] = PlannedChunk(sequence=sequence, begin=sequence.submitted, end=end, follows=follows)

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence out of it, which gives its tokens back."""
        if (chunk := self._chunks.pop(sequence.id, None)) is not None:
            self.left += chunk.end - chunk.begin

    def submitted(self) -> list[PlannedChunk]:
        """Its chunks, all of which are to be computed."""
        for chunk in self._chunks.values():
            chunk.sequence.submitted = chunk.end
        return list(self._chunks.values())
