"""Steps of a decoder, and the instruction sets that this machine has for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fleetstart.runtime.llm.engine.runner import Batch
from tests.runtime.llm.models import BLOCK_TOKENS, native, tiny


def has_isa(isa: str) -> bool:
    try:
        native(tiny(), isa=isa)
    except ValueError:
        return False
    return True


ISAS = [isa for isa in ("avx512", "avx2", "generic") if has_isa(isa)]
"""Those that compute in fp32."""
HAS_AMX = has_isa("amx")
EVERY_ISA = [*ISAS, *(["amx"] if HAS_AMX else [])]
Piece = tuple[list[int], int, list[int]]
"""Tokens, position of the first, block table."""


def batch_of(pieces: list[Piece], *, every_row: bool = False) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    for piece, first, _ in pieces:
        tokens += piece
        positions += range(first, first + len(piece))
        starts.append(len(tokens))
    rows = list(range(len(tokens))) if every_row else [start - 1 for start in starts[1:]]
    return Batch(
        tokens=tokens, positions=positions, starts=starts, tables=[table for *_, table in pieces], logits_rows=rows
    )


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(2, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def table(first: int, count: int) -> list[int]:
    return list(range(first, first + -(-count // BLOCK_TOKENS)))


def steps(decoder: Any) -> list[Tensor]:
    """Prompts, whole and in chunks, then decodes mixed with a chunk: everything that a step can hold."""
    long, short = some_tokens(75), some_tokens(5, 2)
    first = decoder.forward(batch_of([(long[:40], 0, [9, 3, 7]), (short, 0, [1])], every_row=True)).clone()
    second = decoder.forward(batch_of([(long[40:], 40, [9, 3, 7, 0, 5]), ([77], 5, [1])], every_row=True)).clone()
    third = decoder.forward(batch_of([([78], 6, [1]), ([11], 75, [9, 3, 7, 0, 5]), (short, 0, [2])])).clone()
    return [first, second, third]
