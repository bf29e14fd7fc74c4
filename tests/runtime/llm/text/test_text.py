"""Tokens to text as they come, stop strings, and chat templates from strangers."""

from __future__ import annotations

import itertools
import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from tokenizers import decoders, pre_tokenizers

from fleetstart.runtime.contract.errors import CheckpointInvalid, InvalidInput
from fleetstart.runtime.llm.text import chat_template
from fleetstart.runtime.llm.text.chat_template import ChatTemplate, read_chat_template
from fleetstart.runtime.llm.text.stop_strings import StopMatcher
from fleetstart.runtime.llm.text.tokenizer import Detokenizer, Tokenizer
from tests.runtime.llm.models import Checkpoint, byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer())


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_bytes_one_by_one_give_whole_characters_and_all_of_them(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.feed(token) for token in TOKENIZER.encode(text, add_special_tokens=False)]
    assert "".join(pieces) + detokenizer.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 257), max_size=60))
def test_any_tokens_give_what_the_whole_gives(tokens: list[int]) -> None:
    """Broken characters, too."""
    detokenizer = Detokenizer(TOKENIZER)
    got = "".join(detokenizer.feed(token) for token in tokens) + detokenizer.flush()
    assert got == TOKENIZER.decode(tokens)


LLAMA_2 = {"<s>": 0, "</s>": 1, "▁": 2, "▁a": 3, "b": 4, "▁▁": 5}


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=20))
def test_spaces_before_words_stay_behind_whatever_came_before(tokens: list[int]) -> None:
    """Also behind a special token, whose own text is empty: decoded first, a word has no space before it."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=LLAMA_2, merges=[]))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    made.add_special_tokens(["<s>", "</s>"])
    tokenizer = Tokenizer(made.to_str().encode())
    detokenizer = Detokenizer(tokenizer)
    got = "".join(detokenizer.feed(token) for token in tokens) + detokenizer.flush()
    assert got == tokenizer.decode(tokens)


def streamed(text: str, ends: list[int]) -> list[str]:
    """Pieces of a text as they come from tokens that end at these bytes of it, wherever in a character that is."""
    [(letters, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    tokens = [letters[begin:end] for begin, end in itertools.pairwise([0, *ends, len(letters)])]
    data = byte_tokenizer(*tokens, special=False)
    ids = tokenizers.Tokenizer.from_buffer(data).get_vocab()
    detokenizer = Detokenizer(Tokenizer(data))
    return [*(detokenizer.feed(ids[token]) for token in tokens), detokenizer.flush()]


def test_a_token_may_end_one_character_and_begin_the_next() -> None:
    text = "픠킠훗킕홚훎"
    pieces = streamed(text, list(range(2, 18, 3)))
    assert "".join(pieces) == text
    assert pieces[3] == text[:3]  # no longer held than the characters that are whole by then


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_characters="\ufffd", codec="utf-8"), min_size=1, max_size=20), st.data())
def test_tokens_that_end_anywhere_give_the_text(text: str, data: st.DataObject) -> None:
    most = len(text.encode()) - 1
    ends = sorted(data.draw(st.sets(st.integers(1, most)))) if most else []
    pieces = streamed(text, ends)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_is_shown_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    tokens = TOKENIZER.encode("é😀", add_special_tokens=False)
    assert [detokenizer.feed(token) for token in tokens] == ["", "é", "", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_bytes_that_never_become_a_character_are_shown_in_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    lead = TOKENIZER.encode("😀", add_special_tokens=False)[0]
    assert detokenizer.feed(lead) == ""
    assert detokenizer.flush() == "\ufffd"
    broken = Detokenizer(TOKENIZER)
    assert "".join(broken.feed(lead) for _ in range(12)).count("\ufffd") >= 8


def test_bytes_before_tokens_without_a_text_are_shown_all_the_same() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    lead, end = TOKENIZER.encode("😀", add_special_tokens=False)[0], 1
    pieces = [
        detokenizer.feed(token) for token in (lead, end, end, end, *TOKENIZER.encode("ab", add_special_tokens=False))
    ]
    assert pieces == ["", "", "", "\ufffd", "a", "b"]


def test_special_tokens_have_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    ids = TOKENIZER.encode("a<|im_end|>b", add_special_tokens=False)
    assert len(ids) == 3
    assert [detokenizer.feed(token) for token in ids] == ["a", "", "b"]


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(alphabet="ab.", max_size=40),
    stops=st.lists(st.text(alphabet="ab.", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(1, 5), min_size=1),
)
def test_a_stop_ends_the_text_where_it_begins_however_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown, rest, turn = "", text, 0
    while rest and not matcher.stopped:
        size = cuts[turn % len(cuts)]
        shown += matcher.feed(rest[:size])
        rest, turn = rest[size:], turn + 1
        # What is shown can never be taken back: no stop may begin in it.
        assert not any(stop in shown for stop in stops)
    if matcher.stopped:
        assert text.startswith(shown)
        assert any(text.startswith(stop, len(shown)) for stop in stops)
    else:
        assert shown + matcher.flush() == text
        assert not any(stop in text for stop in stops)


def test_text_that_may_become_a_stop_is_held_back_and_given_when_it_does_not() -> None:
    matcher = StopMatcher(["\n\nUser:"])
    assert matcher.feed("Hello\n") == "Hello"
    assert matcher.feed("\nUs") == ""
    assert matcher.feed("ual") == "\n\nUsual"
    assert matcher.feed("\n\nUser: hi") == ""
    assert matcher.stopped
    assert matcher.feed("more") == ""


def test_templates_run_in_a_sandbox() -> None:
    template = ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(InvalidInput, match="unsafe"):
        template.render([])
    template = ChatTemplate("{{ messages.append(1) }}", {})
    with pytest.raises(InvalidInput, match="unsafe"):
        template.render([])


def test_templates_have_what_those_of_transformers_have() -> None:
    text = "{% generation %}{% set a = 1 %}said{% endgeneration %} in {{ strftime_now('%Y')|int > 2000 }}{{ a }}"
    assert ChatTemplate(text, {}).render([]) == "said in True"


@pytest.mark.parametrize("text", ["{{ messages|length / 0 }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"])
def test_a_template_whose_expressions_fail_refuses_messages(text: str) -> None:
    with pytest.raises(InvalidInput, match="chat template refuses them"):
        ChatTemplate(text, {}).render([])


NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% set c = a + b %}{% endfor %}{% endfor %}"
ENDLESS = {
    "loops": NESTED,
    "a loop in itself": "{% for a in range(9) recursive %}{{ loop(range(99999)) if loop.depth < 9 }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "sums in a loop": "{% for a in range(99999) %}{% set c = range(99999)|sum %}{% endfor %}",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_computes_without_end_refuses_messages(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_S", 0.1)
    with pytest.raises(InvalidInput, match=r"chat template refuses them: it computes for more than 0\.1 s"):
        ChatTemplate(text, {}).render([])


@pytest.mark.parametrize(
    "text",
    [
        "{{ 10 ** (10 ** 9) }}", "{{ ('a' * 9999999999)|length }}", "{{ (9999999999 * [1])|length }}",
        "{% set x = namespace(y=3) %}{% for a in range(99) %}{% set x.y = x.y * x.y %}{% endfor %}",
    ],
)  # fmt: skip
def test_a_product_that_is_too_large_refuses_messages(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"(product|power) in it is too large"):
        ChatTemplate(text, {}).render([])


def test_loops_are_what_they_are_in_jinja() -> None:
    text = (
        "{% for a in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }}"
        "{{ '.' if loop.last }}{% else %}none{% endfor %}{% for a in missing %}{% else %} none{% endfor %}"
        " {% for a, b in {'x': 1}.items() if b * 2 == 2 %}{{ a * 3 }}{{ 2 ** 10 }}{{ 2 * 1.5 }}{% endfor %}"
        "{% for a in [[1, [2]], 3] recursive %}{{ loop(a) if a is iterable else a }}{{ loop.depth }}{% endfor %}"
    )
    plain = Environment().from_string(text).render()
    assert ChatTemplate(text, {}).render([]) == plain


def test_a_template_may_refuse_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidInput, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_a_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointInvalid, match="does not compile"):
        ChatTemplate("{% if %}", {})


def test_the_template_is_found_in_either_place(tiny_model: Checkpoint) -> None:
    inside = b'{"chat_template": "{{ bos_token }}inside", "bos_token": {"content": "<s>"}}'
    found = read_chat_template(inside, None)
    assert found is not None
    assert found.render([]) == "<s>inside"
    found = read_chat_template(inside, b"{{ bos_token }}beside")
    assert found is not None
    assert found.render([]) == "<s>beside"
    assert read_chat_template(b"{}", None) is None
    assert read_chat_template(None, None) is None
    with pytest.raises(CheckpointInvalid, match="JSON"):
        read_chat_template(b"{", None)


def test_a_broken_tokenizer_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json"):
        Tokenizer(b"{}")


def test_a_model_may_have_a_template_of_its_own_for_tools() -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | tojson }}"},
    ]
    config = json.dumps({"chat_template": templates}).encode()
    template = read_chat_template(config, None)
    assert template is not None
    assert template.takes_tools
    assert template.render([]) == "plain"
    assert template.render([], tools=[{"name": "é"}]) == 'with [{"name": "é"}]'
    other = read_chat_template(json.dumps({"chat_template": templates[1:]}).encode(), None)
    assert other is None
