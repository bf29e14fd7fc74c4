"""Chat completions of a real language model: OpenAI's own client unchanged, the golden answers, the bill."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Semaphore
from typing import Any

import openai
import pytest

from fleetstart.client import Client
from fleetstart.runtime.contract.billing.ledger import InvocationRow, cost_nusd, dollars
from tests.e2e.systems import System, running
from tests.servers import wait_until

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "chat"
GOLDEN = json.loads((ROOT / "tests" / "runtime" / "llm" / "golden.json").read_text())
CASES = GOLDEN["cases"]
SHORT = CASES[0]
LIMIT_TOKENS = GOLDEN["max_new_tokens"]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def chat(system: System) -> System:
    """The example as it is in the repository, deployed."""
    return with_example(system)


def with_example(system: System) -> System:
    if not (EXAMPLE / "weights" / "model.safetensors").exists():
        if os.environ.get("CI"):
            pytest.fail("examples/chat/weights is not there: `make models` makes it")
        pytest.skip("examples/chat/weights is not there: `make models` makes it")
    system.deploy_file(EXAMPLE / "handler.py", "--keep-alive", "600", "--no-probe")
    return system


@pytest.fixture
def client(chat: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{chat.url}/fn/chat/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def expected(case: dict[str, Any]) -> str:
    return str(case["output_text"]).replace("<|im_end|>", "")


def row_of(system: System, request: str) -> InvocationRow:
    """The call's one row in the ledger, which is written a moment after its answer."""

    def rows() -> list[InvocationRow]:
        return [row for row in system.invocations() if row.id == request]

    wait_until(rows, what=f"the row of {request}")
    (row,) = rows()
    return row


def answered(client: openai.OpenAI, case: dict[str, Any]) -> tuple[str, str]:
    """(text, why it ended) of a greedy answer."""
    if case["kind"] == "chat":
        said = client.chat.completions.create(
            model="chat",
            messages=[{"role": "user", "content": case["prompt"]}],
            temperature=0,
            max_completion_tokens=LIMIT_TOKENS,
        )
        return said.choices[0].message.content or "", said.choices[0].finish_reason
    text = client.completions.create(model="chat", prompt=case["prompt"], temperature=0, max_tokens=LIMIT_TOKENS)
    return text.choices[0].text, text.choices[0].finish_reason


def test_its_first_call_is_cold_and_the_second_is_hot(chat: System) -> None:
    """Runs first: the others find the model awake."""
    body = {"messages": [{"role": "user", "content": SHORT["prompt"]}], "temperature": 0, "max_tokens": 8}
    first = chat.call("chat", body, path="/v1/chat/completions", timeout_s=90)
    assert first.status_code == 200, first.text
    assert first.headers["fs-start"] == "cold"
    phases = {entry.partition(";")[0].strip() for entry in first.headers["server-timing"].split(",")}
    assert {"queue", "place", "start", "fetch", "load", "execute"} <= phases
    second = chat.call("chat", body, path="/v1/chat/completions")
    assert second.headers["fs-start"] == "hot"
    for response in (first, second):
        assert response.headers["fs-version"] == str(chat.info("chat").version)
        assert response.headers["x-request-id"].startswith("inv-")
        row = row_of(chat, response.headers["x-request-id"])
        assert (row.status, row.start) == (200, response.headers["fs-start"])
        assert int(response.headers["fs-billed-ms"]) == row.billed_ms
        memory_bytes = chat.info("chat").spec.memory_bytes
        assert row.cost_nusd == cost_nusd(row.billed_ms, memory_bytes, row.rate_nusd_per_gib_s)
        assert response.headers["fs-cost"] == dollars(row.cost_nusd)
    assert int(first.headers["fs-billed-ms"]) < first.elapsed.total_seconds() * 1000


@pytest.mark.parametrize("case", [CASES[0], CASES[8]], ids=["chat", "raw"])
def test_one_call_alone_gives_the_golden_answer(client: openai.OpenAI, case: dict[str, Any]) -> None:
    assert answered(client, case) == (expected(case), "stop" if case["finished"] else "length")


