"""Engines by name: the module that loads a model into each, imported when a function needs it."""

from __future__ import annotations

from importlib import import_module

from ...contract.errors import StartFailed
from ...contract.function.spec import EngineName, LLMSettings
from ..model.loaded_model import LoadedModel
from ..model.weights import ModelWeights

LOADERS: dict[EngineName, str] = {
    "native": "..model.loader",
    "transformers": "..transformers_engine.loader",
    "vllm": "..vllm_engine.loader",
}
"""Modules with `load_model(weights, settings, *, threads) -> LoadedModel`."""


def load_engine(weights: ModelWeights, settings: LLMSettings, *, threads: int) -> LoadedModel:
    """Loads the model into the engine of its settings.

    Errors: StartFailed if the engine's package is not installed; CheckpointInvalid and InvalidSpec for a model or
    settings that the engine cannot run.
    """
    try:
        module = import_module(LOADERS[settings.engine], __package__)
    except ModuleNotFoundError as error:
        if settings.engine == "native":
            raise
        raise StartFailed(
            f'LLM(engine="{settings.engine}") needs {error.name}, which is not installed where functions run',
            hint=f"install it into the node's environment: pip install 'fleetstart[{settings.engine}]'",
        ) from error
    loaded: LoadedModel = module.load_model(weights, settings, threads=threads)
    return loaded
