"""Tied tensors: finds tensors that are equal to others of the same model, to store and fetch their bytes once.

Models tie weights (the head is the embedding), and tools that write safetensors then write the bytes twice. Most
tensors of a model have the shape of others, so reading all of them to compare would be a pass of its own: a few
kilobytes out of the middle tell nearly all apart, and only those that agree there are read whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import xxhash

from fleetstart.runtime.contract.sizes import MIB

from .local_files import read_at
from .publish_layout import in_order_of_use
from .safetensors_header import StoredTensor

TIED_MIN_BYTES = MIB
"""Smallest tied tensor: a copy of a smaller one costs little, and small tensors (norms, masks) are often equal by
chance."""
SAMPLE_BYTES = 4096
READERS = 16
"""Threads that read samples: each is one round trip if the source is an object store."""

Key = Callable[[StoredTensor], object]


def find_tied(tensors: Sequence[StoredTensor], *, layers: str = "", min_bytes: int = TIED_MIN_BYTES) -> dict[str, str]:
    """Tensors that need not be stored, each with the equal one that is first in the order of use."""
    large = [tensor for tensor in in_order_of_use(tensors, layers) if tensor.size_bytes >= max(1, min_bytes)]
    groups = _split([large], lambda tensor: (tensor.dtype, tensor.shape))
    with ThreadPoolExecutor(READERS) as pool:
        alike = [tensor for group in groups for tensor in group]
        samples = dict(zip((tensor.name for tensor in alike), pool.map(_sample, alike), strict=True))
        groups = _split(groups, lambda tensor: samples[tensor.name])
    groups = _split(groups, _digest)
    return {tensor.name: group[0].name for group in groups for tensor in group[1:]}


def _split(groups: Iterable[Sequence[StoredTensor]], key: Key) -> list[list[StoredTensor]]:
    """Splits groups by a key, in the same order; groups of one tensor are dropped."""
    finer: list[list[StoredTensor]] = []
    for group in groups:
        found: defaultdict[object, list[StoredTensor]] = defaultdict(list)
        for tensor in group:
            found[key(tensor)].append(tensor)
        finer.extend(alike for alike in found.values() if len(alike) > 1)
    return finer


def _sample(tensor: StoredTensor) -> bytes:
    wanted = min(SAMPLE_BYTES, tensor.size_bytes)
    return read_at(tensor.file, tensor.offset + (tensor.size_bytes - wanted) // 2, wanted)


def _digest(tensor: StoredTensor) -> bytes:
    hasher = xxhash.xxh3_128()
    for block in tensor.file.blocks(tensor.offset, tensor.size_bytes):
        hasher.update(block)
    return hasher.digest()
