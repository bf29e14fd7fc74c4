"""Interface of a model's weights: tensors by their Hugging Face names, and small files."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ModelWeights(Protocol):
    """Tensors by name, as views; `weights[name]` blocks until the tensor's bytes are verified."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __contains__(self, name: object, /) -> bool: ...

    def file(self, name: str) -> bytes:
        """Bytes of config.json, tokenizer.json and friends. Errors: KeyError if the checkpoint lacks it."""
        ...


def optional_file(weights: ModelWeights, name: str) -> bytes | None:
    """A file of the checkpoint; None if it has none of that name."""
    try:
        return weights.file(name)
    except (KeyError, FileNotFoundError):
        return None
