"""A stream that another worker began goes on here from its marks, token for token; marks that are none are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.worker_headers import CONTINUE_HEADER, MARK
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.server.stream_resume import (
    CARRIED_MAX_BYTES,
    ResumeMarkWriter,
    apply_settings,
    choose_settings,
    read_resume_marks,
    split_body,
)
from tests.runtime.llm.models import Checkpoint, engine, native, run, text_of, tiny, tokens_of
from tests.runtime.llm.server.test_openai_responses import Served, served

VOCAB = 258


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Served, Served]]:
    """Two workers of one version."""
    with served(tiny()) as one, served(tiny()) as other:
        yield one, other


def ask(server: Served, path: str, body: dict[str, Any], carried: bytes = b"") -> list[bytes]:
    """The stream's blocks, marks among them."""
    answer = server.http.post(
        path, content=json.dumps(body).encode() + carried, headers={CONTINUE_HEADER: str(len(carried))}
    )
    assert answer.status_code == 200, answer.text
    assert answer.headers[CONTINUE_HEADER] == "1"
    return [block + b"\n\n" for block in answer.content.split(b"\n\n")[:-1]]


def refused(server: Served, body: dict[str, Any], carried: bytes, size: str | None = None) -> str:
    headers = {CONTINUE_HEADER: str(len(carried)) if size is None else size}
    answer = server.http.post("/v1/completions", content=json.dumps(body).encode() + carried, headers=headers)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


COMPLETION = {"prompt": "Once", "stream": True, "max_tokens": 40, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 30, "ignore_eos": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION | {"temperature": 0}),
        ("/v1/completions", COMPLETION | {"temperature": 1.2, "stream_options": {"include_usage": True}}),
        ("/v1/completions", COMPLETION | {"temperature": 0.8, "seed": 5, "top_p": 0.9, "presence_penalty": 0.5}),
        ("/v1/completions", COMPLETION | {"prompt": ["a", "bc"], "n": 2, "temperature": 1.0}),
        ("/v1/completions", COMPLETION | {"temperature": 1.0, "stop": ["a", "e "], "ignore_eos": False, "n": 3}),
        ("/v1/completions", COMPLETION | {"temperature": 1.0, "logprobs": 2, "logit_bias": {"70": 5}, "stop": ["a"]}),
        ("/v1/completions", COMPLETION | {"temperature": 1.0, "logprobs": 0, "n": 2}),
        ("/v1/completions", COMPLETION | {"temperature": 1.0, "seed": 2**64 - 1, "n": 2}),
        ("/v1/completions", COMPLETION | {"temperature": 1.0, "seed": 1 - 2**64, "n": 2}),
        ("/v1/chat/completions", CHAT | {"temperature": 1.0, "logprobs": True, "top_logprobs": 3, "n": 2}),
        ("/v1/chat/completions", CHAT | {"temperature": 0, "frequency_penalty": 1.0}),
        ("/v1/chat/completions", CHAT | {"n": 2, "temperature": 1.0, "stream_options": {"include_usage": True}}),
    ],
)
def test_a_stream_that_is_cut_at_any_mark_goes_on_with_the_same_events(
    servers: tuple[Served, Served], path: str, body: dict[str, Any]
) -> None:
    """With one choice event for event; with several, whose turns may change, choice by choice."""
    blocks = ask(servers[0], path, body)
    marks = [number for number, block in enumerate(blocks) if block.startswith(MARK)]
    assert len(marks) > 2
    for cut in {marks[0], marks[1], marks[len(marks) // 3], marks[len(marks) // 2], marks[-2], marks[-1]}:
        carried = b"\n".join(block[len(MARK) : -2] for block in blocks[: cut + 1] if block.startswith(MARK))
        rest = ask(servers[1], path, body, carried)
        seamless = [block for block in blocks[: cut + 1] + rest if not block.startswith(MARK)]
        assert by_choice(seamless) == by_choice(blocks)
        if body.get("n", 1) == 1:
            assert b"".join(seamless) == b"".join(block for block in blocks if not block.startswith(MARK))
        # And the marks of both are those of one stream, for a second loss.
        said = [block[len(MARK) : -2] for block in rest if block.startswith(MARK)]
        again = ask(servers[0], path, body, b"\n".join([carried, *said]))
        assert all(b'"choices":[]' in block or b"[DONE]" in block for block in again), "nothing was left to be said"


def by_choice(blocks: list[bytes]) -> dict[Any, list[Any]]:
    """Its events by choice, and what is said of all at the end."""
    found: dict[Any, list[Any]] = {}
    for block in blocks:
        if block.startswith(MARK):
            continue
        data = block.removeprefix(b"data: ").strip()
        event: dict[str, Any] = json.loads(data) if data != b"[DONE]" else {"choices": [], "done": True}
        index = event["choices"][0]["index"] if event["choices"] else None
        found.setdefault(index, []).append(event)
    return found


def test_choices_differ_whatever_the_seed(servers: tuple[Served, Served]) -> None:
    for seed in (-1, 2**64 - 1):
        body = COMPLETION | {"temperature": 1.0, "seed": seed, "n": 3, "stream": False}
        found = [servers[0].http.post("/v1/completions", json=body).json()["choices"] for _ in range(2)]
        assert found[0] == found[1]
        assert len({choice["text"] for choice in found[0]}) == 3


def test_streams_without_a_gateway_have_no_marks(servers: tuple[Served, Served]) -> None:
    answer = servers[0].http.post("/v1/completions", json=COMPLETION)
    assert CONTINUE_HEADER not in answer.headers
    assert MARK not in answer.content


def test_a_whole_answer_has_no_marks_and_nothing_behind_it(servers: tuple[Served, Served]) -> None:
    body = COMPLETION | {"stream": False, "temperature": 0}
    whole = servers[0].http.post("/v1/completions", json=body, headers={CONTINUE_HEADER: "0"})
    assert whole.status_code == 200
    assert CONTINUE_HEADER not in whole.headers


def marks(tokens: list[tuple[int, list[int]]], **fields: Any) -> bytes:
    head = {"id": "cmpl-1", "created_s": 1, "seeds": [None], "limits": [40]} | fields
    return msgspec.json.encode([tokens, head])


@pytest.mark.parametrize(
    ("carried", "why"),
    [
        (b"no", "invalid marks"),
        (b"[[]]", "settings"),
        (marks([]) + b"\n" + marks([]), "settings"),
        (marks([], id="x\ny"), "id"),
        (marks([], id="x" * 65), "id"),
        (marks([], created_s=-1), "time"),
        (marks([], seeds=[]), "seeds"),
        (marks([], limits=[1, 2]), "limits"),
        (marks([], limits=[0]), "limit"),
        (marks([], limits=[10**6]), "context"),
        (marks([], seeds=[1 << 64]), "bits"),
        (marks([(1, [5])]), "choice 1"),
        (marks([(-1, [5])]), "choice -1"),
        (marks([(0, [VOCAB])]), "token"),
        (marks([(0, [-1])]), "token"),
        (marks([(0, [1 << 70])]), "token"),
        (marks([(0, [5] * 41)]), "at most"),
        (marks([(0, [5, 1, 5])]), "ends after 2"),
        (marks([], more=1), "invalid marks"),
        (marks([])[:-1] + b",[],-1]", "cached tokens"),
        (marks([])[:-1] + b",[],5000000000]", "cached tokens"),
        (b"[" * 2000, "invalid marks"),
        (b"\xff\xfe", "invalid marks"),
    ],
)
def test_marks_that_no_stream_has_said_are_refused(servers: tuple[Served, Served], carried: bytes, why: str) -> None:
    body = COMPLETION | {"ignore_eos": False, "temperature": 0}
    assert why in refused(servers[0], body, carried)
    servers[0].until_idle()


@pytest.mark.parametrize("size", ["-1", "x", "1e3", "99999", "9" * 30, ""])
def test_a_size_that_the_body_has_not_is_refused(servers: tuple[Served, Served], size: str) -> None:
    assert CONTINUE_HEADER in refused(servers[0], COMPLETION, b"", size)


def test_too_many_marks_are_refused() -> None:
    with pytest.raises(InvalidInput, match="at most"):
        read_resume_marks(b" " * (CARRIED_MAX_BYTES + 1), choices=1, vocab_size=VOCAB)


@pytest.mark.slow
@given(st.binary(max_size=200) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode))
def test_whatever_is_carried_is_read_or_refused(carried: bytes) -> None:
    try:
        read_resume_marks(carried, choices=1, vocab_size=VOCAB)
    except InvalidInput:
        return


TOKENS = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, VOCAB - 1), max_size=4)), max_size=12)


