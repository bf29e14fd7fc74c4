"""Loads a model into vLLM: its arguments from our settings, its weights from the mapping, its files from a folder."""

from __future__ import annotations

import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from ...contract.errors import CheckpointInvalid, FleetError, InvalidSpec
from ...contract.function.spec import LLMSettings
from ...contract.weights.decoder_config import stored_dtype
from ...weights.tensor_mapping import TensorMapping
from ..model.loaded_model import LoadedModel, ModelFiles
from ..model.weights import ModelWeights, optional_file
from .adapters import arguments as adapter_arguments
from .adapters import requests_of, write_adapters
from .compiled_kernels import offer_kernels
from .device_arguments import device_arguments, dtype_of, refuse_adapters_in_fp32
from .engine import VllmEngine, VllmModel
from .environment import prepare_environment
from .load_format import LOAD_FORMAT, offering, register
from .sampling import RequestSampler, processor_class

POSITIONS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
"""Fields of config.json that limit the positions of some models: vLLM takes the least of those that are there."""
REASON_MAX = 300
"""Characters of why vLLM does not run a model."""
SMALL_FILES = ("config.json", "generation_config.json", "tokenizer_config.json")
"""Files that vLLM reads. The tokenizer is ours, and text never reaches vLLM."""


def load_model(
    weights: ModelWeights,
    settings: LLMSettings,
    *,
    threads: int,
    adapters: Mapping[str, TensorMapping] | None = None,
) -> LoadedModel:
    """Loads a model. Errors: CheckpointInvalid if vLLM cannot run it, InvalidSpec for settings that do not fit."""
    prepare_environment()
    cores = settings.threads or threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(cores)
    import vllm  # noqa: F401  # fails here with the module's name where it is not installed
    from vllm.platforms import current_platform
    from vllm.v1.engine.llm_engine import LLMEngine

    register()
    offer_kernels()
    _inspect_in_process()
    files = ModelFiles(weights)
    samplers: dict[int, RequestSampler] = {}
    processor = processor_class(samplers)

    on_cpu = current_platform.is_cpu()
    config = _fields(files.config, "config.json")
    dtype = dtype_of(settings.dtype, stored_dtype(config), on_cpu=on_cpu)
    if adapters:
        refuse_adapters_in_fp32(dtype, on_cpu=on_cpu)
    context_tokens = min(settings.max_context_tokens, model_positions(config) or settings.max_context_tokens)
    changes = {
        "dtype": dtype,
        "max_model_len": context_tokens,  # by itself it has another one for some, and ends answers there
        **device_arguments(settings.max_batch, on_cpu=on_cpu),
        **adapter_arguments(adapters or {}),
    }
    requests: dict[str, Any] = {}

    def build() -> Any:
        # What a worker that is killed would leave behind: vLLM reads it while it is built, and not again.
        with _building(weights), tempfile.TemporaryDirectory(prefix="vllm-model-") as name:
            folder = _filled(Path(name), weights)
            _rendezvous_in(folder)
            vllm = LLMEngine.from_engine_args(_arguments(folder, settings, processor, changes))
            _check_heads(vllm)
            requests.update(requests_of(write_adapters(folder, adapters or {})))
            for request in requests.values():  # what it cannot apply fails the start, not a call
                vllm.add_lora(request)
            return vllm

    eos_ids = _eos_ids(files)
    model = VllmModel(tokenizer=files.tokenizer, eos_ids=eos_ids, context_tokens=context_tokens)
    engine = VllmEngine(model, build, _close, samplers, requests)
    vocab_size: int = engine._vllm.model_config.get_vocab_size()
    return files.model(engine, vocab_size, eos_ids, torch_threads=cores)


def _check_heads(vllm: Any) -> None:
    """Checks that there is attention for the model's heads. On processors vLLM does not compare them with its own list,
    and each call failed in its first step. Errors: CheckpointInvalid."""
    for layer in vllm.vllm_config.compilation_config.static_forward_context.values():
        backend, size = getattr(layer, "attn_backend", None), getattr(layer, "head_size", None)
        if backend is not None and size is not None and not backend.supports_head_size(size):
            known = ", ".join(map(str, backend.get_supported_head_sizes()))
            raise CheckpointInvalid(f"vLLM does not run this model: it has heads of {size}, and attention for {known}")


def _inspect_in_process() -> None:
    """Lets vLLM look at a model's class here, and not in a Python of its own that imports everything again.

    That one spares CUDA in a process that will fork, which a worker does not. Its answers are cached in a home folder,
    and a worker has none.
    """
    from vllm.model_executor.models import registry

    if hasattr(registry, "_run_in_subprocess"):
        registry._run_in_subprocess = _call


def _rendezvous_in(folder: Path) -> None:
    """Puts the file over which vLLM's processes, here this one alone, form their group into the folder: by itself vLLM
    makes one in the temporary folder and leaves it there."""
    from vllm.v1.executor import uniproc_executor

    if hasattr(uniproc_executor, "get_file_store_init_method"):
        uniproc_executor.get_file_store_init_method = lambda: f"file://{folder}/rendezvous"


