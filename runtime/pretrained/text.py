"""Tasks on text: classification, embedding, reranking. Texts of concurrent calls share a pass of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import torch
from msgspec import Meta
from transformers import AutoTokenizer, TextClassificationPipeline

from ..openai_api.embeddings import EmbeddedText
from .loading import CPU, load_config, load_model, max_tokens
from .shared_pass import SharedPass, in_rows

if TYPE_CHECKING:
    from ..weights.tensor_mapping import TensorMapping

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
        self._pass = SharedPass(self.compute)

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        tokenizer = _padding_tokenizer(weights)
        self._limit = max_tokens(tokenizer, config, self._settings.get("max_tokens"))
        model = load_model(weights, config, kinds=CLASSIFIERS)
        self._together = _pads(tokenizer, model)
        self._pipeline = TextClassificationPipeline(model=model, tokenizer=tokenizer, device=CPU)

    def warm(self) -> None:
        self.compute([[WARM_UP]])

    async def __call__(
        self, texts: str | list[str], top_k: Annotated[int, Meta(ge=1)] | None = None
    ) -> list[list[Label]]:
        return [labels[:top_k] for labels in await self._pass.call(_listed(texts))]

    def compute(self, calls: list[list[str]]) -> list[list[list[Label]]]:
        """All labels of each text of each call."""
        return in_rows(calls, len, self._labels, together=self._together)

    def _labels(self, texts: list[str]) -> list[list[Label]]:
        found: list[list[Label]] = self._pipeline(
            texts,
            top_k=None,
            truncation=self._limit is not None,
            max_length=self._limit,
            batch_size=len(texts),
        )
        return found


class Embedding:
    """A vector for each text: the pooled last hidden states, of length one unless `normalize` is off."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._pooling: str = settings.get("pooling", "mean")
        self._normalize: bool = settings.get("normalize", True)
        self._pass = SharedPass(self.compute)

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        self._tokenizer = _padding_tokenizer(weights)
        self._limit = max_tokens(self._tokenizer, config, self._settings.get("max_tokens"))
        # Pooling is done here, so a checkpoint may lack the model's own.
        self._model = load_model(weights, config, kinds=("MODEL_MAPPING",), optional=("pooler.",))

    def warm(self) -> None:
        self.compute([[WARM_UP]])

    async def __call__(self, texts: str | list[str]) -> Embeddings:
        return {"embeddings": [one.vector for one in await self.embed(_listed(texts))]}

    async def embed(self, texts: Sequence[str]) -> Sequence[EmbeddedText]:
        """The vectors of these texts."""
        return await self._pass.call(list(texts))

    def compute(self, calls: list[list[str]]) -> list[list[EmbeddedText]]:
        """The vectors of each call's texts."""
        return in_rows(calls, len, self._vectors, together=self._tokenizer.pad_token is not None)

    @torch.inference_mode()
    def _vectors(self, texts: list[str]) -> Iterable[EmbeddedText]:
        inputs = _tokens(self._tokenizer, self._limit, texts)
        hidden, mask = self._model(**inputs).last_hidden_state, inputs["attention_mask"]
        pooled = _pooled(hidden, mask, self._pooling)
        vectors = (torch.nn.functional.normalize(pooled, dim=1) if self._normalize else pooled).float()
        return map(EmbeddedText, vectors.tolist(), mask.sum(1).tolist())


class Reranking:
    """Scores of how well each document answers the query, by a model that reads both together; best first.

    The score is the sigmoid of a model's one output, or the last of several after a softmax.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._pass = SharedPass(self.compute)

    def load(self, weights: TensorMapping) -> None:
        config = load_config(weights)
        self._tokenizer = _padding_tokenizer(weights)
        self._limit = max_tokens(self._tokenizer, config, self._settings.get("max_tokens"))
        self._model = load_model(weights, config, kinds=CLASSIFIERS)
        self._together = _pads(self._tokenizer, self._model)

    def warm(self) -> None:
        self.compute([[(WARM_UP, WARM_UP)]])

    async def __call__(
        self, query: str, documents: list[str], top_n: Annotated[int, Meta(ge=1)] | None = None
    ) -> Ranking:
        scores = await self._pass.call([(query, document) for document in documents])
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
        return {"results": [{"index": index, "relevance_score": scores[index]} for index in order]}

    def compute(self, calls: list[list[tuple[str, str]]]) -> list[list[float]]:
        """The score of each pair of a query and a document."""
        return in_rows(calls, lambda pair: len(pair[0]) + len(pair[1]), self._scores, together=self._together)

    @torch.inference_mode()
    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        queries, documents = ([pair[place] for pair in pairs] for place in (0, 1))
        logits = self._model(**_tokens(self._tokenizer, self._limit, queries, documents)).logits.float()
        scores: list[float] = (logits.sigmoid()[:, 0] if logits.shape[1] == 1 else logits.softmax(1)[:, -1]).tolist()
        return scores


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _padding_tokenizer(weights: TensorMapping) -> Any:
    """The tokenizer, with texts padded at their end; without a token of its own it pads with the last token's."""
    tokenizer = AutoTokenizer.from_pretrained(weights.folder())
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _pads(tokenizer: Any, model: Any) -> bool:
    """Checks whether texts of different lengths can share a pass; tells the model which token pads."""
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer.pad_token is not None


def _tokens(tokenizer: Any, limit: int | None, *texts: list[str]) -> Any:
    padding = tokenizer.pad_token is not None
    return tokenizer(*texts, padding=padding, truncation=limit is not None, max_length=limit, return_tensors="pt")


def _pooled(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Shapes: hidden [texts, tokens, width], mask [texts, tokens], padded at the end; the result [texts, width]."""
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
    weight = mask[..., None].to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1).clamp(min=1e-9)
