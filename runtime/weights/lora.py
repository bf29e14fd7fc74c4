"""LoRA: a base's tensors with an adapter applied, as one mapping over two checkpoints.

The base stays in shared memory: unchanged tensors are views of it, and only changed matrices are memory of this worker,
computed on access. So a node keeps one copy of the base for all its adapters, and each tensor waits for the chunks of
its own three matrices only.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from ..contract.errors import CheckpointInvalid
from ..contract.weights import lora
from ..contract.weights.manifest import TensorEntry
from .tensor_mapping import TensorMapping, select, unknown_name

if TYPE_CHECKING:
    import torch

    from .numpy_arrays import NumpyWeights

SCRATCH_BYTES = 16 * 1024 * 1024
"""Temporary fp32 memory while a matrix is computed: a few times the cache, and small beside any model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDelta:
    """Addend of one matrix: scale · B A, transposed if the base stores [in, out].

    Shapes:  the tensors that `a` and `b` name in the adapter are [r, in] and [out, r].
    """

    a: str
    b: str
    scale: float
    transposed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraChanges:
    """Changes by the base's tensor names: matrices with an addend, and tensors that the adapter replaces."""

    deltas: dict[str, LoraDelta]
    whole: dict[str, str]


class AdaptedWeights(TensorMapping):
    """Tensors of a base with an adapter applied; files are the base's."""

    def __init__(self, base: TensorMapping, adapter: TensorMapping, changes: LoraChanges | None = None) -> None:
        """Waits only for the adapter's config. Errors: CheckpointInvalid if the adapter does not fit the base."""
        self.base = base
        self.adapter = adapter
        if changes is None:
            changes = _changes(adapter, base)
        self._changes = changes
        # A computed matrix is shared as long as a caller holds it; keeping it longer would cost memory for nothing.
        self._computed: weakref.WeakValueDictionary[str, torch.Tensor] = weakref.WeakValueDictionary()

    @property
    def changed(self) -> frozenset[str]:
        """Names of tensors that differ from the base's."""
        return frozenset(self._changes.deltas) | frozenset(self._changes.whole)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._changes.deltas:
            source, stored = self._stored(name)
            return source[stored]
        tensor = self._computed.get(name)
        if tensor is None:
            tensor = self.rows(name, 0, self.entry(name).shape[0])
            self._computed[name] = tensor
        return tensor

    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        source, stored_name = self._stored(name)
        stored = source.rows(stored_name, begin, end)
        delta = self._changes.deltas.get(name)
        if delta is None:
            return stored
        if delta.transposed:
            left, right = self.adapter[delta.a].T[begin:end], self.adapter[delta.b].T
        else:
            left, right = self.adapter.rows(delta.b, begin, end), self.adapter[delta.a]
        return _add(stored, left, right, delta.scale)

    def entry(self, name: str) -> TensorEntry:
        source, stored = self._stored(name)
        entry = source.entry(stored)
        # The layer number is that of the base, whichever checkpoint stores the tensor.
        return msgspec.structs.replace(entry, layer=self.base.entry(name).layer) if name in self.base else entry

    def _stored(self, name: str) -> tuple[TensorMapping, str]:
        """The checkpoint that stores a tensor before any addend, and its name there."""
        if name in self._changes.whole:
            return self.adapter, self._changes.whole[name]
        if name not in self.base:
            raise unknown_name("tensor", name, self)
        return self.base, name

    def __iter__(self) -> Iterator[str]:
        """Names of the base in order of arrival, then those that only the adapter has."""
        yield from self.base
        yield from (name for name in self._changes.whole if name not in self.base)

    def __len__(self) -> int:
        return len(self.base) + sum(name not in self.base for name in self._changes.whole)

    def __contains__(self, name: object) -> bool:
        return name in self.base or name in self._changes.whole

    def numpy(self, *, widen: bool = False) -> NumpyWeights:
        """Arrays of the adapted tensors, in memory of the worker's own where they are changed; needs torch."""
        from .numpy_arrays import NumpyWeights

        return NumpyWeights(dict.fromkeys(self), self.entry, self._tensor_bytes, widen=widen)

    def _tensor_bytes(self, name: str) -> memoryview:
        import torch

        flat: Any = self[name].contiguous().reshape(-1).cpu().view(torch.uint8).numpy()
        return memoryview(flat).toreadonly()

    def to(
        self, device: torch.device | str, *, first: Iterable[str | int] = (), only: Iterable[str | int] | None = None
    ) -> AdaptedWeights:
        """Moves base and adapter to a device, where changed matrices are computed; the small adapter moves whole."""
        chosen = set(self) if only is None else set(select(self, only))
        ahead = [name for name in select(self, first) if name in self.base]
        base = self.base.to(device, first=ahead, only=None if only is None else [n for n in self.base if n in chosen])
        changes = LoraChanges(
            deltas={name: delta for name, delta in self._changes.deltas.items() if name in chosen},
            whole={name: own for name, own in self._changes.whole.items() if name in chosen},
        )
        return AdaptedWeights(base, self.adapter.to(device), changes)

    def __repr__(self) -> str:
        return f"AdaptedWeights({len(self.changed)} tensors changed of {self.base!r} by {self.adapter!r})"

    @property
    def files(self) -> tuple[str, ...]:
        return self.base.files

    def file_view(self, name: str) -> memoryview:
        return self.base.file_view(name)


def with_adapter(attached: Sequence[TensorMapping]) -> TensorMapping | None:
    """The weights of a base and perhaps its adapter, with that applied; None without any."""
    if len(attached) < 2:
        return attached[0] if attached else None
    base, adapter = attached
    return AdaptedWeights(base, adapter)


def _changes(adapter: TensorMapping, base: TensorMapping) -> LoraChanges:
    if lora.CONFIG not in adapter.files:
        raise CheckpointInvalid(
            f"the adapter has no {lora.CONFIG}", hint="push the folder that PEFT's save_pretrained wrote"
        )
    tensors = ((name, adapter.entry(name)) for name in adapter)
    found = lora.read_adapter(adapter.file(lora.CONFIG), tensors, patterns=True)
    lora.check_fits(found, {name: base.entry(name) for name in base})
    transposed = bool(found.config.fan_in_fan_out)
    return LoraChanges(
        deltas={
            f"{module}.weight": LoraDelta(a=pair.a, b=pair.b, scale=found.config.scale(module), transposed=transposed)
            for module, pair in found.pairs.items()
        },
        whole={target: whole.name for target, whole in found.whole.items()},
    )


def _add(stored: torch.Tensor, left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns stored + scale · left right, computed in fp32 and rounded once to the stored dtype.

    Shapes:  stored [rows, columns], left [rows, r], right [r, columns].
    """
    import torch

    wide = torch.promote_types(stored.dtype, torch.float32)
    right = right.to(wide)
    result = torch.empty_like(stored)
    step = max(1, SCRATCH_BYTES // (wide.itemsize * max(1, stored.shape[1])))
    for begin in range(0, stored.shape[0], step):
        rows = slice(begin, begin + step)
        result[rows] = torch.addmm(stored[rows].to(wide), left[rows].to(wide), right, alpha=scale)
    return result
