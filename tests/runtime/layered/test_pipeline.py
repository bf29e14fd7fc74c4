"""Stages of a model in layers answer as the whole model does, also while they are consolidated or break."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import FleetError, HandlerFailed, NoHandler
from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.layered.activations import pack
from fleetstart.runtime.layered.app import instantiate_model
from fleetstart.runtime.layered.stages import whole_app
from fleetstart.runtime.pipeline.frames import Activations, ArrayForm, Hello, StageLoaded, send_frame
from fleetstart.runtime.pipeline.links import SILENCE_S
from fleetstart.runtime.sdk.declarations import Layered
from tests.runtime.layered.models import (
    LAYERS,
    WIDTH,
    Calls,
    Tower,
    alone,
    call,
    parts_of,
    pipeline,
    weights_of,
)
from tests.servers import wait_until
from tests.stopwatch import Stopwatch

THREE = [(0, 2), (2, 4), (4, LAYERS)]


def rows(count: int, seed: int = 1) -> list[list[float]]:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed)).tolist()


def cuts_of(bounds: list[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise([0, *bounds, LAYERS]))


cuts = st.lists(st.integers(1, LAYERS - 1), min_size=1, max_size=3, unique=True).map(sorted).map(cuts_of)


class Gated(Tower):
    def __init__(self, gates: dict[int, threading.Event]) -> None:
        self.gates = gates


def held_up(layer: int) -> tuple[threading.Event, Any]:
    """A gate before a layer, and what makes the models of stages that have it."""
    gate = threading.Event()
    return gate, lambda index: Gated({layer: gate})


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(cuts=cuts, count=st.integers(1, 8), seed=st.integers(0, 99))
def test_every_cut_gives_the_answers_of_the_whole(cuts: list[tuple[int, int]], count: int, seed: int) -> None:
    asked = rows(count, seed)
    with pipeline(cuts, seed=seed) as stages:
        assert call(stages.first.app, asked) == alone(asked, seed)
        assert stages.first.speed() is not None
        assert stages.first.speed().stages == len(cuts)  # type: ignore[union-attr]


def test_several_calls_are_under_way_at_once() -> None:
    gate, model = held_up(4)
    with pipeline(THREE, model=model) as stages:
        calls = Calls(stages.first.app, rows(5))
        wait_until(
            lambda: stages.first.pipeline.in_flight == 5, 5, what="five calls, of which one is in the last stage"
        )
        gate.set()
        assert calls.join() == alone(rows(5))
        assert stages.first.pipeline.in_flight == 0


@settings(max_examples=10, deadline=None)
@given(cuts=cuts, count=st.integers(1, 8), held=st.integers(0, LAYERS - 1))
def test_consolidation_changes_no_answer(cuts: list[tuple[int, int]], count: int, held: int) -> None:
    gate, model = held_up(held)
    with pipeline(cuts, model=model) as stages:
        calls = Calls(stages.first.app, rows(count))
        stages.consolidate()
        gate.set()
        assert calls.join() == alone(rows(count))
        wait_until(lambda: set(stages.ended) == set(range(1, len(cuts))), 5, what="farewells")
        assert set(stages.ended.values()) == {""}
        assert stages.whole == {0}
        assert call(stages.first.app, rows(2, 5)) == alone(rows(2, 5))


def test_the_other_stages_are_kept_until_the_last_call_of_theirs_has_ended() -> None:
    gate, model = held_up(5)
    with pipeline(THREE, model=lambda index: model(index) if index else Tower()) as stages:
        calls = Calls(stages.first.app, rows(1))
        wait_until(lambda: stages.first.pipeline.in_flight, 5, what="the call")
        stages.consolidate()
        wait_until(lambda: stages.first.app.stage_count == 1, 5, what="the whole model")
        assert call(stages.first.app, rows(3, 2)) == alone(rows(3, 2)), "calls that come need no stage"
        assert not stages.ended
        assert not stages.whole
        gate.set()
        assert calls.join() == alone(rows(1))
        wait_until(lambda: stages.whole == {0} and set(stages.ended) == {1, 2}, 5, what="farewells")


def test_helpers_become_whole_workers_beside_their_pipeline() -> None:
    with pipeline(THREE) as stages:
        calls = Calls(stages.first.app, rows(8))
        stages.consolidate(1)
        stages.consolidate(2)
        wait_until(lambda: stages.whole == {1, 2}, 5, what="two whole workers")
        assert calls.join() == alone(rows(8))
        assert call(stages.later[0].app, rows(3)) == alone(rows(3))
        assert call(stages.first.app, rows(3)) == alone(rows(3)), "its pipeline is still served"
        stages.consolidate()
        wait_until(lambda: stages.whole == {0, 1, 2}, 5, what="three whole workers")
        assert call(stages.later[1].app, rows(3)) == alone(rows(3))
        assert not stages.ended, "who has grown is not ended by a farewell"


def test_a_stage_that_serves_nobody_says_so() -> None:
    from tests.runtime.layered.models import answer

    with pipeline(THREE) as stages:
        import asyncio

        status, body = asyncio.run(answer(stages.later[0].app, b"{}"))
        assert status == 503
        assert "runs a pipeline stage" in body["error"]["message"]


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_stage_costs_callers_time_and_nothing_else(lost: int) -> None:
    gate, model = held_up(4)
    with pipeline(THREE, model=model) as stages:
        calls = Calls(stages.first.app, rows(6))
        wait_until(lambda: stages.first.pipeline.in_flight == 6, 5, what="calls")
        watch = Stopwatch()
        stages.kill(lost)
        assert stages.hurried.wait(SILENCE_S + 5)
        assert watch.unhindered_s < SILENCE_S + 5
        gate.set()
        assert calls.join() == alone(rows(6))
        wait_until(lambda: stages.whole == {0}, 5, what="growth")
        assert stages.first.app.stage_count == 1


def test_a_stage_that_hangs_is_lost_with_its_calls_time() -> None:
    gate, model = held_up(4)
    with pipeline(THREE, model=lambda index: model(index) if index else Tower(), timeout_s=0.5) as stages:
        (found,) = call(stages.first.app, rows(1))
        assert stages.hurried.is_set()
        # Its own time is over as well: it got its answer from the whole model, or learns that there was none in time.
        assert found == alone(rows(1))[0] or (isinstance(found, FleetError) and found.status == 503)
        wait_until(lambda: stages.whole == {0}, 5, what="growth")
        assert call(stages.first.app, rows(1)) == alone(rows(1))
        gate.set()


def test_a_stage_lost_before_it_was_ready_leaves_a_whole_worker() -> None:
    with pipeline(THREE, ready=False) as stages:
        stages.kill(2)
        stages.first.wait_until_ready()
        assert stages.whole == {0}
        assert call(stages.first.app, rows(2)) == alone(rows(2))


def test_a_first_stage_that_is_lost_ends_the_others() -> None:
    with pipeline(THREE) as stages:
        stages.first.close()
        wait_until(lambda: set(stages.ended) == {1, 2}, SILENCE_S + 5, what="the end of the others")
        assert all("first stage is lost" in why for why in stages.ended.values())


@pytest.mark.parametrize("layer", range(LAYERS))
def test_what_a_layer_raises_fails_its_call_wherever_the_layer_is(layer: int) -> None:
    bad = [1000.0 + layer, *[0.0] * (WIDTH - 1)]

    class Passing(Tower):
        """Gives on what it got, so that the layer meets what was asked."""

        def layer(self, weights: Any, index: int) -> Any:
            own = super().layer(weights, index)
            return lambda activations: own(activations) if index == layer else activations

    with pipeline(THREE, model=lambda index: Passing()) as stages:
        failed, *fine = call(stages.first.app, [bad, *rows(3)])
        assert len(fine) == 3
        assert all(isinstance(one, list) for one in fine)
        assert not stages.first.pipeline.broken
        assert f"layer {layer} does not like it" in str(failed)
        if layer >= 2:
            assert isinstance(failed, HandlerFailed)
            assert str(failed).startswith("ValueError")


class Wrong(Tower):
    def __init__(self, layer: int, what: Any) -> None:
        self._layer, self._what = layer, what

    def layer(self, weights: Any, index: int) -> Any:
        return (lambda activations: self._what) if index == self._layer else super().layer(weights, index)


@pytest.mark.parametrize("what", [None, [1, 2], {"x": "text"}])
def test_what_cannot_travel_is_refused_on_one_worker_as_on_three(what: Any) -> None:
    (here,) = call(whole_app(parts_of(Wrong(3, what), weights_of())), rows(1))
    with pipeline(THREE, model=lambda index: Wrong(3, what)) as stages:
        (there,) = call(stages.first.app, rows(1))
        assert not stages.first.pipeline.broken
    assert "layer 3 gave" in str(here)
    assert str(here) in str(there)


def test_layers_of_one_worker_are_called_by_one_thread_at_a_time() -> None:
    inside, most = 0, 0

    class Counting(Tower):
        def layer(self, weights: Any, index: int) -> Any:
            own = super().layer(weights, index)

            def run(activations: Any) -> Any:
                nonlocal inside, most
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1
                return own(activations)

            return run

    with pipeline([(0, 4), (4, LAYERS)], model=lambda index: Tower() if index else Counting()) as stages:
        calls = Calls(stages.first.app, rows(8))
        stages.consolidate()
        assert calls.join() == alone(rows(8))
    assert most == 1


# ── frames that no stage sends ─────────────────────────────────────────────────────────────────────


def spoken_to(index: int, stages: Any) -> socket.socket:
    """A connection to a stage, as of another process that knows the word."""
    links = (stages.first if index == 0 else stages.later[index - 1]).links
    return socket.create_connection(links._listener.getsockname())


@pytest.mark.parametrize(
    "forms",
    [
        [ArrayForm("x", "F32", (1 << 40,), "torch")],
        [ArrayForm("x", "F32", (-1,), "torch")],
        [ArrayForm("x", "nonsense", (1,), "torch")],
        [],
    ],
)
def test_hostile_activations_lose_their_sender_and_no_answer(forms: list[ArrayForm]) -> None:
    with pipeline(THREE, ready=False) as stages:
        for stage in stages.later:
            stage.wait_until_ready()
        stages.first.wait_until_ready()
        stages.first.links.send(1, Activations(1, forms, True), b"")  # as a first stage that went mad
        wait_until(lambda: stages.ended or stages.whole, 5, what="the loss")
        assert call(stages.first.app, rows(2)) == alone(rows(2))


def test_an_answer_that_nobody_waits_for_is_dropped() -> None:
    with pipeline(THREE) as stages:
        message, payload = pack(99, torch.ones(3))
        stages.later[1].links.send(0, message, payload)
        stages.later[0].links.send(1 - 1, StageLoaded())
        assert call(stages.first.app, rows(2)) == alone(rows(2))
        assert not stages.first.pipeline.broken


def test_an_answer_of_a_stage_that_is_not_the_last_breaks_the_pipeline_and_no_call() -> None:
    with pipeline(THREE) as stages:
        message, payload = pack(0, torch.ones(3))
        stages.later[0].links.send(0, message, payload)
        wait_until(lambda: stages.whole == {0}, 5, what="growth")
        assert "sent a Activations" in stages.first.pipeline.broken
        assert call(stages.first.app, rows(2)) == alone(rows(2))


def test_who_has_not_the_word_is_not_heard() -> None:
    with pipeline(THREE) as stages, spoken_to(1, stages) as stranger:
        send_frame(stranger, Hello(PipelineId("p-1"), 0, "another word"))
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
        assert call(stages.first.app, rows(1)) == alone(rows(1))


# ── what a class must have ─────────────────────────────────────────────────────────────────────────


class NoLayer(Layered):
    def before(self, x: int) -> int:
        return x


class NoBefore(Layered):
    def layer(self, weights: Any, index: int) -> Any: ...


class Waiting(Layered):
    def layer(self, weights: Any, index: int) -> Any: ...

    async def before(self, x: int) -> int:
        return x


@pytest.mark.parametrize(
    ("target", "what"),
    [
        (NoLayer, "no layer"), (NoBefore, "no before"), (Waiting, "before.. of class Waiting is asynchronous"),
        (int, "deployed as a Layered class"), (len, "deployed as a Layered class"),
    ],
)  # fmt: skip
def test_a_start_says_what_a_class_lacks(target: Any, what: str) -> None:
    with pytest.raises(NoHandler, match=what):
        instantiate_model(target)


def test_a_layer_that_cannot_be_called_is_named() -> None:
    class Words(Tower):
        def layer(self, weights: Any, index: int) -> Any:
            return "text"

    with pytest.raises(FleetError, match=r"layer\(0\) of Words returned a str"):
        whole_app(parts_of(Words(), weights_of()))
