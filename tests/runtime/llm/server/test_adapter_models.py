"""A request's `model` chooses an adapter, through a real server and the `openai` client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.server.served_models import ServedModels
from tests.runner.late import late
from tests.runtime.llm.engine.test_adapter_engines import attached, base_of, changes_of
from tests.runtime.llm.model.test_adapters import merged
from tests.runtime.llm.models import Checkpoint
from tests.runtime.llm.server.test_openai_responses import Served, served, user

openai = late("openai")

SETTINGS = LLMSettings(max_context_tokens=256, kv_memory_bytes=12 << 20)
ASKED = {"prompt": "Once upon", "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    weights, adapters = attached(base_of())
    with served(weights, SETTINGS, adapters) as subject:
        yield subject


def text_of(weights: Checkpoint) -> str:
    with served(weights, SETTINGS) as alone:
        return str(alone.client.completions.create(model="chat", **ASKED).choices[0].text)


def test_completions_are_those_of_the_model_that_is_named(server: Served) -> None:
    found = {}
    for model in ("chat", "sql", "legal"):
        answer = server.client.completions.create(model=model, **ASKED)
        assert answer.model == model
        found[model] = answer.choices[0].text
    changes = changes_of(base_of())
    assert found == {"chat": text_of(base_of())} | {name: text_of(merged(base_of(), changes[name])) for name in changes}
    assert len(set(found.values())) == 3


def test_chats_stream_from_the_model_that_is_named(server: Served) -> None:
    def ask(model: str) -> tuple[str, set[str]]:
        stream = server.client.chat.completions.create(
            model=model, messages=user("hi"), max_tokens=8, temperature=0, stream=True
        )
        chunks = list(stream)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks), {chunk.model for chunk in chunks}

    base, legal = ask("chat"), ask("legal")
    assert (base[1], legal[1]) == ({"chat"}, {"legal"})
    assert base[0] != legal[0]


def test_responses_and_embeddings_take_the_adapter_too(server: Served) -> None:
    answers = [
        server.client.responses.create(model=model, input="hi", max_output_tokens=8, temperature=0)
        for model in ("chat", "sql")
    ]
    assert [answer.model for answer in answers] == ["chat", "sql"]
    assert answers[0].output_text != answers[1].output_text
    vectors = [server.client.embeddings.create(model=model, input="hi").data[0].embedding for model in ("chat", "sql")]
    assert vectors[0] != vectors[1]


def test_the_list_of_models_has_the_adapters(server: Served) -> None:
    listed = list(server.client.models.list())
    assert [(one.id, getattr(one, "parent", None)) for one in listed] == [
        ("chat", None), ("legal", "chat"), ("sql", "chat"),
    ]  # fmt: skip
    assert server.client.models.retrieve("sql").id == "sql"


def test_another_model_is_refused_with_those_that_exist(server: Served) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        server.client.completions.create(model="gpt", **ASKED)
    assert error.value.code == "model_not_found"
    assert error.value.body["hint"] == "ask for 'chat' or 'legal' or 'sql'"


def test_the_function_is_the_base_by_each_of_its_names() -> None:
    models = ServedModels("search.chat", ["sql"])
    assert {models.adapter_of(name) for name in (None, "", "chat", "search.chat", "chat@3")} == {""}
    assert models.adapter_of("sql") == "sql"