def test_eight_calls_at_a_time_give_all_golden_answers(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda case: answered(client, case), CASES))
    assert answers == [(expected(case), "stop" if case["finished"] else "length") for case in CASES]


def test_the_client_streams_and_is_told_how_much_was_used(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": SHORT["prompt"]}],
        temperature=0,
        max_completion_tokens=LIMIT_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == expected(SHORT)
    assert len([text for text in texts if text]) > 3  # it came in pieces
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens == len(SHORT["prompt_ids"])
    assert usage.completion_tokens == len(SHORT["output_ids"])


def test_a_schema_a_tool_and_a_response_go_through_the_gateway(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    messages: Any = [{"role": "user", "content": SHORT["prompt"]}]
    shape: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    filled = client.chat.completions.create(
        model="chat", messages=messages, temperature=0, max_tokens=60, response_format=shape
    )
    assert "city" in json.loads(filled.choices[0].message.content or "")
    tool: Any = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    called = client.chat.completions.create(
        model="chat", messages=messages, temperature=0, max_tokens=60, tools=[tool], tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert "city" in json.loads(call.function.arguments)
    with client.responses.stream(model="chat", input=SHORT["prompt"], temperature=0) as stream:
        assert [event.type for event in stream][-1] == "response.completed"
        assert stream.get_final_response().output_text == expected(SHORT)


def test_the_client_gets_embeddings(client: openai.OpenAI) -> None:
    answer = client.embeddings.create(model="chat", input=["a cat on a mat", "the cat on the mat", "tax law of 1912"])
    cat, same, other = (one.embedding for one in answer.data)

    def likeness(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert likeness(cat, cat) == pytest.approx(1, abs=1e-5)
    assert likeness(cat, same) > likeness(cat, other)
    assert answer.usage.prompt_tokens >= 12


def test_a_stream_within_a_schema_goes_on_after_its_worker_was_killed(chat: System, client: openai.OpenAI) -> None:
    """Drawn tokens: the grammar's state, the draws and the text are those that one worker would have had."""
    person = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    people = {"type": "array", "minItems": 8, "items": person | {"required": ["name", "age"]}}
    shape: Any = {"type": "json_schema", "json_schema": {"name": "people", "schema": people}}
    fields: Any = {
        "model": "chat", "messages": [{"role": "user", "content": "List some people."}], "response_format": shape,
        "temperature": 0.8, "seed": 7, "max_tokens": 120,
    }  # fmt: skip
    wanted = client.chat.completions.create(**fields).choices[0].message.content
    pieces: list[str] = []
    with client.chat.completions.create(**fields, stream=True) as stream:
        for chunk in stream:
            pieces.append(chunk.choices[0].delta.content or "")
            if len(pieces) == 10:
                (victim,) = chat.worker_processes("chat")
                chat.kill(victim)
    assert "".join(pieces) == wanted


@pytest.fixture
def own_chat() -> Iterator[System]:
    """One whose controller may be killed."""
    with running(env={"FS_PROFILES": "torch"}) as system:
        yield with_example(system)


def test_streams_with_a_key_give_all_golden_answers_though_their_controller_is_killed(own_chat: System) -> None:
    """The Python client goes on with them by itself. Each ran once, and has one row."""
    chat = own_chat
    cases = [case for case in CASES if case["kind"] == "chat"]
    with Client(chat.url, "") as client, ThreadPoolExecutor(len(cases)) as pool:
        completions = client.function("chat", path="/v1/chat/completions", timeout_s=100)
        begun = Semaphore(0)

        def read(number: int, case: dict[str, Any]) -> str:
            stream = completions.with_options(idempotency_key=f"golden-{number}").stream(
                messages=[{"role": "user", "content": case["prompt"]}],
                temperature=0,
                max_completion_tokens=LIMIT_TOKENS,
                stream=True,
            )
            text = ""
            for chunk in stream:
                begun.release()
                text += chunk["choices"][0]["delta"].get("content") or "" if chunk["choices"] else ""
            return text

        before = {row.id for row in chat.invocations()}
        reading = [pool.submit(read, number, case) for number, case in enumerate(cases)]
        assert begun.acquire(timeout=60)
        chat.kill(chat.one("controller"))
        texts = [one.result(100) for one in reading]
    assert texts == [expected(case) for case in cases]

    def rows() -> list[InvocationRow]:
        return [row for row in chat.invocations() if row.id not in before]

    wait_until(lambda: len(rows()) >= len(cases) and chat.open_invocations() == 0, 20, what="their rows")
    assert [row.status for row in rows()] == [200] * len(cases)


def test_a_stream_closes_with_the_bill(chat: System) -> None:
    body = {"prompt": "The three states of matter are", "max_tokens": 8, "temperature": 0, "stream": True}
    with chat.http.stream("POST", "/fn/chat/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        events = [event for event in "".join(response.iter_text()).split("\n\n") if event]
        request = response.headers["x-request-id"]
    assert "data: [DONE]" in events
    name, _, data = events[-1].partition("\n")
    assert name == "event: fleetstart"
    bill = json.loads(data.removeprefix("data: "))
    assert bill["request_id"] == request
    row = row_of(chat, request)
    assert (bill["billed_ms"], bill["cost"]) == (row.billed_ms, dollars(row.cost_nusd))


def test_the_models_that_it_lists(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["chat"]
    assert client.models.retrieve("chat").id == "chat"


def test_the_client_gets_openais_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="chat", messages=[])
    assert "messages" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=[{"role": "user", "content": "hi"}])
    long = "word " * 10_000
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="chat", prompt=long, max_tokens=1)
    assert "token" in str(too_long.value)


def test_a_client_that_leaves_frees_its_place(chat: System) -> None:
    """The stream would have taken minutes; the next ones get the whole engine."""
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "stream": True}
    with chat.http.stream("POST", "/fn/chat/v1/completions", json=body) as response:
        request = response.headers["x-request-id"]
        next(response.iter_lines())
    assert row_of(chat, request).status == 499
    wait_until(lambda: chat.info("chat").running == 0, what="a free engine")


def test_curl_streams(chat: System) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("no curl on this machine")
    body = json.dumps(
        {"messages": [{"role": "user", "content": SHORT["prompt"]}], "temperature": 0, "stream": True, "max_tokens": 20}
    )
    argv = [curl, "-sS", "-N", f"{chat.url}/fn/chat/v1/chat/completions", "-H", "content-type: application/json"]
    done = subprocess.run([*argv, "-d", body], capture_output=True, text=True, timeout=60, check=True)
    chunks = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line.startswith('data: {"id"')]
    texts = [json.loads(chunk)["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == expected(SHORT)


def test_fs_invoke_streams_text(chat: System) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": SHORT["prompt"]}], "temperature": 0, "max_tokens": 20})
    ran = chat.fs("invoke", "chat", body, "--path", "/v1/chat/completions", "--stream")
    assert ran.out.strip() == expected(SHORT)
    assert "billed" in ran.err
    assert "$" in ran.err


def test_another_version_with_the_same_weights_sends_nothing_and_wakes_warm(chat: System) -> None:
    ran = chat.fs("deploy", str(EXAMPLE / "handler.py"), "--keep-alive", "500")
    assert "in the store already" in ran.err
    body = {"prompt": "The three states of matter are", "max_tokens": 4, "temperature": 0}
    response = chat.call("chat", body, path="/v1/completions", timeout_s=90)
    assert response.status_code == 200, response.text
    assert {worker.start for worker in chat.info("chat").workers} == {"warm"}, "that of the deploy's trial"
    chat.fs("scale", "chat", "--keep-alive", "0.5")
    wait_until(lambda: not chat.info("chat").workers, 20, what="chat asleep")
    again = chat.call("chat", body, path="/v1/completions", timeout_s=90)
    assert again.headers["fs-start"] == "warm"
    assert again.json()["choices"][0]["text"] == response.json()["choices"][0]["text"]
