"""Values of tensors that a model computes when it is built: buffers that no checkpoint stores, and plain attributes.

Rotary frequencies, position numbers, masks. Of a model built on the meta device they have no values, and are made anew
here, module by module, in one of three ways:

1. by the initialiser of the model that the module belongs to (`_init_weights(module)`, as transformers has it), or by
   the module's own `reset_parameters()`, both run over empty parameters, which they cannot harm;
2. from a module of the same class, built again with the arguments that the module has kept as attributes;
3. from the checkpoint, if it has a tensor of that name.

A value counts as made only if it can be shown to be. Each way is tried twice, over memory that holds zeros and ones: a
tensor that differs was left as it was, or is random. A module that is built again must have the same attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OPTIONAL = frozenset({"device", "dtype"})
"""Arguments of constructors that say where and how tensors are made, and not what is in them."""
_ALLOCATIONS = frozenset({torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty})
_CONTENTS = (0, 1)
_MARKS = frozenset({"training", "_is_hf_initialized"})
"""Attributes that others set on a module after it was built."""
_PLAIN = (bool, int, float, str, tuple, type(None))
"""Types of attributes that are compared between a module and its twin."""


def lacking_tensors(model: nn.Module) -> list[str]:
    """Names of parameters, buffers and plain tensor attributes on the meta device."""
    return [f"{path}.{name}".removeprefix(".") for path, module in model.named_modules() for name in _lacking(module)]


def compute_tensors(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Makes what lacks values, where that is possible. `stored`: tensors of the checkpoint by the names of buffers."""
    device = next((tensor.device for tensor in model.parameters() if not tensor.is_meta), torch.device("cpu"))
    for path, module, owners in _with_owners(model):
        if not _lacking(module):
            continue
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for initialise in _initialisers(module, owners):
                if _lacking(module):
                    _initialised(module, initialise)
            if _lacking(module):
                _rebuilt(module, owners)
        for name in _lacking(module):
            tensor = stored.get(f"{path}.{name}".removeprefix("."))
            if tensor is not None and tensor.shape == getattr(module, name).shape:
                _set(module, name, tensor)
        for name in _tensors(module):
            if name not in module._parameters and not getattr(module, name).is_meta:
                _set(module, name, getattr(module, name).to(device))


def _with_owners(
    module: nn.Module, path: str = "", owners: tuple[nn.Module, ...] = ()
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Every module with its path and the modules around it, itself first."""
    owners = (module, *owners)
    yield path, module, owners
    for name, child in module.named_children():
        yield from _with_owners(child, f"{path}.{name}".removeprefix("."), owners)


def _tensors(module: nn.Module) -> list[str]:
    plain = [name for name, value in vars(module).items() if isinstance(value, Tensor)]
    return [
        *(name for name, value in module._parameters.items() if value is not None),
        *(name for name, value in module._buffers.items() if value is not None),
        *plain,
    ]


def _lacking(module: nn.Module) -> list[str]:
    return [name for name in _tensors(module) if getattr(module, name).is_meta]


def _set(module: nn.Module, name: str, tensor: Tensor) -> None:
    if name in module._buffers:
        module._buffers[name] = tensor
    else:
        setattr(module, name, tensor)


def _initialisers(module: nn.Module, owners: tuple[nn.Module, ...]) -> Iterator[Callable[[], object]]:
    """The nearest model's initialiser of its modules, then the module's own."""
    for owner in owners:
        if callable(initialise := getattr(owner, "_init_weights", None)):
            yield lambda: initialise(module)
            break
    if callable(reset := getattr(module, "reset_parameters", None)):
        yield reset


def _initialised(module: nn.Module, initialise: Callable[[], object]) -> None:
    """Takes what an initialiser writes into every element, whatever was there before."""
    empty = {name: getattr(module, name) for name in _lacking(module) if name not in module._parameters}
    written: list[dict[str, Tensor]] = []
    with _harmless(module):
        for content in _CONTENTS:
            for name, tensor in empty.items():
                _set(module, name, torch.full(tensor.shape, content, dtype=tensor.dtype, device="cpu"))
            try:
                initialise()
            except Exception:  # of a kind that needs real parameters: another way is tried
                break
            written.append({name: getattr(module, name) for name in empty})
    for name, tensor in empty.items():
        made = [one[name] for one in written]
        _set(module, name, made[0] if len(made) == len(_CONTENTS) and _is_made(made[0], made[1], tensor) else tensor)


@contextmanager
def _harmless(module: nn.Module) -> Iterator[None]:
    """Swaps all values below a module for empty ones on the meta device, where writing changes nothing."""
    kept: list[tuple[dict[str, Any], str, Any]] = []
    for one in module.modules():
        tables: tuple[dict[str, Any], ...] = (one._parameters, one._buffers)
        for table in tables:
            kept += [(table, name, tensor) for name, tensor in table.items() if tensor is not None]
    try:
        for table, name, tensor in kept:
            empty = torch.empty_like(tensor, device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            table[name] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
        yield
    finally:
        for table, name, tensor in kept:
            table[name] = tensor


def _rebuilt(module: nn.Module, owners: tuple[nn.Module, ...]) -> None:
    """Takes tensors from a twin: the same class, built with the same arguments, as far as the module has kept them."""
    arguments = _arguments(module, owners)
    if arguments is None:
        return
    twins: list[nn.Module] = []
    try:
        for content in _CONTENTS:
            with torch.device("cpu"), _Allocating(content):
                twins.append(type(module)(**arguments))
    except Exception:  # the attributes are no arguments after all: another way is tried
        return
    if not _alike(module, twins[0]):
        return
    for name in _lacking(module):
        made, other = (getattr(twin, name, None) for twin in twins)
        if name not in module._parameters and _is_made(made, other, getattr(module, name)):
            assert made is not None
            _set(module, name, made)


class _Allocating(TorchFunctionMode):
    """Gives memory that would be uninitialised a known content."""

    def __init__(self, content: int) -> None:
        super().__init__()
        self._content = content

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.fill_(self._content) if func in _ALLOCATIONS else result


def _is_made(one: Any, other: Any, empty: Tensor) -> bool:
    """Checks whether both ways to make a tensor agree, and it fits."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.is_meta or other.is_meta:
        return False
    return (one.shape, one.dtype) == (empty.shape, empty.dtype) and torch.equal(one, other)


def _arguments(module: nn.Module, owners: tuple[nn.Module, ...]) -> dict[str, Any] | None:
    """Arguments that the module was built with, from attributes of the same names; None if one is not kept."""
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(type(module).__init__).parameters.items():
        if name == "self" or (name in _OPTIONAL and parameter.default is not parameter.empty):
            continue
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            return None
        holders = owners if name == "config" else (module,)
        holder = next((one for one in holders if hasattr(one, name)), None)
        if holder is None:
            return None
        found[name] = getattr(holder, name)
    return found


def _alike(module: nn.Module, twin: nn.Module) -> bool:
    """True if all plain attributes are the same; an argument that was changed before it was kept differs here."""
    kept = {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN) and name not in _MARKS}
    return all(name in vars(twin) and vars(twin)[name] == value for name, value in kept.items())
