"""Requests that move from a first engine to a second one that came up behind it: no token lost, none twice.

The second one is the native engine again, transformers, or vLLM (`make vllm-test`), over the same weights.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from fleetstart.runtime.contract.errors import FleetError, InvalidInput, StartFailed, Unavailable
from fleetstart.runtime.contract.function.spec import EngineName, LLMSettings
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.inference_engine import InferenceEngine
from fleetstart.runtime.llm.engine.two_engines import MOVED_TOKENS, WORTH_TOKENS, TwoEngines
from fleetstart.runtime.llm.model.loaded_model import LoadedModel
from fleetstart.runtime.llm.server.engines import load_engine
from tests.runtime.llm.engine.test_inference_engine import (
    DRAWN,
    GREEDY,
    NEEDED,
    SETTINGS,
    SHAPE,
    VLLM,
    load,
    request,
)
from tests.runtime.llm.models import Checkpoint, run, text_of, tiny, tokens_of
from tests.servers import wait_until

WAIT_S = 60.0
HANDOVERS = 100
THREADS = 3
"""Unlike what any thread has by itself."""
SEEDED = 1
"""Place among `requests_of` of the one that is drawn."""
GOLDEN = json.loads((Path(__file__).parents[1] / "golden.json").read_text())["cases"]
ENGINES = ("native", pytest.param("transformers", marks=pytest.mark.slow), VLLM)


class Pair:
    """Two engines of which the second one comes up when the test says so."""

    def __init__(self, first: InferenceEngine, second: Callable[[], InferenceEngine], **settings: Any) -> None:
        self._gate = threading.Event()

        def build() -> InferenceEngine:
            assert self._gate.wait(WAIT_S)
            return second()

        self.both = TwoEngines(first, build, name="other", **({"embeds": True, "quiet_s": 0.0} | settings))
        self.deltas: dict[int, list[TokenDelta]] = {}

    def add(self, requests: list[Request]) -> None:
        self.deltas |= {self.both.add(one): [] for one in requests}

    def steps(self, count: int = 1 << 30) -> None:
        """Steps until nothing is left to compute, or so many."""
        while count and not self.both.idle:
            count -= 1
            for delta in self.both.step():
                self.deltas[delta.id].append(delta)

    @property
    def moved(self) -> int:
        return self.both.second.moved

    def bring_up(self, state: str = "ready") -> None:
        self._gate.set()
        wait_until(lambda: self.both.second.state == state, WAIT_S, what=f"a second engine that is {state}")


@pytest.fixture(scope="module", params=ENGINES)
def name(request: pytest.FixtureRequest) -> EngineName:
    engine: EngineName = request.param
    if find_spec(NEEDED[engine]) is None:
        pytest.skip("needs vLLM: make vllm-test" if engine == "vllm" else f"{NEEDED[engine]} is not installed")
    return engine


@pytest.fixture(scope="module")
def second(name: EngineName) -> Iterator[LoadedModel]:
    model = load(name, tiny(**SHAPE))
    yield model
    model.engine.close()


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load("native", tiny(**SHAPE))


@pytest.fixture
def first(model: LoadedModel) -> InferenceEngine:
    """An engine that another test has ended computes again."""
    model.engine.regain()
    assert model.engine.idle
    return model.engine


def requests_of(number: int) -> list[Request]:
    """Four requests of all kinds, which differ from those of other numbers."""
    penalised = {"sampling": GREEDY, "stops": ["\x00never"], "logprobs": 2}
    return [
        request(3 + number % 40, 40, number),
        request(20, 40, number + 1, sampling=DRAWN),
        request(9, 40, number + 2, **penalised),
        request(1 + number % 7, 24 + number % 16, number + 3, ignore_eos=False),
    ]


def may_differ(name: EngineName) -> range:
    """Places among `requests_of` whose tokens can differ after the hand-over.

    Where an engine rounds otherwise than the first one, once in some thousand tokens another one is drawn; and on a GPU
    vLLM's attention computes fp32 in TF32.
    """
    if name == "vllm" and torch.cuda.is_available():
        return range(4)
    return range(SEEDED, SEEDED + (name == "vllm" or (name == "transformers" and torch.cuda.is_available())))


@pytest.mark.slow
def test_a_hundred_handovers_neither_lose_nor_double_a_token(
    name: EngineName, first: InferenceEngine, second: LoadedModel
) -> None:
    """Each after another number of steps, of up to four streams at a time; text and tokens are those of one engine."""
    moved = number = streams = different = 0
    while moved < HANDOVERS:
        number += 1
        requests = requests_of(number)
        first.regain()
        wanted = run(first, requests)
        pair = Pair(first, lambda: second.engine)
        pair.add(requests)
        pair.steps(number % 20)
        pair.bring_up()
        pair.steps()
        found = list(pair.deltas.values())
        for place, (deltas, expected) in enumerate(zip(found, wanted, strict=True)):
            streams += 1
            if place in may_differ(name) and tokens_of(deltas) != tokens_of(expected):
                different += 1
                before = number % 20
                assert tokens_of(deltas)[:before] == tokens_of(expected)[:before]
                assert len(tokens_of(deltas)) == len(tokens_of(expected)) or not requests[place].ignore_eos
                assert deltas[-1].finish in ("stop", "length")
                continue
            assert tokens_of(deltas) == tokens_of(expected)
            assert text_of(deltas) == text_of(expected)
            assert deltas[-1].finish == expected[-1].finish
        assert all(len(delta.logprobs) == 1 for delta in found[2])
        moved += pair.moved
    assert different <= streams // 4
    assert second.engine.load.free_blocks == second.engine.load.block_count


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ENGINES[1:], indirect=True)  # the native engine's own are held by test_golden.py
def test_streams_of_the_real_model_keep_their_golden_tokens(name: EngineName, chat_model: Checkpoint) -> None:
    settings: dict[str, Any] = {"kv_memory_bytes": 64 << 20, "max_context_tokens": 512, "max_batch": 8, "dtype": "fp32"}
    native, other = load("native", chat_model, **settings).engine, load(name, chat_model, **settings).engine
    every, wanted = (GOLDEN, HANDOVERS) if name == "vllm" else (GOLDEN[:4], 4)
    requests = [Request(tokens=case["prompt_ids"], max_new_tokens=48, sampling=GREEDY) for case in every]
    moved = steps = 0
    while moved < wanted:
        steps = steps % 30 + 5
        native.regain()
        pair = Pair(native, lambda: other)
        pair.add(requests)
        pair.steps(steps)
        pair.bring_up()
        pair.steps()
        assert [tokens_of(deltas) for deltas in pair.deltas.values()] == [case["output_ids"] for case in every]
        moved += pair.moved
    other.close()


def test_the_second_engine_is_built_after_a_first_token(first: InferenceEngine) -> None:
    begun = threading.Event()

    def build() -> InferenceEngine:
        begun.set()
        raise StartFailed("no room")

    both = TwoEngines(first, build, name="other", embeds=True, quiet_s=WAIT_S)
    ids = [both.add(request(40, 40, seed)) for seed in range(2)]
    assert both.second.state == "waiting"
    given: set[int] = set()
    while given != set(ids):
        assert not begun.is_set()
        given |= {delta.id for delta in both.step()}
    assert begun.wait(WAIT_S)
    both.close()
    for id in ids:
        both.cancel(id)


def test_a_call_that_waits_long_for_its_first_token_keeps_the_second_engine_waiting(first: InferenceEngine) -> None:
    """However slow the machine is: it began two seconds after the start of the worker."""
    both = TwoEngines(first, lambda: first, name="other", embeds=True, quiet_s=0.2)
    id = both.add(request(40, 40))
    while both.second.state != "waiting":  # the machine was too slow for this call to come first
        both.cancel(id)
        both = TwoEngines(first, lambda: first, name="other", embeds=True, quiet_s=0.2)
        id = both.add(request(40, 40))
    assert not both._begin.wait(0.5)
    assert both.second.state == "waiting"
    while not both.step():
        pass
    wait_until(lambda: both.second.state != "waiting", WAIT_S, what="the second engine's start")
    both.cancel(id)


@pytest.mark.parametrize(
    "name", ENGINES[1:], indirect=True
)  # the native engine has threads of its own, none of torch's
def test_the_second_engine_computes_with_all_its_threads(name: EngineName) -> None:
    """The number is one of each thread, and the engines' thread has one while the native engine computes."""
    settings = LLMSettings(engine=name, first="native", threads=THREADS, **SETTINGS)
    model = load_engine(tiny(**SHAPE), settings, threads=1)
    engine = model.engine
    assert isinstance(engine, TwoEngines)

    def compute() -> int:
        torch.set_num_threads(model.torch_threads)
        before = torch.get_num_threads()
        while engine.second.state != "running":
            assert engine.second.state != "failed", engine.second.error
            run(engine, [request(4, 4)])
        assert before == 1
        return torch.get_num_threads()

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(compute).result() == THREADS
    finally:
        torch.set_num_threads(threads)  # later threads begin with the last number that any has set
        engine.close()


