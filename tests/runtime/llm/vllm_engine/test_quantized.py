"""Quantised weights over vLLM: it gets them as they are stored, and computes with them by its own method."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from fleetstart.runtime.llm.engine.generation import Request
from tests.runtime.llm.engine.test_inference_engine import GOLDEN, GREEDY, load
from tests.runtime.llm.models import Checkpoint, in_int8, run, tokens_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test"),
]
FIRST = 4


def test_int8_begins_with_golden_tokens(chat_model: Checkpoint) -> None:
    """vLLM rounds the activations, too: half of the answers part from those in fp32 at once. Noise would give none."""
    engine = load("vllm", in_int8(chat_model), kv_memory_bytes=256 << 20, max_context_tokens=512).engine
    cases = GOLDEN[:8]
    requests = [Request(tokens=case["prompt_ids"], max_new_tokens=FIRST, sampling=GREEDY) for case in cases]
    got = [tokens_of(deltas) for deltas in run(engine, requests)]
    assert sum(tokens == case["output_ids"][:FIRST] for tokens, case in zip(got, cases, strict=True)) >= 2
