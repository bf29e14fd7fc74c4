"""Tools through the `openai` client: forced and free calls, streams and their resume, results that come back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema_rs
import pytest

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.worker_headers import MARK
from fleetstart.runtime.llm.engine.constraint import ConstraintCompiler
from fleetstart.runtime.llm.engine.generation import FinishReason, TokenDelta
from fleetstart.runtime.llm.server.answer_writers import ChatWriter
from fleetstart.runtime.llm.server.tools.formats import (
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_NAMED,
    MISTRAL_NAMED_IDS,
    PROMPTED,
    QWEN_CODER,
    ToolFormat,
    format_of,
    mark_tokens,
)
from fleetstart.runtime.llm.server.tools.grammar import calls_grammar, free_grammar
from fleetstart.runtime.llm.server.tools.reader import ToolReader
from fleetstart.runtime.llm.server.tools.requests import FunctionTool, ToolUse
from fleetstart.runtime.llm.text.chat_template import ChatTemplate
from fleetstart.runtime.llm.text.tokenizer import Tokenizer
from tests.runtime.llm.models import Checkpoint, byte_tokenizer, tiny
from tests.runtime.llm.server.test_openai_responses import Served, openai, served, user
from tests.runtime.llm.server.test_stream_resume import ask

ROOMY = LLMSettings(max_context_tokens=1024)
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object", "properties": {"zone": {"$ref": "#/$defs/zone"}}, "required": ["zone"],
    "additionalProperties": False, "$defs": {"zone": {"enum": ["CET", "UTC"]}},
}  # fmt: skip
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}


def tool(name: str) -> dict[str, Any]:
    function = {"name": name, "description": f"What {name} says", "parameters": SCHEMAS[name]}
    return {"type": "function", "function": function}


TOOLS = [tool("get_weather"), tool("get_time")]
NAMED = {"type": "function", "function": {"name": "get_time"}}
MESSAGES = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}CALL{{ call.function | tojson }}END{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)
TEMPLATES = {
    "Hermes": "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Use <tool_call> tags.\n{% endif %}",
    "Llama 3": "{% if not tools is defined %}{% set tools = none %}{% endif %}{% if tools is not none %}"
    "{{ tools | tojson(indent=4) }} <|python_tag|>{% endif %}",
    "Mistral": "{% if tools is not none %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    " [TOOL_CALLS]{% endif %}",
    "Mistral, names first": "{% if tools is not none %}{{ tools | tojson }} [TOOL_CALLS] [ARGS]{% endif %}",
    "Mistral, names and ids first": "{% if tools is not none %}{{ tools | tojson }} [TOOL_CALLS] [CALL_ID] [ARGS]"
    "{% endif %}",
    "Qwen for code": "{% if tools %}{{ tools | tojson }} <tool_call> <function=f> <parameter=p>{% endif %}",
}
ADDED = {
    "Hermes": ["<tool_call>", "</tool_call>"], "Llama 3": ["<|python_tag|>"], "Mistral": ["[TOOL_CALLS]"],
    "Mistral, names first": ["[TOOL_CALLS]", "[ARGS]"],
    "Mistral, names and ids first": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
    "Qwen for code": ["<tool_call>", "</tool_call>"],
}  # fmt: skip
"""Tokens that these models have for their marks; those of Hermes and Qwen are not special ones."""
FORMS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL, MISTRAL_NAMED, MISTRAL_NAMED_IDS, QWEN_CODER)}
NOT_SPECIAL = {"Hermes", "Qwen for code"}


def family(name: str, **changes: Any) -> Checkpoint:
    """A tiny model whose template and tokenizer are in the style of a family."""
    added = ADDED[name]
    weights = tiny(vocab_size=258 + len(added), max_position_embeddings=4096, **changes)
    files = {name: weights.file(name) for name in ("config.json", "generation_config.json", "tokenizer_config.json")}
    files["tokenizer.json"] = byte_tokenizer(*added, special=name not in NOT_SPECIAL)
    files["chat_template.jinja"] = (TEMPLATES[name] + MESSAGES).encode()
    return Checkpoint(dict(weights), files)


@pytest.fixture(scope="module")
def real(chat_model: Checkpoint) -> Iterator[Served]:
    with served(chat_model, ROOMY) as subject:
        yield subject


@pytest.fixture(scope="module", params=list(TEMPLATES))
def of_family(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with served(family(request.param), LLMSettings(max_context_tokens=3072)) as subject:
        yield request.param, subject


def test_the_real_model_calls_a_tool_and_uses_its_result(real: Served) -> None:
    fields: dict[str, Any] = {"model": "chat", "temperature": 0, "max_tokens": 120, "tools": TOOLS}
    asked = user("What is the weather in Paris?")
    first = real.client.chat.completions.create(
        **fields, messages=asked, tool_choice="required", parallel_tool_calls=False
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    assert message.content is None
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] == "Paris"
    result = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees, sunny"}
    second = real.client.chat.completions.create(
        **fields, messages=[*asked, message.model_dump(exclude_none=True), result]
    )
    assert "sunny" in second.choices[0].message.content
    assert second.choices[0].finish_reason == "stop"


def streamed(stream: Any) -> tuple[list[dict[str, Any]], str]:
    """Calls put together from the deltas as a client does, and why it ended."""
    calls: list[dict[str, Any]] = []
    finish = ""
    for chunk in stream:
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        assert not choice.delta.content
        for delta in choice.delta.tool_calls or []:
            if delta.index == len(calls):
                assert delta.type == "function"
                calls.append({"id": delta.id, "name": delta.function.name, "arguments": ""})
            calls[delta.index]["arguments"] += delta.function.arguments
    return calls, finish


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "count"), [("required", None), (NAMED, 1)])
def test_forced_calls_follow_their_schemas_in_every_family(
    of_family: tuple[str, Served], choice: Any, count: int | None
) -> None:
    name, subject = of_family
    for seed in range(3):
        fields: dict[str, Any] = {
            "model": "chat", "messages": user("hi"), "tools": TOOLS, "tool_choice": choice, "seed": seed,
            "temperature": 1.0, "max_tokens": 900,
        }  # fmt: skip
        whole = subject.client.chat.completions.create(**fields).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        for call in whole.message.tool_calls:
            jsonschema_rs.validate(SCHEMAS[call.function.name], json.loads(call.function.arguments))
            assert (len(call.id) == 9) is name.startswith("Mistral")
        assert count is None or [call.function.name for call in whole.message.tool_calls] == ["get_time"]
        calls, finish = streamed(subject.client.chat.completions.create(**fields, stream=True))
        assert finish == "tool_calls"
        assert [(call["name"], call["arguments"]) for call in calls] == [
            (call.function.name, call.function.arguments) for call in whole.message.tool_calls
        ]


@pytest.mark.parametrize("form", [*FORMS.values(), PROMPTED], ids=lambda form: form.name)
def test_a_free_call_streams_its_arguments_as_they_come(form: ToolFormat) -> None:
    text = written(form, "f", {"a": "1, 2, 3"})
    text = text if form.bare else f"Sure. {text}"
    writer = ChatWriter("chat", tools=ToolReader(form, True))
    deltas = []
    for place, letter in enumerate(text):
        finish: FinishReason | None = "stop" if place == len(text) - 1 else None
        events = writer.feed(0, TokenDelta(id=0, text=letter, tokens=(5,), finish=finish)).split(b"\n\n")[:-1]
        deltas += [json.loads(event[6:])["choices"][0] for event in events]
    content = "".join(delta["delta"].get("content") or "" for delta in deltas)
    assert content == ("" if form.bare else "Sure.")
    parts = [part for delta in deltas for part in delta["delta"].get("tool_calls", [])]
    assert [part["function"].get("name") for part in parts if "id" in part] == ["f"]
    arguments = [part["function"]["arguments"] for part in parts]
    assert "".join(arguments) == '{"a": "1, 2, 3"}'
    assert len(arguments) > 5
    assert [delta["finish_reason"] for delta in deltas if delta["finish_reason"]] == ["tool_calls"]


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"tool_choice": "required"}, {"tool_choice": "auto"}, {"n": 2, "logprobs": True}])
def test_a_stream_with_tools_that_is_cut_goes_on_with_the_same_calls(fields: dict[str, Any]) -> None:
    body = {
        "messages": user("hi"), "stream": True, "max_tokens": 120, "temperature": 1.0, "tools": TOOLS,
        "tool_choice": "required", "ignore_eos": fields.get("tool_choice") == "auto",
    } | fields  # fmt: skip
    with served(family("Mistral"), ROOMY) as one, served(family("Mistral"), ROOMY) as other:
        blocks = ask(one, "/v1/chat/completions", body)
        marks = [number for number, block in enumerate(blocks) if block.startswith(MARK)]
        for cut in {marks[0], marks[len(marks) // 3], marks[len(marks) // 2], marks[-2], marks[-1]}:
            carried = b"\n".join(block[len(MARK) : -2] for block in blocks[: cut + 1] if block.startswith(MARK))
            rest = ask(other, "/v1/chat/completions", body, carried)
            assert events_of([*blocks[: cut + 1], *rest]) == events_of(blocks)


def events_of(blocks: list[bytes]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for block in blocks:
        if block.startswith(b"data: {"):
            event = json.loads(block[6:])
            found.setdefault(event["choices"][0]["index"], []).append(event)
    return found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}, "strict": True}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
    ],
)
def test_wrong_tools_are_refused_by_name(real: Served, fields: dict[str, Any], param: str) -> None:
    answer = real.http.post("/v1/chat/completions", json={"messages": user("hi")} | fields)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


@pytest.mark.slow
def test_strict_tools_leave_free_text_as_it_is(real: Served) -> None:
    strict = [{"type": "function", "function": tool["function"] | {"strict": True}} for tool in TOOLS]
    fields: dict[str, Any] = {"model": "chat", "messages": user("What is the weather in Paris?"), "temperature": 0}
    free = real.client.chat.completions.create(**fields, tools=TOOLS, max_tokens=40).choices[0]
    bound = real.client.chat.completions.create(**fields, tools=strict, max_tokens=40).choices[0]
    assert (bound.message.content, bound.finish_reason) == (free.message.content, free.finish_reason)


@pytest.mark.slow
def test_tools_that_may_not_be_used_cost_no_prompt(real: Served) -> None:
    fields: dict[str, Any] = {"model": "chat", "messages": user("hi"), "max_tokens": 2}
    without = real.client.chat.completions.create(**fields).usage.prompt_tokens
    assert real.client.chat.completions.create(**fields, tools=TOOLS, tool_choice="none").usage.prompt_tokens == without
    assert real.client.chat.completions.create(**fields, tools=TOOLS).usage.prompt_tokens > without + 100


@pytest.mark.parametrize("form", [*FORMS.values(), PROMPTED], ids=lambda form: form.name)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_free_answer_has_only_calls_of_strict_functions(form: ToolFormat, parallel: bool) -> None:
    """Checked on tokens: a model of noise makes no calls of its own accord."""
    added = ADDED.get(form.name, [])
    data = byte_tokenizer(*added, special=form.name not in NOT_SPECIAL)
    vocabulary = Tokenizer(data)
    strict = FunctionTool("f", parameters=WEATHER, strict=True)
    use = ToolUse([strict, FunctionTool("g", parameters=WEATHER)], parallel=parallel)
    compiler = ConstraintCompiler(lambda: data, 258 + len(added), frozenset({1}))
    constraint = compiler.compile(free_grammar(use, form, mark_tokens(form, vocabulary)))

    def allowed(text: str) -> bool:
        """True if the answer may be this text, and end there."""
        try:
            state = constraint.matcher(vocabulary.encode(text, add_special_tokens=False))
        except InvalidInput:
            return False
        return bool(state.allowed()[1])

    good = {"city": "Paris", "unit": "celsius"}
    before = "" if form.bare else "Let me see.\n"
    assert allowed("")
    assert allowed("A text < with <tool_ and [TOOL and {braces}.")
    assert allowed(before + written(form, "f", good))
    assert allowed(written(form, "g", good | {"unit": "kelvin"})), "g is not strict"
    assert not allowed(before + written(form, "f", good | {"unit": "kelvin"}))
    assert not allowed(before + written(form, "f", good | {"city": "Llanfairpwllgwyngyll"}))
    assert not allowed(before + written(form, "h", good))
    assert not allowed(before + written(form, "f", good)[:-1])
    assert allowed(written(form, "f", good, times=2)) is parallel


def written(form: ToolFormat, name: str, arguments: dict[str, str], *, times: int = 1) -> str:
    """Calls as a model of the family writes them."""
    if form.kind == "named":
        id = "[CALL_ID]a1B2c3D4e" if form.call_ids else ""
        call = f"{name}{id}[ARGS]{json.dumps(arguments)}"
    elif form.kind == "parameters":
        tags = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        call = f"<function={name}>\n{tags}</function>"
    else:
        call = f'{{"name": "{name}", "{form.arguments}": {json.dumps(arguments)}}}'
    begin = "" if form.bare else form.begin
    if form.one_per_block:
        return form.between.join([f"{begin}{form.opens}{call}{form.closes}{form.end}"] * times)
    return f"{begin}{form.opens}{form.between.join([call] * times)}{form.closes}{form.end}"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}, "'pattern' of the text 'a'"),
        ({"type": "object", "properties": {}, "minProperties": 1}, "'minProperties' of its parameters"),
        ({"type": "object", "properties": {"a>b": {"type": "integer"}}}, "the name 'a>b'"),
    ],
)
def test_what_tags_cannot_follow_is_refused_by_name(schema: dict[str, Any], words: str) -> None:
    use = ToolUse([FunctionTool("f", parameters=schema, strict=True)], forced=True)
    with pytest.raises(InvalidInput, match=words):
        calls_grammar(use, QWEN_CODER, {})


@pytest.mark.slow
def test_an_answer_is_a_call_or_follows_its_format(of_family: tuple[str, Served]) -> None:
    _, subject = of_family
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]} | {
        "additionalProperties": False
    }
    kinds = set()
    for seed in range(12):
        choice = subject.client.chat.completions.create(
            model="chat", messages=user("hi"), tools=TOOLS, seed=seed, temperature=1.0, max_tokens=900,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        ).choices[0]  # fmt: skip
        kinds.add(choice.finish_reason)
        if choice.finish_reason == "stop":
            jsonschema_rs.validate(schema, json.loads(choice.message.content))
    assert "stop" in kinds or "tool_calls" in kinds


def test_formats_are_recognised_by_their_templates() -> None:
    for name, template in TEMPLATES.items():
        assert format_of(ChatTemplate(template + MESSAGES, {})) == FORMS[name]
    assert format_of(ChatTemplate(MESSAGES, {})) == PROMPTED
    for unknown in ("{{ tools }}", "{{ tools }}<tool_call><function=x>", "{{ tools }}<tool_call><arg_key>"):
        assert format_of(ChatTemplate(unknown, {})) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_transformers(name: str) -> None:
    rendering = pytest.importorskip("transformers.utils.chat_template_utils")
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "é<"}}}]}
    messages = [*user("hi"), called, {"role": "tool", "content": "1", "tool_call_id": "x", "name": "f"}]
    template = TEMPLATES[name] + MESSAGES
    for tools in (TOOLS, None):
        (wanted,), _ = rendering.render_jinja_template(
            [messages], tools=tools, chat_template=template, add_generation_prompt=True
        )
        assert ChatTemplate(template, {}).render(messages, tools=tools) == wanted


def test_a_format_that_is_not_known_refuses_tools() -> None:
    weights = tiny()
    files = {name: weights.file(name) for name in ("config.json", "tokenizer.json", "generation_config.json")}
    files["chat_template.jinja"] = b"{{ tools }}" + MESSAGES.encode()
    with served(Checkpoint(dict(weights), files)) as subject, pytest.raises(openai.BadRequestError) as caught:
        subject.client.chat.completions.create(model="chat", messages=user("hi"), tools=TOOLS)
    assert caught.value.param == "tools"
