"""curl commands that call a server or a function, ready to paste into a shell.

They do not contain the key: the shell reads it from its file or variable, and curl hides what follows
`--oauth2-bearer` from `ps`.
"""

from __future__ import annotations

import shlex

import msgspec

from fleetstart.runtime.contract.function.interface import Interface

from ..schemas.examples import example, has_file
from .api_client import Address

EXAMPLE_MAX_CHARS = 200
"""A longer example body is not shown; `openapi.json` has it."""


def curl_command(url: str, address: Address) -> str:
    key = f' --oauth2-bearer "{address.key_in}"' if address.key else ""
    return f"curl {shlex.quote(url)}{key}"


def curl_for_function(url: str, interface: Interface | None, address: Address, *, chats: bool = True) -> str:
    """curl command with an example of the function's input. `chats`: as of a language model with a template of them."""
    if interface is None:
        return curl_command(url, address)
    if interface.takes == "llm":
        given = {"messages": [{"role": "user", "content": "Hello!"}]} if chats else {"prompt": "Once upon a time"}
        route = "/v1/chat/completions" if chats else "/v1/completions"
        return f"{curl_command(url + route, address)} --json {shlex.quote(msgspec.json.encode(given).decode())}"
    if interface.takes == "bytes":
        return f"{curl_command(url, address)} --data-binary @FILE"
    if interface.files:
        return " ".join((curl_command(url, address), *(f"-F {shlex.quote(part)}" for part in _parts(interface))))
    if interface.takes == "whole" or interface.input.get("required"):
        body = msgspec.json.encode(example(interface.input, interface.schemas)).decode()
        if len(body) <= EXAMPLE_MAX_CHARS:
            return f"{curl_command(url, address)} -d {shlex.quote(body)}"
    return curl_command(url, address)


def _parts(interface: Interface) -> list[str]:
    """The parts of a form that a call cannot leave out: FILE stands for a path of the reader's."""
    properties, required = interface.input.get("properties", {}), interface.input.get("required", [])
    parts = []
    for name in required:
        value = example(properties.get(name, {}), interface.schemas)
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        parts.append(f"{name}=@FILE" if has_file(properties.get(name, {})) else f"{name}={text}")
    return parts


def access_line(kind: str, address: Address) -> str:
    """One line on who may call the server, and how. `kind`: SystemStatus.access."""
    if kind == "open":
        return (
            "open: programs on this machine need no key, until the first one is created "
            "(fs key create admin --scope admin)"
        )
    line = curl_command(address.url + "/api/v1/status", address)
    return f"every request needs a key; in a browser: fs dashboard; in a shell: {line}"
