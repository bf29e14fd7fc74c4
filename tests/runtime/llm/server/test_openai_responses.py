"""The routes through a real server and the real `openai` client, over a tiny model and the real one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm import create_app
from fleetstart.runtime.llm.model.weights import ModelWeights
from fleetstart.runtime.llm.server.app import LLMApp
from fleetstart.runtime.llm.server.connection import BODY_MAX_BYTES
from fleetstart.runtime.llm.server.engines import Adapters
from tests.runner.late import late
from tests.runtime.llm.models import BLOCK_TOKENS, Checkpoint, tiny
from tests.servers import NO_CERTIFICATES, wait_until

openai = late("openai")

WAIT_S = 20.0
SETTINGS = LLMSettings(max_context_tokens=256)
LONG = {"max_tokens": 200, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Served:
    def __init__(self, app: LLMApp, url: str) -> None:
        self.app = app
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=WAIT_S, verify=NO_CERTIFICATES)
        own = openai.DefaultHttpxClient(verify=NO_CERTIFICATES)
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60, http_client=own)

    def until_idle(self) -> None:
        engine = self.app._model.engine
        wait_until(lambda: engine.idle and not self.app.service.active_count, WAIT_S, what="an idle engine")
        assert engine.load.free_blocks == engine.load.block_count


@contextmanager
def served(
    weights: ModelWeights, settings: LLMSettings = SETTINGS, adapters: Adapters | None = None
) -> Iterator[Served]:
    app = create_app(weights, settings, name="chat", threads=2, adapters=adapters)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", timeout_graceful_shutdown=5))
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])))
        thread.start()
        subject = Served(app, f"http://127.0.0.1:{listening.getsockname()[1]}")
        try:
            wait_until(lambda: server.started, WAIT_S, what="a server that listens")
            yield subject
        finally:
            subject.http.close()
            subject.client.close()
            server.should_exit = True
            thread.join()
            app.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny()) as subject:
        yield subject


@pytest.fixture(scope="module")
def real_server(chat_model: Checkpoint) -> Iterator[Served]:
    with served(chat_model) as subject:
        yield subject


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


GOLDEN = [
    case
    for case in json.loads((Path(__file__).parents[1] / "golden.json").read_text())["cases"]
    if case["kind"] == "chat"
]


def test_the_real_model_answers_the_golden_text(real_server: Served) -> None:
    def ask(case: dict[str, Any]) -> str:
        answer = real_server.client.chat.completions.create(
            model="chat", messages=user(case["prompt"]), max_tokens=48, temperature=0
        )
        assert answer.choices[0].finish_reason == ("stop" if case["finished"] else "length")
        assert answer.usage.prompt_tokens == len(case["prompt_ids"])
        assert answer.usage.completion_tokens == len(case["output_ids"])
        return str(answer.choices[0].message.content)

    with ThreadPoolExecutor(len(GOLDEN)) as threads:
        texts = list(threads.map(ask, GOLDEN))
    assert texts == [case["output_text"].removesuffix("<|im_end|>") for case in GOLDEN]


def test_the_real_model_streams_the_golden_text(real_server: Served) -> None:
    case = GOLDEN[0]
    stream = real_server.client.chat.completions.create(
        model="chat", messages=user(case["prompt"]), stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    deltas = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(delta.delta.content or "" for delta in deltas) == "The capital of France is Paris."
    assert [delta.finish_reason for delta in deltas][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == len(case["prompt_ids"]) + len(case["output_ids"])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_streamed_and_whole_are_the_same(server: Served) -> None:
    fields = {"model": "chat", "messages": user("hi"), "max_tokens": 30, "temperature": 1.0, "seed": 9}
    whole = server.client.chat.completions.create(**fields)
    stream = server.client.chat.completions.create(**fields, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_completions_with_several_prompts_and_choices(server: Served) -> None:
    fields = {"model": "chat", "prompt": ["ab", "cd"], "n": 2, "max_tokens": 6, "temperature": 1.0, "seed": 4}
    fields["extra_body"] = {"ignore_eos": True}
    answer = server.client.completions.create(**fields)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[0].text != answer.choices[1].text
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 24)
    texts = ["", "", "", ""]
    for chunk in server.client.completions.create(**fields, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]
    as_tokens = server.client.completions.create(model="chat", prompt=[67, 68], max_tokens=3, temperature=0)
    assert as_tokens.usage.prompt_tokens == 2


def test_usage_counts_the_tokens_that_an_earlier_prompt_had(server: Served) -> None:
    prompt = "One system prompt that many calls have in common. "
    usages = []
    for question in ("first", "another", "another"):
        fields = {"model": "chat", "prompt": prompt + question, "max_tokens": 3, "temperature": 0}
        usages.append(server.client.completions.create(**fields).usage)
    before, common, same = (usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert (before, common) == (0, len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS)
    assert same == (usages[2].prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    chunks = server.client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert [chunk.usage for chunk in chunks][-1].prompt_tokens_details.cached_tokens == same


def test_models(server: Served) -> None:
    assert [model.id for model in server.client.models.list()] == ["chat"]
    assert server.client.models.retrieve("chat").owned_by == "fleetstart"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("gpt")


def test_the_plain_route(server: Served) -> None:
    answer = server.http.post("/", json={"prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True})
    assert answer.status_code == 200
    body = answer.json()
    assert body["finish_reason"] == "length"
    details = {"cached_tokens": 0}
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6, "prompt_tokens_details": details
    }  # fmt: skip
    answer = server.http.post("/", json={"messages": user("hi"), "max_tokens": 2})
    assert set(answer.json()) == {"text", "finish_reason", "usage"}


def test_errors_name_the_field(server: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(model="chat", messages=user("hi"), modalities=["audio"])
    assert caught.value.param == "modalities"
    assert caught.value.code == "invalid_input"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as missing:
        server.client.chat.completions.create(model="gpt", messages=user("hi"))
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="token"):
        server.client.completions.create(model="chat", prompt=[5, 999])
    server.until_idle()


@pytest.mark.parametrize(
    ("path", "param", "body"),
    [
        ("/v1/chat/completions", "messages", {"messages": user("hi"), "max_tokens": 10_000}),
        ("/v1/chat/completions", "messages", {"messages": user("hi" * 300)}),
        # A stream that cannot begin has a status of its own.
        ("/v1/chat/completions", "messages", {"messages": user("hi" * 20_000), "stream": True}),
        ("/v1/completions", "prompt", {"prompt": "hi" * 300}),
        ("/v1/responses", "input", {"input": "hi" * 300}),
        ("/v1/embeddings", "input", {"input": "hi" * 300}),
    ],
)
def test_what_is_too_long_has_the_code_and_the_words_that_clients_look_for(
    server: Served, path: str, param: str, body: dict[str, Any]
) -> None:
    answer = server.http.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert (error["code"], error["param"], error["type"]) == ("context_length_exceeded", param, "invalid_request_error")
    assert error["message"].startswith("This model's maximum context length is 256 tokens; the prompt is too long for ")
    server.until_idle()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/v1/models", 405), ("GET", "/", 405)],
)
def test_wrong_routes(server: Served, method: str, path: str, status: int) -> None:
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"messages": 5}'])
def test_what_is_no_call_is_refused(server: Served, body: bytes) -> None:
    answer = server.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}


def test_a_huge_body_is_refused(server: Served) -> None:
    with contextlib.suppress(httpx.WriteError):
        answer = server.http.post("/", content=b" " * (BODY_MAX_BYTES + 1))
        assert answer.status_code == 413


def test_the_stream_is_server_sent_events(server: Served) -> None:
    body = {"messages": user("hi"), "max_tokens": 3, "stream": True, "temperature": 0, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in json.loads(events[0].removeprefix("data: "))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_blocks(stream: bool) -> None:
    slow = tiny(num_hidden_layers=12, hidden_size=512, intermediate_size=1024)
    body = json.dumps({"messages": user("hi"), "max_tokens": 200, "stream": stream, "ignore_eos": True}).encode()
    with served(slow) as subject:
        with socket.create_connection(("127.0.0.1", int(subject.url.rsplit(":", 1)[1]))) as sock:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            if stream:
                assert sock.recv(1)
            else:
                wait_until(lambda: subject.app.service.active_count, WAIT_S, what="a call under way")
        subject.until_idle()


def test_a_deadline_of_the_gateway_ends_the_call(server: Served) -> None:
    body = {"messages": user("hi"), "max_tokens": 200, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body, headers={"fs-deadline-ms": "0"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    server.until_idle()


def test_closing_amid_a_stream_says_so_and_does_not_say_done() -> None:
    slow = tiny(num_hidden_layers=12, hidden_size=512, intermediate_size=1024)
    body = {"messages": user("hi"), "max_tokens": 220, "stream": True, "ignore_eos": True}
    with served(slow) as subject:
        with subject.http.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            subject.app.close()
            rest = [line for line in lines if line]
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert "data: [DONE]" not in rest
        assert subject.http.post("/", json={"prompt": "x"}).status_code == 503


def test_a_model_without_a_template_says_what_to_use() -> None:
    weights = tiny()
    files = {name: weights.file(name) for name in ("config.json", "tokenizer.json", "generation_config.json")}
    with served(Checkpoint(dict(weights), files)) as subject:
        answer = subject.http.post("/v1/chat/completions", json={"messages": user("hi")})
        assert answer.status_code == 400
        assert "/v1/completions" in answer.json()["error"]["hint"]
