"""Named adapters: each request has the tokens of the model that it names, on every engine, also beside others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from fleetstart.runtime.contract.errors import CheckpointInvalid, DeadlineExceeded, InvalidInput, Unavailable
from fleetstart.runtime.contract.function.spec import EngineName, LLMSettings
from fleetstart.runtime.llm.engine.adapter_engines import AdapterEngines
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.inference_engine import InferenceEngine
from fleetstart.runtime.llm.engine.runner import ReleasedRunner
from fleetstart.runtime.llm.engine.two_engines import TwoEngines
from fleetstart.runtime.llm.server.engines import Adapters, load_engine
from fleetstart.runtime.weights.tensor_mapping import TensorMapping
from tests.runtime.llm.engine.test_inference_engine import ENGINES, NEEDED, SETTINGS, SHAPE, load, request
from tests.runtime.llm.model.test_adapters import TARGETS, adapter_of, merged
from tests.runtime.llm.models import Checkpoint, run, tiny, tokens_of
from tests.runtime.weights.test_lora import P, config, filled, segment_of
from tests.servers import wait_until

WAIT_S = 30.0
FILES = ("config.json", "tokenizer.json", "generation_config.json")
TEMPLATE = b"{% for message in messages %}{{ message.content }}{% endfor %}"
NAMES = ("", "sql", "legal")


def base_of() -> Checkpoint:
    return tiny(**(SHAPE | {"num_hidden_layers": 3}))


def changes_of(base: Checkpoint) -> dict[str, dict[str, Tensor]]:
    """Tensors of two adapters; the second one's changes are twice as large, and opposite."""
    first = adapter_of(base)
    second = {name: tensor * -2 if ".lora_B." in name else tensor for name, tensor in first.items()}
    return {"sql": first, "legal": second}


def attached(base: Checkpoint) -> tuple[TensorMapping, Adapters]:
    adapters = {name: filled(segment_of(one, config())).attach() for name, one in changes_of(base).items()}
    files = {name: base.file(name) for name in FILES} | {"chat_template.jinja": TEMPLATE}
    return filled(segment_of(dict(base), files)).attach(), adapters


def wanted_of(base: Checkpoint) -> dict[str, list[int]]:
    """Tokens of the merged models."""
    models = {"": base} | {name: merged(base, one) for name, one in changes_of(base).items()}
    return {name: tokens_of(run(load("native", model).engine, [request()])[0]) for name, model in models.items()}


def named(adapter: str, **changes: Any) -> Request:
    return replace(request(**changes), adapter=adapter)


