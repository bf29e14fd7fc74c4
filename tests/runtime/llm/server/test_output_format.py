"""Answers in JSON and by a schema, through the `openai` client, over the real model and a tiny one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema_rs
import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleetstart.runtime.contract.worker_headers import MARK
from tests.runtime.llm.models import Checkpoint, tiny
from tests.runtime.llm.server.test_openai_responses import Served, openai, served, user
from tests.runtime.llm.server.test_stream_resume import ask

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


def by_schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(tiny()) as subject:
        yield subject


@pytest.fixture(scope="module")
def real(chat_model: Checkpoint) -> Iterator[Served]:
    with served(chat_model) as subject:
        yield subject


class Capital(pydantic.BaseModel):
    city: str
    country: Literal["France", "Spain"]
    population_millions: int


def test_the_real_model_fills_a_schema_of_the_client(real: Served) -> None:
    answer = real.client.chat.completions.parse(
        model="chat", messages=user("What is the capital of France?"), response_format=Capital, temperature=0,
        max_tokens=80,
    )  # fmt: skip
    said = answer.choices[0].message.parsed
    assert isinstance(said, Capital)
    assert said.country == "France"
    assert answer.choices[0].finish_reason == "stop"


def test_the_real_model_gives_an_object(real: Served) -> None:
    answer = real.client.chat.completions.create(
        model="chat", messages=user("Describe Paris in JSON with the keys city and country."), temperature=0,
        response_format={"type": "json_object"}, max_tokens=120,
    )  # fmt: skip
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.slow
def test_formats_of_one_batch_are_each_their_own(server: Served) -> None:
    """Sampled noise: without a mask not even the first letter would be right."""

    def answered(seed: int) -> str:
        schema = [PERSON, {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}][seed % 2]
        fields: dict[str, Any] = {} if seed % 3 == 0 else {"response_format": by_schema(schema)}
        text = server.client.chat.completions.create(
            model="chat", messages=user("hi"), temperature=1.0, seed=seed, max_tokens=200, **fields
        )
        said = str(text.choices[0].message.content)
        if fields:
            assert text.choices[0].finish_reason == "stop"
            jsonschema_rs.validate(schema, json.loads(said))
        return said

    alone = [answered(seed) for seed in range(6)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(answered, range(6))) == alone


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.1}, {"temperature": 0}, {"logit_bias": {"5": 100}}])
def test_every_way_to_sample_stays_within_the_schema(server: Served, sampling: dict[str, Any]) -> None:
    body = {"messages": user("hi"), "max_tokens": 200, "seed": 2, "response_format": by_schema(PERSON)}
    answer = server.http.post("/v1/chat/completions", json=body | sampling)
    said = json.loads(answer.json()["choices"][0]["message"]["content"])
    jsonschema_rs.validate(PERSON, said)


def test_a_limit_cuts_the_answer_and_a_stop_string_ends_it(server: Served) -> None:
    fields = {"model": "chat", "messages": user("hi"), "temperature": 0, "response_format": by_schema(PERSON)}
    cut = server.client.chat.completions.create(**fields, max_tokens=5).choices[0]
    assert (cut.finish_reason, cut.message.content[0]) == ("length", "{")
    ended = server.client.chat.completions.create(**fields, max_tokens=99, stop=['"age"']).choices[0]
    assert ended.finish_reason == "stop"
    assert ended.message.content.rstrip().endswith(",")


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_is_cut_goes_on_within_its_schema(n: int) -> None:
    body = {
        "messages": user("hi"), "stream": True, "max_tokens": 150, "temperature": 1.0, "n": n,
        "response_format": by_schema(PERSON), "logprobs": True,
    }  # fmt: skip
    with served(tiny()) as one, served(tiny()) as other:
        blocks = ask(one, "/v1/chat/completions", body)
        marks = [number for number, block in enumerate(blocks) if block.startswith(MARK)]
        assert len(marks) > 20
        for cut in (marks[0], marks[9], marks[len(marks) // 2], marks[-2], marks[-1]):
            carried = b"\n".join(block[len(MARK) : -2] for block in blocks[: cut + 1] if block.startswith(MARK))
            seamless = [*blocks[: cut + 1], *ask(other, "/v1/chat/completions", body, carried)]
            assert texts(seamless) == texts(blocks)
        for text in texts(blocks):
            jsonschema_rs.validate(PERSON, json.loads(text))
        # Tokens that the schema forbids are no stream's.
        first = json.loads(blocks[marks[0]][len(MARK) :])
        first[0][0][1] = [70, 71]
        answer = one.http.post(
            "/v1/chat/completions",
            content=json.dumps(body).encode() + json.dumps(first).encode(),
            headers={"fs-continue": str(len(json.dumps(first)))},
        )
        assert answer.status_code == 400, answer.text
        assert "grammar does not allow" in answer.text


def texts(blocks: list[bytes]) -> list[str]:
    found: dict[int, str] = {}
    for block in blocks:
        if block.startswith(b"data: {"):
            for choice in json.loads(block[6:])["choices"]:
                found[choice["index"]] = found.get(choice["index"], "") + choice["delta"].get("content", "")
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"a": {"type": "foo"}}}, "Invalid type: foo"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "https://example.com/schema.json"}, "example.com"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"type": "integer", "multipleOf": 10**9 + 7}, "multipleOf"),
        ({"$ref": "#"}, "leads back to itself"),
        (False, "schema is false"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_followed_is_refused_with_the_reason(
    server: Served, schema: Any, reason: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        server.client.chat.completions.create(
            model="chat", messages=user("hi"), response_format=by_schema(schema), stream=stream
        )
    assert caught.value.param == "response_format"
    server.until_idle()


@pytest.mark.parametrize(
    "given_format",
    [
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_object", "json_schema": {"name": "x"}},
        {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}},
        "json",
    ],
)
def test_a_format_that_is_none_is_refused(server: Served, given_format: Any) -> None:
    answer = server.http.post("/v1/chat/completions", json={"messages": user("hi"), "response_format": given_format})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format"


def test_ignore_eos_and_a_format_do_not_go_together(server: Served) -> None:
    body = {"messages": user("hi"), "response_format": {"type": "json_object"}, "ignore_eos": True}
    assert server.http.post("/v1/chat/completions", json=body).json()["error"]["param"] == "ignore_eos"


LEAVES: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    [
        {"type": "string", "maxLength": 3},
        {"type": "integer", "minimum": -9, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", 1, None]},
        {"const": "é"},
        {"type": "string", "pattern": "^[a-c]{2}$"},
    ]
)


def _nested(children: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    of_objects = st.dictionaries(st.sampled_from("abc"), children, max_size=2).map(
        lambda fields: {
            "type": "object",
            "properties": fields,
            "required": list(fields),
            "additionalProperties": False,
        }
    )
    of_arrays = children.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 2})
    return of_objects | of_arrays | st.lists(children, min_size=1, max_size=2).map(lambda some: {"anyOf": some})


@pytest.mark.slow
@given(schema=st.recursive(LEAVES, _nested, max_leaves=4), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_noise_follows_any_schema(server: Served, schema: dict[str, Any], seed: int) -> None:
    body = {"messages": user("hi"), "max_tokens": 220, "seed": seed, "response_format": by_schema(schema)}
    choice = server.http.post("/v1/chat/completions", json=body | {"temperature": 1.0}).json()["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema_rs.validate(schema, json.loads(choice["message"]["content"]))
