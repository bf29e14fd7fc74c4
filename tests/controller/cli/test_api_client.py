"""The HTTP client of `fs`: answers of servers of other releases."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from fleetstart.controller.cli.api_client import ApiClient, nearest_function
from fleetstart.controller.cli.output import Unreachable
from fleetstart.controller.schemas.functions import FunctionInfo, VersionRef
from fleetstart.runtime.contract.errors import FleetError
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, Version
from tests.servers import serving


def answering(body: bytes) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        await send({"type": "http.response.body", "body": body})

    return app


def test_fields_of_a_later_release_are_passed_over() -> None:
    """Users' `fs` goes on while the server is upgraded before them. What they send is checked more strictly."""
    body = json.dumps({"version": 3, "of_a_later_release": {"x": 1}}).encode()
    with serving(answering(body)) as server, ApiClient(server.url) as client:
        assert client.get("/api/v1/any", VersionRef) == VersionRef(version=3)


def test_an_answer_of_another_server_says_so() -> None:
    with serving(answering(b"<html>")) as server, ApiClient(server.url) as client:
        with pytest.raises(FleetError, match="sent an answer that this `fs` cannot read") as caught:
            client.get("/api/v1/any", FunctionInfo)
        assert "is it a fleetstart server" in str(caught.value.hint)
        with pytest.raises(FleetError, match="sent an answer that this `fs` cannot read"):
            list(client.log_lines("f", tail=1, follow=False))


def test_a_server_that_sends_its_callers_elsewhere_is_not_spoken_with() -> None:
    """As a proxy does that speaks TLS alone. Its page was shown as the answer of a function."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"location", b"https://fleet.example.com/api/v1/any")]
        await send({"type": "http.response.start", "status": 308, "headers": headers})
        await send({"type": "http.response.body", "body": b"moved"})

    with serving(app) as server, ApiClient(server.url) as client:
        for ask in (lambda: client.get("/api/v1/any", FunctionInfo), lambda: client.http.post("/fn/f", json={})):
            with pytest.raises(Unreachable, match=f"{server.url} sends its callers to https://fleet.example.com"):
                ask()


@pytest.mark.parametrize(
    ("count", "hint"),
    [
        (0, "no function is deployed yet: fs deploy handler.py"),
        (2, "deployed are f-0000, f-0001"),
        (1022, f"deployed are {', '.join(f'f-{number:04}' for number in range(20))} and 1,002 more: fs ls"),
    ],
)
def test_an_unknown_name_has_a_hint_of_a_readable_length(count: int, hint: str) -> None:
    spec = FunctionSpec(name=FunctionName("f"), bundle=BundleId("b"), entry="a:b")
    found = [
        FunctionInfo(
            name=FunctionName(f"f-{number:04}"), version=Version(1), url="", spec=spec, deployed_unix_ms=0, workers=[],
            queued=0, running=0,
        )
        for number in range(count)
    ]  # fmt: skip
    with serving(answering(msgspec.json.encode(found))) as server, ApiClient(server.url) as client:
        assert nearest_function(client, "zzz") == hint
