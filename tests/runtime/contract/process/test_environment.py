"""Settings in the environment: what is read, and that what cannot be used is refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.runtime.contract.process.environment import (
    ConfigError,
    Environment,
    read_choice,
    read_flag,
    read_int,
    read_log_format,
    read_required,
    read_size,
    read_store,
)
from fleetstart.runtime.contract.sizes import MIB


@given(st.integers(-10, 200) | st.text(max_size=5))
def test_a_number_is_within_its_limits_or_refused(value: int | str) -> None:
    env = {"FS_N": str(value)}
    text = env["FS_N"] or "7"
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= 100:
        assert read_int(env, "FS_N", 7, least=1, most=100) == int(text)
    else:
        with pytest.raises(ConfigError, match="FS_N="):
            read_int(env, "FS_N", 7, least=1, most=100)


def test_what_is_not_set_or_empty_has_its_default() -> None:
    for env in ({}, {"FS_N": "", "FS_STORE": "", "FS_LOG_FORMAT": "", "FS_FLAG": ""}):
        assert read_int(env, "FS_N", 7, most=9) == 7
        assert read_size(env, "FS_N", 7) == 7
        assert read_store(env, "FS_STORE", "/s") == "/s"
        assert read_log_format(env) == "text"
        assert not read_flag(env, "FS_FLAG")
        assert read_choice(env, "FS_N", ("a", "b")) is None


def test_a_choice_is_one_of_those_given_and_an_error_names_them() -> None:
    assert read_choice({"FS_X": "b"}, "FS_X", ("a", "b")) == "b"
    with pytest.raises(ConfigError, match="FS_X='c' must be a or b, or not set"):
        read_choice({"FS_X": "c"}, "FS_X", ("a", "b"))


def test_values() -> None:
    env = {"FS_A": "3", "FS_B": "2MiB", "FS_C": "1", "FS_STORE": "s3://b/x", "FS_LOG_FORMAT": "json"}
    assert (read_required(env, "FS_A"), read_int(env, "FS_A", 0, most=9), read_size(env, "FS_B", 0)) == (
        "3",
        3,
        2 * MIB,
    )
    assert (read_flag(env, "FS_C"), read_flag(env, "FS_A")) == (True, False)
    assert (read_store(env, "FS_STORE"), read_log_format(env)) == ("s3://b/x", "json")


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("FS_X", "", lambda env: read_required(env, "FS_X")),
        ("FS_X", "much", lambda env: read_size(env, "FS_X", 0)),
        ("FS_X", "10", lambda env: read_int(env, "FS_X", 0, most=9)),
        ("FS_X", "", lambda env: read_store(env, "FS_X")),
        ("FS_X", "s3:///prefix", lambda env: read_store(env, "FS_X")),
        ("FS_LOG_FORMAT", "xml", read_log_format),
    ],
)
def test_what_cannot_be_used_is_named(name: str, text: str, read: Callable[[Environment], object]) -> None:
    with pytest.raises(ConfigError, match=name):
        read({name: text})
