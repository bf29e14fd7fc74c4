"""Interface of all weight mappings: a `Mapping` of tensors with the methods of `safetensors.safe_open`.

Code written for `safe_open` works on it: `keys`, `offset_keys`, `get_tensor`, `get_tensors`, `get_slice`, `metadata`,
and `with`. A slice waits only for the rows that it needs. Names iterate in order of arrival, so `items()` and
`load_state_dict(weights, assign=True)` wait for one tensor at a time. `load_into`, `numpy` and `folder` give the model
to what does not read mappings of tensors: torch modules, numpy, and libraries that open files.
"""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ..contract.weights.manifest import TensorEntry

if TYPE_CHECKING:
    import torch

    from .numpy_arrays import NumpyWeights

Mapped = TypeVar("Mapped", bound="TensorMapping")
Module = TypeVar("Module", bound="torch.nn.Module")


class TensorMapping(Mapping[str, "torch.Tensor"]):
    """Tensors by name, with the small files of the model."""

    _folder: Path | None = None

    @abstractmethod
    def entry(self, name: str) -> TensorEntry:
        """Shape and dtype (by its safetensors name), without waiting. Errors: KeyError with the nearest names."""

    @abstractmethod
    def rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Rows `[begin, end)` of a tensor; waits for these rows only."""

    @property
    @abstractmethod
    def files(self) -> tuple[str, ...]:
        """Names of the small files that belong to the model: config.json, tokenizer.json."""

    @abstractmethod
    def file_view(self, name: str) -> memoryview:
        """A file's bytes as a read-only view, once they arrived; it keeps the memory alive."""

    @abstractmethod
    def to(
        self, device: torch.device | str, *, first: Iterable[str | int] = (), only: Iterable[str | int] | None = None
    ) -> TensorMapping:
        """Starts to move the tensors to a device in the background, as they arrive; returns them as a mapping.

        Accessing a tensor waits until it has moved, and moves it next. `first`: tensors by name, or layers by number,
        to move before the others; `only`: those to move at all. Errors: KeyError for an unknown tensor or layer.
        """

    def load_into(self, model: Module, *, unused: Iterable[str] = ()) -> Module:
        """Binds a torch model to the tensors without a copy, puts it into eval mode and returns it.

        The model may be built on the meta device, which allocates nothing. Tied parameters stay tied, and parameters
        take the dtypes of the checkpoint. Buffers that are not stored (rotary frequencies, position numbers) are
        computed anew. `unused`: names in the checkpoint that the model does not need, as patterns with `*`.

        Errors: CheckpointInvalid with the names that only the checkpoint has, only the model has, or for which no
        value can be made.
        """
        from .module_loading import load_module

        load_module(self, model, unused)
        return model

    def folder(self) -> Path:
        """A read-only folder with the small files, for `AutoConfig.from_pretrained(weights.folder())` and its like.

        The files are written to the worker's temporary memory at the first call. The tensors are not among them.
        """
        if self._folder is None:
            from .file_folder import write_folder

            self._folder = write_folder(self.files, self.file_view)
        return self._folder

    @abstractmethod
    def numpy(self, *, widen: bool = False) -> NumpyWeights:
        """The tensors as numpy arrays: read-only views, without an import of torch.

        numpy has no bfloat16: reading such a tensor raises TypeError, unless `widen` asks for float32 copies.
        """

    def file(self, name: str) -> bytes:
        """A copy of a file's bytes. Errors: KeyError."""
        return bytes(self.file_view(name))

    def get_tensor(self, name: str) -> torch.Tensor:
        return self[name]

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """All tensors; waits for the last one."""
        return dict(self)

    def get_slice(self, name: str) -> TensorSlice:
        return TensorSlice(self, name)

    def offset_keys(self) -> list[str]:
        """Names in the order of offsets, which is the order of iteration."""
        return list(self)

    def metadata(self) -> dict[str, str]:
        return {"format": "pt"}

    def __enter__(self: Mapped) -> Mapped:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Does nothing: the memory lives as long as its last tensor."""


class IndexedTensors(TensorMapping):
    """Tensors whose names, shapes and dtypes are known from the start, before their bytes arrive."""

    def __init__(self, entries: Mapping[str, TensorEntry]) -> None:
        self._entries = entries

    def entry(self, name: str) -> TensorEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise unknown_name("tensor", name, self._entries)
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Checks whether the checkpoint has the tensor, without waiting for its bytes."""
        return name in self._entries


class TensorSlice:
    """Lazy tensor, read when it is indexed: `get_slice(name)[2:4]` waits for two rows."""

    def __init__(self, tensors: TensorMapping, name: str) -> None:
        self._tensors = tensors
        self._name = name
        self._entry = tensors.entry(name)

    def get_shape(self) -> list[int]:
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        return self._entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Indexes as torch does. Only a leading integer or slice avoids waiting for the other rows."""
        leading, *others = index if isinstance(index, tuple) and index else (index,)
        shape = self._entry.shape
        if shape and isinstance(leading, slice):
            taken = range(*leading.indices(shape[0]))
            if leading.step is None or leading.step > 0:  # torch refuses a negative step, below
                rows = self._tensors.rows(self._name, *((taken[0], taken[-1] + 1) if taken else (0, 0)))
                return rows[(slice(None, None, taken.step), *others)]
        elif shape and type(leading) is int and -shape[0] <= leading < shape[0]:
            begin = leading % shape[0]
            return self._tensors.rows(self._name, begin, begin + 1)[(0, *others)]
        return self._tensors[self._name][index]


def select(tensors: TensorMapping, wanted: Iterable[str | int]) -> list[str]:
    """Names of the tensors in `wanted`, which has names and layer numbers, in its order. Errors: KeyError."""
    selected: dict[str, None] = {}
    for one in wanted:
        if isinstance(one, str):
            found = [one] if one in tensors else []
        else:
            found = [name for name in tensors if tensors.entry(name).layer == one]
        if not found:
            raise (
                unknown_name("tensor", one, tensors) if isinstance(one, str) else KeyError(f"no tensor of layer {one}")
            )
        selected.update(dict.fromkeys(found))
    return list(selected)


def unknown_name(what: str, name: str, known: Iterable[str]) -> KeyError:
    """KeyError for an unknown name, with the nearest known ones."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3)
    nearest = ", ".join(repr(other) for other in near) or "none similar"
    return KeyError(f"the checkpoint has no {what} {name!r}; it has {len(names)}, the nearest: {nearest}")
