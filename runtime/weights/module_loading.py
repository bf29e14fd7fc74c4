"""Loading into a torch module: binds its parameters to tensors of a checkpoint without a copy, and leaves nothing open.

`load_state_dict(assign=True)` does not look at three things of a model that was built on the meta device: buffers that
are not stored, ties between parameters, and attributes that are plain tensors. What stays on the meta device has no
values, and reading it gives arbitrary numbers. Here each has its value, or the load fails and names it
(`computed_tensors` makes those that are not stored).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from ..contract.errors import CheckpointInvalid
from .computed_tensors import compute_tensors, lacking_tensors

if TYPE_CHECKING:
    from torch import nn

    from .tensor_mapping import TensorMapping

NAMED_MAX = 8
"""Names in an error; the rest are counted."""


def load_module(tensors: TensorMapping, model: nn.Module, unused: Iterable[str] = ()) -> None:
    """Binds every parameter and buffer of the model. `unused`: patterns of names that the model need not have.

    Errors: CheckpointInvalid, before the model is changed unless a tensor's value cannot be made.
    """
    ties = _ties(model)
    computed = _unstored_buffers(model)
    chosen = _matched(tensors, model, ties, computed, tuple(unused))
    model.load_state_dict(chosen, strict=False, assign=True)
    _tie(model, ties, chosen)
    stored = {name: tensors[name] for name in computed if name in tensors}
    compute_tensors(model, stored)
    if lacking := lacking_tensors(model):
        raise CheckpointInvalid(
            f"{type(model).__name__}: no values for what is not stored in a checkpoint and was built on the meta "
            f"device: {_listed(lacking)}",
            hint='compute them with device="cpu" in their module, or in its reset_parameters(); '
            "or build the model without the meta device",
        )
    model.eval()


def _matched(
    tensors: TensorMapping,
    model: nn.Module,
    ties: Mapping[str, str],
    computed: Iterable[str],
    unused: Sequence[str],
) -> dict[str, torch.Tensor]:
    """Tensors of the checkpoint that the model stores. Errors: CheckpointInvalid for names or shapes that differ."""
    wanted = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    left = [name for name in tensors if name not in wanted and not _expected(name, computed, unused)]
    optional = _made_by_torch(model)
    missing = [
        name for name in wanted if name not in tensors and name not in optional and not _is_tied(name, ties, tensors)
    ]
    if left or missing:
        said = [f"the model has no {_listed(left)}"] * bool(left) + [f"it needs {_listed(missing)}"] * bool(missing)
        raise CheckpointInvalid(
            f"the checkpoint is not of this {type(model).__name__}: {'; '.join(said)}", hint=_hint(left, missing)
        )
    for name, expected in wanted.items():
        if name in tensors and tuple(expected.shape) != tensors.entry(name).shape:
            raise CheckpointInvalid(
                f"{name}: {type(model).__name__} has shape {list(expected.shape)}, the checkpoint has "
                f"{list(tensors.entry(name).shape)}",
                hint="build the model from the checkpoint's own config.json",
            )
    return {name: tensors[name] for name in tensors if name in wanted}


def _expected(name: str, computed: Iterable[str], unused: Sequence[str]) -> bool:
    return name in computed or any(fnmatchcase(name, pattern) for pattern in unused)


def _unstored_buffers(model: nn.Module) -> frozenset[str]:
    """Names of buffers that a checkpoint need not have; older files have some of them."""
    return frozenset(name for name, _ in model.named_buffers(remove_duplicate=False)) - model.state_dict().keys()


def _made_by_torch(model: nn.Module) -> frozenset[str]:
    """Stored names whose absence torch itself makes up for: a batch norm's counter in files of old torch."""
    norms = (name for name, module in model.named_modules() if isinstance(module, torch.nn.modules.batchnorm._NormBase))
    return frozenset(f"{name}.num_batches_tracked".removeprefix(".") for name in norms)


def _ties(model: nn.Module) -> dict[str, str]:
    """Each name of a parameter or stored buffer that several modules share → the first of its names."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    found = [(name, first.setdefault(id(tensor), name)) for name, tensor in named]
    shared = {one for name, one in found if name != one}
    return {name: one for name, one in found if one in shared}


def _is_tied(name: str, ties: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> bool:
    """Checks whether another name of the same parameter is in the checkpoint."""
    group = ties.get(name)
    return group is not None and any(one == group and other in tensors for other, one in ties.items())


def _tie(model: nn.Module, ties: Mapping[str, str], chosen: Mapping[str, torch.Tensor]) -> None:
    """Ties again what assigning has untied. Errors: CheckpointInvalid for two different tensors of one parameter."""
    for group, names in groupby(sorted(ties, key=lambda name: ties[name]), key=lambda name: ties[name]):
        members = list(names)
        stored = [name for name in members if name in chosen]
        for other in stored[1:]:
            if not _same(chosen[stored[0]], chosen[other]):
                raise CheckpointInvalid(
                    f"{type(model).__name__} ties {stored[0]} and {other}, which differ in the checkpoint",
                    hint="set tie_word_embeddings=False in its config, if it is a model of transformers",
                )
        tensor = _get(model, stored[0] if stored else group)
        for name in members:
            owner, _, attribute = name.rpartition(".")
            module = model.get_submodule(owner)
            table: dict[str, Any] = module._parameters if attribute in module._parameters else module._buffers
            table[attribute] = tensor


def _get(model: nn.Module, name: str) -> torch.Tensor:
    owner, _, attribute = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(owner), attribute)
    return tensor


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or (one.dtype == other.dtype and torch.equal(one, other))


def _listed(names: Sequence[str]) -> str:
    rest = len(names) - NAMED_MAX
    return ", ".join(names[:NAMED_MAX]) + (f" and {rest} more" if rest > 0 else "")


def _hint(left: Sequence[str], missing: Sequence[str]) -> str:
    """What to do next: names that differ by a prefix only are told."""
    for one, other, said in (
        (left, missing, "the checkpoint's names begin with {!r}, the model's do not: load into what holds the model"),
        (missing, left, "the model's names begin with {!r}, the checkpoint's do not: load into that part of the model"),
    ):
        for name in one:
            prefix = next((name[: -len(end)] for end in other if name.endswith(f".{end}")), "")
            if prefix:
                return said.format(prefix)
    if left and not missing:
        return f'if the model does not need them: load_into(model, unused=["{left[0]}"]); * stands for any part'
    return "build the model from the checkpoint's own config.json, with the class that its architectures name"