# On a GPU vLLM has no adapters in fp32.
@pytest.fixture(scope="module", params=ENGINES[:2] if torch.cuda.is_available() else ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[InferenceEngine]:
    name: EngineName = request.param
    if find_spec(NEEDED[name]) is None:
        pytest.skip("needs vLLM: make vllm-test" if name == "vllm" else f"{NEEDED[name]} is not installed")
    weights, adapters = attached(base_of())
    settings = LLMSettings(engine=name, **(SETTINGS | {"kv_memory_bytes": 6 << 20}))
    engine = load_engine(weights, settings, threads=1, adapters=adapters).engine
    yield engine
    engine.close()


def test_each_request_has_the_tokens_of_the_model_that_it_names(engine: InferenceEngine) -> None:
    """Both adapters are asked for at once: two models that transformers built at a time had no heads."""
    wanted = wanted_of(base_of())
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3
    together = run(engine, [named(name) for name in (*NAMES, *NAMES)])
    assert [tokens_of(one) for one in together] == 2 * [wanted[name] for name in NAMES]
    assert engine.idle
    assert engine.load.active == 0


def test_adapters_are_there_again_after_a_release(engine: InferenceEngine) -> None:
    wanted = wanted_of(base_of())
    engine.release()
    engine.regain()
    assert tokens_of(run(engine, [named("sql")])[0]) == wanted["sql"]


def test_a_request_moves_to_a_second_engine_with_its_adapter() -> None:
    weights, adapters = attached(base_of())
    settings = LLMSettings(**(SETTINGS | {"kv_memory_bytes": 6 << 20}))
    first, second = (load_engine(weights, settings, threads=1, adapters=adapters).engine for _ in range(2))
    may_end = threading.Event()

    def build() -> InferenceEngine:
        may_end.wait(WAIT_S)
        return second

    two = TwoEngines(first, build, name="transformers", embeds=True)
    id = two.add(named("legal", new=40))
    found: list[int] = []
    while len(found) < 5:
        found += tokens_of(two.step())
    may_end.set()
    wait_until(lambda: two.second.state == "ready", WAIT_S, what="the second engine")
    while not two.idle:
        found += [token for delta in two.step() if delta.id == id for token in delta.tokens]
    assert two.second.moved == 1
    two.close()
    alone = load("native", merged(base_of(), changes_of(base_of())["legal"])).engine
    assert found == tokens_of(run(alone, [request(new=40)])[0])


# ── an engine for each adapter ─────────────────────────────────────────────────────────────────────


class Building:
    """An engine whose adapters come up when a test lets them."""

    def __init__(self, error: Exception | None = None) -> None:
        self.may_end = threading.Event()
        self.built: list[str] = []
        self.engine = AdapterEngines(load("native", tiny(**SHAPE)).engine, self.build, ["sql", "legal"])
        self.error = error

    def build(self, adapter: str) -> InferenceEngine:
        self.built.append(adapter)
        assert self.may_end.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return load("native", tiny(**SHAPE)).engine


def test_requests_of_the_base_go_on_while_an_adapter_is_loaded() -> None:
    building = Building()
    engine = building.engine
    waiting = [engine.add(named("sql")) for _ in range(2)]
    assert engine.stalled
    assert not engine.idle
    assert tokens_of(run_one(engine, request()))
    assert engine.load.active == 2
    building.may_end.set()
    ended: set[int] = set()
    wait_until(lambda: not engine.stalled or engine._built, WAIT_S, what="the adapter")
    while not engine.idle:
        ended |= {delta.id for delta in engine.step() if delta.last}
    assert ended == set(waiting)
    assert building.built == ["sql"]
    engine.close()


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone_and_is_tried_again() -> None:
    building = Building(CheckpointInvalid("it does not fit"))
    engine = building.engine
    building.may_end.set()
    for _ in range(2):
        id = engine.add(named("sql"))
        wait_until(lambda: bool(engine._built), WAIT_S, what="the failure")
        [delta] = engine.step()
        assert (delta.id, delta.error) == (id, building.error)
        assert engine.idle
    assert building.built == ["sql", "sql"]
    assert tokens_of(run_one(engine, request()))
    engine.close()


def test_a_request_that_comes_after_a_failed_load_hides_the_failure_from_nobody() -> None:
    building = Building(CheckpointInvalid("it does not fit"))
    engine = building.engine
    building.may_end.set()
    first = engine.add(named("sql"))
    wait_until(lambda: bool(engine._built), WAIT_S, what="the failure")
    base, second = engine.add(request(new=3)), engine.add(named("sql"))
    deltas: list[TokenDelta] = []
    while not engine.idle:
        deltas += engine.step()
    errors = {delta.id: delta.error for delta in deltas if delta.last}
    assert errors == {first: building.error, base: None, second: building.error}
    assert building.built == ["sql"]
    engine.close()


def test_waiting_requests_end_by_deadline_cancel_and_the_end_of_the_worker() -> None:
    building = Building()
    engine = building.engine
    late, gone, last = engine.add(named("sql", deadline_ns=100)), engine.add(named("sql")), engine.add(named("legal"))
    [delta] = engine.step(100)
    assert (delta.id, type(delta.error)) == (late, DeadlineExceeded)
    engine.cancel(gone)
    assert [delta.id for delta in engine.fail_all(Unavailable("the worker is shutting down"))] == [last]
    assert engine.idle
    building.may_end.set()
    engine.close()


@pytest.mark.parametrize("first", ["built", "released"])
def test_an_adapter_that_nobody_waits_for_any_more_holds_no_memory_in_standby(first: str) -> None:
    """No step takes it then: its request was cancelled while it was built, and a standby has none."""
    building = Building()
    engine = building.engine
    engine.cancel(engine.add(named("sql")))
    if first == "released":
        engine.release()
    building.may_end.set()
    wait_until(lambda: bool(engine._built), WAIT_S, what="the adapter")
    if first == "built":
        engine.release()
    [adapter] = engine._built.values()
    assert isinstance(adapter, Engine)
    assert isinstance(adapter._runner, ReleasedRunner)
    engine.regain()
    assert len(tokens_of(run_one(engine, named("sql")))) == 12
    assert building.built == ["sql"]
    engine.close()


def test_an_unknown_adapter_is_refused_by_name() -> None:
    engine = Building().engine
    with pytest.raises(InvalidInput, match="no adapter 'other'") as error:
        engine.check(named("other"))
    assert error.value.hint == "there are legal, sql"
    engine.close()


def run_one(engine: InferenceEngine, one: Request) -> list[TokenDelta]:
    deltas: list[TokenDelta] = []
    id = engine.add(one)
    while not any(delta.id == id and delta.last for delta in deltas):
        deltas += engine.step()
    return [delta for delta in deltas if delta.id == id]


def test_modules_of_the_adapters_are_those_of_their_files() -> None:
    assert {name.removeprefix(P).partition(".lora_")[0] for name in changes_of(base_of())["sql"]} == set(TARGETS)
