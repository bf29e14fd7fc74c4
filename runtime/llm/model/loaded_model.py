"""A loaded model: an engine, and what the server needs beside it to make tokens of requests and text of tokens."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from ...contract.errors import CheckpointInvalid
from ...contract.weights import token_table
from ..engine.constraint import ConstraintCompiler
from ..engine.inference_engine import InferenceEngine
from ..engine.sampler import SamplingParams
from ..text.chat_template import ChatTemplate, read_chat_template
from ..text.table_tokenizer import TableTokenizer
from ..text.tokenizer import Tokenizer, Vocabulary
from .weights import ModelWeights, optional_file

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A loaded model: engine, tokenizer, chat template and defaults."""

    engine: InferenceEngine
    tokenizer: Vocabulary
    chat_template: ChatTemplate | None
    vocab_size: int
    sampling: SamplingParams
    """The checkpoint's default sampling parameters."""
    constraints: ConstraintCompiler
    torch_threads: int = 1
    """Threads of torch's operations on the CPU. One for a decoder with threads of its own: sampling is a few operations
    on one row, and more threads would only compete with the decoder's."""


class ModelFiles:
    """Small files of a checkpoint; the tokenizer is parsed in a thread from the beginning on, beside the weights."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights
        self._parsing = _tokenizer(weights)
        self.generation = optional_file(weights, "generation_config.json")

    @property
    def config(self) -> bytes:
        return required_file(self._weights, "config.json")

    @property
    def tokenizer(self) -> Vocabulary:
        """The tokenizer; waits for it. Errors: CheckpointInvalid."""
        return self._parsing.result() if isinstance(self._parsing, _ThreadResult) else self._parsing

    def model(
        self, engine: InferenceEngine, vocab_size: int, eos_ids: frozenset[int], *, torch_threads: int = 1
    ) -> LoadedModel:
        """The model over an engine. `vocab_size`: width of the logits."""
        template = read_chat_template(
            optional_file(self._weights, "tokenizer_config.json"), optional_file(self._weights, "chat_template.jinja")
        )
        return LoadedModel(
            engine=engine,
            tokenizer=self.tokenizer,
            chat_template=template,
            vocab_size=vocab_size,
            sampling=default_sampling(self.generation),
            torch_threads=torch_threads,
            constraints=ConstraintCompiler(lambda: required_file(self._weights, "tokenizer.json"), vocab_size, eos_ids),
        )


def default_sampling(generation: bytes | None) -> SamplingParams:
    """Sampling defaults from generation_config.json: greedy, or its temperature, top_k and top_p."""
    fields = msgspec.json.decode(generation, type=dict[str, Any]) if generation else {}
    if fields.get("do_sample") is False:
        return SamplingParams(temperature=0.0)
    return SamplingParams(
        temperature=float(fields.get("temperature") or 1.0),
        top_k=int(fields.get("top_k") or 0),
        top_p=float(fields.get("top_p") or 1.0),
    )


def required_file(weights: ModelWeights, name: str) -> bytes:
    """A file of the checkpoint. Errors: CheckpointInvalid if it has none of that name."""
    data = optional_file(weights, name)
    if data is None:
        raise CheckpointInvalid(f"the checkpoint has no {name}", hint="put it beside the safetensors and deploy again")
    return data


def _tokenizer(weights: ModelWeights) -> Vocabulary | _ThreadResult[Vocabulary]:
    """Tokenizer: at once from a token table; otherwise parsed in a thread, since that takes longer than binding the
    weights."""

    def parse() -> Vocabulary:
        return Tokenizer(required_file(weights, "tokenizer.json"))

    table = optional_file(weights, token_table.FILE)
    return _ThreadResult(parse) if table is None else TableTokenizer(memoryview(table), functools.cache(parse))


class _ThreadResult(Generic[Result]):
    """Runs one call in a thread; `result` returns its value or raises its error."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call = call
        self._value: Result | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="llm-tokenizer", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Result:
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value
