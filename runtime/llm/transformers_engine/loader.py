"""Loads a causal language model of transformers into an engine.

The model is built on the meta device and bound to the tensors as they lie in the segment, without a copy, unless
another dtype than theirs is asked for. The shapes of its keys and values are read from a first pass of one token: they
are what the model itself caches, for whichever architecture.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from typing import Any

import msgspec
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicCache, LinearAttentionCacheLayerMixin

from ...contract.errors import CheckpointInvalid, InvalidSpec, StartFailed
from ...contract.function.spec import LLMSettings
from ...contract.weights.causal_config import read_causal_config, require_transformers
from ...pretrained.loading import load_model as bind_model
from ...pretrained.loading import quieten
from ...weights.tensor_mapping import TensorMapping
from ..engine.block_pool import BlockPool
from ..engine.engine import Engine
from ..engine.runner import Runner
from ..engine.scheduler import Scheduler
from ..model.loaded_model import LoadedModel, ModelFiles
from ..model.loader import BLOCK_TOKENS, CUDA_STEP_TOKENS, DTYPES, STEP_TOKENS
from ..model.weights import ModelWeights
from .paged_cache import KeyValueShape, PagedCache, cache_argument
from .runner import TransformersRunner

TRANSFORMERS_MAJOR = 5
"""First release whose models take masks and caches as they are given here."""
KINDS = ("MODEL_FOR_CAUSAL_LM_MAPPING",)


def load_model(weights: ModelWeights, settings: LLMSettings, *, threads: int) -> LoadedModel:
    """Loads a model, waiting for all its weights.

    Errors: CheckpointInvalid for a model that transformers does not have, or whose state is more than keys and values;
    InvalidSpec if the KV memory is too small; StartFailed for an older transformers.
    """
    if int(transformers.__version__.partition(".")[0]) < TRANSFORMERS_MAJOR:
        raise StartFailed(
            f'engine="transformers" needs transformers {TRANSFORMERS_MAJOR}, this node has {transformers.__version__}',
            hint="pip install --upgrade transformers",
        )
    files = ModelFiles(weights)
    causal = read_causal_config(files.config, files.generation)
    require_transformers(causal)
    config = _config(files.config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, shapes, vocab_size = _bound(weights, config, settings, device)
    context = min(settings.max_context_tokens, causal.max_positions or settings.max_context_tokens)
    blocks = _block_count(shapes, model.dtype, settings, context)

    def runner_of(model: Any) -> Runner:
        cache = PagedCache(shapes, blocks * BLOCK_TOKENS, model.dtype, device)
        return TransformersRunner(model, cache, BLOCK_TOKENS, vocab_size)

    scheduler = Scheduler(
        BlockPool(blocks, BLOCK_TOKENS),
        max_batch=settings.max_batch,
        token_budget=max(STEP_TOKENS if device.type == "cpu" else CUDA_STEP_TOKENS, settings.max_batch),
        context_tokens=context,
    )
    engine = Engine(
        runner_of(model),
        scheduler,
        files.tokenizer,
        causal.eos_ids,
        lambda: runner_of(_bound(weights, config, settings, device)[0]),
    )
    cores = settings.threads or threads or len(os.sched_getaffinity(0))
    return files.model(engine, vocab_size, causal.eos_ids, torch_threads=cores)


def _config(data: bytes) -> Any:
    """The model's config. Errors: CheckpointInvalid for a kind that transformers does not have."""
    quieten()
    fields = msgspec.json.decode(data, type=dict[str, Any])
    name = fields.pop("model_type", None)
    if name in transformers.CONFIG_MAPPING:
        try:
            return transformers.AutoConfig.for_model(name, **fields)
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise CheckpointInvalid(f"config.json: transformers refuses it: {error}") from error
    raise CheckpointInvalid(
        f"transformers {transformers.__version__} has no model_type {name!r}",
        hint="a newer release may have it; code that comes with a checkpoint is not run",
    )


def _bound(
    weights: ModelWeights, config: Any, settings: LLMSettings, device: torch.device
) -> tuple[Any, list[KeyValueShape | None], int]:
    """The model, the shapes of what each of its layers caches, and the width of its logits."""
    if device.type == "cuda" and isinstance(weights, TensorMapping):
        weights = weights.to(device)
    assert isinstance(weights, Mapping)
    tensors = dict(weights)
    dtype = _stored_dtype(tensors) if settings.dtype == "auto" else DTYPES[settings.dtype]
    model = bind_model(tensors, config, kinds=KINDS, dtype=dtype).to(device)
    shapes, vocab_size = _probe(model)
    return model, shapes, vocab_size


def _stored_dtype(weights: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype of most numbers of the checkpoint."""
    numbers: dict[torch.dtype, int] = {}
    for tensor in weights.values():
        if tensor.is_floating_point():
            numbers[tensor.dtype] = numbers.get(tensor.dtype, 0) + tensor.numel()
    return max(numbers, key=lambda dtype: numbers[dtype], default=torch.float32)


@torch.inference_mode()
def _probe(model: Any) -> tuple[list[KeyValueShape | None], int]:
    """Shapes of each layer's key and value, and the width of the logits, from a pass of one token.

    Errors: CheckpointInvalid for a model that keeps another state.
    """
    kind = type(model).__name__
    usual = DynamicCache(config=model.config)
    if getattr(model, "_is_stateful", False) or any(
        isinstance(layer, LinearAttentionCacheLayerMixin) for layer in usual.layers
    ):
        raise CheckpointInvalid(
            f"{kind} keeps a recurrent state, and the transformers engine only keys and values",
            hint="serve it with a handler of your own",
        )
    cache = DynamicCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    argument = cache_argument(inspect.signature(model.forward).parameters)
    output = model(input_ids=token, use_cache=True, **{argument: cache})
    shapes = [_shape(layer) for layer in cache.layers]
    if not any(shapes):
        raise CheckpointInvalid(
            f"{kind} does not cache keys and values in the way of transformers {transformers.__version__}",
            hint="serve it with a handler of your own",
        )
    return shapes, output.logits.shape[-1]


def _shape(layer: CacheLayerMixin) -> KeyValueShape | None:
    if not layer.is_initialized:
        return None
    keys, values = layer.keys, layer.values
    assert keys is not None
    assert values is not None
    return KeyValueShape(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3])


def _block_count(shapes: list[KeyValueShape | None], dtype: torch.dtype, settings: LLMSettings, context: int) -> int:
    """Number of KV blocks: as many as fit the memory, at most as many as the batch can use."""
    block_bytes = sum(shape.numbers for shape in shapes if shape is not None) * dtype.itemsize * BLOCK_TOKENS
    count = min(settings.kv_memory_bytes // block_bytes, settings.max_batch * -(-context // BLOCK_TOKENS))
    if count < 2:
        raise InvalidSpec(
            f"llm: kv_memory of {settings.kv_memory_bytes} bytes holds {count} blocks of {block_bytes} bytes, "
            "at least 2 are needed",
            hint="give the function more kv_memory",
        )
    return count
