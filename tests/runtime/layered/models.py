"""Small models in layers, and whole pipelines of them in one process: every stage with links of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, CheckpointId, FunctionName, PipelineId
from fleetstart.runtime.contract.weights.stage import Stage
from fleetstart.runtime.layered.app import LayeredApp
from fleetstart.runtime.layered.stages import LayeredFirstStage, LayeredLaterStage, LayeredModel, whole_app
from fleetstart.runtime.pipeline.node_messages import NodeMessages
from fleetstart.runtime.pipeline.stage_context import StageContext
from fleetstart.runtime.sdk.declarations import Layered

LAYERS = 6
WIDTH = 8
START_S = 60.0


def weights_of(seed: int = 0) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    names = ["stem.weight", *(f"blocks.{index}.weight" for index in range(LAYERS)), "head.weight"]
    return {name: torch.randn(WIDTH, WIDTH, generator=made) / WIDTH**0.5 for name in names}


class Tower(Layered):
    """Matrices with a skip connection beside them, in a dict of two arrays. `gates` hold up a layer until it is let."""

    gates: Mapping[int, threading.Event] = {}

    def load(self, weights: Any) -> None:
        self.stem, self.head = weights["stem.weight"], weights["head.weight"]

    def layer(self, weights: Any, index: int) -> Callable[[Any], Any]:
        matrix = weights[f"blocks.{index}.weight"]

        def run(activations: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            if index in self.gates:
                self.gates[index].wait(START_S)
            if activations["x"][0, 0] == 1000 + index:
                raise ValueError(f"layer {index} does not like it")
            grown = torch.tanh(activations["x"] @ matrix)
            activations["x"].zero_()  # a layer may write into what it is given
            return {"x": grown + 0.1 * activations["skip"], "skip": activations["skip"]}

        return run

    def before(self, row: list[float]) -> dict[str, torch.Tensor]:
        x = torch.tensor([row])
        return {"x": x, "skip": x @ self.stem}

    def after(self, activations: dict[str, torch.Tensor]) -> list[float]:
        found: list[float] = (activations["x"] @ self.head)[0].tolist()
        return found


class Arriving(dict[str, torch.Tensor]):
    """Weights of which a stage has its own layers; the rest comes when it is let."""

    def __init__(self, whole: Mapping[str, torch.Tensor], first: int, end: int) -> None:
        super().__init__(whole)
        self._own = (first, end)
        self.rest = threading.Event()

    def __getitem__(self, name: str) -> torch.Tensor:
        layer = int(name.split(".")[1]) if name.startswith("blocks.") else None
        here = self._own[0] == 0 if layer is None else self._own[0] <= layer < self._own[1]
        if not here and not self.rest.wait(START_S):
            raise TimeoutError(f"{name} did not come")
        return super().__getitem__(name)


def spec_of(timeout_s: float = 30.0) -> FunctionSpec:
    return FunctionSpec(
        name=FunctionName("tower"),
        bundle=BundleId("0" * 64),
        entry="handler:Tower",
        weights=CheckpointId("1" * 64),
        layered=True,
        concurrency=8,
        timeout_s=timeout_s,
    )


def parts_of(model: Layered, weights: Any, layers: int = LAYERS, timeout_s: float = 30.0) -> LayeredModel:
    return LayeredModel(model=model, weights=weights, layers=layers, spec=spec_of(timeout_s), bundle_dir="/nowhere")


def alone(rows: list[list[float]], seed: int = 0) -> list[Any]:
    """What one worker with the whole model answers."""
    return call(whole_app(parts_of(Tower(), weights_of(seed))), rows)


@dataclass(slots=True)
class Stages:
    """What runs, and what was said."""

    first: LayeredFirstStage
    later: list[LayeredLaterStage]
    weights: list[Arriving]
    hurried: threading.Event = field(default_factory=threading.Event)
    whole: set[int] = field(default_factory=set)
    ended: dict[int, str] = field(default_factory=dict)

    def consolidate(self, index: int = 0) -> None:
        """The rest of a stage's weights comes, and it grows."""
        self.weights[index].rest.set()
        (self.first if index == 0 else self.later[index - 1]).consolidate()

    def kill(self, index: int) -> None:
        """As the end of its process: its sockets close."""
        self.later[index - 1].close()

    def close(self) -> None:
        for stage in self.later:
            stage.close()
        self.first.close()


@contextlib.contextmanager
def pipeline(
    cuts: list[tuple[int, int]],
    *,
    seed: int = 0,
    ready: bool = True,
    timeout_s: float = 30.0,
    model: Callable[[int], Layered] = lambda index: Tower(),
    weights: Any = None,
) -> Iterator[Stages]:
    """`model` makes that of each stage; `weights` are those of another one than the `Tower`, and there at once."""
    count = len(cuts)
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = [listener.getsockname() for listener in listeners]
    arriving = [Arriving(weights_of(seed), first, end) for first, end in cuts]
    hurried, whole, ended = threading.Event(), set[int](), dict[int, str]()

    def prioritise_weights() -> None:
        hurried.set()
        arriving[0].rest.set()

    def of(index: int) -> StageContext:
        return StageContext(
            stage=Stage(pipeline=PipelineId("p-1"), index=index, cuts=tuple(cuts)),
            secret="word",
            node_messages=NodeMessages(listeners[index]),
            deadline_ns=time.monotonic_ns() + int(START_S * 1e9),
            prioritise_weights=prioritise_weights,
            on_consolidated=lambda switch: whole.add(index),
            on_end=lambda why: ended.__setitem__(index, why),
        )

    def parts(index: int) -> LayeredModel:
        own = arriving[index] if weights is None else weights
        return parts_of(model(index), own, layers=cuts[-1][1], timeout_s=timeout_s)

    later = [LayeredLaterStage(parts(index), of(index)) for index in range(1, count)]
    stages = Stages(LayeredFirstStage(parts(0), of(0)), later, arriving, hurried, whole, ended)
    try:
        for index, links in enumerate([stages.first.links, *(stage.links for stage in later)]):
            for other in range(count):
                if other != index:
                    links.connect(other, socket.create_connection(addresses[other]))
        if ready:
            for stage in later:
                stage.wait_until_ready()
            stages.first.wait_until_ready()
        yield stages
    finally:
        stages.close()


async def answer(app: Any, body: bytes) -> tuple[int, Any]:
    """Status and decoded body of one call. Errors: what the app raises before its response begins."""
    sent: list[dict[str, Any]] = []
    inbox = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if inbox:
            return inbox.pop()
        await asyncio.Event().wait()
        return {}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
    await app(scope, receive, send)
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent[1:]))


def call(app: LayeredApp | Any, rows: list[list[float]]) -> list[Any]:
    """All at once; answers, or what was raised, in order."""

    async def run() -> list[Any]:
        calls = [answer(app, json.dumps({"row": row}).encode()) for row in rows]
        found: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        return found

    return [one[1] if isinstance(one, tuple) else one for one in asyncio.run(run())]


class Calls:
    """The same in a thread: what is done meanwhile is done to calls under way."""

    def __init__(self, app: Any, rows: list[list[float]]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.extend(call(app, rows)), daemon=True)
        self._thread.start()

    def join(self) -> list[Any]:
        self._thread.join(START_S)
        assert not self._thread.is_alive(), "calls did not end"
        return self._found
