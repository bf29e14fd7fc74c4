"""How to call a system from a shell, told so that it works as it is pasted.

The key is never printed: the line reads it where it is kept, and curl hides from `ps` what follows `--oauth2-bearer`.
"""

from __future__ import annotations

import shlex

import msgspec

from fleetstart.runtime.contract.function.interface import Interface

from ..schemas.examples import example
from .api_client import Address

EXAMPLE_MAX_CHARS = 200
"""Longer ones are for `openapi.json`."""


def curl_command(url: str, address: Address) -> str:
    key = f' --oauth2-bearer "{address.key_in}"' if address.key else ""
    return f"curl {shlex.quote(url)}{key}"


def curl_for_function(url: str, interface: Interface | None, address: Address) -> str:
    """With the plainest input that the function takes."""
    if interface is None:
        return curl_command(url, address)
    if interface.takes == "llm":
        return curl_command(url + "/v1/models", address)
    if interface.takes == "bytes":
        return f"{curl_command(url, address)} --data-binary @FILE"
    if interface.files:
        return curl_command(url, address)
    if interface.takes == "whole" or interface.input.get("required"):
        body = msgspec.json.encode(example(interface.input, interface.schemas)).decode()
        if len(body) <= EXAMPLE_MAX_CHARS:
            return f"{curl_command(url, address)} -d {shlex.quote(body)}"
    return curl_command(url, address)


def access_line(kind: str, address: Address) -> str:
    """One line: who may call, and how. `kind`: SystemStatus.access."""
    if kind == "open":
        return (
            "open: whoever is on this machine may do everything without a key, until there is one "
            "(fs key create admin --scope admin)"
        )
    line = curl_command(address.url + "/api/v1/status", address)
    return f"every call shows a key; in a browser: fs dashboard; in a shell: {line}"