@given(steps=TOKENS, body=st.binary(max_size=20))
def test_what_marks_say_is_read(steps: list[tuple[int, list[int]]], body: bytes) -> None:
    greedy, drawn = SamplingParams(temperature=0), SamplingParams()
    requests = [Request(tokens=[5], max_new_tokens=64, sampling=sampling) for sampling in (greedy, drawn, drawn)]
    first = choose_settings("cmpl-7", 17, requests)
    assert (first.seeds[0], *(type(seed) for seed in first.seeds[1:])) == (None, int, int)
    assert [one.sampling.seed for one in apply_settings(requests, first)] == first.seeds
    marker = ResumeMarkWriter(first)
    said = []
    for choice, tokens in steps:
        marker.add(choice, tokens, cached_tokens=16)
        said.append(marker.mark())
    said.append(marker.mark())
    carried = b"\n".join(mark[len(MARK) : -2] for mark in said)
    got_body, got = split_body([(CONTINUE_HEADER.encode(), str(len(carried)).encode())], body + carried)
    assert (got_body, got) == (body, carried)
    read = read_resume_marks(carried, choices=3, vocab_size=VOCAB)
    assert read.chosen == first
    assert read.cached_tokens == 16 * len(steps)
    wanted: list[list[int]] = [[], [], []]
    for choice, tokens in steps:
        wanted[choice] += tokens
    assert read.tokens == wanted


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(seed=3, frequency_penalty=0.7)])
@pytest.mark.parametrize("stops", [[], ["a", "ee"]])
def test_an_engine_goes_on_after_any_token(tiny_model: Checkpoint, sampling: SamplingParams, stops: list[str]) -> None:
    """Its text behind what was shown before is the text of one engine that did it all."""
    request = Request(tokens=[70, 71, 72], max_new_tokens=24, sampling=sampling, stops=stops, ignore_eos=True)
    (whole,) = run(engine(tiny_model, native(tiny_model)), [request])
    tokens = tokens_of(whole)
    for count in range(len(tokens) + 1):
        subject = engine(tiny_model, native(tiny_model))
        past = subject.resume(request, tokens[:count])
        shown = "".join(delta.text for delta in whole[:count])
        if count == len(tokens):
            assert past.finish == whole[-1].finish
            continue
        assert past.finish is None
        (rest,) = run(subject, [replace(request, resume=past)])
        assert tokens_of(rest) == tokens[count:]
        assert shown + text_of(rest) == text_of(whole)
        assert rest[-1].finish == whole[-1].finish
