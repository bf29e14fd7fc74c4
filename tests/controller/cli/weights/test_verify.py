"""Reading objects back through a controller: goes on over its restarts, and believes no answer of the wrong shape."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import pytest

from fleetstart.controller.cli.api_client import ApiClient
from fleetstart.runtime.contract.errors import NotFound, StoreFailed, TooLarge
from tests.controller.conftest import ControllerProcess
from tests.servers import serving


def test_a_read_goes_on_over_a_restart_of_the_controller(controller: ControllerProcess) -> None:
    data = os.urandom(48 << 20)
    key = f"bundles/{hashlib.sha256(data).hexdigest()}"
    controller.http.put(f"/api/v1/objects/{key}", content=data).raise_for_status()
    with ApiClient(controller.url) as server:
        blocks = server.read_range(key, 5, len(data) - 10)
        found = [next(blocks)]
        controller.kill()
        controller.spawn()
        found.extend(blocks)
        assert b"".join(found) == data[5:-5]
        with pytest.raises(TooLarge):
            server.read_object(key, len(data) - 1)
        assert server.read_object(key, len(data)) == data
        assert server.read_object(f"bundles/{'0' * 64}", 10) is None
        with pytest.raises(NotFound):
            next(server.read_range(f"bundles/{'0' * 64}", 0, 1))


@pytest.mark.parametrize("range_", [None, b"bytes 0-9/100", b"bytes 10-18/100"])
def test_an_answer_that_is_not_the_range_that_was_asked_for_is_refused(range_: bytes | None) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"10"), *([(b"content-range", range_)] if range_ else [])]
        await send({"type": "http.response.start", "status": 206 if range_ else 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(10)})

    with serving(app) as other, ApiClient(other.url) as server, pytest.raises(StoreFailed, match="were asked for"):
        next(server.read_range("bundles/x", 10, 10))
