"""Steps that are submitted before the tokens of the last one are said, as where a GPU computes them by itself."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fleetstart.runtime.contract.errors import HandlerFailed
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.runner import Batch, Decoder, LocalRunner
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from tests.runtime.llm.engine.test_engine import GREEDY, embedding, request
from tests.runtime.llm.models import Checkpoint, engine, native, run, text_of, tiny, tokens_of


class Device:
    """A decoder that leaves the host free after each step of decodes, and says which steps it has begun."""

    def __init__(self, decoder: Decoder, fails_in: range = range(0)) -> None:
        self._decoder = decoder
        self._fails_in = fails_in
        self.begun: list[Batch] = []
        self.host_is_free = False

    def forward(self, batch: Batch) -> Tensor:
        self.begun.append(batch)
        if len(self.begun) in self._fails_in:
            raise RuntimeError("the device is lost")
        self.host_is_free = len(batch.tokens) == len(batch.tables)
        if batch.device_tokens is not None:
            assert not any(batch.tokens)
            batch = replace(batch, tokens=batch.device_tokens.tolist())
        return self._decoder.forward(batch)

    def hidden(self, batch: Batch) -> Tensor:
        self.host_is_free = False
        return self._decoder.hidden(batch)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._decoder.logits(hidden)

    def normed(self, hidden: Tensor) -> Tensor:
        return self._decoder.normed(hidden)


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
)
def test_answers_are_those_of_one_step_after_the_other(
    lengths: list[tuple[int, int]], blocks: int, budget: int, share: bool
) -> None:
    weights = tiny()
    requests = [
        request(length, new, seed % 3, sampling=SamplingParams(temperature=1.0, seed=seed) if seed % 2 else GREEDY,
                stops=["e"] if seed % 3 == 2 else [], ignore_eos=seed % 4 != 0, logprobs=1 if seed % 5 == 1 else None)
        for seed, (length, new) in enumerate(lengths)
    ] + [embedding(7)]  # fmt: skip
    answers: list[list[list[Any]]] = []
    for decoder in (native(weights, blocks=blocks), Device(native(weights, blocks=blocks))):
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
    requests = [request(new=8), request(new=20, seed=2)]
    wanted = run(engine(tiny_model, native(tiny_model)), requests)
    with caplog.at_level(logging.CRITICAL):
        found = run(engine(tiny_model, Device(native(tiny_model), fails_in=range(5, 6))), requests)
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


def test_a_release_keeps_what_the_step_under_way_gives(tiny_model: Checkpoint) -> None:
    wanted = tokens_of(run(engine(tiny_model, native(tiny_model)), [request(new=10)])[0])
    plain = engine(tiny_model, Device(native(tiny_model)))
    subject = Engine(
        LocalRunner(Device(native(tiny_model))), plain.scheduler, plain._tokenizer, frozenset(),
        lambda: LocalRunner(Device(native(tiny_model))),
    )  # fmt: skip
    subject.add(request(new=10))
    deltas = [*subject.step(), *subject.step()]
    subject.release()
    assert subject.stalled
    assert not subject.idle
    deltas += subject.step()  # those of the step that was under way
    assert len(tokens_of(deltas)) == 3
    subject.regain()
    while not subject.idle:
        deltas += subject.step()
    assert tokens_of(deltas) == wanted


def test_a_release_after_the_last_token_leaves_its_delta(tiny_model: Checkpoint) -> None:
    plain = engine(tiny_model, Device(native(tiny_model)))
    subject = Engine(
        LocalRunner(Device(native(tiny_model))), plain.scheduler, plain._tokenizer, frozenset(),
        lambda: LocalRunner(Device(native(tiny_model))),
    )  # fmt: skip
    subject.add(request(new=3))
    deltas = [*subject.step(), *subject.step()]
    subject.release()
    assert not subject.idle
    deltas += subject.step()
    assert [delta.finish for delta in deltas] == [None, None, "length"]
    assert subject.idle


def test_a_cancelled_request_has_no_part_in_the_step_under_way(tiny_model: Checkpoint) -> None:
    subject = engine(tiny_model, Device(native(tiny_model)))
    gone, stays = subject.add(request(new=9)), subject.add(request(new=9, seed=2))
    deltas = [*subject.step(), *subject.step()]
    subject.cancel(gone)
    new = subject.add(Request(tokens=[5, 6, 7], max_new_tokens=2, sampling=GREEDY, ignore_eos=True))
    while not subject.idle:
        deltas += subject.step()
    assert len([delta for delta in deltas if delta.id == gone]) == 2
    mine = [delta for delta in deltas if delta.id == stays]
    assert tokens_of(mine) == tokens_of(run(engine(tiny_model, native(tiny_model)), [request(new=9, seed=2)])[0])
    assert [delta.finish for delta in deltas if delta.id == new] == [None, "length"]
