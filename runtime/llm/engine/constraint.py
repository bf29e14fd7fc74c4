"""Constrained decoding: grammars that the output of a request must follow, over a model's own tokens.

`llguidance` computes for each step which tokens may come next; the sampler masks the others. A matcher's state follows
from the output's tokens alone, so a resumed stream has it again. At the end of the grammar only end tokens are left.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...contract.errors import InvalidInput

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_PLACE = re.compile(r"\A(?:at )?\d+\(\d+\): ")
_LISTING = re.compile(r"\n(?:<| *\d+ \| )")
_DEAD_END = ("NoExtensionBias", "no text follows it, as where a $ref leads back to itself")
"""The compiler's name for a place where no token may come next, and what it means."""
GRAMMARS_KEPT = 16
"""Compiled grammars kept by a worker: calls repeat their schemas, and a large one takes a second to compile."""


class TokenMatcher:
    """State of one output that follows a grammar."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def failure(self) -> str:
        """Why the grammar can no longer be followed; empty as long as it can."""
        return _first_line(self._matcher.get_error())

    def allowed(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """One for each token that may come next, zero for the others: [vocab]. Check `failure` afterwards."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little")

    def consume(self, token: int) -> None:
        """Adds a token of the output. Check `failure` afterwards."""
        self._matcher.consume_token(token)


@dataclass(frozen=True, slots=True, eq=False)
class Constraint:
    """A compiled grammar. Thread-safe."""

    prototype: LLMatcher
    vocab_size: int

    def matcher(self, outputs: Sequence[int] = ()) -> TokenMatcher:
        """State after these tokens of an output. Errors: InvalidInput if the grammar does not allow them."""
        state = self.prototype.deep_copy()
        if outputs and not state.consume_tokens(list(outputs)):
            raise InvalidInput(f"tokens of an answer that its grammar does not allow: {_first_line(state.get_error())}")
        return TokenMatcher(state, self.vocab_size)


class ConstraintCompiler:
    """Compiles grammars for one vocabulary. Thread-safe; the vocabulary is read with the first grammar."""

    def __init__(self, tokenizer_json: Callable[[], bytes], vocab_size: int, eos_ids: frozenset[int]) -> None:
        """`vocab_size`: width of the logits."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = sorted(token for token in eos_ids if 0 <= token < vocab_size)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self.compile = lru_cache(GRAMMARS_KEPT)(self._compile)
        """Compiles a grammar in llguidance's JSON or Lark. Errors: InvalidInput with the reason."""

    def _compile(self, grammar: str) -> Constraint:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ModuleNotFoundError as error:
            raise InvalidInput(
                "answers cannot follow a grammar: the package llguidance is not installed where functions run",
                hint="install it into the node's environment: pip install 'fleetstart[model]'",
            ) from error
        limits = LLParserLimits(verbose_errors=False)
        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        trial = matcher.deep_copy()
        if not trial.get_error():
            trial.compute_bitmask()  # some grammars show only here that nothing follows them
        if trial.get_error():
            raise InvalidInput(_reason(trial.get_error()))
        return Constraint(matcher, self._vocab_size)

    def _vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                if not self._eos_ids:
                    raise InvalidInput("this model has no end token, so an answer that follows a grammar would not end")
                text = self._tokenizer_json().decode()
                try:
                    try:
                        self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids)
                    except ValueError:  # the tokenizer has more tokens than the model: the last have no logits
                        self._tokenizer = LLTokenizer(text, eos_token=self._eos_ids)
                except ValueError as error:
                    raise InvalidInput(f"answers of this model's tokenizer cannot follow a grammar: {error}") from error
            return self._tokenizer


def masked(logits: Tensor, rows: list[int], matchers: list[TokenMatcher]) -> Tensor:
    """Logits with minus infinity at the tokens that the rows' grammars forbid. Changes `logits`.

    Shapes:  logits [batch, vocab]; rows: one for each matcher. A row whose grammar fails stays as it is.
    """
    for row, matcher in zip(rows, matchers, strict=True):
        forbidden = torch.from_numpy(matcher.allowed() == 0)
        if matcher.failure:
            continue
        if logits.is_cuda:  # out of other memory the host would copy it after all that the device has to do
            forbidden = forbidden.pin_memory().to(logits.device, non_blocking=True)
        logits[row].masked_fill_(forbidden, float("-inf"))
    return logits


def _reason(text: str) -> str:
    """The compiler's reason in one line, without the place in the grammar, the grammar, and options of its own."""
    text = _PLACE.sub("", _LISTING.split(text, 1)[0].replace("failed to compile JSON schema: ", ""))
    return " ".join(text.split(". Enable '", 1)[0].split()).replace(*_DEAD_END)


def _first_line(text: str) -> str:
    return text.split("\n", 1)[0].strip().replace(*_DEAD_END) if text else ""
