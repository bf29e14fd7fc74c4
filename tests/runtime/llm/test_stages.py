"""Decoders of a few layers each, in a row, compute what the whole one does; so does one that takes over their cache."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.llm.batch import Batch
from fleetstart.runtime.llm.native_decoder import NativeDecoder
from fleetstart.runtime.llm.torch_decoder import TorchDecoder
from tests.runtime.llm.models import BLOCK_TOKENS, Checkpoint, config_of, native, stage_of, tiny
from tests.runtime.llm.test_decoders import ISAS, Piece, batch_of, some_tokens, steps, table

LAYERS = 5
BLOCKS = 48
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
AnyDecoder = NativeDecoder | TorchDecoder

cuts_of_the_layers = st.sets(st.integers(1, LAYERS - 1))


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    return tiny(num_hidden_layers=LAYERS)


def stage(
    kind: str, weights: Checkpoint, first: int = 0, end: int | None = None, *, kv: str = "fp32", threads: int = 1
) -> AnyDecoder:
    config, tensors = config_of(weights), stage_of(weights, first, end)
    if kind == "torch":
        return TorchDecoder(
            config, tensors,
            device=torch.device("cpu"), dtype=DTYPES[kv], block_count=BLOCKS, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip
    return NativeDecoder(
        config, tensors,
        kv_dtype=kv, block_count=BLOCKS, block_tokens=BLOCK_TOKENS, threads=threads, isa=kind,
    )  # fmt: skip


class Pipeline:
    """Stages that are called one after the other; the first ends what the last gives back."""

    def __init__(self, kind: str, weights: Checkpoint, cuts: set[int], **options: Any) -> None:
        layers = config_of(weights).layer_count
        self.firsts, self.ends = [0, *sorted(cuts)], [*sorted(cuts), layers]
        self.stages = [
            stage(kind, weights, first, end, **options) for first, end in zip(self.firsts, self.ends, strict=True)
        ]

    def forward(self, batch: Batch) -> Tensor:
        if len(self.stages) == 1:
            return self.stages[0].forward(batch)
        hidden: Tensor | None = None
        for one in self.stages:
            hidden = one.forward(batch, hidden)
        assert hidden is not None
        return self.stages[0].logits(hidden[batch.logits_rows])


class Sequences:
    """Some sequences that are computed together: prompts in chunks, then token after token."""

    def __init__(self, lengths: list[int], chunk: int, *, seed: int = 0) -> None:
        self.tokens = [some_tokens(length + 12, seed + number) for number, length in enumerate(lengths)]
        self.done = [0] * len(lengths)
        self.lengths, self.chunk = lengths, chunk
        self.tables = [list(range(5 * n + 4, 5 * n - 1, -1)) for n in range(len(lengths))]

    def batch(self) -> Batch:
        """The next step of each: a chunk of its prompt, or one token."""
        pieces: list[Piece] = []
        for number, begin in enumerate(self.done):
            left = self.lengths[number] - begin
            end = begin + (min(self.chunk, left) if left > 0 else 1)
            pieces.append((self.tokens[number][begin:end], begin, self.tables[number]))
            self.done[number] = end
        return batch_of(pieces)

    def batches(self, count: int) -> Iterator[Batch]:
        return (self.batch() for _ in range(count))


some_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=20, deadline=None)
@given(
    cuts=cuts_of_the_layers, lengths=some_lengths, chunk=st.integers(1, 40), threads=st.sampled_from([1, 2]),
    tied=st.booleans(),
)  # fmt: skip
def test_stages_in_a_row_give_the_bits_of_the_whole(
    isa: str, cuts: set[int], lengths: list[int], chunk: int, threads: int, tied: bool
) -> None:
    weights = tiny(num_hidden_layers=LAYERS, tie_word_embeddings=tied)
    pipeline, whole = Pipeline(isa, weights, cuts, threads=threads), stage(isa, weights)
    for batch in Sequences(lengths, chunk).batches(6):
        assert torch.equal(pipeline.forward(batch), whole.forward(batch))


@pytest.mark.parametrize("cuts", [{1}, {2, 4}, {1, 2, 3, 4}])
def test_torch_stages_in_a_row_equal_the_whole(model: Checkpoint, cuts: set[int]) -> None:
    for got, wanted in zip(steps(Pipeline("torch", model, cuts)), steps(stage("torch", model)), strict=True):
        assert torch.equal(got, wanted)


@settings(max_examples=20, deadline=None)
@given(wanted=st.lists(st.integers(0, 29), max_size=9), threads=st.sampled_from([1, 3]))
def test_logits_of_a_row_are_the_same_bits_beside_any_others(wanted: list[int], threads: int) -> None:
    weights = tiny()
    hidden = torch.randn(30, 64, generator=torch.Generator().manual_seed(1))
    alone = stage("auto", weights, 0, 1)
    got = stage("auto", weights, 0, 1, threads=threads).logits(hidden[wanted])
    assert got.shape == (len(wanted), 258)
    for row, logits in zip(wanted, got, strict=True):
        assert torch.equal(logits, alone.logits(hidden[row : row + 1])[0])


def test_hidden_states_of_a_stage_stay_while_it_goes_on(model: Checkpoint) -> None:
    first = stage("auto", model, 0, 2)
    batch = batch_of([(some_tokens(9), 0, [0])])
    hidden = first.forward(batch)
    kept = hidden.clone()
    first.forward(batch_of([(some_tokens(9, 7), 0, [1])]))
    first.logits(hidden)
    assert torch.equal(hidden, kept)


def test_a_stage_needs_no_other_stages_tensors(model: Checkpoint) -> None:
    def having(*parts: str) -> Checkpoint:
        tensors = {name: tensor for name, tensor in model.items() if any(part in name for part in parts)}
        return Checkpoint(tensors, {name: model.file(name) for name in ("config.json", "generation_config.json")})

    first = stage_of(having("layers.0.", "layers.1.", "embed_tokens", "model.norm"), 0, 2)
    assert first.head is first.embedding is not None
    assert first.final_norm is not None
    last = stage_of(having("layers.2.", "layers.3.", "layers.4."), 2, 5)
    assert last.head is last.embedding is last.final_norm is None
    assert [len(one.layers) for one in (first, last)] == [2, 3]


@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_only_the_first_stage_has_logits(model: Checkpoint, kind: str) -> None:
    last = stage(kind, model, 2)
    with pytest.raises(ValueError, match="first stage"):
        last.logits(torch.zeros(1, 64))
    for hidden in (None, torch.zeros(1, 64)):
        with pytest.raises(ValueError, match="takes tokens"):
            stage(kind, model, 2 if hidden is None else 0).forward(batch_of([([5], 0, [0])]), hidden)


@pytest.mark.parametrize("hidden", [torch.zeros(2, 63), torch.zeros(64), torch.zeros(2, 65)])
def test_hidden_states_of_another_shape_have_no_logits(model: Checkpoint, hidden: Tensor) -> None:
    with pytest.raises(ValueError, match="hidden"):
        native(model).logits(hidden)


# ── the cache, from one decoder to another ─────────────────────────────────────────────────────────


def hand_over(pipeline: Pipeline, sequences: Sequences, to: AnyDecoder, split: int) -> None:
    """All that the stages hold, to other blocks of the whole decoder: some in one go, the rest layer by layer."""
    moved = [[BLOCKS - 1 - block for block in blocks] for blocks in sequences.tables]
    for blocks, target, count in zip(sequences.tables, moved, sequences.done, strict=True):
        middle = min(split, count)
        for one, first, end in zip(pipeline.stages, pipeline.firsts, pipeline.ends, strict=True):
            to.write_kv(target, 0, middle, first, one.read_kv(blocks, 0, middle))
            data = memoryview(one.read_kv(blocks, middle, count))
            layer_bytes = len(data) // (end - first)
            for layer in range(end - first):
                piece = data[layer * layer_bytes : (layer + 1) * layer_bytes]
                to.write_kv(target, middle, count, first + layer, piece)
    sequences.tables = moved


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
