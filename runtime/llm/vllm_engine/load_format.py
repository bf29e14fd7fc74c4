"""vLLM's load format "fleetstart": weights from a node's segment, or from a checkpoint folder of the object store.

`register` is a plugin of vLLM (entry point `vllm.general_plugins`), which each of its processes runs. In a worker the
tensors come from the segment that is offered around the building of the engine (`offering`). A plain
`vllm serve FOLDER --load-format fleetstart --model-loader-extra-config '{"checkpoint": "ID"}'` gets them from the
segment of the node on its machine (`node_segment`), and with `STORE/checkpoints/ID` in place of ID from the parts of
that folder; FOLDER has the small files. vLLM copies each tensor into the layout of its kernels.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...contract.errors import CheckpointInvalid
from ...contract.ids import CheckpointId
from ...contract.object_keys import is_digest
from ...contract.sizes import MIB

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "fleetstart"
CHECKPOINT = "checkpoint"
"""Key of `--model-loader-extra-config`: id of a checkpoint, or folder with its manifest and parts."""
HOME = "home"
"""Key of `--model-loader-extra-config`: FS_HOME of the node that has the segment, instead of the variable's."""
ROOM_BYTES = 512 * MIB
"""Device memory that is left beside a second copy of the weights."""
NAMED = 3
"""Parameters that an error names."""
_offered: ContextVar[Mapping[str, torch.Tensor] | None] = ContextVar("offered weights", default=None)


