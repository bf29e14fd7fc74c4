"""Models that a function serves: itself and its adapters, which a request chooses by `model`, as with vLLM."""

from __future__ import annotations

import time
from collections.abc import Collection

from ...contract.function.names import means
from ...openai_api import responses as openai_responses
from ...openai_api.invalid_parameter import ModelNotFound


class ServedModels:
    """Names of the base, which is the function's, and of its adapters."""

    def __init__(self, name: str, adapters: Collection[str] = ()) -> None:
        self.name = name
        self._adapters = sorted(adapters)
        self._created_s = int(time.time())

    def adapter_of(self, model: str | None) -> str:
        """The adapter that a request's `model` names; empty for the base, also without a `model`.

        Errors: ModelNotFound, which names those that exist.
        """
        if not model or means(model.partition("@")[0], self.name):
            return ""
        if model in self._adapters:
            return model
        known = [repr(one) for one in (self.name, *self._adapters)]
        raise ModelNotFound(f"the model {model[:200]!r} is not served here", hint=f"ask for {' or '.join(known)}")

    def shown(self, adapter: str) -> str:
        """The model that an answer names."""
        return adapter or self.name

    def listed(self) -> openai_responses.Json:
        """Body of `/v1/models`."""
        return {"object": "list", "data": [self.one(adapter) for adapter in ("", *self._adapters)]}

    def one(self, adapter: str) -> openai_responses.Json:
        """Body of `/v1/models/{name}`."""
        body = openai_responses.model(self.shown(adapter), self._created_s)
        return body | ({"parent": self.name} if adapter else {})