def test_the_thread_that_built_the_second_engine_stays_until_the_end(first: InferenceEngine) -> None:
    """Without its threads of arithmetic those of the steps spin while they wait, on cores that others use."""
    pair = Pair(first, lambda: load("native", tiny(**SHAPE)).engine)
    pair.add(requests_of(1))
    pair.steps(3)
    pair.bring_up()
    pair.steps()
    assert pair.moved
    assert pair.both._builder.is_alive()
    pair.both.close()
    pair.both._builder.join(WAIT_S)
    assert not pair.both._builder.is_alive()


def test_without_a_second_engine_the_first_one_goes_on(first: InferenceEngine) -> None:
    def fails() -> InferenceEngine:
        raise StartFailed("it does not run this model")

    requests = requests_of(1)
    wanted = [tokens_of(deltas) for deltas in run(first, requests)]
    pair = Pair(first, fails)
    pair.add(requests)
    pair.steps(3)
    pair.bring_up("failed")
    assert pair.both.second.error == "it does not run this model"
    pair.steps()
    assert [tokens_of(deltas) for deltas in pair.deltas.values()] == wanted
    assert tokens_of(run(pair.both, requests[:1])[0]) == wanted[0]


class Refusing:
    """An engine that refuses requests of more tokens than it has room for."""

    def __init__(self, engine: InferenceEngine, most: int) -> None:
        self._engine = engine
        self._most = most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def check(self, request: Request) -> None:
        if len(request.tokens) > self._most:
            raise InvalidInput("no room")

    def add(self, request: Request, id: int | None = None) -> int:
        self.check(request)
        return self._engine.add(request, id)


