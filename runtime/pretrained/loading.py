"""Builds a model of transformers over mapped weights: the numbers of `from_pretrained`, and no copy of a tensor.

transformers loads the tensors itself, with its renamings for older checkpoints, ties and initialisers; it is given
views of the segment instead of a file. A model that is not whole afterwards is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import transformers
from huggingface_hub import constants
from transformers.utils import logging

from ..contract.errors import CheckpointInvalid
from ..weights.computed_tensors import lacking_tensors

if TYPE_CHECKING:
    import torch

    from ..weights.tensor_mapping import TensorMapping

CONFIG = "config.json"
CPU = "cpu"
"""The device of pipelines, which would else take the first GPU that they see."""
NAMED_MAX = 8
"""Names of tensors in an error."""
MAX_TOKENS_UNKNOWN = 1_000_000
"""From here on a tokenizer's limit means that it was saved without one."""
POSITIONS_FROM_PADDING = frozenset({"camembert", "longformer", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})
"""Model types whose first position is numbered one above the padding token's id."""


def quieten() -> None:
    """Keeps transformers from the hub and from drawing progress: everything is in the checkpoint."""
    constants.HF_HUB_OFFLINE = True
    logging.disable_progress_bar()


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps transformers quiet meanwhile, as `quieten`: for a process whose children may want it otherwise."""
    offline = constants.HF_HUB_OFFLINE
    quieten()
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.enable_progress_bar()


def load_config(weights: TensorMapping) -> Any:
    """The model's config. Errors: CheckpointInvalid without a config.json."""
    if CONFIG not in weights.files:
        raise CheckpointInvalid(
            f"the checkpoint has no {CONFIG}", hint="push the folder that save_pretrained wrote, not a file of it"
        )
    quieten()
    name = msgspec.json.decode(weights.file(CONFIG)).get("model_type")
    try:
        # Said aloud: transformers would ask at a terminal.
        return transformers.AutoConfig.from_pretrained(weights.folder(), trust_remote_code=False)
    except ValueError as error:
        raise CheckpointInvalid(
            f"transformers {transformers.__version__} has no model_type {name!r}",
            hint="a newer release may have it; code that comes with a checkpoint is not run: write a handler with it",
        ) from error


def load_model(
    weights: Mapping[str, torch.Tensor],
    config: Any,
    *,
    kinds: Sequence[str],
    optional: Sequence[str] = (),
    dtype: torch.dtype | str = "auto",
) -> Any:
    """The model of the first kind that transformers has for the config, in eval mode.

    `kinds`: names of transformers' mappings from configs to classes. `optional`: beginnings of names of parameters that
    the task does not use. `dtype`: that of the arithmetic; tensors of another one are copied.

    Errors: CheckpointInvalid.
    """
    mappings = [getattr(transformers, kind) for kind in kinds]
    found = next((mapping[type(config)] for mapping in mappings if type(config) in mapping), None)
    if found is None:
        raise CheckpointInvalid(
            f"model_type {config.model_type!r} has no model for this task in transformers {transformers.__version__}",
            hint="see the model's page for its task",
        )
    kind = found[0] if isinstance(found, tuple) else found
    model, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(weights),
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused here, with their shapes: its own error has them in a table
    )
    if others := sorted(info["mismatched_keys"]):
        name, stored, required = others[0]
        raise CheckpointInvalid(f"tensor {name} has shape {list(stored)}, config.json requires {list(required)}")
    missing = [name for name in info["missing_keys"] if not name.startswith(tuple(optional))]
    if missing or (missing := lacking_tensors(model)):
        saved = ", ".join(config.architectures or ["unknown"])
        raise CheckpointInvalid(
            f"the checkpoint does not fill {kind.__name__}; it lacks {', '.join(sorted(missing)[:NAMED_MAX])}"
            + (f" and {len(missing) - NAMED_MAX} more" if len(missing) > NAMED_MAX else ""),
            hint=f"it was saved from {saved}: choose the task that this model was trained for",
        )
    return model


def max_tokens(tokenizer: Any, config: Any, setting: int | None) -> int | None:
    """Longest input in tokens: the setting, else the tokenizer's limit, else the model's; None if it has none."""
    if setting is not None:
        return setting
    if tokenizer.model_max_length < MAX_TOKENS_UNKNOWN:
        return int(tokenizer.model_max_length)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is None:
        return None
    return int(positions) - (config.pad_token_id + 1 if config.model_type in POSITIONS_FROM_PADDING else 0)
