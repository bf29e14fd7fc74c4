"""Tensors over a region: the bytes at their offset, in any shape that fits, and errors for all others."""

from __future__ import annotations

import mmap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.dlpack import from_dlpack

from fleetstart.runtime.contract.weights.manifest import DTYPE_BYTES
from tests.native.neighbours import attached, owned

PAGE = mmap.PAGESIZE

TORCH_OF = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16,
    "F16": torch.float16, "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32,
    "U64": torch.uint64, "I64": torch.int64, "F64": torch.float64,
    "F8_E4M3": torch.uint8, "F8_E5M2": torch.uint8, "F8_E8M0": torch.uint8, "C64": torch.complex64,
    "F8_E4M3FNUZ": torch.uint8, "F8_E5M2FNUZ": torch.uint8,
}  # fmt: skip


def test_every_dtype_of_a_manifest_has_its_tensor() -> None:
    assert TORCH_OF.keys() == DTYPE_BYTES.keys()


@pytest.mark.parametrize("dtype", TORCH_OF)
def test_tensors_are_the_bytes_at_their_offset(dtype: str) -> None:
    width = DTYPE_BYTES[dtype]
    owner = owned(PAGE)
    content = bytes(index % 2 for index in range(6 * width))
    owner.view(64, 6 * width)[:] = content
    tensor = from_dlpack(attached(owner).dlpack(64, [2, 3], dtype))
    assert tensor.dtype is TORCH_OF[dtype]
    assert (tensor.shape, tensor.is_contiguous(), tensor.device.type) == ((2, 3), True, "cpu")
    assert bytes(tensor.view(torch.uint8).flatten().tolist()) == content


@given(st.lists(st.integers(0, 9), max_size=5), st.sampled_from(sorted(TORCH_OF)))
def test_any_shape_comes_as_it_is_or_is_an_index_error(shape: list[int], dtype: str) -> None:
    region = owned(PAGE)
    count = torch.Size(shape).numel()
    if count * DTYPE_BYTES[dtype] > PAGE:
        with pytest.raises(IndexError):
            region.dlpack(0, shape, dtype)
        return
    tensor = from_dlpack(region.dlpack(0, shape, dtype))
    assert (list(tensor.shape), tensor.numel(), tensor.is_contiguous()) == (shape, count, True)


def test_scalars_and_tensors_without_elements() -> None:
    owner = owned(PAGE)
    from_dlpack(owner.dlpack(PAGE - 4, [1], "F32")).fill_(2.5)
    scalar = from_dlpack(owner.dlpack(PAGE - 4, [], "F32"))
    assert (scalar.shape, scalar.item()) == ((), 2.5)
    assert from_dlpack(owner.dlpack(PAGE, [0, 7], "F32")).shape == (0, 7)
    assert from_dlpack(owner.dlpack(0, [2**40, 0, 2**40], "F64")).shape == (2**40, 0, 2**40)


@pytest.mark.parametrize(
    ("offset", "shape", "dtype", "error"),
    [
        (0, [PAGE + 1], "U8", IndexError),
        (PAGE, [1], "U8", IndexError),
        (-4, [1], "F32", IndexError),
        (2**64 - 4, [1], "F32", IndexError),
        (4, [2**62, 4], "F32", IndexError),
        (0, [2**32, 2**32], "U8", IndexError),
        (0, [2**63 - 1] * 3, "F64", IndexError),
        (0, [-1], "F32", ValueError),
        (0, [-1, -1], "F32", ValueError),
        (0, [0, -1], "F32", ValueError),
        (2, [1], "F32", ValueError),
        (1, [0], "BF16", ValueError),
        (0, [1], "F31", ValueError),
        (0, [1], "", ValueError),
        (0, [1] * 65, "U8", ValueError),
    ],
)
def test_tensors_that_cannot_be(offset: int, shape: list[int], dtype: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        owned(PAGE).dlpack(offset, shape, dtype)
