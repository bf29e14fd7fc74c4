"""Loading of a model that is split over several devices: each rank reads its shard of every tensor.

The arithmetic is that of `TorchDecoder`: the CPU kernels compute whole layers in one call, and a layer has two sums
over the ranks in it. The first rank has scheduler, sampler and tokenizer; the others have weights and KV blocks alone.
"""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import NoReturn

import torch

from ...contract.errors import InvalidSpec
from ...contract.function.spec import LLMSettings
from ...contract.node.messages import DeviceBinding
from ..engine.engine import Engine
from ..engine.runner import Batch, Decoder, LocalRunner
from ..model.int8_matrix import Matrix
from ..model.layers import StageWeights, gather
from ..model.loaded_model import LoadedModel, ModelFiles
from ..model.loader import BLOCK_TOKENS, DTYPES, DecoderBuilder, decoder_builder, scheduler_of
from ..model.shard import Shard
from ..model.torch_decoder import TorchDecoder
from ..model.weights import ModelWeights
from .collectives import RankGroup, open_meeting
from .rank_process import RankPlace, RankProcesses, serve_steps
from .runner import TensorParallelRunner

logger = logging.getLogger(__name__)


def load_model(weights: ModelWeights, settings: LLMSettings, ranks: RankProcesses, *, threads: int) -> LoadedModel:
    """Loads the first rank's shard, and waits for the others'. Errors: those of `decoder_builder`, of the weights and
    of the other ranks; InvalidSpec for a model that cannot be split."""
    try:
        return _load_first(weights, settings, ranks, threads)
    finally:
        ranks.met()


def _load_first(weights: ModelWeights, settings: LLMSettings, ranks: RankProcesses, threads: int) -> LoadedModel:
    files = ModelFiles(weights)
    built = _builder(weights, settings, ranks.shard)
    threads = threads_of(settings, ranks.binding, 0, threads)
    torch.set_num_threads(threads)
    group = RankGroup(ranks.shard, open_meeting(ranks.meeting, ranks.shard), device_of(0))
    decoder, own_bytes = load_shard(built, ranks.shard, group)
    others = ranks.wait_loaded()
    logger.info(
        "the model is split",
        extra={"ranks": ranks.shard.count, "device": str(group.device), "weight_bytes": [own_bytes, *others]},
    )
    scheduler, config = scheduler_of(built, files, settings)
    engine = Engine(TensorParallelRunner(decoder, ranks), scheduler, files.tokenizer, config.eos_ids)
    return files.model(engine, config.vocab_size, config.eos_ids, torch_threads=threads)


def serve_rank(weights: ModelWeights, settings: LLMSettings, place: RankPlace, *, threads: int) -> NoReturn:
    """Serves another rank in its own process, to its end."""
    device = device_of(place.shard.rank)
    torch.set_num_threads(threads_of(settings, place.binding, place.shard.rank, threads))
    _limit_memory(device, place.binding)
    group = RankGroup(place.shard, open_meeting(place.meeting, place.shard), device)

    def load() -> tuple[int, Step]:
        decoder, size_bytes = load_shard(_builder(weights, settings, place.shard), place.shard, group)
        return size_bytes, Step(decoder)

    serve_steps(place, load)


class Step:
    """Computes a step of another rank, whose results the first one has."""

    def __init__(self, decoder: Decoder) -> None:
        self._runner = LocalRunner(decoder)

    def __call__(self, batch: Batch) -> None:
        self._runner.submit(batch)
        self._runner.collect()


def load_shard(built: DecoderBuilder, shard: Shard, group: RankGroup) -> tuple[TorchDecoder, int]:
    """One rank's decoder, and the bytes of weights that it reads. Errors: CheckpointInvalid; the weights'."""
    config = built.config
    parts = gather(built.weights, config, 0, config.layer_count, shard)
    decoder = TorchDecoder(
        shard.config(config),
        parts,
        device=group.device,
        dtype=DTYPES[built.dtype],
        block_count=built.block_count,
        block_tokens=BLOCK_TOKENS,
        group=group,
    )
    return decoder, stored_bytes(parts)


def stored_bytes(parts: StageWeights) -> int:
    """Size of a shard's tensors; a tied one is counted once."""
    values: list[Matrix | None] = [parts.embedding, parts.final_norm, parts.head]
    for layer in parts.layers:
        values += [getattr(layer, field.name) for field in fields(layer)]
    return sum({id(one): one.nbytes for one in values if one is not None}.values())


def device_of(rank: int) -> torch.device:
    """The device of a rank: of the GPUs that the group sees, the one with its number."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def threads_of(settings: LLMSettings, binding: DeviceBinding, rank: int, threads: int) -> int:
    """Threads of a rank's arithmetic: those that are set, else one for each core of its device."""
    cores = binding.cores_of[rank] if rank < len(binding.cores_of) else ()
    return settings.threads or len(cores) or max(1, threads // max(1, len(binding.devices)))


def _builder(weights: ModelWeights, settings: LLMSettings, shard: Shard) -> DecoderBuilder:
    """Configuration and KV blocks. Each rank has its heads' part of every block, so that the memory of all together is
    that of the settings."""
    # Not moved as a whole: a rank moves its own part.
    built = decoder_builder(weights, settings, threads=1, whole=False)
    if reason := built.config.not_split(shard.count):
        raise InvalidSpec(
            f"llm: tensor_parallel_size={shard.count}: {reason}",
            hint="take one that divides heads, key-value heads and intermediate_size of config.json",
        )
    return built


def _limit_memory(device: torch.device, binding: DeviceBinding) -> None:
    if device.type == "cuda" and device.index < len(binding.fractions):
        torch.cuda.set_per_process_memory_fraction(binding.fractions[device.index], device.index)
