"""Calls that the `openai` client repeats after a function's errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fleetstart.runtime.contract.errors import FleetError, HandlerFailed, Unavailable
from fleetstart.runtime.contract.worker_headers import REQUEST_HEADER, TOKEN_HEADER
from fleetstart.runtime.openai_api.responses import respond_error
from tests.runner.late import late
from tests.runtime.workers import TOKEN, Functions

openai = late("openai")

HEADERS = {TOKEN_HEADER: TOKEN, REQUEST_HEADER: "inv-test"}


def test_a_handler_that_raises_runs_once(functions: Functions) -> None:
    worker = functions.assigned("runs = []\ndef f():\n    runs.append(1)\n    raise ValueError(f'run {len(runs)}')\n")
    worker.ready()
    with (
        openai.OpenAI(base_url=worker.url, api_key="none", max_retries=1, default_headers=HEADERS) as client,
        pytest.raises(openai.InternalServerError, match="ValueError: run 1 "),
    ):
        client.models.list()


def test_errors_of_models_say_so_too() -> None:
    def headers(error: FleetError) -> dict[bytes, bytes]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(respond_error(send, error))
        return dict(sent[0]["headers"])

    assert headers(HandlerFailed("the engine failed"))[b"x-should-retry"] == b"false"
    assert b"x-should-retry" not in headers(Unavailable("the engine ends"))
