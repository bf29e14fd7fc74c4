"""A decoder that takes over the cache of others goes on as they would have; keys and values are read and written."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.runtime.llm.batches import batch_of, some_tokens, table
from tests.runtime.llm.models import BLOCK_TOKENS, Checkpoint, native, tiny
from tests.runtime.llm.stages import (
    BLOCKS,
    DTYPES,
    LAYERS,
    AnyDecoder,
    Pipeline,
    Sequences,
    cuts_of_the_layers,
    hand_over,
    some_lengths,
    stage,
)


@pytest.mark.parametrize("kv", ["fp32", "fp16"])
@settings(max_examples=20, deadline=None)
@given(
    cuts=cuts_of_the_layers, lengths=some_lengths, chunk=st.integers(1, 40), before=st.integers(1, 5),
    split=st.integers(0, 40),
)  # fmt: skip
def test_a_decoder_that_takes_over_the_cache_goes_on_with_the_same_bits(
    kv: str, cuts: set[int], lengths: list[int], chunk: int, before: int, split: int
) -> None:
    weights = tiny(num_hidden_layers=LAYERS)
    pipeline, target, whole = (
        Pipeline("auto", weights, cuts, kv=kv), stage("auto", weights, kv=kv), stage("auto", weights, kv=kv)
    )  # fmt: skip
    ours, theirs = Sequences(lengths, chunk), Sequences(lengths, chunk)
    for batch in theirs.batches(before):
        whole.forward(batch)
    for batch in ours.batches(before):
        pipeline.forward(batch)
    hand_over(pipeline, ours, target, split)
    for _ in range(4):
        assert torch.equal(target.forward(ours.batch()), whole.forward(theirs.batch()))


def test_a_torch_decoder_that_takes_over_the_cache_goes_on_the_same(model: Checkpoint) -> None:
    pipeline, target, whole = Pipeline("torch", model, {1, 3}), stage("torch", model), stage("torch", model)
    ours, theirs = Sequences([30, 7], 16), Sequences([30, 7], 16)
    for batch in theirs.batches(3):
        whole.forward(batch)
    for batch in ours.batches(3):
        pipeline.forward(batch)
    hand_over(pipeline, ours, target, 20)
    for _ in range(4):
        assert torch.equal(target.forward(ours.batch()), whole.forward(theirs.batch()))


class Reference:
    """A cache as one array: [layer, key or value, kv_head, block * BLOCK_TOKENS + token, bytes of the head]."""

    def __init__(self, decoder: AnyDecoder, width_bytes: int) -> None:
        self.decoder = decoder
        self.shape = (LAYERS, 2, 2, BLOCKS * BLOCK_TOKENS, 16 * width_bytes)
        self.data = self.read()

    def read(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        data = self.decoder.read_kv(list(range(BLOCKS)), 0, BLOCKS * BLOCK_TOKENS)
        return np.frombuffer(data, np.uint8).reshape(self.shape).copy()


@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize("kv", ["fp32", "fp16", "bf16"])
@settings(max_examples=15, deadline=None)
@given(
    blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=6, unique=True),
    edges=st.tuples(st.integers(0, 96), st.integers(0, 96)),
    layers=st.sets(st.integers(0, LAYERS), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)
def test_what_is_written_is_read_and_nothing_else_changes(
    kind: str, kv: str, blocks: list[int], edges: tuple[int, int], layers: set[int], seed: int
) -> None:
    decoder = stage(kind, tiny(num_hidden_layers=LAYERS), kv=kv)
    reference = Reference(decoder, DTYPES[kv].itemsize)
    begin, end = sorted(min(edge, len(blocks) * BLOCK_TOKENS) for edge in edges)
    first, last = sorted(layers)
    shape = (last - first, 2, 2, end - begin, reference.shape[-1])
    values = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    decoder.write_kv(blocks, begin, end, first, bytearray(values.tobytes()))
    slots = [blocks[token // BLOCK_TOKENS] * BLOCK_TOKENS + token % BLOCK_TOKENS for token in range(begin, end)]
    reference.data[first:last, :, :, slots] = values
    assert np.array_equal(reference.read(), reference.data)
    read = np.frombuffer(decoder.read_kv(blocks, begin, end), np.uint8)
    assert np.array_equal(read, reference.data[:, :, :, slots].reshape(-1))


def test_both_decoders_hold_the_same_tokens_in_the_same_order(model: Checkpoint) -> None:
    caches = []
    for kind in ("auto", "torch"):
        decoder = stage(kind, model)
        decoder.forward(batch_of([(some_tokens(40), 0, [7, 2, 9])]))
        caches.append(torch.tensor(np.frombuffer(decoder.read_kv([7, 2, 9], 3, 40), np.float32)))
    torch.testing.assert_close(*caches, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize(
    ("blocks", "begin", "end"),
    [
        ([0, 1], 5, 4), ([0, 1], -1, 4), ([0, 1], -4, -1), ([0, 1], 0, 33), ([0, 1], 33, 34), ([], 0, 1),
        ([0, 1], 0, 1 << 62), ([0, -1], 0, 17), ([0, BLOCKS], 0, 17), ([BLOCKS, 0], 15, 16), ([0, 1 << 40], 0, 32),
    ],
)  # fmt: skip
def test_tokens_that_lie_outside_are_refused(
    model: Checkpoint, kind: str, blocks: list[int], begin: int, end: int
) -> None:
    decoder = stage(kind, model)
    reference = Reference(decoder, 4)
    with pytest.raises((ValueError, IndexError, OverflowError)):
        decoder.read_kv(blocks, begin, end)
    with pytest.raises((ValueError, IndexError, OverflowError)):
        decoder.write_kv(blocks, begin, end, 0, bytes(2 * 2 * 16 * 4 * min(max(end - begin, 0), 99)))
    assert np.array_equal(reference.read(), reference.data)


@pytest.mark.parametrize("kind", ["auto", "torch"])
@pytest.mark.parametrize(
    ("first", "size_layers", "more_bytes"),
    [
        (0, LAYERS + 1, 0),
        (1, LAYERS, 0),
        (LAYERS, 1, 0),
        (-1, 1, 0),
        (1 << 62, 1, 0),
        (0, 1, 1),
        (0, 1, -1),
        (0, 0, 3),
        (0, 0, 0),
    ],
)
def test_layers_and_sizes_that_do_not_fit_are_refused(
    model: Checkpoint, kind: str, first: int, size_layers: int, more_bytes: int
) -> None:
    decoder = stage(kind, model)
    reference = Reference(decoder, 4)
    with pytest.raises(ValueError, match="layer"):
        decoder.write_kv([3, 4], 2, 30, first, b"\1" * (size_layers * 28 * 2 * 2 * 16 * 4 + more_bytes))
    with pytest.raises(ValueError, match="bytes"):
        decoder.write_kv([3, 4], 2, 2, 0, b"\1")
    assert np.array_equal(reference.read(), reference.data)


@pytest.mark.parametrize("data", [np.zeros(256, np.float32), np.zeros((2, 128), np.uint8), "text", None])
def test_keys_and_values_are_bytes(model: Checkpoint, data: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        native(model).write_kv([0], 0, 1, 0, data)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_the_cache_moves_while_a_step_runs(kind: str) -> None:
    weights = tiny(num_hidden_layers=LAYERS, hidden_size=256, intermediate_size=512)
    decoder, other = stage(kind, weights), stage(kind, weights)
    decoder.forward(batch_of([(some_tokens(60), 0, table(0, 60))]))
    wanted = decoder.forward(batch_of([(some_tokens(200, 3), 0, table(10, 200))])).clone()
    kept = decoder.read_kv(table(0, 60), 0, 60)
    other.forward(batch_of([(some_tokens(60), 0, table(0, 60))]))
    ended = threading.Event()
    got: list[Tensor] = []

    def step() -> None:
        try:
            for _ in range(8):
                got.append(decoder.forward(batch_of([(some_tokens(200, 3), 0, table(10, 200))])).clone())
        finally:
            ended.set()

    thread = threading.Thread(target=step)
    thread.start()
    while not ended.is_set():
        assert decoder.read_kv(table(0, 60), 0, 60) == kept
        decoder.write_kv([40, 41, 42, 43], 0, 60, 0, kept)
    thread.join()
    assert len(got) == 8
    assert all(torch.equal(one, wanted) for one in got)
    decoder.write_kv([40, 41, 42, 43], 0, 60, 0, kept)
    after = batch_of([([77], 60, [40, 41, 42, 43])])
    assert torch.equal(decoder.forward(after), other.forward(batch_of([([77], 60, [0, 1, 2, 3])])))


def test_a_native_copy_of_the_cache_lets_other_threads_run() -> None:
    decoder = native(tiny(), blocks=6000)
    blocks, count = list(range(6000)), 6000 * BLOCK_TOKENS
    began, ended, seen = threading.Event(), threading.Event(), 0

    def copy() -> None:
        began.set()
        decoder.read_kv(blocks, 0, count)
        ended.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # whoever runs does so until it lets go of its own accord
    try:
        thread = threading.Thread(target=copy)
        thread.start()
        began.wait(10)
        while not ended.is_set():
            seen += 1
            time.sleep(0)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert seen > 0


def test_the_real_model_in_stages_and_taken_over_gives_the_bits_of_the_whole(chat_model: Checkpoint) -> None:
    pipeline = Pipeline("auto", chat_model, {9, 22}, threads=2)
    target, whole = stage("auto", chat_model, threads=2), stage("auto", chat_model, threads=2)
    ours, theirs = Sequences([37, 12], 30), Sequences([37, 12], 30)
    for _ in range(3):
        assert torch.equal(pipeline.forward(ours.batch()), whole.forward(theirs.batch()))
    hand_over(pipeline, ours, target, 20)
    for _ in range(2):
        assert torch.equal(target.forward(ours.batch()), whole.forward(theirs.batch()))
