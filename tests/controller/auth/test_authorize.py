"""Who may do what, without a server: keys, rights, functions, projects, and what a refusal says."""

from __future__ import annotations

from base64 import b64encode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.auth.api_key import new_key_text
from fleetstart.controller.auth.authorize import Caller, authenticate, is_fleetstart_key, key_in_headers
from fleetstart.controller.state.access_records import RIGHTS, Credential, KeyRecord, Right
from fleetstart.controller.state.access_table import EMPTY, AccessTable, read_table
from fleetstart.runtime.contract.errors import Forbidden, NotFound, Unauthorized

NOW = 1_800_000_000_000
FUNCTIONS = ("ml.chat", "ml.embed", "hello")


def record(text_hash: tuple[str, str, str], *, rights: list[Right] | None = None, ends: int = 0) -> KeyRecord:
    _, id, sha256 = text_hash
    credential = Credential(id=id, sha256=sha256, created_unix_ms=NOW, expires_unix_ms=ends)
    rights = rights if rights is not None else ["invoke"]
    return KeyRecord(name="ci", rights=rights, credentials=[credential], created_unix_ms=NOW, created_by="local")


def table(*records: KeyRecord) -> AccessTable:
    return read_table({one.name.encode(): msgspec.json.encode(one) for one in records}, {}, {}, {})


def caller(rights: list[Right], *, functions: list[str] | None = None, project: str = "") -> Caller:
    key = msgspec.structs.replace(record(new_key_text(), rights=rights), functions=functions or [], project=project)
    return Caller(name="ci", key=key)


def test_a_key_is_known_by_its_text_and_by_nothing_less() -> None:
    made, other = new_key_text(), new_key_text()
    known = table(record(made))
    assert authenticate(known, made.text, NOW).name == "ci"
    for text, told in ((None, "none was sent"), ("", "none was sent"), (other.text, "unknown to this system")):
        with pytest.raises(Unauthorized, match=told):
            authenticate(known, text, NOW)
    forged = msgspec.structs.replace(record(made).credentials[0], sha256=other.sha256)
    with pytest.raises(Unauthorized, match="is unknown"):
        authenticate(table(msgspec.structs.replace(record(made), credentials=[forged])), made.text, NOW)


def test_what_has_ended_says_so_to_whoever_has_it() -> None:
    made = new_key_text()
    with pytest.raises(Unauthorized, match="has expired"):
        authenticate(table(record(made, ends=NOW)), made.text, NOW)
    assert authenticate(table(record(made, ends=NOW + 1)), made.text, NOW)
    with pytest.raises(Unauthorized, match="was revoked"):
        authenticate(table(msgspec.structs.replace(record(made), revoked_unix_ms=NOW)), made.text, NOW)
    newer, old = record(new_key_text()).credentials[0], record(made, ends=NOW).credentials[0]
    rotated = msgspec.structs.replace(record(made), credentials=[newer, old])
    with pytest.raises(Unauthorized, match="is the old one"):
        authenticate(table(rotated), made.text, NOW)
    assert authenticate(table(rotated), made.text, NOW - 1)


def test_keys_that_are_not_understood_keep_the_door_shut() -> None:
    later = read_table({b"ci": b'{"name": 1}'}, {}, {}, {})
    assert later.locked
    assert not later.keys
    assert not EMPTY.locked
    assert read_table({b"ci": b'{"name": 1}'}, {}, {}, {}, later) is later


@pytest.mark.parametrize(
    ("own", "may"),
    [
        ("invoke", {"invoke"}),
        ("read", {"read"}),
        ("deploy", {"deploy", "read"}),
        ("node", {"node"}),
        ("admin", {"invoke", "read", "deploy", "node", "admin"}),
    ],
)
def test_rights_and_what_they_include(own: Right, may: set[str]) -> None:
    for right in RIGHTS:
        if right in may:
            caller([own]).require_right(right, "x")
        else:
            with pytest.raises(Forbidden, match=f"key ci may {own}; x needs {right}"):
                caller([own]).require_right(right, "x")


def test_a_limited_key_sees_its_functions_and_hears_nothing_of_others() -> None:
    of_functions = caller(["read"], functions=["ml.chat", "ml.later"])
    of_project = caller(["read"], project="ml")
    assert [name for name in FUNCTIONS if of_functions.sees(name)] == ["ml.chat"]
    assert [name for name in FUNCTIONS if of_project.sees(name)] == ["ml.chat", "ml.embed"]
    assert not caller(["read"], functions=["ml.chat"], project="default").sees("ml.chat")
    assert not caller(["read"], project="default").sees(""), "what is of no function is about the system"
    for name in ("hello", "hellp"):  # one exists, the other does not
        with pytest.raises(NotFound) as caught:
            of_project.require_existing(name, FUNCTIONS)
        assert caught.value.message == f"function {name} does not exist"
        assert "hello" not in caught.value.hint
    with pytest.raises(NotFound) as caught:
        of_project.require_existing("ml.embeds", FUNCTIONS)
    assert caught.value.hint == "did you mean ml.embed?"
    with pytest.raises(Forbidden, match="project ml"):
        of_project.require_unlimited("GET /api/v1/keys")


def test_a_name_without_a_project_is_in_the_one_of_the_key() -> None:
    of_project, of_functions = caller(["invoke"], project="ml"), caller(["invoke"], functions=["ml.chat", "ml.embed"])
    for one in (of_project, of_functions):
        assert one.full_name("chat") == "ml.chat"
        assert one.full_name("default.chat") == "chat"
        assert not one.sees("chat")
    for several in (caller(["invoke"]), caller(["invoke"], functions=["ml.chat", "hello"])):
        assert several.full_name("chat") == "chat"
        assert several.sees(several.full_name("ml.chat"))
    assert not caller(["deploy"], functions=["tool"]).sees("payments.tool")


def test_where_a_key_is_looked_for() -> None:
    basic = b"Basic " + b64encode(b"me:fs_x")
    assert key_in_headers(b"Bearer fs_x", None) == "fs_x"
    assert key_in_headers(b"bearer   fs_x ", None) == "fs_x"
    assert key_in_headers(b"Bearer user", b"fs_own") == "fs_own"
    assert key_in_headers(basic, None) is None, "browsers send it along with what other pages make them send"
    assert key_in_headers(None, None) is None
    assert is_fleetstart_key(b"Bearer fs_abc")
    assert not is_fleetstart_key(b"Bearer sk-abc")


@given(st.binary(max_size=3000))
def test_no_header_breaks_it(value: bytes) -> None:
    known = table(record(new_key_text()))
    for header in (value, b"Bearer " + value, b"Basic " + value, b"Bearer fs_" + value):
        for text in (key_in_headers(header, None), key_in_headers(None, header)):
            with pytest.raises(Unauthorized):
                authenticate(known, text, NOW)
        is_fleetstart_key(header)
