"""Rows of a matrix are rounded to the nearest whole numbers that a factor allows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fleetstart.controller.cli.quantization import int8_rows
from fleetstart.controller.cli.quantization.int8_rows import rounded
from fleetstart.runtime.contract.errors import CheckpointInvalid

MATRICES = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 9), st.integers(1, 20)),
    elements=st.floats(-1000, 1000, width=16),
)


def bits_of(matrix: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":
        return bytes((matrix.view(np.uint32) >> 16).astype(np.uint16).tobytes())
    return bytes(matrix.astype({"F32": np.float32, "F16": np.float16}[dtype]).tobytes())


def stored(matrix: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers as the dtype has them."""
    if dtype == "BF16":
        return (matrix.view(np.uint32) >> 16 << 16).view(np.float32)
    return matrix.astype({"F32": np.float32, "F16": np.float16}[dtype]).astype(np.float32)


@given(matrix=MATRICES, dtype=st.sampled_from(["F32", "F16", "BF16"]), block_rows=st.integers(1, 10))
def test_each_number_is_half_a_factor_away_at_most(matrix: np.ndarray, dtype: str, block_rows: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(int8_rows, "BLOCK_BYTES", 4 * matrix.shape[1] * block_rows)
        numbers, factors = rounded(bits_of(matrix, dtype), dtype, matrix.shape, "w")
    whole = np.frombuffer(numbers, np.int8).reshape(matrix.shape)
    factor = np.frombuffer(factors, np.float32)[:, None]
    wanted = stored(matrix, dtype)
    assert (factor > 0).all()
    assert (whole >= -127).all()
    assert (np.abs(whole * factor - wanted) <= factor * 0.50001).all()
    largest = np.abs(wanted).max(axis=1)
    assert (np.abs(whole).max(axis=1)[largest > 1e-30] == 127).all()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(wrong: float) -> None:
    matrix = np.zeros((2, 4), np.float32)
    matrix[1, 2] = wrong
    with pytest.raises(CheckpointInvalid, match=r"tensor up_proj\.weight has numbers that are not finite"):
        rounded(matrix.tobytes(), "F32", (2, 4), "up_proj.weight")
