"""Rounds the rows of a matrix to whole numbers of one byte, each row with a factor of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fleetstart.runtime.contract.errors import CheckpointInvalid
from fleetstart.runtime.contract.sizes import MIB

if TYPE_CHECKING:
    import numpy as np

LARGEST = 127
"""Largest whole number: rows are symmetric, and -128 is left out."""
BLOCK_BYTES = 64 * MIB
"""Rows that are rounded at a time, in fp32."""
FLOATS = frozenset({"F32", "F16", "BF16"})


def rounded(data: bytes, dtype: str, shape: tuple[int, int], name: str) -> tuple[bytes, bytes]:
    """Whole numbers [rows, columns] in int8, and factors [rows] in fp32, by which they are nearest to the matrix.

    A factor is the row's largest number over 127; that of a row of zeros is 1.

    Errors: CheckpointInvalid for a number that is not finite.
    """
    import numpy as np

    numbers, factors = [], []
    for block in _blocks(data, dtype, columns=shape[1]):
        largest = np.abs(block).max(axis=1, keepdims=True, initial=0.0)
        if not np.isfinite(largest).all():
            raise CheckpointInvalid(f"tensor {name} has numbers that are not finite: it cannot be quantised")
        factor = np.where(largest == 0, np.float32(1), largest / np.float32(LARGEST)).astype(np.float32)
        numbers.append(np.rint(block / factor).clip(-LARGEST, LARGEST).astype(np.int8).tobytes())
        factors.append(factor.tobytes())
    return b"".join(numbers), b"".join(factors)


def _blocks(data: bytes, dtype: str, columns: int) -> Iterator[np.ndarray[Any, np.dtype[np.float32]]]:
    """Rows in fp32, some at a time."""
    import numpy as np

    stored = np.frombuffer(data, dtype={"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[dtype])
    matrix = stored.reshape(-1, columns)
    step = max(1, BLOCK_BYTES // (4 * columns))
    for begin in range(0, len(matrix), step):
        block = matrix[begin : begin + step]
        yield (block.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else block.astype(np.float32)
