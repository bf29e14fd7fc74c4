"""The server over the transformers engine: the answers of the native one, and streams that go from one to the other."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import torch

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.function.spec import EngineName, LLMSettings
from fleetstart.runtime.contract.worker_headers import MARK
from fleetstart.runtime.llm.model.loaded_model import LoadedModel
from fleetstart.runtime.llm.server import engines
from tests.runner.late import late
from tests.runtime.llm.models import tiny
from tests.runtime.llm.server.test_openai_responses import WAIT_S, Served, served
from tests.runtime.llm.server.test_stream_resume import ask, by_choice
from tests.runtime.llm.server.tools.test_tools import family
from tests.servers import wait_until

late("transformers")
pytestmark = pytest.mark.slow
"""Whichever test is first pays for the import."""

SHAPE: dict[str, Any] = {"dtype": torch.float32, "hidden_size": 96, "num_hidden_layers": 1}
MESSAGES = [{"role": "user", "content": "hi"}]
CITY = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}


def serving(engine: EngineName) -> LLMSettings:
    return LLMSettings(engine=engine, max_context_tokens=3072, kv_memory_bytes=16 << 20)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Served]]:
    """Both engines over the same weights."""
    weights = family("Hermes", **SHAPE)
    with served(weights, serving("native")) as native, served(weights, serving("transformers")) as other:
        yield {"native": native, "transformers": other}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", GREEDY | {"prompt": ["Once", "upon a time"], "logprobs": 2}),
        ("/v1/completions", {"prompt": "Once", "max_tokens": 20, "temperature": 0.8, "seed": 7, "n": 3}),
        ("/v1/chat/completions", GREEDY | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", GREEDY | {"messages": MESSAGES, "frequency_penalty": 1.0, "stop": ["e"]}),
        ("/v1/embeddings", {"input": ["a", "some longer text"]}),
        ("/", {"messages": MESSAGES, "max_tokens": 8, "temperature": 0}),
    ],
)
def test_an_answer_is_that_of_the_native_engine(servers: dict[str, Served], path: str, body: dict[str, Any]) -> None:
    answers = {name: server.http.post(path, json=body) for name, server in servers.items()}
    assert answers["transformers"].status_code == 200, answers["transformers"].text
    said = {name: _plain(answer.json()) for name, answer in answers.items()}
    assert said["transformers"] == said["native"]


def _plain(value: Any) -> Any:
    """An answer without what differs from call to call; numbers as precise as two ways of arithmetic agree."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if key not in ("id", "created")}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return pytest.approx(value, abs=1e-3) if isinstance(value, float) else value


def test_a_schema_and_a_tool_are_followed(servers: dict[str, Served]) -> None:
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": 120}
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}
    client = servers["transformers"].http
    filled = client.post("/v1/chat/completions", json=fields | {"response_format": shape}).json()["choices"][0]
    assert set(json.loads(filled["message"]["content"])) == {"city"}
    forced = fields | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    [call] = client.post("/v1/chat/completions", json=forced).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "look_up"
    assert set(json.loads(call["function"]["arguments"])) == {"city"}


@pytest.mark.parametrize(("first", "second"), [("native", "transformers"), ("transformers", "native")])
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 5, "top_p": 0.9}])
def test_a_stream_goes_on_on_another_engine_from_its_tokens(
    servers: dict[str, Served], first: str, second: str, sampling: dict[str, Any]
) -> None:
    body = {"prompt": "Once", "stream": True, "max_tokens": 20, "ignore_eos": True} | sampling
    blocks = ask(servers[first], "/v1/completions", body)
    marks = [number for number, block in enumerate(blocks) if block.startswith(MARK)]
    cut = marks[len(marks) // 2]
    carried = b"\n".join(block[len(MARK) : -2] for block in blocks[: cut + 1] if block.startswith(MARK))
    rest = ask(servers[second], "/v1/completions", body, carried)
    assert by_choice([*blocks[: cut + 1], *rest]) == by_choice(blocks)


def texts_of(blocks: list[bytes]) -> list[str]:
    """The text of each event: a token's."""
    return [event["choices"][0]["text"] for event in by_choice(blocks)[0]]


def test_streams_go_on_when_the_engine_behind_the_first_one_is_up(
    servers: dict[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run move, the next ones begin there, and each says what it says on one engine."""
    gate = threading.Event()
    load = engines.load_engine

    def loaded(*args: Any, **kwargs: Any) -> LoadedModel:
        assert args[1].engine == "native" or args[1].first or gate.wait(WAIT_S)
        return load(*args, **kwargs)

    monkeypatch.setattr(engines, "load_engine", loaded)
    settings = msgspec.structs.replace(serving("transformers"), first="native")
    fields = {"stream": True, "max_tokens": 150, "ignore_eos": True}
    bodies = [fields | {"prompt": "Once", "temperature": 0}, fields | {"prompt": "a", "temperature": 0.8, "seed": 5}]
    wanted = [texts_of(ask(servers["native"], "/v1/completions", body)) for body in bodies]
    with served(family("Hermes", **SHAPE), settings) as both, ThreadPoolExecutor(2) as threads:
        engine: Any = both.app._model.engine
        running = [threads.submit(ask, both, "/v1/completions", body) for body in bodies]
        wait_until(lambda: engine.second.state == "starting", WAIT_S, what="a first token of each")
        gate.set()
        assert [texts_of(one.result()) for one in running] == wanted
        wait_until(lambda: engine.second.state in ("ready", "running"), WAIT_S, what="the second engine")
        assert [texts_of(ask(both, "/v1/completions", body)) for body in bodies] == wanted
        second = both.app.second_engine()
        assert second is not None
        assert (second.engine, second.state) == ("transformers", "running")
        both.until_idle()


def test_a_deadline_ends_a_call_and_frees_its_blocks(servers: dict[str, Served]) -> None:
    server = servers["transformers"]
    body = {"messages": MESSAGES, "max_tokens": 2000, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body, headers={"fs-deadline-ms": "0"})
    assert answer.status_code == 504
    server.until_idle()


def test_an_engine_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.LOADERS, "vllm", "no_such_engine.loader")
    with pytest.raises(StartFailed, match=r'LLM\(engine="vllm"\) needs no_such_engine, which is not installed'):
        engines.load_engine(tiny(), LLMSettings(engine="vllm"), threads=1)
