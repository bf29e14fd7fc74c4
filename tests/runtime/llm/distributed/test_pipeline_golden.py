"""The real model along pipelines gives the very tokens that transformers gave, also while it is consolidated."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from tests.runtime.llm.models import Checkpoint, tokens_of
from tests.runtime.llm.pipelines import after, pipeline

CASES: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["cases"]
LAYERS = 30
SETTINGS = LLMSettings(max_batch=8, max_context_tokens=512, kv_memory_bytes=256 * MIB)


@st.composite
def cuts(draw: st.DrawFn, stages: int) -> list[tuple[int, int]]:
    inner = st.lists(st.integers(1, LAYERS - 1), min_size=stages - 1, max_size=stages - 1, unique=True)
    bounds = [0, *sorted(draw(inner)), LAYERS]
    return list(itertools.pairwise(bounds))


@pytest.mark.timeout(300)  # of a busy machine
@pytest.mark.parametrize("stages", [2, 3, 4])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tokens_are_golden(chat_model: Checkpoint, stages: int, data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(range(len(CASES))), min_size=3, max_size=6, unique=True))
    grows_after = data.draw(st.integers(0, 60))
    requests = [
        Request(tokens=CASES[case]["prompt_ids"], max_new_tokens=48, sampling=SamplingParams(temperature=0))
        for case in chosen
    ]
    with pipeline(chat_model, data.draw(cuts(stages)), settings=SETTINGS) as running:
        found = after(running, requests, grows_after, running.consolidate)
        assert running.whole.wait(60)
    assert [tokens_of(deltas) for deltas in found] == [CASES[case]["output_ids"] for case in chosen]
