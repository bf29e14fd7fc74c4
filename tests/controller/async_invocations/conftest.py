"""Async calls against a real controller, with a node driven by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.controller.conftest import ControllerProcess
from tests.servers import AppServer, wait_until

ASYNC = {"prefer": "respond-async"}


class Client:
    """Makes async calls and asks what became of them."""

    def __init__(self, controller: ControllerProcess) -> None:
        self.http = controller.http

    def post(self, path: str, body: bytes = b"", **headers: str) -> httpx.Response:
        return self.http.post(f"/fn/{path}", content=body, headers={**ASYNC, **_named(headers)})

    def accepted(self, path: str, body: bytes = b"", **headers: str) -> str:
        answer = self.post(path, body, **headers)
        assert answer.status_code == 202, answer.text
        assert answer.headers["location"] == f"/api/v1/invocations/{answer.json()['id']}"
        return str(answer.json()["id"])

    def get(self, invocation: str, **headers: str) -> dict[str, Any]:
        answer = self.http.get(f"/api/v1/invocations/{invocation}", headers=_named(headers))
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def until(self, invocation: str, *statuses: str, deadline_s: float = 15) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.update(self.get(invocation))
            return found["status"] in statuses

        try:
            wait_until(reached, deadline_s, what=f"{invocation} to be {statuses}")
        except AssertionError as error:
            raise AssertionError(f"{error}: it is {found}") from error
        return found

    def listed(self, **query: str | int) -> list[dict[str, Any]]:
        answer = self.http.get("/api/v1/async", params=query)
        assert answer.status_code == 200, answer.text
        return list(answer.json())

    def rows_of(self, function: str) -> list[dict[str, Any]]:
        """Of the ledger."""
        answer = self.http.get("/api/v1/invocations", params={"function": function, "limit": 1000})
        return list(answer.json())


def _named(headers: dict[str, str]) -> dict[str, str]:
    return {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture
def calls(controller: ControllerProcess) -> Client:
    return Client(controller)


class Receiver:
    """Takes webhooks; answers the first ones as it is told to."""

    def __init__(self) -> None:
        self.answers: list[int] = []
        self.got: list[tuple[dict[str, str], bytes, str]] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        message = await receive()
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.got.append((headers, message["body"], scope["path"]))
        status = self.answers.pop(0) if self.answers else 200
        location = [(b"location", b"/elsewhere")] if status == 302 else []
        await send({"type": "http.response.start", "status": status, "headers": location})
        await send({"type": "http.response.body", "body": b"x" * 100})


@pytest.fixture
def receiver() -> Receiver:
    return Receiver()


@pytest.fixture
def hook(receiver: Receiver) -> Iterator[str]:
    server = AppServer(receiver).start()
    try:
        yield f"{server.url}/hook"
    finally:
        server.close()
