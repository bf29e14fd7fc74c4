"""Engines by name: the module that loads a model into each, imported when a function needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
import torch

from ...contract.errors import StartFailed
from ...contract.function.spec import EngineName, LLMSettings
from ...weights.lora import AdaptedWeights
from ...weights.tensor_mapping import TensorMapping
from ..engine.adapter_engines import AdapterEngines
from ..engine.inference_engine import InferenceEngine
from ..engine.two_engines import TwoEngines
from ..model.loaded_model import LoadedModel
from ..model.weights import ModelWeights
from .kv_memory import with_kv_memory

if TYPE_CHECKING:
    from ..tensor_parallel.rank_process import RankProcesses

LOADERS: dict[EngineName, str] = {
    "native": "..model.loader",
    "transformers": "..transformers_engine.loader",
    "vllm": "..vllm_engine.loader",
}
"""Modules with `load_model(weights, settings, *, threads) -> LoadedModel`."""


Adapters = Mapping[str, TensorMapping]
"""Attached LoRA adapters by the name that requests choose them by."""

EMBEDDING: frozenset[EngineName] = frozenset({"native", "transformers"})
"""Engines that compute embeddings."""


def load_engine(
    weights: ModelWeights,
    settings: LLMSettings,
    *,
    threads: int,
    ranks: RankProcesses | None = None,
    adapters: Adapters | None = None,
) -> LoadedModel:
    """Loads the model into the engine of its settings; with `first`, into that one, and the other one comes up later.
    `ranks`: the processes of the other ranks of a model that is split over devices; `adapters`: those that requests
    may name.

    Errors: StartFailed if the engine's package is not installed; CheckpointInvalid and InvalidSpec for a model or
    settings that the engine cannot run.
    """
    if ranks is not None:
        from ..tensor_parallel.loader import load_model  # late: few models need torch.distributed

        return load_model(weights, settings, ranks, threads=threads)
    alone = 1 if settings.engine == "vllm" else 1 + len(adapters or ())  # an engine an adapter, with weights of its own
    settings = with_kv_memory(settings, weights, engines=alone + 1 if settings.first else alone)
    if settings.first:
        return _load_two(weights, settings, threads=threads, adapters=adapters)
    try:
        module = import_module(LOADERS[settings.engine], __package__)
    except ModuleNotFoundError as error:
        if settings.engine == "native":
            raise
        raise StartFailed(
            f'LLM(engine="{settings.engine}") needs {error.name}, which is not installed where functions run',
            hint=f"install it into the node's environment: pip install 'fleetstart[{settings.engine}]'",
        ) from error
    loaded: LoadedModel
    if not adapters:
        loaded = module.load_model(weights, settings, threads=threads)
    elif settings.engine == "vllm":
        loaded = module.load_model(weights, settings, threads=threads, adapters=adapters)
    else:
        loaded = _load_adapted(weights, settings, module.load_model, threads=threads, adapters=adapters)
    return loaded


def _load_adapted(
    weights: ModelWeights,
    settings: LLMSettings,
    load: Callable[..., LoadedModel],
    *,
    threads: int,
    adapters: Adapters,
) -> LoadedModel:
    """Loads the base; adapters get an engine each once a request names them. The KV memory is divided evenly."""
    assert isinstance(weights, TensorMapping)
    base_weights = weights
    share = msgspec.structs.replace(settings, kv_memory_bytes=settings.kv_memory_bytes // (1 + len(adapters)))
    base = load(weights, share, threads=threads)

    def build(adapter: str) -> InferenceEngine:
        return load(AdaptedWeights(base_weights, adapters[adapter]), share, threads=threads).engine

    return replace(base, engine=AdapterEngines(base.engine, build, adapters))


def _load_two(weights: ModelWeights, settings: LLMSettings, *, threads: int, adapters: Adapters | None) -> LoadedModel:
    """Loads the first engine, over which the other one takes its requests when it is up."""
    own = msgspec.structs.replace(settings, first="")
    first = load_engine(weights, _of_first(settings), threads=threads, adapters=adapters)

    second_threads = 1

    def build() -> InferenceEngine:
        nonlocal second_threads
        second = load_engine(weights, own, threads=threads, adapters=adapters)
        second_threads = second.torch_threads
        return second.engine

    engine = TwoEngines(
        first.engine,
        build,
        name=settings.engine,
        embeds=settings.engine in EMBEDDING,
        taken=lambda: torch.set_num_threads(second_threads),
    )
    return replace(first, engine=engine)


def _of_first(settings: LLMSettings) -> LLMSettings:
    """Settings of the first engine. "auto" is the arithmetic of the other one: on processors fp32, so that keys and
    values are stored in it, too, and the tokens of both are the same."""
    dtype = "fp32" if settings.dtype == "auto" and not torch.cuda.is_available() else settings.dtype
    return msgspec.structs.replace(settings, engine=settings.first, first="", dtype=dtype)
