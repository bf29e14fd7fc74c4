"""Keys' texts: what is made can be read, what was changed anywhere cannot, and nothing of a text is told."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.auth.api_key import TEXT_CHARS, MalformedKey, new_key_text, parse_key


def test_what_is_made_is_read_and_looks_as_scanners_expect() -> None:
    made = [new_key_text() for _ in range(50)]
    for one in made:
        assert parse_key(one.text) == (one.id, one.sha256)
        assert re.fullmatch(r"fs_[0-9a-z]{10}_[0-9A-Za-z]{49}", one.text)
        assert len(one.text) == TEXT_CHARS
    assert len({one.id for one in made}) == len({one.sha256 for one in made}) == 50


@given(at=st.integers(0, TEXT_CHARS - 1), to=st.characters())
def test_any_one_character_that_is_changed_is_noticed(at: int, to: str) -> None:
    text = new_key_text().text
    changed = text[:at] + to + text[at + 1 :]
    if changed != text:
        with pytest.raises(MalformedKey):
            parse_key(changed)


@given(st.text(max_size=200))
def test_nothing_else_is_a_key_and_errors_do_not_repeat_it(text: str) -> None:
    with pytest.raises(MalformedKey) as caught:
        parse_key("fs_" + text)
    assert len(text) < 8 or text not in str(caught.value)
