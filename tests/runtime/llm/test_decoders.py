"""The native decoder computes what the torch one does, on every kind of processor, whatever the batch."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.native import Decoder
from fleetstart.runtime.llm.batch import Batch
from fleetstart.runtime.llm.rope import inverse_frequencies
from tests.runtime.llm.models import BLOCK_TOKENS, Checkpoint, config_of, native, plain, stage_of, tiny


def has_isa(isa: str) -> bool:
    try:
        native(tiny(), isa=isa)
    except ValueError:
        return False
    return True


ISAS = [isa for isa in ("avx512", "avx2", "generic") if has_isa(isa)]
Piece = tuple[list[int], int, list[int]]
"""Tokens, position of the first, block table."""


def batch_of(pieces: list[Piece], *, every_row: bool = False) -> Batch:
    tokens: list[int] = []
    positions: list[int] = []
    starts = [0]
    for piece, first, _ in pieces:
        tokens += piece
        positions += range(first, first + len(piece))
        starts.append(len(tokens))
    rows = list(range(len(tokens))) if every_row else [start - 1 for start in starts[1:]]
    return Batch(
        tokens=tokens, positions=positions, starts=starts, tables=[table for *_, table in pieces], logits_rows=rows
    )


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(2, 258, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def table(first: int, count: int) -> list[int]:
    return list(range(first, first + -(-count // BLOCK_TOKENS)))


def steps(decoder: Any) -> list[Tensor]:
    """Prompts, whole and in chunks, then decodes mixed with a chunk: everything that a step can hold."""
    long, short = some_tokens(75), some_tokens(5, 2)
    first = decoder.forward(batch_of([(long[:40], 0, [9, 3, 7]), (short, 0, [1])], every_row=True)).clone()
    second = decoder.forward(batch_of([(long[40:], 40, [9, 3, 7, 0, 5]), ([77], 5, [1])], every_row=True)).clone()
    third = decoder.forward(batch_of([([78], 6, [1]), ([11], 75, [9, 3, 7, 0, 5]), (short, 0, [2])])).clone()
    return [first, second, third]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_native_equals_torch(isa: str, dtype: torch.dtype) -> None:
    weights = tiny(dtype=dtype)
    for got, wanted in zip(steps(native(weights, isa=isa)), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False},
        {"num_attention_heads": 2, "num_key_value_heads": 2},
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 48},
        {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 3},
        {"hidden_size": 1552, "intermediate_size": 1600, "num_hidden_layers": 1},
        {"vocab_size": 301},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                          "original_max_position_embeddings": 64}},
    ],
    ids=["head of its own", "no groups", "one kv head", "odd head", "long rows", "odd vocabulary", "llama3"],
)  # fmt: skip
def test_native_equals_torch_in_other_shapes(isa: str, changes: dict[str, Any]) -> None:
    weights = tiny(dtype=torch.float32, **changes)
    wide = changes.get("hidden_size", 64) > 1000
    for got, wanted in zip(steps(native(weights, isa=isa)), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3 if wide else 2e-4, atol=2e-2 if wide else 2e-4)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}], ids=["tied", "untied"])
def test_torch_equals_transformers(changes: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    weights = tiny(dtype=torch.float32, num_attention_heads=4, **changes)  # transformers wants 4 x 16 = 64
    config = transformers.LlamaConfig(**{**config_fields(weights), "attn_implementation": "eager"})
    theirs = transformers.LlamaForCausalLM(config).eval()
    missing, unexpected = theirs.load_state_dict(dict(weights), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = some_tokens(60)
    with torch.inference_mode():
        wanted = theirs(torch.tensor([tokens])).logits[0]
    got = plain(weights).forward(batch_of([(tokens, 0, table(0, 60))], every_row=True))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_llama3_frequencies_equal_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}  # fmt: skip
    weights = tiny(rope_scaling=scaling, num_attention_heads=4)
    fields = {**config_fields(weights), "rope_parameters": {**scaling, "rope_theta": 10000.0}}
    fields.pop("rope_scaling")
    model = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**fields))
    torch.testing.assert_close(inverse_frequencies(config_of(weights)), model.inv_freq)


def config_fields(weights: Checkpoint) -> dict[str, Any]:
    import json

    fields: dict[str, Any] = json.loads(weights.file("config.json"))
    return {name: value for name, value in fields.items() if name != "model_type"}


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_a_row_is_the_same_bits_in_any_batch(isa: str, lengths: list[int], threads: int, seed: int) -> None:
    weights = tiny()
    prompts = [some_tokens(length, seed + number) for number, length in enumerate(lengths)]
    together = native(weights, threads=threads, isa=isa)
    pieces = [(prompt, 0, [3 * number, 3 * number + 1, 3 * number + 2]) for number, prompt in enumerate(prompts)]
    got = together.forward(batch_of(pieces)).clone()
    for number, prompt in enumerate(prompts):
        alone = native(weights, isa=isa).forward(batch_of([(prompt, 0, [5, 4, 3])]))
        assert torch.equal(got[number], alone[0])


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=25, deadline=None)
@given(cuts=st.sets(st.integers(1, 69), max_size=6))
def test_chunks_of_a_prompt_are_the_same_bits_as_the_whole(isa: str, cuts: set[int]) -> None:
    weights, tokens = tiny(), some_tokens(70)
    blocks = table(0, 70)
    whole = native(weights, isa=isa).forward(batch_of([(tokens, 0, blocks)])).clone()
    decoder = native(weights, isa=isa)
    edges = [0, *sorted(cuts), 70]
    for begin, end in itertools.pairwise(edges):
        last = decoder.forward(batch_of([(tokens[begin:end], begin, blocks)]))
    assert torch.equal(last, whole)


@pytest.mark.parametrize("kv", ["fp16", "bf16"])
@pytest.mark.parametrize("isa", ISAS)
def test_narrow_keys_and_values_change_little(isa: str, kv: str) -> None:
    weights = tiny()
    tolerance = 0.1 if kv == "fp16" else 0.5  # of logits that spread over some 20
    for got, wanted in zip(steps(native(weights, isa=isa, kv=kv)), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_the_cpu() -> None:
    weights = tiny(dtype=torch.float32)
    for got, wanted in zip(steps(plain(weights, device="cuda")), steps(plain(weights)), strict=True):
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-3, atol=1e-3)


def test_nan_of_a_former_owner_does_not_reach_the_next(tiny_model: Checkpoint) -> None:
    weights = Checkpoint(
        dict(tiny_model), {name: tiny_model.file(name) for name in ("config.json", "generation_config.json")}
    )
    embedding = weights["model.embed_tokens.weight"].clone()
    embedding[200] = float("nan")
    weights["model.embed_tokens.weight"] = embedding
    for decoder in (native(weights), plain(weights)):
        decoder.forward(batch_of([([200] * 16, 0, [3])]))
        alone = decoder.forward(batch_of([(some_tokens(5), 0, [0])]))[0, :200].clone()
        reused = decoder.forward(batch_of([(some_tokens(5), 0, [3])]))[0, :200]
        assert torch.equal(alone, reused)
        assert reused.isfinite().all()


def good(**changes: Any) -> dict[str, Any]:
    """Arguments of a step of two sequences that is right, but for the changes."""
    arguments: dict[str, Any] = {
        "tokens": np.array([5, 6, 7], np.int32),
        "hidden": None,
        "positions": np.array([0, 1, 3], np.int32),
        "starts": np.array([0, 2, 3], np.int32),
        "tables": np.array([[0], [1]], np.int32),
        "logits_rows": np.array([1, 2], np.int32),
        "output": np.zeros((2, 258), np.float32),
    }
    return arguments | changes


def ints(*values: Any) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": ints(5, 6, 258)},
        {"tokens": ints(5, -1, 7)},
        {"tokens": ints(5, 6)},
        {"tokens": np.array([5, 6, 7], np.int64)},
        {"tokens": np.array([5, 6, 7], np.float32)},
        {"tokens": None},
        {"tokens": None, "hidden": np.zeros((3, 64), np.float32)},
        {"hidden": np.zeros((3, 64), np.float32)},
        {"positions": ints(0, 2, 3)},
        {"positions": ints(-1, 0, 3)},
        {"positions": ints(0, 1, 16)},
        {"positions": ints(0, 1, 2**31 - 1)},
        {"starts": ints(0, 3, 3)},
        {"starts": ints(0, 4, 3)},
        {"starts": ints(0, -1, 3)},
        {"starts": ints(1, 2, 3)},
        {"starts": ints(0, 2, 2)},
        {"starts": ints()},
        {"tables": ints([0], [-1])},
        {"tables": ints([0], [64])},
        {"tables": ints([0])},
        {"tables": ints(0, 1)},
        {"tables": np.zeros((2, 0), np.int32)},
        {"logits_rows": ints(1, 3)},
        {"logits_rows": ints(1, -1)},
        {"output": np.zeros((1, 258), np.float32)},
        {"output": np.zeros((2, 257), np.float32)},
        {"output": np.zeros((2, 258), np.float64)},
        {"output": np.zeros((258, 2), np.float32).T},
    ],
)  # fmt: skip
def test_a_step_that_would_reach_outside_is_refused(tiny_model: Checkpoint, changes: dict[str, Any]) -> None:
    decoder: Decoder = native(tiny_model)._decoder
    decoder.step(**good())
    with pytest.raises((ValueError, IndexError, TypeError)):
        decoder.step(**good(**changes))
    decoder.step(**good())


def test_a_read_only_output_is_refused(tiny_model: Checkpoint) -> None:
    output = np.zeros((2, 258), np.float32)
    output.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        native(tiny_model)._decoder.step(**good(output=output))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stage: {"embedding": stage.embedding[:-1]},
        lambda stage: {"embedding": stage.embedding.to(torch.float64)},
        lambda stage: {"embedding": stage.embedding.T.contiguous().T},
        lambda stage: {"final_norm": None},
        lambda stage: {"layers": []},
        lambda stage: {"layers": [[stage.final_norm] * 8]},
        lambda stage: {"layers": [[stage.final_norm] * 9]},
        lambda stage: {"isa": "neon"},
        lambda stage: {"kv_dtype": "int8"},
        lambda stage: {"head_dim": 8},
        lambda stage: {"block_tokens": 3},
        lambda stage: {"block_count": 0},
        lambda stage: {"kv_head_count": 4},
        lambda stage: {"kv_head_count": 0},
        lambda stage: {"inverse_frequencies": np.zeros(3, np.float32)},
    ],
)
def test_weights_that_do_not_fit_are_refused(tiny_model: Checkpoint, spoil: Any) -> None:
    stage = stage_of(tiny_model)
    arguments: dict[str, Any] = {
        "hidden_size": 64, "head_count": 6, "kv_head_count": 2, "head_dim": 16, "ffn_size": 96, "vocab_size": 258,
        "norm_eps": 1e-5, "inverse_frequencies": np.ones(8, np.float32), "embedding": stage.embedding,
        "final_norm": stage.final_norm, "head": stage.head, "kv_dtype": "fp32", "block_count": 4, "block_tokens": 16,
        "threads": 1, "isa": "auto",
        "layers": [[getattr(layer, name) for name in layer.__slots__] for layer in stage.layers],
    }  # fmt: skip
    Decoder(**arguments)
    with pytest.raises((ValueError, TypeError)):
        Decoder(**(arguments | spoil(stage)))


def test_weights_live_as_long_as_their_decoder(tiny_model: Checkpoint) -> None:
    weights = tiny()
    freed = threading.Event()

    def owned(tensor: Tensor) -> Tensor:
        """The same numbers in memory that tells when it is given back."""
        array = tensor.numpy().copy()
        owner = weakref.finalize(array, freed.set)
        owner.atexit = False
        return torch.from_numpy(array)

    weights["model.layers.0.mlp.up_proj.weight"] = owned(weights["model.layers.0.mlp.up_proj.weight"])
    decoder = native(weights)
    wanted = decoder.forward(batch_of([([5, 6], 0, [0])])).clone()
    del weights
    gc.collect()
    assert not freed.is_set()
    assert torch.equal(decoder.forward(batch_of([([5, 6], 0, [0])])), wanted)
    del decoder
    gc.collect()
    assert freed.is_set()


def test_a_step_lets_other_threads_run() -> None:
    weights = tiny(num_hidden_layers=24, hidden_size=512, intermediate_size=1024)
    decoder = native(weights)
    began, ended, seen = threading.Event(), threading.Event(), 0

    def step() -> None:
        began.set()
        decoder.forward(batch_of([(some_tokens(480), 0, table(0, 480))]))
        ended.set()

    thread = threading.Thread(target=step)
    thread.start()
    began.wait(10)
    while not ended.is_set():
        seen += 1
    thread.join()
    # With the GIL held this thread would come to run once the step is over, and count to a few at most.
    assert seen > 1000


def test_two_steps_at_once_are_refused(tiny_model: Checkpoint) -> None:
    decoder = native(tiny(num_hidden_layers=12, hidden_size=512, intermediate_size=1024))
    errors: list[Exception] = []
    done = threading.Event()

    def step() -> None:
        try:
            for _ in range(200):
                if done.is_set():
                    return
                decoder.forward(batch_of([(some_tokens(60), 0, table(0, 60))]))
        except RuntimeError as error:
            errors.append(error)
            done.set()

    threads = [threading.Thread(target=step) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert "another thread" in str(errors[0])


def test_helpers_begin_after_a_fork_and_leave_with_their_process() -> None:
    code = """
import os
from tests.runtime.llm.models import native, tiny
from tests.runtime.llm.test_decoders import batch_of
decoder = native(tiny(), threads=3)
child = os.fork()
values = decoder.forward(batch_of([(list(range(2, 42)), 0, [0, 1, 2])])).sum().item()
if child == 0:
    os._exit(0 if values == values else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=100, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
