"""Behaviour of every engine behind the seam: the same requests to each, over the same weights.

`ENGINES` lists them. vLLM has an environment of its own: `make vllm-test`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetstart.runtime.contract.errors import ContextExceeded, DeadlineExceeded, Unavailable
from fleetstart.runtime.contract.function.spec import EngineName, LLMSettings
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.inference_engine import InferenceEngine
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.model.loaded_model import LoadedModel
from fleetstart.runtime.llm.server.engines import load_engine
from tests.runtime.llm.model.test_adapters import adapted, adapter_of, merged
from tests.runtime.llm.models import Checkpoint, run, text_of, tiny, tokens_of

VLLM = pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.filterwarnings("ignore")])
"""Its modules and those that it imports warn of one another."""
ENGINES = ("native", pytest.param("transformers", marks=pytest.mark.slow), VLLM)
NEEDED = {"native": "torch", "transformers": "transformers", "vllm": "vllm"}
SETTINGS: dict[str, Any] = {"max_batch": 4, "max_context_tokens": 256, "kv_memory_bytes": 4 << 20}
SHAPE: dict[str, Any] = {
    "dtype": torch.float32, "hidden_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip
"""transformers wants as many numbers in a hidden state as in its heads, and vLLM heads of 32 or more."""
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.9, top_k=50, top_p=0.95, seed=7)
GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["cases"]

Loading = Callable[..., LoadedModel]


@pytest.fixture(scope="module", params=ENGINES)
def name(request: pytest.FixtureRequest) -> EngineName:
    engine: EngineName = request.param
    if find_spec(NEEDED[engine]) is None:
        pytest.skip("needs vLLM: make vllm-test" if engine == "vllm" else f"{NEEDED[engine]} is not installed")
    return engine


@pytest.fixture(scope="module")
def model(name: EngineName) -> LoadedModel:
    return load(name, tiny(**SHAPE))


@pytest.fixture
def engine(model: LoadedModel) -> InferenceEngine:
    assert model.engine.idle
    return model.engine


def load(name: EngineName, weights: Checkpoint, **changes: Any) -> LoadedModel:
    return load_engine(weights, LLMSettings(engine=name, **(SETTINGS | changes)), threads=1)


def prompt(length: int, seed: int = 1) -> list[int]:
    tokens: list[int] = torch.randint(2, 258, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


def request(length: int = 12, new: int = 12, seed: int = 1, **fields: Any) -> Request:
    settings: dict[str, Any] = {"sampling": GREEDY, "ignore_eos": True} | fields
    return Request(tokens=prompt(length, seed), max_new_tokens=new, **settings)


def alone(engine: InferenceEngine, one: Request) -> list[TokenDelta]:
    return run(engine, [one])[0]


def test_every_engine_gives_the_tokens_of_the_native_one(engine: InferenceEngine) -> None:
    requests = [request(length, 10, length) for length in (1, 5, 16, 40)]
    native = load("native", tiny(**SHAPE)).engine
    wanted = [tokens_of(alone(native, one)) for one in requests]
    assert [tokens_of(alone(engine, one)) for one in requests] == wanted


def test_requests_together_get_what_they_get_alone(engine: InferenceEngine) -> None:
    """More than the batch holds, with prompts and answers of many lengths."""
    requests = [request(length, 4 + length % 7, length) for length in (3, 50, 17, 1, 33, 8)]
    requests[2] = request(17, 9, 17, sampling=DRAWN)
    wanted = [tokens_of(alone(engine, one)) for one in requests]
    assert [tokens_of(deltas) for deltas in run(engine, requests)] == wanted
    assert engine.load.free_blocks == engine.load.block_count


def test_a_request_ends_at_its_limit_or_at_a_stop_string(engine: InferenceEngine) -> None:
    whole = alone(engine, request(new=10))
    assert whole[-1].finish == "length"
    assert len(tokens_of(whole)) == 10
    text = text_of(whole)
    stop = text[len(text) // 2 :][:2]
    stopped = alone(engine, request(new=10, stops=[stop]))
    assert stopped[-1].finish == "stop"
    assert text_of(stopped) == text[: text.index(stop)]


def test_log_probabilities_are_those_of_the_tokens(engine: InferenceEngine) -> None:
    deltas = alone(engine, request(new=5, logprobs=2))
    logprobs = [one for delta in deltas for one in delta.logprobs]
    assert [one.token for one in logprobs] == tokens_of(deltas)
    assert all(one.logprob == one.top[0][1] <= 0.0 and one.top[0][0] == one.token for one in logprobs)
    assert all(len(one.top) == 2 for one in logprobs)


def test_an_answer_follows_its_grammar(model: LoadedModel) -> None:
    pytest.importorskip("llguidance")
    grammar = json.dumps({"grammars": [{"json_schema": {"enum": ["yes", "no"]}}]})
    constraint = model.constraints.compile(grammar)
    deltas = alone(model.engine, request(new=16, ignore_eos=False, constraint=constraint))
    assert deltas[-1].finish == "stop"
    assert json.loads(text_of(deltas)) in ("yes", "no")


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_request_resumes_from_the_tokens_of_another_worker(engine: InferenceEngine, sampling: SamplingParams) -> None:
    wanted = tokens_of(alone(engine, request(new=12, sampling=sampling)))
    resumed = request(new=12, sampling=sampling)
    state = engine.resume(resumed, wanted[:5])
    rest = alone(engine, request(new=12, sampling=sampling, resume=state))
    assert tokens_of(rest) == wanted[5:]
    assert text_of(state.deltas) + text_of(rest) == text_of(alone(engine, resumed))


def test_a_cancelled_request_frees_what_it_holds(engine: InferenceEngine) -> None:
    id, other = engine.add(request(new=200)), engine.add(request(new=8, seed=2))
    wanted = tokens_of(alone(load("native", tiny(**SHAPE)).engine, request(new=8, seed=2)))
    engine.step()
    engine.cancel(id)
    engine.cancel(id)
    found: list[int] = []
    while not engine.idle:
        deltas = engine.step()
        assert all(delta.id == other for delta in deltas)
        found += tokens_of(deltas)
    assert found[-4:] == wanted[-4:]
    assert engine.load.free_blocks == engine.load.block_count


def test_a_deadline_and_the_end_of_the_worker_end_requests(engine: InferenceEngine) -> None:
    late, other = engine.add(request(new=50, deadline_ns=100)), engine.add(request(new=50))
    errors = {delta.id: delta.error for delta in engine.step(100) if delta.error is not None}
    assert isinstance(errors.pop(late), DeadlineExceeded)
    assert not errors
    ended = engine.fail_all(Unavailable("the worker is shutting down"))
    assert [delta.id for delta in ended] == [other]
    assert engine.idle


def test_a_request_that_can_never_fit_is_refused(engine: InferenceEngine) -> None:
    assert engine.context_tokens == 256
    with pytest.raises(ContextExceeded, match="context length is 256 tokens; "):
        engine.check(request(200, 57))


def test_weights_are_released_and_regained_under_a_request(name: EngineName) -> None:
    """What was computed of it is computed again, from its tokens."""
    engine = load(name, tiny(**SHAPE)).engine
    wanted = tokens_of(alone(engine, request(new=12)))
    engine.release()
    engine.release()
    engine.regain()
    assert tokens_of(alone(engine, request(new=12))) == wanted
    engine.add(request(new=12))
    found = [token for _ in range(5) for token in tokens_of(engine.step())]
    assert 0 < len(found) < 12
    engine.release()
    assert engine.stalled
    assert not engine.step()
    engine.regain()
    engine.regain()
    while not engine.idle:
        found += tokens_of(engine.step())
    assert found == wanted
    engine.close()


def test_an_adapter_gives_the_tokens_of_the_merged_model(name: EngineName) -> None:
    base = tiny(**(SHAPE | {"num_hidden_layers": 3}))
    adapter = adapter_of(base)
    models = [
        load_engine(adapted(base, adapter), LLMSettings(engine=name, **SETTINGS), threads=1),
        load("native", merged(base, adapter)),
        load("native", base),
    ]
    answers = [tokens_of(alone(model.engine, request())) for model in models]
    models[0].engine.close()
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.slow
def test_the_real_model_gives_its_golden_tokens(name: EngineName, chat_model: Checkpoint) -> None:
    engine = load(name, chat_model, kv_memory_bytes=64 << 20, max_context_tokens=512).engine
    cases = GOLDEN[:3]
    requests = [Request(tokens=case["prompt_ids"], max_new_tokens=12, sampling=GREEDY) for case in cases]
    assert [tokens_of(deltas) for deltas in run(engine, requests)] == [case["output_ids"][:12] for case in cases]
