"""Warm-up of a fork server for vLLM: everything that an engine imports, and kernels bound once for all workers.

An engine cannot be built in the parent, whose children would lose its threads. So a child builds one of a tiny model
and says which modules that took; the parent imports these and is forked with no thread of an import. Kernels that
Triton compiled for that engine are kept for the workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from ...contract.function.spec import LLMSettings
from ...contract.sizes import MIB
from ..engine.generation import Request
from ..model.weights import ModelWeights
from .compiled_kernels import keep_kernels
from .environment import prepare_environment

TRIAL_S = 120.0
"""Limit of the child's engine; without its list workers import for themselves."""
THREADS_S = 10.0
UNCHANGED_S = 3.0
"""Threads that are the same for so long are of those that never end and hold no lock of ours: beside a GPU, some
libraries have one for their events, and an allocator has one that gives memory back."""
CONTEXT_TOKENS = 256
MAX_BATCH = 8
"""Shape of the trial's engine. Kernels differ by what is 1 and what is a multiple of 16: with a block table of 16
entries and several sequences, the trial compiles those that functions need."""
READ_BYTES = 1 << 16
_WIDTH, _ROWS = 64, 256
_CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": _ROWS, "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": _WIDTH, "max_position_embeddings": CONTEXT_TOKENS, "tie_word_embeddings": True, "eos_token_id": 1,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "float16",
}  # fmt: skip


class _TinyWeights(dict[str, torch.Tensor]):
    """Weights of a Llama of one layer, as the loaders read them."""

    def __init__(self) -> None:
        square, vector = torch.zeros(_WIDTH, _WIDTH, dtype=torch.float16), torch.ones(_WIDTH, dtype=torch.float16)
        square_names = [f"self_attn.{name}_proj" for name in "qkvo"] + [
            f"mlp.{name}_proj" for name in ("gate", "up", "down")
        ]
        layer = dict.fromkeys(square_names, square) | dict.fromkeys(
            ("input_layernorm", "post_attention_layernorm"), vector
        )
        super().__init__({f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()})
        self["model.embed_tokens.weight"] = torch.zeros(_ROWS, _WIDTH, dtype=torch.float16)
        self["model.norm.weight"] = vector

    def file(self, name: str) -> bytes:
        files: Mapping[str, Any] = {"config.json": _CONFIG, "tokenizer.json": _tokenizer()}
        return msgspec.json.encode(files[name])


def warm_up_vllm() -> None:
    """Imports what an engine imports and binds its kernels. Errors: ImportError where vLLM does not run here."""
    prepare_environment()
    importlib.import_module("vllm")
    importlib.import_module("vllm.v1.engine.llm_engine")
    with tempfile.TemporaryDirectory(prefix="fs-kernels-", ignore_cleanup_errors=True) as kernels:
        for name in _modules_of_an_engine(kernels):
            with contextlib.suppress(Exception):  # parts of packages that fail alone are not needed alone
                importlib.import_module(name)
        keep_kernels(Path(kernels))
    _bind_kernels()
    _close_device_files()
    _wait_for_threads(time.monotonic() + THREADS_S)


def _close_device_files() -> None:
    """Ends what torch and vLLM have begun of NVML, which lists GPUs: a worker closes the descriptors that it inherits,
    and those of NVML would be of other files then."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return
    while nvml.nvmlShutdown() == 0:  # until it says that it was not begun
        pass


def _wait_for_threads(deadline_s: float) -> None:
    """Waits for the threads with which some imports look around, which end by themselves, until those are left that do
    not."""
    threads, since_s = os.listdir("/proc/self/task"), time.monotonic()
    while len(threads) > 1 and (now_s := time.monotonic()) < min(deadline_s, since_s + UNCHANGED_S):
        time.sleep(0.01)
        if (left := os.listdir("/proc/self/task")) != threads:
            threads, since_s = left, now_s


def _bind_kernels() -> None:
    """Puts the processor's kernels in the place of Triton's, which walks over all modules; children skip it."""
    from vllm.platforms import current_platform

    bind = getattr(current_platform, "register_triton_kernel_overrides", None)
    if bind is not None:
        bind()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)


def _modules_of_an_engine(kernels: str) -> list[str]:
    """Names of the modules that building and running an engine imports, from a child that does it; none if it fails.

    Triton compiles its kernels into the folder `kernels`.
    """
    before = set(sys.modules)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        os.environ["TRITON_CACHE_DIR"] = kernels
        _try_engine(writer, before)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        names = _read_all(pipe.fileno(), time.monotonic() + TRIAL_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return names


def _read_all(descriptor: int, deadline_s: float) -> list[str]:
    data = b""
    while (left_s := deadline_s - time.monotonic()) > 0 and select.select([descriptor], [], [], left_s)[0]:
        if not (piece := os.read(descriptor, READ_BYTES)):
            return data.decode().split()
        data += piece
    sys.stderr.write(f"vLLM built no engine in {TRIAL_S:.0f} s: its workers import modules for themselves\n")
    return []


def _try_engine(writer: int, before: set[str]) -> None:
    """Builds and runs an engine, writes the names of new modules; ends the process."""
    try:
        from .loader import load_model

        weights: ModelWeights = _TinyWeights()
        settings = LLMSettings(
            engine="vllm", max_batch=MAX_BATCH, max_context_tokens=CONTEXT_TOKENS, kv_memory_bytes=8 * MIB
        )
        engine = load_model(weights, settings, threads=1).engine
        engine.add(Request(tokens=[2, 3], max_new_tokens=2))
        while not engine.idle:
            engine.step()
        names = "\n".join(sorted(set(sys.modules) - before)).encode()
        while names:
            names = names[os.write(writer, names) :]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _tokenizer() -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
    }