def _call(function: Callable[[], Any]) -> Any:
    return function()


@contextmanager
def _building(weights: ModelWeights) -> Iterator[None]:
    """Offers the weights, keeps the garbage collector from looking at what is being built, and explains failures.

    On processors vLLM puts a function that does nothing in the place of `torch.set_num_threads`. The number is a
    thread's own, and the thread that steps sets it: without that, an engine that came up behind another one computed
    with the one thread of that one.

    vLLM tries its sampler while it is built, for which Triton compiles three kernels in 2 s beside an H200. Sampling is
    ours, and vLLM takes the largest logits alone: so it tries that, with memory for the largest batch.

    In this thread alone, the collector does nothing: vLLM asks for it a dozen times, each of which looks through all
    modules, a third of the time that it took to build beside an H200. And a graph that is captured in this thread
    forbids memory calls to it alone: by default it would forbid them to the engine that computes meanwhile, too.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # that of processors inherits from it

    builder, graph, collect = threading.get_ident(), torch.cuda.graph, gc.collect

    def collect_elsewhere(generation: int = 2) -> int:
        return 0 if threading.get_ident() == builder else collect(generation)

    def capture(*arguments: Any, **options: Any) -> Any:
        if threading.get_ident() == builder:
            options.setdefault("capture_error_mode", "thread_local")
        return graph(*arguments, **options)

    enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            _replaced(torch, "set_num_threads", torch.set_num_threads),
            _replaced(torch.cuda, "graph", capture),
            _replaced(gc, "collect", collect_elsewhere),
            _replaced(GPUModelRunner, "_dummy_sampler_run", _try_largest_logits),
            offering(cast("Mapping[str, torch.Tensor]", weights)),
        ):
            yield
    except FleetError:
        raise
    except ValueError as error:  # vLLM's own checks of models and settings
        reason = _reason(error)
        if "kv cache" in reason.lower() or "max_model_len" in reason:
            raise InvalidSpec(f"llm: vLLM does not start: {reason}", hint="change kv_memory or max_context") from error
        raise CheckpointInvalid(f"vLLM does not run this model: {reason}") from error
    finally:
        if enabled:
            gc.enable()


def _reason(error: ValueError) -> str:
    """The beginning of what vLLM says. Its configuration's checks are pydantic's, whose own first line is how many of
    them failed; for an architecture it lists all that it has."""
    found = error.errors() if hasattr(error, "errors") else []
    text = str(found[0]["msg"]).removeprefix("Value error, ") if found else str(error)
    line = text.strip().splitlines()[0] if text.strip() else repr(error)
    return line if len(line) <= REASON_MAX else line[:REASON_MAX].rsplit(" ", 1)[0] + " ..."


def _try_largest_logits(runner: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Tries the largest logits of a batch, in place of vLLM's sampler."""
    tokens: torch.Tensor = runner.model.compute_logits(hidden_states).float().argmax(dim=-1)
    return tokens


@contextmanager
def _replaced(owner: object, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replaces a function of a module or class until the block ends; what others put there meanwhile goes, too."""
    before = getattr(owner, name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _arguments(folder: Path, settings: LLMSettings, processor: type[Any], more: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(folder),
        runner="generate",  # by itself it takes a model whose config names no architecture for one of embeddings
        load_format=LOAD_FORMAT,
        max_num_seqs=settings.max_batch,
        kv_cache_memory_bytes=settings.kv_memory_bytes,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        async_scheduling=False,
        logits_processors=[processor],
        **more,
    )


def _close(vllm: Any) -> None:
    """Ends vLLM's engine. Its groups, of this process alone, stay: the next engine uses them."""
    vllm.engine_core.shutdown()


def _filled(folder: Path, weights: ModelWeights) -> Path:
    """The folder, with the small files that vLLM reads."""
    for name in SMALL_FILES:
        if (data := optional_file(weights, name)) is not None:
            (folder / name).write_bytes(data)
    return folder


def model_positions(config: Mapping[str, Any]) -> int | None:
    """Positions that the model of a config.json has; None if it does not say."""
    text = config.get("text_config")
    found = [fields.get(name) for fields in (config, text if isinstance(text, dict) else {}) for name in POSITIONS]
    return min((value for value in found if isinstance(value, int) and value > 0), default=None)


def _eos_ids(files: ModelFiles) -> frozenset[int]:
    """End tokens; generation_config.json has precedence, where instruct models add their end-of-turn token."""
    generation = _fields(files.generation, "generation_config.json") if files.generation else {}
    value = generation.get("eos_token_id", _fields(files.config, "config.json").get("eos_token_id"))
    ids = value if isinstance(value, list) else [] if value is None else [value]
    return frozenset(token for token in ids if isinstance(token, int))


def _fields(data: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise CheckpointInvalid(f"{name} is not a JSON object: {error}") from error
