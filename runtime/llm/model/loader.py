"""Model loading: builds an engine from a checkpoint and settings.

It chooses the decoder and the number of KV blocks. Decoder and tokenizer are loaded independently of each other.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...contract.errors import InvalidSpec
from ...contract.function.spec import LLMSettings
from ...contract.weights.decoder_config import DecoderConfig, read_config
from ...weights.tensor_mapping import TensorMapping
from ..engine.block_pool import BlockPool
from ..engine.engine import Engine
from ..engine.runner import LocalRunner, Runner
from ..engine.scheduler import Scheduler
from .first_steps import BLOCKS, take_first_steps
from .layers import StageWeights, gather
from .loaded_model import LoadedModel, ModelFiles, required_file
from .native_decoder import NativeDecoder
from .torch_decoder import TorchDecoder
from .weights import ModelWeights

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Tokens a block: a sequence wastes half a block on average, and the CPU kernels read four keys at a time."""
STEP_TOKENS = 256
"""Rows a step on the CPU: long enough that weights are read once for many rows, short enough (some 0.3 s for
a small model on one core) that those who decode beside a long prompt do not stall."""
CUDA_STEP_TOKENS = 2048
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderBuilder:
    """Builds decoders of ranges of the model's layers, all with the same KV blocks."""

    weights: ModelWeights
    config: DecoderConfig
    dtype: str
    """The type of keys and values, and on CUDA of the arithmetic: "fp32", "bf16" or "fp16". On a CPU the arithmetic is
    fp32, but that of matrix products and attention is bf16 where both weights and this are, and the processor has
    AMX."""
    device: torch.device
    block_count: int
    threads: int

    def decoder(self, first: int, end: int) -> NativeDecoder | TorchDecoder:
        """Decoder of layers `first .. end - 1`; waits for their weights. Errors: CheckpointInvalid; the weights'."""
        stage = gather(self.weights, self.config, first, end)
        reason = self.config.not_native if self.device.type == "cpu" else f"the device is {self.device.type}"
        logger.info(
            "decoder chosen",
            extra={
                "decoder": "torch" if reason else "native", "reason": reason, "family": self.config.family,
                "layers": f"{first}-{end - 1}", "dtype": self.dtype,
            },
        )  # fmt: skip
        if not reason:
            return NativeDecoder(
                self.config,
                stage,
                kv_dtype=self.dtype,
                block_count=self.block_count,
                block_tokens=BLOCK_TOKENS,
                threads=self.threads,
                isa="bf16" if self._in_bf16 else "auto",
            )
        return self._torch_decoder(stage)

    def first_layer(self) -> TorchDecoder:
        """A first stage of one layer on a GPU, for steps of no request. Errors as of `decoder`."""
        return replace(self, block_count=BLOCKS)._torch_decoder(gather(self.weights, self.config, 0, 1))

    def _torch_decoder(self, stage: StageWeights) -> TorchDecoder:
        return TorchDecoder(
            self.config,
            stage,
            device=self.device,
            dtype=DTYPES[self.dtype],
            block_count=self.block_count,
            block_tokens=BLOCK_TOKENS,
        )

    @property
    def _in_bf16(self) -> bool:
        """True if no weight is stored in another type, and would be rounded."""
        return self.dtype == self.config.stored_dtype == "bf16" and not self.config.int8_matrices

    @property
    def kv_bytes(self) -> int:
        """Size of one layer's key and value of one token."""
        return 2 * self.config.kv_width * DTYPES[self.dtype].itemsize

    def whole(self) -> NativeDecoder | TorchDecoder:
        return self.decoder(0, self.config.layer_count)


MakeRunner = Callable[[DecoderBuilder], Runner]


def decoder_builder(
    weights: ModelWeights, settings: LLMSettings, *, threads: int, device: str = "auto", whole: bool = True
) -> DecoderBuilder:
    """Reads the configuration. Errors: CheckpointInvalid, InvalidSpec if the KV memory is too small."""
    chosen = _device(device)
    if whole:  # a stage moves its tensors when it binds them
        weights = _moving(weights, chosen)
    config = read_config(required_file(weights, "config.json"))
    config = replace(config, context_tokens=min(settings.max_context_tokens, config.max_positions))
    dtype = config.stored_dtype if settings.dtype == "auto" else settings.dtype
    return DecoderBuilder(
        weights=weights,
        config=config,
        dtype=dtype,
        device=chosen,
        block_count=_block_count(config, settings, dtype),
        threads=settings.threads or threads or _cores(),
    )


def load_model(
    weights: ModelWeights,
    settings: LLMSettings,
    *,
    threads: int,
    device: str = "auto",
    runner: MakeRunner | None = None,
) -> LoadedModel:
    """Loads a model. `runner` makes the runner of a pipeline stage; without it all layers are computed here.

    Errors: CheckpointInvalid, InvalidSpec if the KV memory is too small.
    """
    built = decoder_builder(weights, settings, threads=threads, device=device, whole=runner is None)
    files = ModelFiles(weights)
    # Along a pipeline several steps are in flight, and blocks of later stages move when it is consolidated.
    scheduler, config = scheduler_of(built, files, settings, share_prefixes=runner is None)

    # On their way to a GPU, as they are stored.
    if built.weights is not weights and built.dtype == config.stored_dtype and config.layer_count > 1:
        take_first_steps(built.first_layer())

    def again() -> Runner:
        return LocalRunner(replace(kept, weights=_moving(weights, kept.device)).whole())

    running = LocalRunner(built.whole()) if runner is None else runner(built)
    kept = replace(built, weights=weights)  # what was moved to a GPU is its runner's alone, and goes with it
    engine = Engine(running, scheduler, files.tokenizer, config.eos_ids, again if runner is None else None)
    return files.model(engine, config.vocab_size, config.eos_ids)


def scheduler_of(
    built: DecoderBuilder, files: ModelFiles, settings: LLMSettings, *, share_prefixes: bool = True
) -> tuple[Scheduler, DecoderConfig]:
    """The scheduler of a model's steps, and the configuration with its generation's end tokens."""
    config = read_config(files.config, files.generation)
    step_tokens = STEP_TOKENS if built.device.type == "cpu" else CUDA_STEP_TOKENS
    scheduler = Scheduler(
        BlockPool(built.block_count, BLOCK_TOKENS),
        max_batch=settings.max_batch,
        token_budget=max(step_tokens, settings.max_batch),
        context_tokens=min(settings.max_context_tokens, config.max_positions),
        share_prefixes=share_prefixes,
    )
    return scheduler, config


def _moving(weights: ModelWeights, device: torch.device) -> ModelWeights:
    """Starts to move the tensors to a GPU in the background, before anything waits for a file. The CPU's decoder reads
    them in the segment."""
    return weights.to(device) if device.type == "cuda" and isinstance(weights, TensorMapping) else weights


def _block_count(config: DecoderConfig, settings: LLMSettings, dtype: str) -> int:
    """Number of KV blocks: as many as fit the memory, at most as many as the batch can use."""
    width_bytes = DTYPES[dtype].itemsize
    block_bytes = 2 * config.layer_count * config.kv_width * width_bytes * BLOCK_TOKENS
    useful = settings.max_batch * -(-config.context_tokens // BLOCK_TOKENS)
    kv_bytes = settings.least_kv_bytes
    count = min(kv_bytes // block_bytes, useful)
    if count < 2:
        raise InvalidSpec(
            f"llm: kv_memory of {kv_bytes} bytes holds {count} blocks of {block_bytes} bytes, at least 2 are needed",
            hint="give the function more kv_memory",
        )
    return count


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
