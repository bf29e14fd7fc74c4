"""Embeddings API: `/v1/embeddings` in front of the app of an embedding function."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from ..contract.errors import FleetError, InvalidInput
from ..contract.function.names import means
from ..worker_io.asgi import JSON, App, ClientDisconnected, Receive, Scope, Send, read_body, respond
from .call_reader import CallReader
from .invalid_parameter import InvalidParameter, ModelNotFound
from .responses import Json, model, models, respond_error

MAX_TEXTS = 2048
"""OpenAI's own limit."""


@dataclass(frozen=True, slots=True)
class EmbeddedText:
    """A vector, and the tokens that it was computed from, without what was cut."""

    vector: list[float]
    tokens: int


class TextEmbedder(Protocol):
    """A loaded embedding model."""

    async def embed(self, texts: Sequence[str]) -> Sequence[EmbeddedText]:
        """The vectors of these texts."""
        ...


class EmbeddingCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of `/v1/embeddings`."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    def check(self) -> None:
        """Errors: InvalidParameter."""
        if not 1 <= len(self.texts()) <= MAX_TEXTS or not all(self.texts()):
            raise InvalidParameter(f"input: 1 to {MAX_TEXTS} texts, none of them empty", "input")

    def texts(self) -> list[str]:
        """The texts. Errors: InvalidParameter for tokens."""
        if isinstance(self.input, str):
            return [self.input]
        texts = [text for text in self.input if isinstance(text, str)]
        if len(texts) < len(self.input):
            raise InvalidParameter(
                "input: send text: numbers of another tokenizer's tokens mean nothing here",
                "input",
                hint="LangChain's OpenAIEmbeddings sends text with check_embedding_ctx_length=False",
            )
        return texts


class EmbeddingsApp:
    """ASGI app: OpenAI's routes for embeddings and models, and the function's own app on all other paths."""

    def __init__(self, embedder: TextEmbedder, app: App, *, name: str) -> None:
        self._embedder = embedder
        self._app = app
        self._name = name
        self._created_s = int(time.time())
        self._reader = CallReader(EmbeddingCall, "embeddings")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rstrip("/") if scope["type"] == "http" else ""
        if path != "/v1/embeddings" and not path.startswith("/v1/models"):
            return await self._app(scope, receive, send)
        try:
            body = await self._answer(scope["method"], path, receive)
        except ClientDisconnected:
            return
        except FleetError as error:
            return await respond_error(send, error)
        await respond(send, 200, msgspec.json.encode(body), JSON)

    async def _answer(self, method: str, path: str, receive: Receive) -> Json:
        wanted = "POST" if path == "/v1/embeddings" else "GET"
        if method != wanted:
            raise InvalidInput(f"{path} takes {wanted}, not {method}")
        if path == "/v1/models":
            return models(self._name, self._created_s)
        if path.startswith("/v1/models"):
            self._check_model(path.removeprefix("/v1/models/"))
            return model(self._name, self._created_s)
        call = self._reader.read(await read_body(receive))
        self._check_model(call.model)
        return embeddings_body(call, await self._embedder.embed(call.texts()), model_name=self._name)

    def _check_model(self, name: str | None) -> None:
        if name and not means(name.partition("@")[0], self._name):
            raise ModelNotFound(f"the model {name!r} is not served here", hint=f"ask for {self._name!r}")


def embeddings_body(call: EmbeddingCall, embedded: Sequence[EmbeddedText], *, model_name: str) -> Json:
    """Body of the answer. Errors: InvalidParameter for `dimensions` that are not the model's."""
    width = len(embedded[0].vector)
    if call.dimensions not in (None, width):
        raise InvalidParameter(f"dimensions: the model's vectors have {width}", "dimensions")
    count = sum(one.tokens for one in embedded)
    plain = call.encoding_format != "base64"
    encoded = [one.vector if plain else _base64(one.vector) for one in embedded]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(encoded)],
        "model": model_name,
        "usage": {"prompt_tokens": count, "total_tokens": count},
    }


def _base64(vector: list[float]) -> str:
    """Little-endian 32-bit floats in base64, as clients of OpenAI ask for them."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
