"""Worker of our side: asks a node for a checkpoint and binds its tensors. The counterpart of `loaders_peer.py`."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from typing import Any

import torch

from fleetstart.runtime.weights.warmup import warm_up_weights
from fleetstart.runtime.weights.weights import Weights
from tests.bench.weights.descriptors import ask_descriptors
from tests.bench.weights.forked import Load, Prepare, serve, touch

DEADLINE_S = 300.0


def stream(question: Any) -> Load:
    """Load from the request to all tensors; each comes when its bytes have been verified."""

    def load() -> Iterable[tuple[str, torch.Tensor]]:
        weights = _attach(question)
        return ((name, weights[name]) for name in weights)

    return load


def move(question: Any) -> Load:
    """Load from the request to all tensors on the device; each comes when its chunks have moved."""

    def load() -> Iterable[tuple[str, torch.Tensor]]:
        weights = _attach(question).to(question["device"])
        return ((name, weights[name]) for name in weights)

    return load


def survive(question: Any) -> Load:
    """Binds and touches all, then lets everything go but the tensors: what is timed is a look at them."""
    weights = _attach(question)
    tensors = dict(weights)
    for tensor in tensors.values():
        touch(tensor)
    del weights
    gc.collect()
    return tensors.items


def idle(question: Any) -> Load:
    """A worker that has no weights."""
    return lambda: ()


def bind(question: Any) -> Any:
    """Milliseconds from descriptors of a ready segment to all its tensors.

    In a process that has done nothing yet, or one that has rehearsed, as pooled workers have when they are given work.
    """
    if question["rehearsed"]:
        warm_up_weights()
    descriptors = ask_descriptors(question["socket"], question["checkpoint"])
    began_s = time.perf_counter()
    weights = Weights.attach(*descriptors, deadline_ns=_deadline_ns())
    tensors = dict(weights)
    bound_s = time.perf_counter()
    touched = sum(map(touch, tensors.values()))
    touched_s = time.perf_counter()
    return {
        "bind_ms": (bound_s - began_s) * 1e3,
        "touch_ms": (touched_s - bound_s) * 1e3,
        "tensors": len(tensors),
        "touched": touched,
    }


def _attach(question: Any) -> Weights:
    descriptors = ask_descriptors(question["socket"], question["checkpoint"])
    return Weights.attach(*descriptors, deadline_ns=_deadline_ns())


def _deadline_ns() -> int:
    return time.monotonic_ns() + int(DEADLINE_S * 1e9)


if __name__ == "__main__":
    loaders: dict[str, Prepare] = {"fleetstart": stream, "move": move, "survive": survive, "idle": idle}
    serve({"torch": torch.__version__}, loaders, {"bind": bind})
