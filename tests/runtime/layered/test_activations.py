"""Activations on their way: whatever goes in comes out, and what cannot be is refused before it is touched."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.layered.activations import ARRAYS_MAX, InvalidActivations, forms_of, pack, unpack
from fleetstart.runtime.pipeline.frames import PAYLOAD_MAX_BYTES, Activations, ArrayForm

TORCH = ["bool", "uint8", "uint16", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
TORCH += ["complex64", "float8_e4m3fn"]
NUMPY = ["bool", "uint8", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)


def tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return (torch.arange(int(np.prod(shape))).view(shape) % 7).to(getattr(torch, dtype))


def array(dtype: str, shape: tuple[int, ...]) -> Any:
    return np.asarray(np.arange(int(np.prod(shape))).reshape(shape) % 7).astype(dtype)


some = st.one_of(
    st.builds(tensor, st.sampled_from(TORCH), shapes),
    st.builds(array, st.sampled_from(NUMPY), shapes),
)


def over(activations: Any) -> Any:
    """As it comes out at the other end of a link."""
    message, payload = pack(7, activations)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Activations)
    assert again.number == 7
    return unpack(again, bytearray(payload))


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one.to(torch.complex64), other.to(torch.complex64))
    return np.array_equal(one, other)


@given(some)
def test_an_array_comes_out_as_it_went_in(activations: Any) -> None:
    assert same(over(activations), activations)


@given(st.dictionaries(st.text(max_size=5), some, min_size=1, max_size=5))
def test_so_does_a_dict_of_arrays_and_keeps_its_order(activations: dict[str, Any]) -> None:
    found = over(activations)
    assert list(found) == list(activations)
    assert all(same(found[name], activations[name]) for name in activations)


def test_what_does_not_lie_in_one_piece_arrives_in_one() -> None:
    view = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)[::2]
    found = over(view)
    assert torch.equal(found, view)
    assert found.is_contiguous()
    assert np.array_equal(over(np.arange(12).reshape(3, 4).T), np.arange(12).reshape(3, 4).T)
    assert torch.equal(over(torch.tensor([1 + 2j]).conj()), torch.tensor([1 - 2j]))


def test_a_number_of_numpys_arrives_as_an_array_without_dimensions() -> None:
    found = over(np.arange(4.0).sum())
    assert (found.shape, found.dtype, float(found)) == ((), np.float64, 6.0)


def test_gradients_stay_where_they_are() -> None:
    assert not over(torch.nn.Parameter(torch.ones(3))).requires_grad


def test_who_gets_them_may_write_into_them() -> None:
    found = over({"a": torch.ones(3), "b": np.ones(3)})
    found["a"].add_(1)
    found["b"] += 1


@pytest.mark.parametrize(
    ("activations", "what"),
    [
        (None, "None"), ([1, 2], "a list"), ("text", "a str"), (1.5, "a float"), ({}, "0 arrays"),
        ({"x": [1]}, "'x': a list"), ({1: torch.ones(1)}, "key '1'"), (np.array(["text"]), "numpy array of <U4"),
        (np.array([object()]), "object"), (np.ones(3, ">f4"), "numpy array of >f4"),
        (torch.ones(2, dtype=torch.complex128), "complex128"), (torch.eye(2).to_sparse(), "sparse"),
        (torch.ones((1,) * 17), "17 dimensions"), ({str(n): np.ones(1) for n in range(ARRAYS_MAX + 1)}, "65 arrays"),
    ],
)  # fmt: skip
def test_what_is_no_activation_is_named(activations: Any, what: str) -> None:
    with pytest.raises(InvalidActivations, match=what):
        forms_of(activations)


def test_more_than_a_frame_holds_is_refused_before_it_is_copied() -> None:
    huge = torch.empty(1).expand(PAYLOAD_MAX_BYTES // 4 + 1)
    with pytest.raises(InvalidActivations, match=f"{PAYLOAD_MAX_BYTES} at most"):
        pack(0, huge)


F32 = ArrayForm("", "F32", (2, 2), "torch")


@pytest.mark.parametrize(
    ("forms", "single", "size_bytes"),
    [
        ([F32], True, 15), ([F32], True, 17), ([F32], True, 0), ([], False, 0), ([], True, 0), ([F32, F32], True, 80),
        ([F32, F32], False, 80),
        ([ArrayForm("", "F32", (-2, -2), "torch")], True, 16),
        ([ArrayForm("", "F32", (1 << 62, 4), "torch")], True, 0),
        ([ArrayForm("", "F32", (0, 1 << 62), "torch")], True, 0),
        ([ArrayForm("", "F32", (1,) * 17, "torch")], True, 4),
        ([ArrayForm("", "BF16", (2,), "numpy")], True, 4),
        ([ArrayForm("", "object", (2,), "numpy")], True, 16),
        ([ArrayForm("", "nn", (2,), "torch")], True, 16),
        ([ArrayForm("x" * 300, "F32", (2, 2), "torch")], False, 16),
        ([ArrayForm(str(n), "U8", (1,), "numpy") for n in range(ARRAYS_MAX + 1)], False, 4097),
    ],
)  # fmt: skip
def test_a_hostile_frame_is_refused(forms: list[ArrayForm], single: bool, size_bytes: int) -> None:
    with pytest.raises(ValueError, match=r"array|frame|bytes|name"):
        unpack(Activations(1, forms, single), bytearray(size_bytes))


@given(
    st.lists(
        st.builds(
            ArrayForm,
            st.text(max_size=2),
            st.sampled_from(["F32", "BF16", "I8", "C64", "F9", ""]),
            st.lists(st.integers(-2, 1 << 40), max_size=4).map(tuple),
            st.sampled_from(["torch", "numpy"]),
        ),
        max_size=4,
    ),
    st.booleans(),
    st.binary(max_size=200),
)
def test_any_frame_is_read_or_refused(forms: list[Any], single: bool, payload: bytes) -> None:
    try:
        found = unpack(Activations(1, forms, single), bytearray(payload))
    except ValueError:
        return
    arrays = [found] if single else list(found.values())
    assert [tuple(one.shape) for one in arrays] == [form.shape for form in forms]


@pytest.mark.parametrize(
    "body",
    [
        {"type": "activations", "number": "1", "arrays": [], "single": True},
        {"type": "activations", "number": 1, "arrays": [{"name": "", "dtype": "F32", "shape": [0.5]}], "single": True},
        {"type": "activations", "number": 1, "arrays": None, "single": True},
        {"type": "call_failed", "number": 1, "error": "text"},
    ],
)
def test_messages_of_another_form_are_not_decoded(body: dict[str, Any]) -> None:
    from fleetstart.runtime.pipeline.frames import Message

    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=Message)
