"""ASGI app of a layered model: `before`, the layers on one worker or several, `after`."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ..contract.errors import NoHandler, Unavailable
from ..contract.node.speed import Speed
from ..handlers.app import handler_app
from ..sdk.declarations import Layered
from ..worker_io.asgi import Receive, Scope, Send
from .layer_slice import without_gradients
from .pipeline import StageLost

SYNCHRONOUS = ("load", "layer", "before", "after")


class LayerRunner(Protocol):
    """Runs all layers, in this process or along a pipeline. Thread-safe."""

    def run(self, activations: Any) -> Any:
        """Returns the activations after the last layer."""


class LayeredApp:
    """ASGI app without lifespan, like a handler class whose `__call__` has the parameters of `before`."""

    def __init__(
        self, model: Layered, runner: LayerRunner, *, stages: int = 1, slots: int, timeout_s: float, bundle_dir: str
    ) -> None:
        """`stages`: number of workers that run the layers. Errors: those of `handler_app`."""
        self._model = model
        self._runner = runner
        self.stage_count = stages
        self._timeout_s = timeout_s
        self._replaced = threading.Condition()
        self._speed: Speed | None = None
        self._app = handler_app(self._caller(), slots=slots, bundle_dir=bundle_dir, returns=self._model.after)

    def _caller(self) -> Callable[..., Any]:
        @functools.wraps(self._model.before)
        def call(*arguments: Any, **named: Any) -> Any:
            return self._call(arguments, named)

        return call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def take_over(self, runner: LayerRunner) -> None:
        """Replaces the runner by one with the whole model, for new calls and for calls that lost their stage."""
        with self._replaced:
            self._runner, self.stage_count = runner, 1
            self._replaced.notify_all()

    def speed(self) -> Speed | None:
        """Mean call times; None until one call has ended. From any thread."""
        return self._speed

    def _call(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Runs one call in its thread. If a stage is lost, the call is retried from `before`, because layers may change
        their input in place."""
        ends_s = time.monotonic() + self._timeout_s
        began_s, stages = time.monotonic(), self.stage_count
        with without_gradients():
            while True:
                runner = self._runner
                try:
                    activations = runner.run(self._model.before(*arguments, **named))
                    break
                except StageLost as error:
                    if not self._wait_for_other(runner, ends_s - time.monotonic()):
                        text = f"{error}, and the rest of the model did not arrive"
                        raise Unavailable(text, retry_after_s=1) from error
            answer = self._model.after(activations)
        self._note(time.monotonic() - began_s, stages)
        return answer

    def _wait_for_other(self, runner: LayerRunner, timeout_s: float) -> bool:
        with self._replaced:
            return self._replaced.wait_for(lambda: self._runner is not runner, max(0.0, timeout_s))

    def _note(self, call_s: float, stages: int) -> None:
        with self._replaced:
            self._speed = Speed(calls=1, call_s=call_s, prefill_s=call_s, stages=stages).folded_into(self._speed)


def instantiate_model(target: Any) -> Layered:
    """Instantiates the model of an entry. Errors: NoHandler for an invalid class; those of its `__init__`."""
    if not (inspect.isclass(target) and issubclass(target, Layered)):
        raise NoHandler(
            f"the version was deployed as a Layered class, but its entry is {target!r}", hint="deploy it again"
        )
    model: Layered = target()
    for part in SYNCHRONOUS:
        method = getattr(model, part, None)
        if method is None or (part == "layer" and target.layer is Layered.layer):
            what = f"class {target.__name__} is Layered and has no {part}()"
            raise NoHandler(what, hint=f"add `def {part}(self, ...)`")
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise NoHandler(f"{part}() of class {target.__name__} is asynchronous", hint=f"write `def {part}`")
    return model
