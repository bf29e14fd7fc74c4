"""The engine over vLLM's: cached prompts, and requests that end where vLLM or their text does not go on."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import HandlerFailed
from fleetstart.runtime.llm.vllm_engine.engine import VllmEngine
from tests.runtime.llm.engine.test_inference_engine import SHAPE, alone, load, request
from tests.runtime.llm.models import tiny, tokens_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test"),
]


@pytest.fixture(scope="module")
def engine() -> Iterator[VllmEngine]:
    engine: Any = load("vllm", tiny(**SHAPE)).engine
    yield engine
    engine.close()


def test_a_prompt_that_was_there_before_counts_as_cached_in_its_first_delta(engine: VllmEngine) -> None:
    """Cached tokens count in whole blocks of vLLM's. One that goes on from tokens had its count where it began."""
    before = engine.load
    one = request(200, 6)
    deltas = [alone(engine, one) for _ in range(2)]
    block: int = engine._vllm.vllm_config.cache_config.block_size
    cached = 200 // block * block
    assert cached > 0
    assert [[delta.cached_tokens for delta in each] for each in deltas] == [[0] * 6, [cached, 0, 0, 0, 0, 0]]
    resumed = request(200, 6, resume=engine.resume(one, tokens_of(deltas[0])[:2]))
    assert not any(delta.cached_tokens for delta in alone(engine, resumed))
    load = engine.load
    assert (load.prompt_tokens - before.prompt_tokens, load.cached_tokens - before.cached_tokens) == (400, cached)


def test_a_token_without_a_text_ends_its_own_request(engine: VllmEngine) -> None:
    wanted = tokens_of(alone(engine, request(12, 8, 2)))
    broken, other = engine.add(request(12, 8)), engine.add(request(12, 8, 2))

    class Wordless:
        def feed(self, token: int) -> str:
            raise ValueError("it has no text")

    engine._active[broken].detokenizer = Wordless()  # type: ignore[assignment]
    found: dict[int, list[Any]] = {broken: [], other: []}
    while not engine.idle:
        for delta in engine.step():
            found[delta.id].append(delta)
    [failed] = found[broken]
    assert isinstance(failed.error, HandlerFailed)
    assert "it has no text" in failed.error.message
    assert tokens_of(found[other]) == wanted
    assert engine.load.free_blocks == engine.load.block_count


def test_an_answer_that_vllm_ends_by_itself_does_not_wait_for_more(engine: VllmEngine, monkeypatch: Any) -> None:
    monkeypatch.setattr(engine._vllm.engine_core.engine_core.scheduler, "max_model_len", 20)
    engine.add(request(12, 30))
    deltas = [delta for _ in range(20) for delta in engine.step()]
    assert engine.idle
    assert len(tokens_of(deltas)) == 8
    error = deltas[-1].error
    assert isinstance(error, HandlerFailed)
    assert error.message == "vLLM ended the answer after 8 new tokens: length"
