"""`/v1/responses` through the `openai` client: text, events, JSON, tools, and streams that are resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.worker_headers import MARK
from fleetstart.runtime.llm.engine.generation import TokenDelta
from fleetstart.runtime.llm.engine.logprobs import TokenLogprob
from fleetstart.runtime.llm.server.answer_writers import Choice
from fleetstart.runtime.llm.server.responses_api.requests import ResponsesCall
from fleetstart.runtime.llm.server.responses_api.writer import ResponsesWriter
from fleetstart.runtime.llm.server.tools.formats import HERMES
from fleetstart.runtime.llm.server.tools.reader import ToolReader
from fleetstart.runtime.llm.text.token_texts import TokenTexts
from fleetstart.runtime.openai_api.call_reader import CallReader
from fleetstart.runtime.openai_api.invalid_parameter import InvalidParameter
from fleetstart.runtime.openai_api.responses import TokenUsage
from tests.runtime.llm.models import Checkpoint
from tests.runtime.llm.server.test_openai_responses import Served, openai, served
from tests.runtime.llm.server.test_stream_resume import ask
from tests.runtime.llm.server.tools.test_tools import TOOLS, family

CAPITAL = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
READER = CallReader(ResponsesCall, "responses")


class Letters(TokenTexts):
    """Tokens that are characters."""

    def __init__(self) -> None:
        pass

    def raw(self, token: int) -> bytes:
        return chr(token).encode()

    def text(self, token: int) -> str:
        return chr(token)


LETTERS = Letters()


@pytest.fixture(scope="module")
def real(chat_model: Checkpoint) -> Iterator[Served]:
    with served(chat_model, LLMSettings(max_context_tokens=1024)) as subject:
        yield subject


def test_the_real_model_answers(real: Served) -> None:
    answer = real.client.responses.create(model="chat", input=CAPITAL, temperature=0, metadata={"a": "b"})
    assert answer.output_text == ANSWER
    assert (answer.status, answer.error, answer.metadata) == ("completed", None, {"a": "b"})
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    chat = real.client.chat.completions.create(
        model="chat", messages=[{"role": "user", "content": CAPITAL}], temperature=0
    )
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (
        chat.usage.prompt_tokens,
        chat.usage.completion_tokens,
    )


@pytest.mark.slow
def test_instructions_and_earlier_items_are_the_chat(real: Served) -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "Hello!", "annotations": []}]},
        {"role": "user", "content": [{"type": "input_text", "text": CAPITAL}]},
    ]  # fmt: skip
    answer = real.client.responses.create(model="chat", instructions="Be brief.", input=items, temperature=0)
    same = real.client.chat.completions.create(
        model="chat", temperature=0,
        messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
                  {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": CAPITAL}],
    )  # fmt: skip
    assert answer.output_text == same.choices[0].message.content


@pytest.mark.slow
def test_a_stream_has_the_events_of_the_client(real: Served) -> None:
    with real.client.responses.stream(model="chat", input=CAPITAL, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == ANSWER
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.usage.output_tokens > 3


def test_a_limit_leaves_it_incomplete(real: Served) -> None:
    fields: dict[str, Any] = {"model": "chat", "input": CAPITAL, "temperature": 0, "max_output_tokens": 3}
    answer = real.client.responses.create(**fields)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    *_, last = real.client.responses.create(**fields, stream=True)
    assert last.type == "response.incomplete"
    assert last.response.output_text == answer.output_text


class Capital(pydantic.BaseModel):
    city: str
    country: Literal["France", "Spain"]


def test_the_real_model_fills_a_schema_of_the_client(real: Served) -> None:
    answer = real.client.responses.parse(
        model="chat", input=CAPITAL, text_format=Capital, temperature=0, max_output_tokens=60
    )
    assert isinstance(answer.output_parsed, Capital)
    assert answer.output_parsed.country == "France"


def test_the_real_model_calls_a_tool_and_uses_its_result(real: Served) -> None:
    fields: dict[str, Any] = {"model": "chat", "temperature": 0, "tools": FLAT, "max_output_tokens": 100}
    question = {"role": "user", "content": "What is the weather in Paris?"}
    choice = {"type": "function", "name": "get_weather"}
    first = real.client.responses.create(**fields, input=[question], tool_choice=choice)
    (call,) = first.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] == "Paris"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, sunny"}
    items = [question, call.model_dump(exclude_none=True), result]
    assert "sunny" in real.client.responses.create(**fields, input=items).output_text
    with real.client.responses.stream(**fields, input=[question], tool_choice=choice) as stream:
        events = list(stream)
        (again,) = stream.get_final_response().output
    assert (again.name, again.arguments) == (call.name, call.arguments)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    assert len(deltas) > 5


@pytest.mark.slow
def test_log_probabilities_of_a_stream_are_those_of_the_whole_answer(real: Served) -> None:
    fields: dict[str, Any] = {"model": "chat", "input": CAPITAL, "temperature": 0, "top_logprobs": 2}
    answer = real.client.responses.create(**fields, include=["message.output_text.logprobs"])
    listed = [one.model_dump() for one in answer.output[0].content[0].logprobs]
    assert "".join(one["token"] for one in listed) == ANSWER
    assert all(len(one["top_logprobs"]) == 2 for one in listed)
    with real.client.responses.stream(**fields, include=["message.output_text.logprobs"]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [one.model_dump() for one in final.output[0].content[0].logprobs] == listed
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [(one.token, one.logprob) for event in deltas for one in event.logprobs] == [
        (one["token"], one["logprob"]) for one in listed
    ]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert [one.logprob for one in done.logprobs] == [one["logprob"] for one in listed]


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_calls_have_no_log_probabilities(stream: bool) -> None:
    """Only a message's tokens are listed: what follows the mark of a call belongs to the call."""
    writer = ResponsesWriter(
        "m", READER.read(b'{"input": "hi"}'), texts=LETTERS, tools=ToolReader(HERMES, parallel=True)
    )
    text = 'Well. <tool_call>{"name": "f", "arguments": {}}</tool_call>'
    deltas = [TokenDelta(id=0, text=one, tokens=(ord(one),), logprobs=(TokenLogprob(ord(one), -1.0),)) for one in text]
    deltas.append(TokenDelta(id=0, finish="stop"))
    usage = TokenUsage(prompt_tokens=1)
    choice = Choice()
    for delta in deltas:
        choice.add(delta)
    if stream:
        events = b"".join(writer.feed(0, delta) for delta in deltas) + writer.closing(usage)
        last = events.split(b"\n\n")[-3]
        answer = json.loads(last.partition(b"data: ")[2])["response"]
    else:
        answer = json.loads(writer.whole([choice], usage))
    message, call = answer["output"]
    assert (message["content"][0]["text"], call["name"]) == ("Well.", "f")
    assert "".join(one["token"] for one in message["content"][0]["logprobs"]) == "Well."


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": FLAT, "tool_choice": "required"},
        {"text": {"format": "SCHEMA"}},
        {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    ],
)
def test_a_stream_that_is_cut_goes_on_event_for_event(fields: dict[str, Any]) -> None:
    if "text" in fields:
        schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 4, "maxItems": 4}
        fields = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
    body = {"input": "hi", "stream": True, "max_output_tokens": 90, "temperature": 1.0} | fields
    with served(family("Hermes"), LLMSettings(max_context_tokens=1024)) as one:
        blocks = ask(one, "/v1/responses", body)
        marks = [number for number, block in enumerate(blocks) if block.startswith(MARK)]
        for cut in {marks[0], marks[len(marks) // 3], marks[len(marks) // 2], marks[-1]}:
            carried = b"\n".join(block[len(MARK) : -2] for block in blocks[: cut + 1] if block.startswith(MARK))
            rest = ask(one, "/v1/responses", body, carried)
            seamless = [block for block in [*blocks[: cut + 1], *rest] if not block.startswith(MARK)]
            assert seamless == [block for block in blocks if not block.startswith(MARK)]


def test_a_refused_part_has_its_own_name(real: Served) -> None:
    part = {"type": "input_image", "image_url": "x"}
    answer = real.http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
    assert answer.json()["error"]["message"].startswith(
        "input: a part of type 'input_image' is not supported: the engine reads text, not images"
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "{"}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "strict": True, "schema": {"not": {}}}}}, "text"),
        ({"temperature": 3}, "temperature"),
        ({"frobnicate": 1}, "frobnicate"),
    ],
)
def test_wrong_fields_are_refused_by_name(real: Served, fields: dict[str, Any], param: str) -> None:
    answer = real.http.post("/v1/responses", json={"input": "hi"} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_calls_after_a_text_are_one_message() -> None:
    items = [
        {"role": "assistant", "content": "Let me see."},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
    ]
    messages = READER.read(json.dumps({"input": items}).encode()).chat().messages
    assert [message.role for message in messages] == ["assistant", "tool"]
    assert [call.id for call in messages[0].tool_calls or []] == ["a", "b"]


def test_what_clients_send_unasked_is_without_effect() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"}
    items = [
        {"role": "user", "content": "hi"},
        reasoning,
        {"role": "assistant", "content": [{"type": "output_text", "text": "Well."}]},
        reasoning | {"content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    ]
    call = READER.read(json.dumps({"input": items, "include": ["reasoning.encrypted_content"]}).encode())
    assert [(one.role, one.text()) for one in call.chat().messages] == [("user", "hi"), ("assistant", "Well.")]
    assert not call.wants_logprobs


def test_a_truncation_that_is_not_there_says_what_holds(real: Served) -> None:
    error = real.http.post("/v1/responses", json={"input": "hi", "truncation": "auto"}).json()["error"]
    assert "leave truncation out" in error["message"]


@pytest.mark.parametrize(
    "items",
    [
        [{"role": "x", "content": "hi"}],
        [{"type": "function_call_output", "call_id": "a", "output": "1"}],
        [{"type": "reasoning", "summary": []}],
    ],
)
def test_items_that_are_no_chat_are_refused_by_the_name_of_the_field(items: list[Any]) -> None:
    with pytest.raises(InvalidParameter, match=r"^input") as caught:
        READER.read(json.dumps({"input": items}).encode())
    assert caught.value.param == "input"


def test_another_model_is_not_there(real: Served) -> None:
    with pytest.raises(openai.NotFoundError):
        real.client.responses.create(model="gpt", input="hi")
