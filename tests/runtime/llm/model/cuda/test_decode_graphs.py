"""Decode steps of fixed shapes say what steps of the batch's own shape say, and CUDA graphs of them do too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.runner import Batch
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.cuda import decode_graphs
from fleetstart.runtime.llm.model.cuda.decode_graphs import fill, shape_of, split, unused_rows
from fleetstart.runtime.llm.model.loader import load_model
from fleetstart.runtime.llm.model.torch_decoder import TorchDecoder
from tests.runtime.llm.batches import batch_of, some_tokens, table
from tests.runtime.llm.models import BLOCK_TOKENS, plain, run, tiny, tokens_of

SPARE = 64


@given(
    rows=st.lists(st.tuples(st.integers(0, 999), st.integers(0, 4000)), min_size=1, max_size=70),
    earlier=st.integers(0, 70),
)
def test_inputs_hold_the_batch_and_unused_rows_are_of_no_sequence(rows: list[tuple[int, int]], earlier: int) -> None:
    pieces = [([token], position, table(number, position + 1)) for number, (token, position) in enumerate(rows)]
    batch = batch_of(pieces)
    shape = shape_of(batch, BLOCK_TOKENS)
    inputs = unused_rows(shape, SPARE)
    inputs[: min(earlier, shape[0])] = 7  # of a larger batch before
    fill(inputs, batch, BLOCK_TOKENS, SPARE)
    tokens, positions, tables = split(inputs)
    count = len(rows)
    assert count <= shape[0] < 2 * count
    assert tokens[:count].tolist() == [token for token, _ in rows]
    assert positions[:count].tolist() == [position for _, position in rows]
    for row, (_, _, own) in enumerate(pieces):
        assert tables[row, : len(own)].tolist() == own
    assert not tokens[count:].any()
    assert not positions[count:].any()
    assert (tables[count:, 0] == SPARE).all()


def _prepared(decoder: TorchDecoder) -> Batch:
    """Prompts of 40, 5 and 17 tokens are computed; the batch that goes on with them."""
    prompts = [(some_tokens(40), 0, [9, 3, 7]), (some_tokens(5, 2), 0, [1]), (some_tokens(17, 3), 0, [4, 2])]
    decoder.forward(batch_of(prompts))
    return batch_of([([5], 40, [9, 3, 7]), ([6], 5, [1]), ([7], 17, [4, 2])])


@pytest.mark.parametrize("changes", [{}, {"num_attention_heads": 2, "num_key_value_heads": 2}], ids=["groups", "none"])
def test_a_step_of_a_fixed_shape_says_what_the_batch_says(changes: dict[str, int]) -> None:
    """Keys that nobody wrote are NaN: neither padding nor the spare block may read them."""
    decoder = plain(tiny(dtype=torch.float32, **changes))
    decoder._cache.fill_(float("nan"))
    batch = _prepared(decoder)
    wanted = decoder.forward(batch).clone()
    inputs = unused_rows(shape_of(batch, BLOCK_TOKENS), decoder.block_count)
    fill(inputs, batch, BLOCK_TOKENS, decoder.block_count)
    got = decoder._decode(*split(inputs))
    assert got.isfinite().all()
    torch.testing.assert_close(got[:3], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_an_engine_says_with_graphs_what_it_says_without(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny(dtype=torch.float32)
    settings = LLMSettings(max_batch=8, max_context_tokens=512, kv_memory_bytes=64 << 20)
    requests = [
        Request(tokens=some_tokens(length, length), max_new_tokens=new, sampling=SamplingParams(temperature=0))
        for length, new in ((12, 40), (90, 30), (5, 24), (240, 40), (33, 8))
    ]
    answers = []
    for used_before in (0, 1 << 30):
        monkeypatch.setattr(decode_graphs, "USED_BEFORE", used_before)
        engine = load_model(weights, settings, threads=1, device="cuda").engine
        decoder = engine._runner._decoder  # type: ignore[attr-defined]
        if decoder._compiling is not None:
            decoder._compiling.result()  # until then nothing is captured
        answers.append([tokens_of(one) for one in run(engine, requests)])
        assert bool(decoder._graphs._graphs) is not bool(used_before)
    assert answers[0] == answers[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_graph_that_cannot_be_captured_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    decoder = plain(tiny(dtype=torch.float32), device="cuda")
    assert decoder._compiling is not None
    decoder._compiling.result()  # until then nothing is captured
    batch = _prepared(decoder)
    wanted = decoder.forward(batch).clone()
    graphs = decoder._graphs
    assert graphs is not None
    compute = graphs._compute

    def waits(*inputs: torch.Tensor) -> torch.Tensor:
        logits = compute(*inputs)
        torch.cuda.synchronize()  # no capture allows it
        return logits

    monkeypatch.setattr(graphs, "_compute", waits)
    monkeypatch.setattr(decode_graphs, "USED_BEFORE", 0)
    for _ in range(2):
        torch.testing.assert_close(decoder.forward(batch), wanted, rtol=1e-5, atol=1e-5)
    assert caplog.text.count("decode steps go on without CUDA graphs") == 1
    torch.cuda.empty_cache()  # fails as long as the allocator is in a capture
