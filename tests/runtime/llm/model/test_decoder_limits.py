"""What decoders refuse, how long their weights live, and how they share the processor."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fleetstart.native import Decoder
from tests.runtime.llm.batches import batch_of, some_tokens, table
from tests.runtime.llm.models import Checkpoint, native, stage_of, tiny


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


def _with(stage: Any, **changes: Any) -> list[list[Any]]:
    """Tensors of the stage's layers, some of them others."""
    return [[changes.get(name, getattr(layer, name)) for name in layer.__slots__] for layer in stage.layers]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda stage: {"embedding": stage.embedding[:-1]},
        lambda stage: {"embedding": stage.embedding.to(torch.float64)},
        lambda stage: {"embedding": stage.embedding.T.contiguous().T},
        lambda stage: {"final_norm": None},
        lambda stage: {"layers": [], "windows": [], "turns": []},
        lambda stage: {"layers": [[stage.final_norm] * 8] * 3},
        lambda stage: {"layers": [[stage.final_norm] * 20] * 3},
        lambda stage: {"layers": _with(stage, q_bias=stage.final_norm[:16])},
        lambda stage: {"layers": _with(stage, q_bias=torch.zeros(96))},
        lambda stage: {"layers": _with(stage, o_bias=torch.zeros(16))},
        lambda stage: {"layers": _with(stage, k_norm=torch.zeros(32))},
        lambda stage: {"layers": _with(stage, ffn_output_norm=torch.zeros(32))},
        lambda stage: {"embedding": (torch.zeros(258, 64, dtype=torch.int8), torch.ones(258))},
        lambda stage: {"layers": _with(stage, q=torch.zeros(96, 64, dtype=torch.int8))},
        lambda stage: {"layers": _with(stage, q=(torch.zeros(96, 64, dtype=torch.int8),))},
        lambda stage: {"layers": _with(stage, q=(torch.zeros(96, 64, dtype=torch.int8), torch.ones(95)))},
        lambda stage: {"layers": _with(stage, q=(torch.zeros(96, 64, dtype=torch.int8), torch.ones(96).half()))},
        lambda stage: {"layers": _with(stage, q=(torch.zeros(96, 64), torch.ones(96)))},
        lambda stage: {"layers": _with(stage, ffn_norm=(torch.zeros(1, 64, dtype=torch.int8), torch.ones(1)))},
        lambda stage: {"windows": [0, 0]},
        lambda stage: {"windows": [0, -1, 0]},
        lambda stage: {"turns": [0, 0, 2]},
        lambda stage: {"rotary_factors": [1.0]},
        lambda stage: {"isa": "neon"},
        lambda stage: {"kv_dtype": "int8"},
        lambda stage: {"head_dim": 8},
        lambda stage: {"block_tokens": 3},
        lambda stage: {"block_count": 0},
        lambda stage: {"kv_head_count": 4},
        lambda stage: {"kv_head_count": 0},
        lambda stage: {"inverse_frequencies": [np.zeros(9, np.float32)] * 2},
        lambda stage: {"inverse_frequencies": [np.zeros(8, np.float32), np.zeros(4, np.float32)]},
    ],
)
def test_weights_that_do_not_fit_are_refused(tiny_model: Checkpoint, spoil: Any) -> None:
    stage = stage_of(tiny_model)
    arguments: dict[str, Any] = {
        "hidden_size": 64, "head_count": 6, "kv_head_count": 2, "head_dim": 16, "ffn_size": 96, "vocab_size": 258,
        "norm_eps": 1e-5, "inverse_frequencies": [np.ones(8, np.float32)] * 2, "embedding": stage.embedding,
        "final_norm": stage.final_norm, "head": stage.head, "kv_dtype": "fp32", "block_count": 4, "block_tokens": 16,
        "threads": 1, "isa": "auto", "rotary_factors": [1.0, 1.0], "windows": [0, 0, 0], "turns": [0, 0, 0],
        "attention_scale": 0.25, "attention_softcap": 0.0, "embedding_scale": 1.0, "residual_scale": 1.0, "gelu": False,
        "layers": _with(stage),
    }  # fmt: skip
    Decoder(**arguments)
    with pytest.raises((ValueError, TypeError)):
        Decoder(**(arguments | spoil(stage)))


@pytest.mark.slow
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


@pytest.mark.slow
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
from tests.runtime.llm.batches import batch_of
decoder = native(tiny(), threads=3)
child = os.fork()
values = decoder.forward(batch_of([(list(range(2, 42)), 0, [0, 1, 2])])).sum().item()
if child == 0:
    os._exit(0 if values == values else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
