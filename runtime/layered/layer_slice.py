"""Consecutive layers in this process, run for one call at a time."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..contract.errors import InvalidSpec
from ..sdk.declarations import Layered
from .activations import InvalidActivations, forms_of

Layer = Callable[[Any], Any]


class LayerSlice:
    """Layers from number `first` on, in order. Thread-safe."""

    def __init__(self, first: int, layers: Sequence[Layer]) -> None:
        self._first = first
        self._layers = list(layers)
        self._lock = threading.Lock()

    def within(self, before: Sequence[Layer], after: Sequence[Layer]) -> LayerSlice:
        """A longer range around the same layers, which are still called by one thread at a time."""
        longer = LayerSlice(self._first - len(before), [*before, *self._layers, *after])
        longer._lock = self._lock
        return longer

    def run(self, activations: Any) -> Any:
        """Runs the layers. Errors: InvalidActivations, naming the layer; those of a layer."""
        check("before() gave", activations)
        with self._lock, without_gradients():
            for index, layer in enumerate(self._layers, self._first):
                activations = layer(activations)
                check(f"layer {index} gave", activations)
        return activations


def check(who: str, activations: Any) -> None:
    """Checks a result. Errors: InvalidActivations, beginning with `who`."""
    try:
        forms_of(activations)
    except InvalidActivations as error:
        raise InvalidActivations(f"{who} {error}") from None


def without_gradients() -> contextlib.AbstractContextManager[object]:
    """Context without gradients in this thread, if torch is imported."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch is not None else contextlib.nullcontext()


def build(model: Layered, weights: Any, first: int, end: int) -> list[Layer]:
    """Builds layers `first .. end - 1`, waiting for their weights. Errors: InvalidSpec for one that is not callable."""
    found: list[Layer] = []
    for index in range(first, end):
        layer = model.layer(weights, index)
        if not callable(layer):
            raise InvalidSpec(
                f"layer({index}) of {type(model).__name__} returned a {type(layer).__name__}",
                hint="return a callable of activations: a torch module, or a function",
            )
        found.append(layer)
    return found
