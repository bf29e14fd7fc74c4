"""LLM engine for models of Llama's kind: runs a handler file's `LLM(...)` in a worker.

`create_app` is the only entry. Importing the package is cheap; torch is imported with the first call, unless the fork
server has imported it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..contract.function.spec import LLMSettings
    from .model.weights import ModelWeights
    from .server.app import LLMApp
    from .server.engines import Adapters
    from .tensor_parallel.rank_process import RankProcesses

__all__ = ["create_app"]


def create_app(
    weights: ModelWeights,
    settings: LLMSettings,
    *,
    name: str,
    threads: int,
    ranks: RankProcesses | None = None,
    adapters: Adapters | None = None,
) -> LLMApp:
    """Creates an ASGI app (no lifespan) that serves the model; `app.close()` ends its thread.

    Blocks until every weight is verified. `threads` is the number of CPU threads, overridden by `settings.threads`; if
    both are zero, all cores of this process are used. `ranks`: the other processes of a model that is split over
    devices. `adapters`: LoRA adapters by the names with which requests choose one as their `model`.
    Errors: CheckpointInvalid if the engine cannot run the model, and those of weights that do not arrive.
    """
    from .server.app import create_app as create_server_app

    return create_server_app(weights, settings, name=name, threads=threads, ranks=ranks, adapters=adapters)