@contextlib.contextmanager
def offering(weights: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Gives the weights to the loaders that run inside it, in this thread."""
    token = _offered.set(weights)
    try:
        yield
    finally:
        _offered.reset(token)


def register() -> None:
    """Registers the load format with vLLM, once a process."""
    from vllm.distributed import get_tensor_model_parallel_world_size
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class FleetstartLoader(model_loader.BaseModelLoader):  # type: ignore[misc]  # vLLM is typed where it is installed
        """Loader of one model's tensors, in the order in which they arrive."""

        def download_model(self, model_config: Any) -> None:
            """Does nothing: the node fetches weights."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            # Shards, and what a quantised model stores, have other shapes than its parameters.
            whole = model_config.quantization is None and get_tensor_model_parallel_world_size() == 1
            with source(self.load_config.model_loader_extra_config) as weights:
                loaded = (load_checked if whole else load)(model, on_device(weights))
            if loaded is not None and model_config.quantization is None:  # a quantised one makes some by itself
                check_filled(type(model).__name__, [name for name, _ in model.named_parameters()], loaded)

    model_loader.register_model_loader(LOAD_FORMAT)(FleetstartLoader)


def on_device(weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """The tensors on the GPU, while they arrive there, if there is one with room for them beside vLLM's own; else as
    they are, and vLLM copies one after the other out of pageable memory."""
    import torch

    from ...weights.tensor_mapping import TensorMapping

    if not torch.cuda.is_available() or not isinstance(weights, TensorMapping):
        return weights
    free_bytes, whole_bytes = torch.cuda.mem_get_info()
    room = has_room(
        weights_bytes=sum(weights.entry(name).size_bytes for name in weights),
        free_bytes=free_bytes,
        share_bytes=round(whole_bytes * torch.cuda.get_per_process_memory_fraction()),
        used_bytes=torch.cuda.memory_allocated(),
    )
    return weights.to("cuda") if room else weights


def load(model: Any, weights: Mapping[str, torch.Tensor]) -> Collection[str] | None:
    """Loads the tensors; names of the parameters that have them, None if the model does not say."""
    loaded: Collection[str] | None = model.load_weights(weights.items())
    return loaded


def load_checked(model: Any, weights: Mapping[str, torch.Tensor]) -> Collection[str] | None:
    """`load` for tensors and parameters that are whole. vLLM has a bare assertion for some shapes, and leaves out what
    is too much of others, to compute noise with the rest. Errors: CheckpointInvalid with the tensor and both shapes."""
    name = ""
    stored: tuple[int, ...] = ()
    required: tuple[int, ...] | None = None

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal name, stored, required
        for name, tensor in weights.items():
            stored, required = tuple(tensor.shape), required_shape(model, name)
            if required is not None and prod(stored) > prod(required):
                raise _other_shape(name, stored, required)
            yield name, tensor

    try:
        loaded: Collection[str] | None = model.load_weights(tensors())
    except (AssertionError, RuntimeError, ValueError) as error:
        if required is None or stored == required:
            raise
        raise _other_shape(name, stored, required) from error
    return loaded


def required_shape(model: Any, name: str) -> tuple[int, ...] | None:
    """The shape that a tensor of a checkpoint must have for the parameter of this name, or for its part of one that
    holds several (q, k and v); None if the model names it otherwise."""
    owner, _, leaf = name.rpartition(".")
    if (module := _submodule(model, owner)) is not None:
        shape = getattr(getattr(module, leaf, None), "shape", None)
        rows = getattr(module, "org_vocab_size", None)  # a vocabulary is padded
        return None if shape is None else tuple(shape) if rows is None else (rows, *shape[1:])
    parent, _, part = owner.rpartition(".")
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        module = _submodule(model, f"{parent}.{fused}".removeprefix(".")) if part in parts else None
        sizes, shape = getattr(module, "output_sizes", ()), getattr(getattr(module, leaf, None), "shape", None)
        if shape is not None and len(sizes) == len(parts):
            return (sizes[parts.index(part)], *shape[1:])
    return None


def _submodule(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _other_shape(name: str, stored: tuple[int, ...], required: tuple[int, ...]) -> CheckpointInvalid:
    return CheckpointInvalid(f"tensor {name} has shape {list(stored)}, config.json requires {list(required)}")


def check_filled(model: str, parameters: Iterable[str], loaded: Collection[str]) -> None:
    """Checks that a model's parameters have all been loaded: vLLM computes with what memory holds in others. Errors:
    CheckpointInvalid with the names."""
    missing = [name for name in parameters if name not in loaded]
    if missing:
        others = f" and {len(missing) - NAMED} others" if len(missing) > NAMED else ""
        raise CheckpointInvalid(f"the checkpoint does not fill {model}; it lacks {', '.join(missing[:NAMED])}{others}")


def has_room(*, weights_bytes: int, free_bytes: int, share_bytes: int, used_bytes: int) -> bool:
    """Checks whether the weights fit once more. `free_bytes`: of the device; `share_bytes`: what the process may
    allocate there; `used_bytes`: what of it it has allocated."""
    return weights_bytes + ROOM_BYTES <= min(free_bytes, share_bytes - used_bytes)


@contextlib.contextmanager
def source(extra: Mapping[str, Any] | None) -> Iterator[Mapping[str, torch.Tensor]]:
    """The tensors to load. `extra`: vLLM's `model_loader_extra_config`.

    Errors: ValueError where neither a worker offers weights nor a checkpoint is named; CheckpointInvalid; those of
    `segment_weights`.
    """
    if (weights := _offered.get()) is not None:
        yield weights
        return
    settings = dict(extra or {})
    checkpoint = settings.get(CHECKPOINT)
    if not checkpoint:
        raise ValueError(
            f"load format {LOAD_FORMAT!r} outside a worker needs a checkpoint of `fs weights ls`: "
            f"""--model-loader-extra-config '{{"{CHECKPOINT}": "ID"}}', with a node in FS_HOME, """
            "or the folder STORE/checkpoints/ID in place of ID"
        )
    if is_digest(checkpoint):
        from .node_segment import segment_weights

        home = Path(settings.get(HOME) or os.environ.get("FS_HOME") or "~/.fleetstart").expanduser()
        with segment_weights(home, CheckpointId(checkpoint)) as mapped:
            yield mapped
        return
    from .checkpoint_folder import CheckpointFolder

    yield CheckpointFolder(os.path.expanduser(checkpoint))
