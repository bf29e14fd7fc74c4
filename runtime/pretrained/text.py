"""Tasks on text: classification, embedding, reranking."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import torch
from msgspec import Meta
from transformers import AutoTokenizer, TextClassificationPipeline

from ..contract.errors import InvalidInput
from .loading import CPU, load_config, load_model, max_tokens

if TYPE_CHECKING:
    from ..weights.tensor_mapping import TensorMapping

BATCH = 32
"""Texts that are computed in one pass: enough to fill the cores, few enough that a pass stays short."""
WARM_UP = "warm up"
CLASSIFIERS = ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",)


class Label(TypedDict):
    label: str
    score: float


class Embeddings(TypedDict):
    embeddings: list[list[float]]


class Relevance(TypedDict):
    index: int
    relevance_score: float


class Ranking(TypedDict):
    results: list[Relevance]


class TextClassification:
    """The labels of each text with their scores, best first, as transformers' pipeline computes them."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        # A tokenizer may be used by one thread at a time: it keeps the truncation that a call asked for.
        self._lock = threading.Lock()

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        tokenizer = AutoTokenizer.from_pretrained(weights.folder())
        self._limit = max_tokens(tokenizer, config, self._settings.get("max_tokens"))
        self._pipeline = TextClassificationPipeline(
            model=load_model(weights, config, kinds=CLASSIFIERS), tokenizer=tokenizer, device=CPU
        )

    def warm(self) -> None:
        self([WARM_UP])

    def __call__(self, texts: str | list[str], top_k: Annotated[int, Meta(ge=1)] | None = None) -> list[list[Label]]:
        if not texts and not isinstance(texts, str):
            return []  # the pipeline cannot take none
        with self._lock:
            found: list[list[Label]] = self._pipeline(
                _listed(texts), top_k=top_k, truncation=self._limit is not None, max_length=self._limit
            )
        return found


class Embedding:
    """A vector for each text: the pooled last hidden states, of length one unless `normalize` is off."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._pooling: str = settings.get("pooling", "mean")
        self._normalize: bool = settings.get("normalize", True)
        self._lock = threading.Lock()

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        self._tokenizer = _padding_tokenizer(weights)
        self._limit = max_tokens(self._tokenizer, config, self._settings.get("max_tokens"))
        # Pooling is done here, so a checkpoint may lack the model's own.
        self._model = load_model(weights, config, kinds=("MODEL_MAPPING",), optional=("pooler.",))

    def warm(self) -> None:
        self([WARM_UP])

    def __call__(self, texts: str | list[str]) -> Embeddings:
        return {"embeddings": self.embed(_listed(texts))}

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text."""
        vectors: list[list[float]] = []
        with self._lock:
            for some in _batches(texts):
                inputs = _tokens(self._tokenizer, self._limit, some)
                hidden = self._model(**inputs).last_hidden_state
                pooled = _pooled(hidden, inputs["attention_mask"], self._pooling)
                vectors += (
                    (torch.nn.functional.normalize(pooled, dim=1) if self._normalize else pooled).float().tolist()
                )
        return vectors

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Tokens that are computed for these texts, without what is cut."""
        with self._lock:
            found = self._tokenizer(list(texts), truncation=self._limit is not None, max_length=self._limit)
        return sum(map(len, found["input_ids"]))


class Reranking:
    """How well each document answers the query, by a model that reads both together; best first.

    The score is the sigmoid of a model's one output, or the last of several after a softmax.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._lock = threading.Lock()

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        self._tokenizer = _padding_tokenizer(weights)
        self._limit = max_tokens(self._tokenizer, config, self._settings.get("max_tokens"))
        self._model = load_model(weights, config, kinds=CLASSIFIERS)
        if self._model.config.pad_token_id is None:
            self._model.config.pad_token_id = self._tokenizer.pad_token_id

    def warm(self) -> None:
        self(WARM_UP, [WARM_UP])

    @torch.inference_mode()
    def __call__(self, query: str, documents: list[str], top_n: Annotated[int, Meta(ge=1)] | None = None) -> Ranking:
        scores: list[float] = []
        with self._lock:
            for some in _batches(documents):
                inputs = _tokens(self._tokenizer, self._limit, [query] * len(some), some)
                logits = self._model(**inputs).logits.float()
                one = logits.shape[1] == 1
                scores += (logits.sigmoid()[:, 0] if one else logits.softmax(1)[:, -1]).tolist()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        return {"results": [{"index": index, "relevance_score": scores[index]} for index in order]}


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    yield from (list(texts[begin : begin + BATCH]) for begin in range(0, len(texts), BATCH))


def _padding_tokenizer(weights: TensorMapping) -> Any:
    """The tokenizer, with texts padded at their end; without a token of its own it pads with the last token's."""
    tokenizer = AutoTokenizer.from_pretrained(weights.folder())
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _tokens(tokenizer: Any, limit: int | None, *texts: list[str]) -> Any:
    padding = tokenizer.pad_token is not None
    if not padding and len(texts[0]) > 1:
        raise InvalidInput("the model's tokenizer has no padding: send one text at a time")
    return tokenizer(*texts, padding=padding, truncation=limit is not None, max_length=limit, return_tensors="pt")


def _pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Shapes: hidden [texts, tokens, width], mask [texts, tokens], padded at the end; the result [texts, width]."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
    weight = mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
