"""What is printed for a shell: a line for curl that works as it is pasted, and has no key in it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.api_client import Address, shell_path
from fleetstart.controller.cli.curl_hint import access_line, curl_command, curl_for_function
from fleetstart.runtime.contract.function.interface import Interface

URL = "http://127.0.0.1:7433/fn/f"
OPEN = Address("http://127.0.0.1:7433")
KEYED = OPEN._replace(key="fs_a_secret", key_in="$(cat ~/.fleetstart/key)")
FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": {"it": {"type": "string", "examples": ["it's"]}},
    "required": ["it"],
}


def test_the_key_is_named_by_its_place_and_never_told() -> None:
    assert curl_command(URL, KEYED) == f'curl {URL} --oauth2-bearer "$(cat ~/.fleetstart/key)"'
    assert curl_command(URL, OPEN) == f"curl {URL}"
    assert "fs_a_secret" not in access_line("keys", KEYED)
    assert "curl" not in access_line("open", OPEN)


CHAT = '{"messages":[{"role":"user","content":"Hello!"}]}'

PICTURE = {
    "type": "object",
    "properties": {**FIELDS["properties"], "picture": {"type": "string", "format": "binary"}, "size": {}},
    "required": ["it", "picture"],
}
FOUR = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}


@pytest.mark.parametrize(
    ("interface", "wanted"),
    [
        (None, [URL]),
        (Interface(takes="asgi"), [URL]),
        (Interface(takes="llm"), [URL + "/v1/chat/completions", "--json", CHAT]),
        (Interface(takes="bytes", files=True), [URL, "--data-binary", "@FILE"]),
        (Interface(takes="fields", input=FIELDS), [URL, "-d", '{"it":"it\'s"}']),
        (Interface(takes="fields", input={**FIELDS, "required": []}), [URL]),
        (Interface(takes="fields", input=PICTURE, files=True), [URL, "-F", "it=it's", "-F", "picture=@FILE"]),
        (Interface(takes="whole", input={}), [URL, "-d", "{}"]),
        (Interface(takes="whole", input=FOUR), [URL, "-d", "[1.5,1.5,1.5,1.5]"]),
        (Interface(takes="whole", input={"type": "integer"}), [URL, "-d", "1"]),
        (Interface(takes="whole", input={"const": "x" * 300}), [URL]),
    ],
)
def test_a_function_is_called_with_the_plainest_that_it_takes(interface: Interface | None, wanted: list[str]) -> None:
    assert shlex.split(curl_for_function(URL, interface, OPEN)) == ["curl", *wanted]


def test_a_model_without_a_template_of_chats_is_given_a_plain_prompt() -> None:
    said = shlex.split(curl_for_function(URL, Interface(takes="llm"), OPEN, chats=False))
    assert said == ["curl", URL + "/v1/completions", "--json", '{"prompt":"Once upon a time"}']


def test_a_path_is_spelled_for_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert shell_path(Path("/home/ada/.fleetstart/key")) == "~/.fleetstart/key"
    assert shell_path(Path("/home/ada/my home/key")) == "~/'my home/key'"
    assert shell_path(Path("/srv/it's/key")) == "'/srv/it'\"'\"'s/key'"
