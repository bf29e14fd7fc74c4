"""No value of a secret is left in text, however it stands there."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.process.redaction import LEAST_CHARS, Redactor

VALUES = st.lists(
    st.text(min_size=LEAST_CHARS, max_size=30).filter(lambda text: "*" not in text), min_size=1, max_size=4
)


@given(values=VALUES, around=st.text(max_size=10), ascii_only=st.booleans())
def test_values_are_found_plain_and_in_json(values: list[str], around: str, ascii_only: bool) -> None:
    redactor = Redactor(values)
    text = around.join(values)
    redacted = redactor.text(text)
    coded = redactor.data(json.dumps({"error": text}, ensure_ascii=ascii_only).encode())
    for value in values:
        assert value not in redacted or value in around
        assert (
            json.dumps(value, ensure_ascii=ascii_only)[1:-1].encode() not in coded or value in around + '{"error": "}'
        )


def test_a_key_of_several_lines_is_found_line_by_line() -> None:
    key = "-----BEGIN KEY-----\nMIIEvQIBADANBg\n  kqhkiG9w0BAQEF\nend\n-----END KEY-----\n"
    redactor = Redactor([key])
    assert redactor.text("MIIEvQIBADANBg") == "***"
    assert redactor.text("and kqhkiG9w0BAQEF!") == "and ***!"
    assert redactor.text("the end") == "the end", "a short line is in every text"
    assert redactor.text(key) == "***"


def test_of_two_values_that_overlap_nothing_is_left() -> None:
    assert Redactor(["abcd", "abcdefgh"]).text("abcdefgh abcd") == "*** ***"


def test_without_secrets_nothing_is_touched() -> None:
    assert not Redactor()
    assert Redactor().text("abc") == "abc"
    assert Redactor(["abc"]).text("abc") == "abc", "too short to be one; the door does not take it"
