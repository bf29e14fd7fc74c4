"""Our engine for Llama-family models: what `LLM(...)` in a handler file becomes inside a worker.

`create_app` is the whole face. Importing this costs nothing; torch comes in with the first call,
unless the fork server has imported it before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..contract.function.spec import LLMSettings
    from .model.weights import ModelWeights
    from .server.app import LLMApp

__all__ = ["create_app"]


def create_app(weights: ModelWeights, settings: LLMSettings, *, name: str, threads: int) -> LLMApp:
    """An ASGI app (no lifespan) that serves the model; `app.close()` ends its thread.

    Blocks until every weight is there and verified. `threads` counts for arithmetic on the CPU and is
    overruled by `settings.threads`; zero of both means all cores that this process may use.
    Errors: CheckpointInvalid if the checkpoint is not a model that this engine runs, and what the
    weights raise when they do not arrive.
    """
    from .server.app import create_app as create

    return create(weights, settings, name=name, threads=threads)