def test_what_the_second_engine_refuses_ends_on_the_first(first: InferenceEngine) -> None:
    requests = [request(40, 60, 1), request(10, 60, 2)]
    wanted = [tokens_of(deltas) for deltas in run(first, requests)]
    other: Any = Refusing(load("native", tiny(**SHAPE)).engine, 20)
    pair = Pair(first, lambda: other)
    pair.add(requests)
    pair.steps(4)
    pair.bring_up()
    pair.steps()
    assert [tokens_of(deltas) for deltas in pair.deltas.values()] == wanted
    assert pair.moved == 1
    assert first.load.free_blocks == first.load.block_count


def test_what_was_checked_before_the_handover_ends_on_the_engine_that_has_room(first: InferenceEngine) -> None:
    """The first engine's context can be the larger one, and a request was checked while there was no other."""
    running, late = request(10, 60, 1), request(40, 60, 2)
    wanted = [tokens_of(deltas) for deltas in run(first, [running, late])]
    other: Any = Refusing(load("native", tiny(**SHAPE)).engine, 20)
    pair = Pair(first, lambda: other)
    pair.add([running])
    pair.steps(4)
    pair.both.check(late)
    pair.bring_up()
    pair.add([late])
    pair.steps()
    assert [tokens_of(deltas) for deltas in pair.deltas.values()] == wanted
    assert pair.moved == 1
    with pytest.raises(InvalidInput, match="no room"):  # only the other one is left
        pair.both.add(late)
    assert pair.both.idle


