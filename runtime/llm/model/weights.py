"""What the engine asks of weights: tensors by their Hugging Face names, and the small files beside them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class ModelWeights(Protocol):
    """`weights[name]` blocks until that tensor's bytes are there and verified; it is a view, not a copy."""

    def __getitem__(self, name: str, /) -> Tensor: ...

    def __contains__(self, name: object, /) -> bool: ...

    def file(self, name: str) -> bytes:
        """Bytes of config.json, tokenizer.json and friends. Errors: KeyError if the checkpoint lacks it."""
        ...


def optional_file(weights: ModelWeights, name: str) -> bytes | None:
    try:
        return weights.file(name)
    except (KeyError, FileNotFoundError):
        return None
