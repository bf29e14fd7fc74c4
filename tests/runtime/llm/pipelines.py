"""Whole pipelines in one process: every stage with links of its own over loopback, as nodes would connect them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.contract.node.speed import ModeSwitch
from fleetstart.runtime.contract.sizes import MIB
from fleetstart.runtime.contract.weights.stage import Stage
from fleetstart.runtime.llm.distributed.stages import LLMFirstStage, LLMLaterStage
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.server.engine_service import EngineService
from fleetstart.runtime.pipeline.node_messages import NodeMessages
from fleetstart.runtime.pipeline.stage_context import StageContext
from tests.runtime.llm.models import Checkpoint

START_S = 60.0
SETTINGS = LLMSettings(max_batch=8, max_context_tokens=512, kv_memory_bytes=64 * MIB)


class Arriving(Checkpoint):
    """Weights of which a stage has its own layers; the rest comes when it is let."""

    def __init__(self, whole: Checkpoint, first: int, end: int) -> None:
        super().__init__(dict(whole), whole._files)
        self._own = (first, end)
        self.rest = threading.Event()

    def __getitem__(self, name: str, /) -> Tensor:
        parts = name.split(".")
        layer = int(parts[2]) if parts[1] == "layers" else None
        here = self._own[0] == 0 if layer is None else self._own[0] <= layer < self._own[1]
        if not here and not self.rest.wait(START_S):
            raise TimeoutError(f"{name} did not come")
        return super().__getitem__(name)


@dataclass(slots=True)
class Stages:
    """What runs, and what was said."""

    first: LLMFirstStage
    later: list[LLMLaterStage]
    weights: list[Arriving]
    hurried: threading.Event = field(default_factory=threading.Event)
    whole: threading.Event = field(default_factory=threading.Event)
    """Of the first stage."""
    grown: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)
    switches: list[ModeSwitch] = field(default_factory=list)
    """How the first stage took running requests over."""

    def consolidate(self) -> None:
        """The rest of the first stage's weights comes, and it takes over."""
        self.weights[0].rest.set()
        self.first.consolidate()

    def consolidate_later(self, index: int) -> None:
        self.weights[index].rest.set()
        self.later[index - 1].consolidate()

    def kill(self, index: int) -> None:
        """As the end of its process: its sockets close."""
        self.later[index - 1].close()

    def close(self) -> None:
        for stage in self.later:
            stage.close()
        self.first.close()


@contextlib.contextmanager
def pipeline(
    weights: Checkpoint, cuts: list[tuple[int, int]], *, settings: LLMSettings = SETTINGS, ready: bool = True
) -> Iterator[Stages]:
    count = len(cuts)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [listener.getsockname() for listener in listeners]
    arriving = [Arriving(weights, first, end) for first, end in cuts]
    hurried, whole, ended = threading.Event(), threading.Event(), dict[int, str]()
    grown: set[int] = set()
    switches: list[ModeSwitch] = []

    def prioritise_weights() -> None:
        hurried.set()
        arriving[0].rest.set()

    def became_whole(index: int, switch: ModeSwitch | None) -> None:
        grown.add(index)
        if index == 0:
            switches.extend([switch] if switch is not None else [])
            whole.set()

    def of(index: int) -> StageContext:
        return StageContext(
            stage=Stage(pipeline=PipelineId("p-1"), index=index, cuts=tuple(cuts)),
            secret="word",
            node_messages=NodeMessages(listeners[index]),
            deadline_ns=time.monotonic_ns() + int(START_S * 1e9),
            prioritise_weights=prioritise_weights,
            on_consolidated=lambda switch: became_whole(index, switch),
            on_end=lambda why: ended.__setitem__(index, why),
        )

    made: dict[int, LLMLaterStage] = {}

    def later(index: int) -> None:
        made[index] = LLMLaterStage(arriving[index], settings, of(index), name="tiny", threads=1)

    threads = [threading.Thread(target=later, args=(index,)) for index in range(1, count)]
    for thread in threads:
        thread.start()
    first = LLMFirstStage(arriving[0], settings, of(0), name="tiny", threads=1)
    for thread in threads:
        thread.join()
    stages = Stages(first, [made[index] for index in range(1, count)], arriving, hurried, whole, grown, ended, switches)
    try:
        all_links = [first.links, *(stage.links for stage in stages.later)]
        for index, links in enumerate(all_links):
            for other in range(count):
                if other != index:
                    links.connect(other, socket.create_connection(addresses[other]))
        if ready:
            waits = [threading.Thread(target=stage.wait_until_ready) for stage in stages.later]
            for wait in waits:
                wait.start()
            first.wait_until_ready()
            for wait in waits:
                wait.join()
        yield stages
    finally:
        stages.close()


async def generate(
    stages: Stages, requests: list[Request], service: EngineService | None = None
) -> list[list[TokenDelta]]:
    """Every request's deltas, through the first stage's service or another one."""
    deltas: list[list[TokenDelta]] = [[] for _ in requests]
    async with (service or stages.first.app.service).open(requests) as stream:
        async for index, delta in stream:
            deltas[index].append(delta)
    return deltas


def after(stages: Stages, requests: list[Request], tokens: int, act: Callable[[], None]) -> list[list[TokenDelta]]:
    """Generates, and acts once so many tokens have come in all."""

    async def scenario() -> list[list[TokenDelta]]:
        deltas: list[list[TokenDelta]] = [[] for _ in requests]
        came = 0
        async with stages.first.app.service.open(requests) as stream:
            async for index, delta in stream:
                deltas[index].append(delta)
                came += len(delta.tokens)
                if came >= tokens:
                    act()
                    came = -(10**9)
        return deltas

    return asyncio.run(scenario())
