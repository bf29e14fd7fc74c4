"""A first stage that cannot take its requests over, though it has all layers: the pipeline goes on with all tokens."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.llm.distributed.consolidation import Consolidation, ConsolidationPlan
from fleetstart.runtime.llm.distributed.mode_switch import LinearCost
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.runner import LocalRunner
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.distributed.test_pipeline_runner import LAYERS, WEIGHTS, alone, request
from tests.runtime.llm.models import BLOCK_TOKENS, engine, native

WAIT_S = 20.0


class TwoInFlight(LocalRunner):
    depth = 2


class Stepping:
    """The service of an engine with steps in flight whenever something is done in its thread."""

    def __init__(self, requests: list[Request]) -> None:
        tokenizer = Tokenizer(WEIGHTS.file("tokenizer.json"))
        scheduler = engine(WEIGHTS, native(WEIGHTS)).scheduler
        self.engine = Engine(TwoInFlight(native(WEIGHTS)), scheduler, tokenizer, frozenset())
        self.ids = [self.engine.add(one) for one in requests]
        self.deltas: list[TokenDelta] = []
        self.calls = 0

    def do(self, act: Callable[[Engine], list[TokenDelta]]) -> None:
        self.calls += 1
        if self.calls > 1:  # the first one looks for what is computed: nothing yet
            self.deltas += self.engine.step()
            assert not self.engine.idle
        self.deltas += act(self.engine)


class Broken:
    """A pipeline whose stages cannot be asked for keys and values, for a reason that nobody thought of."""

    broken = ""
    stages = 2

    front_cost = LinearCost()

    def read_kv(self, *_: object) -> None:
        raise RuntimeError("out of memory")


def test_tokens_of_steps_in_flight_reach_their_requests(caplog: pytest.LogCaptureFixture) -> None:
    requests = [request(10, 20, 1), request(12, 20, 2)]
    service, pipeline = Stepping(requests), Broken()
    ended: list[FleetError | None] = []
    done = threading.Event()

    def on_end(error: FleetError | None, switch: object = None) -> None:
        ended.append(error)
        done.set()

    parts: Any = {"service": service, "pipeline": pipeline}
    plan = ConsolidationPlan(
        load=lambda: native(WEIGHTS), cuts=((0, 2), (2, LAYERS)), kv_bytes=1, block_tokens=BLOCK_TOKENS, **parts
    )
    with caplog.at_level(logging.CRITICAL):
        Consolidation(plan, on_end).start()
        assert done.wait(WAIT_S)
    assert "out of memory" in str(ended)
    while not service.engine.idle:
        service.deltas += service.engine.step()
    found = [[token for delta in service.deltas if delta.id == id for token in delta.tokens] for id in service.ids]
    assert found == alone(requests)
