"""Steps that are submitted before the tokens of the last one are said, as where a GPU computes them by itself."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import HandlerFailed
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.inference_engine import never
from fleetstart.runtime.llm.engine.runner import LocalRunner, StepOutput, rows_of
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.engine.two_engines import TwoEngines
from fleetstart.runtime.llm.server.engine_service import EngineService, _Close
from tests.runtime.llm.engine.stand_in_device import Device
from tests.runtime.llm.engine.test_engine import GREEDY, embedding, request
from tests.runtime.llm.models import Checkpoint, engine, native, run, text_of, tiny, tokens_of
from tests.servers import wait_until


def test_the_next_step_is_under_way_when_tokens_are_said(tiny_model: Checkpoint) -> None:
    device = Device(native(tiny_model))
    subject = engine(tiny_model, device)
    subject.add(request(new=4))
    begun = []
    while not subject.idle:
        [delta] = subject.step()
        begun.append(len(device.begun))
    assert begun == [1, 3, 4, 4]  # the prompt's step leaves the host busy, and after the last token there is none
    assert delta.finish == "length"
    known = [batch.device_tokens is None for batch in device.begun]
    assert known == [True, True, True, False]


@pytest.mark.parametrize(
    ("fields", "follows"),
    [
        ({}, True),
        ({"sampling": SamplingParams(temperature=0.8, seed=1)}, True),
        ({"sampling": SamplingParams(temperature=0, presence_penalty=1.0)}, False),
        ({"logprobs": 2}, False),
    ],
    ids=["greedy", "drawn", "penalised", "probabilities"],
)
def test_a_step_follows_on_the_device_where_only_that_need_know_its_tokens(
    tiny_model: Checkpoint, fields: dict[str, Any], follows: bool
) -> None:
    device = Device(native(tiny_model))
    found = run(engine(tiny_model, device), [request(new=9), request(new=12, seed=2, **fields)])
    wanted = run(engine(tiny_model, native(tiny_model)), [request(new=9), request(new=12, seed=2, **fields)])
    assert [tokens_of(deltas) for deltas in found] == [tokens_of(deltas) for deltas in wanted]
    both = [batch for batch in device.begun if len(batch.tables) == 2]
    assert (sum(batch.device_tokens is not None for batch in both) > 5) is follows
    assert all(batch.device_tokens is None for batch in both) is not follows


def test_prompts_are_computed_beside_tokens_that_only_the_device_knows(tiny_model: Checkpoint) -> None:
    """Three prompts of 40 in steps of at most 32 rows: all but the first are planned before the one before is done."""
    requests = [request(40, 12, seed) for seed in range(3)]
    device = Device(native(tiny_model), rows=20)
    found = run(engine(tiny_model, device, token_budget=32), requests)
    wanted = run(engine(tiny_model, native(tiny_model), token_budget=32), requests)
    assert [tokens_of(deltas) for deltas in found] == [tokens_of(deltas) for deltas in wanted]
    prompts = [batch for batch in device.begun if len(batch.tokens) > len(batch.tables)]
    assert [len(batch.tokens) for batch in prompts] == [32, 32, 32, 27]
    unknown = [0 if batch.device_tokens is None else len(batch.device_tokens) for batch in prompts]
    assert unknown == [0, 0, 1, 2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_host_does_not_wait_for_the_logits_of_those_that_still_run() -> None:
    logits = torch.randn(5, 300).cuda()
    try:
        with warnings.catch_warnings(action="ignore"):  # it is a prototype, as torch says
            torch.cuda.set_sync_debug_mode("error")
        got = rows_of(logits, [0, 3])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.tolist() == [logits[0].tolist(), logits[3].tolist()]


def test_no_step_is_begun_while_a_request_waits_for_one(tiny_model: Checkpoint) -> None:
    device = Device(native(tiny_model))
    subject = engine(tiny_model, device)
    subject.add(request(new=8))
    for _ in range(3):
        subject.step(0, lambda: True)
    assert len(device.begun) == 3
    other = subject.add(request(new=8, seed=2))
    assert other in {delta.id for delta in subject.step(0, lambda: True)}


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=2, max_size=8),
    blocks=st.integers(6, 16),
    budget=st.integers(8, 64),
    share=st.booleans(),
    rows=st.sampled_from([1, 9, 1 << 30]),
)
def test_answers_are_those_of_one_step_after_the_other(
    lengths: list[tuple[int, int]], blocks: int, budget: int, share: bool, rows: int
) -> None:
    weights = tiny()
    requests = [
        request(length, new, seed % 3, sampling=SamplingParams(temperature=1.0, seed=seed) if seed % 2 else GREEDY,
                stops=["e"] if seed % 3 == 2 else [], ignore_eos=seed % 4 != 0, logprobs=1 if seed % 5 == 1 else None)
        for seed, (length, new) in enumerate(lengths)
    ] + [embedding(7)]  # fmt: skip
    answers: list[list[list[Any]]] = []
    for decoder in (native(weights, blocks=blocks), Device(native(weights, blocks=blocks), rows=rows)):
        subject = engine(weights, decoder, blocks=blocks, token_budget=budget, share_prefixes=share)
        found = run(subject, requests)
        assert subject.scheduler.pool.free_count == blocks
        answers.append([[deltas[-1].finish, text_of(deltas), tokens_of(deltas),
                         [one.token for delta in deltas for one in delta.logprobs]] for deltas in found])  # fmt: skip
    assert answers[0] == answers[1]


def test_a_stop_string_drops_the_token_under_way(tiny_model: Checkpoint) -> None:
    [whole] = run(engine(tiny_model, native(tiny_model)), [request(new=12)])
    stop = next(text for text in (delta.text for delta in whole[3:]) if text)
    device = Device(native(tiny_model))
    subject = engine(tiny_model, device)
    id = subject.add(request(new=12, stops=[stop]))
    deltas: list[TokenDelta] = []
    while not (deltas and deltas[-1].last):
        deltas += subject.step()
    assert {delta.id for delta in deltas} == {id}
    assert deltas[-1].finish == "stop"
    assert stop not in text_of(deltas)
    assert subject.scheduler.pool.free_count == subject.scheduler.pool.block_count
    assert not subject.idle  # a step is under way
    assert subject.step() == []
    assert subject.idle
    assert len(device.begun) == len(tokens_of(deltas)) + 1


def test_tokens_of_before_a_failed_step_are_said_first(
    tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    subject = engine(tiny_model, Device(native(tiny_model), fails_in=range(4, 6)))
    first, ends = subject.add(request(new=8)), subject.add(request(new=3, seed=2))
    deltas: list[TokenDelta] = []
    with caplog.at_level(logging.CRITICAL):
        while not subject.idle:
            deltas += subject.step()
    mine = [delta for delta in deltas if delta.id == first]
    assert len(tokens_of(mine)) == 3
    assert isinstance(mine[-1].error, HandlerFailed)
    assert [delta.finish for delta in deltas if delta.id == ends][-1] == "length"
    assert subject.scheduler.pool.free_count == subject.scheduler.pool.block_count


def test_a_step_that_cannot_be_begun_ahead_is_begun_in_its_turn(
    tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """And says so once, not at each step, of which each second one fails here."""
    requests = [request(new=8), request(new=20, seed=2)]
    wanted = run(engine(tiny_model, native(tiny_model)), requests)
    found = run(engine(tiny_model, Device(native(tiny_model), fails_in=range(5, 14, 2))), requests)
    assert [record.message for record in caplog.records if record.exc_info] == [
        "a step could not be submitted ahead of its tokens, nor may others"
    ]
    assert [tokens_of(deltas) for deltas in found] == [tokens_of(deltas) for deltas in wanted]


def test_a_request_that_a_stop_string_ends_has_not_failed_with_the_step_behind(
    tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    [whole] = run(engine(tiny_model, native(tiny_model)), [request(new=12)])
    at = next(number for number, delta in enumerate(whole) if number >= 3 and delta.text)
    subject = engine(tiny_model, Device(native(tiny_model), fails_in=range(at + 2, at + 4)))
    subject.add(request(new=12, stops=[whole[at].text]))
    deltas: list[TokenDelta] = []
    with caplog.at_level(logging.CRITICAL):
        while not subject.idle:
            deltas += subject.step()
    assert [delta.finish for delta in deltas if delta.last] == ["stop"]


class Lossy(LocalRunner):
    """A runner whose steps fail when they are collected, once it is told so."""

    lost = False

    def collect(self) -> StepOutput:
        if self.lost:
            raise RuntimeError("the device is lost")
        return super().collect()


class Closing(Engine):
    """An engine whose service gets a release and a close behind its second step."""

    service: EngineService | None = None
    steps = 0

    def step(self, now_ns: int = 0, awaited: Callable[[], bool] = never) -> list[TokenDelta]:
        self.steps += not self.idle
        deltas = super().step(now_ns, awaited)
        if self.steps == 2:
            service = self.service
            assert service is not None
            Thread(target=service.release).start()
            wait_until(lambda: not service._commands.empty(), what="the release")
            service._commands.put(_Close())
        return deltas


def releasable(weights: Checkpoint, kind: type[Engine] = Engine) -> Engine:
    plain = engine(weights, native(weights))
    return kind(
        Lossy(Device(native(weights))), plain.scheduler, plain._tokenizer, frozenset(),
        lambda: Lossy(Device(native(weights))),
    )  # fmt: skip


def test_a_release_returns_what_the_step_under_way_gives(tiny_model: Checkpoint) -> None:
    wanted = tokens_of(run(engine(tiny_model, native(tiny_model)), [request(new=10)])[0])
    subject = releasable(tiny_model)
    subject.add(request(new=10))
    deltas = [*subject.step(), *subject.step()]
    deltas += subject.release()
    assert len(tokens_of(deltas)) == 3
    assert subject.stalled
    assert subject.step() == []
    subject.regain()
    while not subject.idle:
        deltas += subject.step()
    assert tokens_of(deltas) == wanted


def test_a_release_fails_what_the_step_under_way_fails(
    tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    subject = releasable(tiny_model)
    id = subject.add(request(new=10))
    deltas = [*subject.step(), *subject.step()]
    assert isinstance(subject._runner, Lossy)
    subject._runner.lost = True
    with caplog.at_level(logging.CRITICAL):
        [failed] = subject.release()
    assert (failed.id, len(tokens_of(deltas))) == (id, 2)
    assert isinstance(failed.error, HandlerFailed)
    assert subject.idle
    subject.regain()
    assert len(tokens_of(run(subject, [request(new=10)])[0])) == 10


def test_a_reader_gets_the_last_token_of_a_release_that_a_close_follows(tiny_model: Checkpoint) -> None:
    """Two tokens come by steps; the third one is under way when the release and the close come."""
    subject = releasable(tiny_model, Closing)
    assert isinstance(subject, Closing)
    service = subject.service = EngineService(subject)

    async def read() -> list[TokenDelta]:
        async with service.open([request(new=3)]) as stream:
            return [delta async for _, delta in stream]

    deltas = asyncio.run(asyncio.wait_for(read(), 10))
    assert [delta.finish for delta in deltas] == [None, None, "length"]


def test_a_request_moves_to_a_second_engine_with_the_token_of_a_release(tiny_model: Checkpoint) -> None:
    wanted = tokens_of(run(engine(tiny_model, native(tiny_model)), [request(new=40)])[0])
    second = releasable(tiny_model)
    both = TwoEngines(releasable(tiny_model), lambda: second, name="other", embeds=True, quiet_s=30)
    both.add(request(new=40))
    deltas = [*both.step(), *both.step()]
    wait_until(lambda: both.second.state == "ready", what="the second engine")
    deltas += both.release()
    both.regain()
    while not both.idle:
        deltas += both.step()
    assert both.second.moved == 1
    assert tokens_of(deltas) == wanted


class Unreadable(dict[int, str]):
    """Shown tokens of which one cannot be looked up."""

    def __init__(self, token: int) -> None:
        self._token = token

    def __contains__(self, token: object) -> bool:
        if token == self._token:
            raise ValueError("no text")
        return False


def test_a_token_without_text_ends_its_own_request(tiny_model: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    third = tokens_of(run(engine(tiny_model, native(tiny_model)), [request(new=8)])[0])[2]
    subject = engine(tiny_model, Device(native(tiny_model)))
    hurt = subject.add(request(new=8, shown_tokens=Unreadable(third)))
    other = subject.add(request(new=8, seed=2))
    deltas: list[TokenDelta] = []
    with caplog.at_level(logging.CRITICAL):
        while not subject.idle:
            deltas += subject.step()
    mine = [delta for delta in deltas if delta.id == hurt]
    assert isinstance(mine[-1].error, HandlerFailed)
    assert len(mine) == 3
    assert len(tokens_of([delta for delta in deltas if delta.id == other])) == 8
    assert subject.scheduler.pool.free_count == subject.scheduler.pool.block_count


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(
    chance=st.randoms(use_true_random=False),
    blocks=st.integers(6, 14),
    budget=st.sampled_from([8, 16, 64]),
    rows=st.sampled_from([1, 9, 1 << 30]),
)
def test_answers_survive_whatever_comes_between_steps(chance: Any, blocks: int, budget: int, rows: int) -> None:
    """Requests that come late, are cancelled or wait, and releases; each answer is that of its request alone."""
    weights = tiny()
    requests = [
        request(
            chance.randint(1, 40), chance.randint(1, 25), seed % 3, ignore_eos=chance.random() < 0.7,
            sampling=SamplingParams(
                temperature=chance.choice([0, 1.0]), seed=seed, presence_penalty=chance.choice([0, 0, 1.0]),
                top_p=chance.choice([1.0, 0.9]),
            ),
            stops=["e"] if chance.random() < 0.3 else [], logprobs=1 if chance.random() < 0.15 else None,
        )
        for seed in range(6)
    ]  # fmt: skip
    by_itself = engine(weights, native(weights))
    alone = [tokens_of(run(by_itself, [one])[0]) for one in requests]
    plain = engine(weights, native(weights), blocks=blocks, token_budget=budget, share_prefixes=chance.random() < 0.5)

    def runner() -> LocalRunner:
        return LocalRunner(Device(native(weights, blocks=blocks), rows=rows))

    subject = Engine(runner(), plain.scheduler, plain._tokenizer, plain._eos_ids, runner)
    waiting, places, cancelled = list(enumerate(requests)), dict[int, int](), set[int]()
    deltas: list[TokenDelta] = []
    while waiting or not subject.idle:
        if waiting and chance.random() < 0.3:
            place, one = waiting.pop()
            places[subject.add(one)] = place
        if places and chance.random() < 0.02:
            gone = chance.choice(list(places))
            cancelled.add(gone)
            subject.cancel(gone)
        if chance.random() < 0.02:
            deltas += subject.release()
            subject.regain()
        deltas += subject.step(0, partial(bool, chance.random() < 0.2))
    assert subject.scheduler.pool.free_count == blocks
    for id, place in places.items():
        mine = [delta for delta in deltas if delta.id == id]
        got = tokens_of(mine)
        if id in cancelled:
            assert got == alone[place][: len(got)]
        else:
            assert got == alone[place]
            assert [delta.last for delta in mine].count(True) == 1


def test_a_cancelled_request_has_no_part_in_the_step_under_way(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, Device(native(tiny_model)))
    gone, stays = subject.add(request(new=9)), subject.add(request(new=9, seed=2))
    deltas = [*subject.step(), *subject.step(), *subject.step()]
    subject.cancel(gone)
    new = subject.add(Request(tokens=[5, 6, 7], max_new_tokens=2, sampling=GREEDY, ignore_eos=True))
    while not subject.idle:
        deltas += subject.step()
    assert len([delta for delta in deltas if delta.id == gone]) == 3
    mine = [delta for delta in deltas if delta.id == stays]
    assert tokens_of(mine) == tokens_of(run(engine(tiny_model, native(tiny_model)), [request(new=9, seed=2)])[0])
    assert [delta.finish for delta in deltas if delta.id == new] == [None, "length"]