def test_few_move_at_a_time_and_those_that_are_nearly_done_stay(first: InferenceEngine) -> None:
    short, long = request(4, WORTH_TOKENS - 1, 1), [request(MOVED_TOKENS // 3, 60, seed) for seed in (2, 3)]
    wanted = [tokens_of(deltas) for deltas in run(first, [short, *long])]
    pair = Pair(first, lambda: load("native", tiny(**SHAPE)).engine)
    pair.add([short, *long])
    pair.steps(2)
    pair.bring_up()
    pair.steps(1)
    assert pair.moved == 2
    assert first.load.active == 1
    pair.steps()
    assert [tokens_of(deltas) for deltas in pair.deltas.values()] == wanted


def test_the_cached_tokens_of_a_prompt_count_once_where_its_request_moves(first: InferenceEngine) -> None:
    """The other engine keeps prompts, too, and the requests that move there one after the other have the same."""
    pair = Pair(first, lambda: load("native", tiny(**SHAPE)).engine)
    pair.add([request(190, 60)])
    pair.steps(3)
    pair.add([request(190, 60) for _ in range(3)])
    pair.steps(4)
    pair.bring_up()
    pair.steps()
    assert pair.moved == 4
    cached = [[delta.cached_tokens for delta in deltas] for deltas in pair.deltas.values()]
    assert cached == [[0] * 60] + [[176] + [0] * 59] * 3


def test_a_request_that_resumes_here_moves_on_with_all_its_tokens(first: InferenceEngine) -> None:
    whole = request(12, 50)
    wanted = tokens_of(run(first, [whole])[0])
    pair = Pair(first, lambda: load("native", tiny(**SHAPE)).engine)
    state = pair.both.resume(whole, wanted[:10])
    pair.add([request(12, 50, resume=state)])
    pair.steps(5)
    pair.bring_up()
    pair.steps()
    assert tokens_of(pair.deltas[0]) == wanted[10:]
    assert pair.moved == 1


def test_weights_are_released_and_regained_around_a_handover(first: InferenceEngine) -> None:
    whole = request(12, 50)
    wanted = tokens_of(run(first, [whole])[0])
    other = load("native", tiny(**SHAPE)).engine
    pair = Pair(first, lambda: other)
    pair.add([whole])
    pair.steps(5)
    pair.both.release()
    assert pair.both.stalled
    pair.bring_up()  # it comes up while nothing may be held
    pair.steps(3)
    assert pair.moved == 0
    pair.both.regain()
    pair.steps()
    assert tokens_of(pair.deltas[0]) == wanted
    assert pair.moved == 1


def test_cancelled_requests_and_the_end_leave_nothing_behind(first: InferenceEngine) -> None:
    other = load("native", tiny(**SHAPE)).engine
    pair = Pair(first, lambda: other)
    pair.add([request(12, 60, seed) for seed in range(4)])
    pair.steps(3)
    pair.both.cancel(1)
    pair.bring_up()
    pair.steps(2)
    pair.both.cancel(2)
    ended = pair.both.fail_all(Unavailable("the worker is shutting down"))
    assert [delta.id for delta in ended] == [0, 3]
    assert pair.both.idle
    assert other.load.free_blocks == other.load.block_count


def test_embeddings_are_refused_where_the_second_engine_has_none(first: InferenceEngine) -> None:
    both = Pair(first, lambda: first, embeds=False).both
    with pytest.raises(FleetError, match="gives no embeddings"):
        both.check(Request(tokens=[2, 3], max_new_tokens=0, embeds=True))
