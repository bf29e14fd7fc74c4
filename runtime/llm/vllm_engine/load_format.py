"""vLLM's load format "fleetstart": weights from a node's segment, or from a checkpoint folder of the object store.

`register` is a plugin of vLLM (entry point `vllm.general_plugins`), which each of its processes runs. In a worker the
tensors come from the segment that is offered around the building of the engine (`offering`). A plain
`vllm serve FOLDER --load-format fleetstart --model-loader-extra-config '{"checkpoint": "STORE/checkpoints/ID"}'` reads
the parts of a published checkpoint; FOLDER has the small files. vLLM copies each tensor into the layout of its kernels.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

LOAD_FORMAT = "fleetstart"
CHECKPOINT = "checkpoint"
"""Key of `--model-loader-extra-config`: folder with a checkpoint's manifest and parts."""
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
    from vllm.model_executor import model_loader

    if LOAD_FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    class FleetstartLoader(model_loader.BaseModelLoader):  # type: ignore[misc]  # vLLM is typed where it is installed
        """Loader of one model's tensors, in the order in which they arrive."""

        def download_model(self, model_config: Any) -> None:
            """Does nothing: the node fetches weights."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(source(self.load_config.model_loader_extra_config).items())

    model_loader.register_model_loader(LOAD_FORMAT)(FleetstartLoader)


def source(extra: Mapping[str, Any] | None) -> Mapping[str, torch.Tensor]:
    """The tensors to load. `extra`: vLLM's `model_loader_extra_config`.

    Errors: ValueError where neither a worker offers weights nor a checkpoint is named; CheckpointInvalid.
    """
    if (weights := _offered.get()) is not None:
        return weights
    folder = dict(extra or {}).get(CHECKPOINT)
    if not folder:
        raise ValueError(
            f"load format {LOAD_FORMAT!r} outside a worker needs the folder of a published checkpoint: "
            f"""--model-loader-extra-config '{{"{CHECKPOINT}": "STORE/checkpoints/ID"}}'"""
        )
    from .checkpoint_folder import CheckpointFolder

    return CheckpointFolder(os.path.expanduser(folder))
