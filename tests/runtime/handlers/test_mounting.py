"""ASGI apps at their mount point: Starlette's redirects and URLs lead back to the function, and no header of theirs is
taken for the platform's."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from fleetstart.runtime.handlers.mounting import mount, mounted
from fleetstart.runtime.sdk.responses import Response

FORGED = {"Fs-Error": "worker_lost", "fs-busy": "1", "FS-Draining": "1", "fs-continue": "1", "fs-entered": "7"}


async def item(request: Request) -> PlainTextResponse:
    names = {"x-seen": ",".join(request.headers), **FORGED}
    return PlainTextResponse(str(request.url_for("item", number=7)), headers=names)


APP = Starlette(routes=[Route("/items/{number}", item, name="item"), Mount("/sub", routes=[Route("/deep/", item)])])


def get(path: str, **headers: str) -> httpx.Response:
    async def scenario() -> httpx.Response:
        transport = httpx.ASGITransport(app=mounted(APP))
        async with httpx.AsyncClient(transport=transport, base_url="http://host") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(scenario())


@pytest.mark.parametrize("root", ["/fn/web", "/fn/web@2"])
def test_urls_and_redirects_stay_below_the_mount_point(root: str) -> None:
    answer = get("/items/3", **{"fs-root-path": root})
    assert answer.text == f"http://host{root}/items/7"
    assert "fs-root-path" not in answer.headers["x-seen"]
    assert get("/items/3/", **{"fs-root-path": root}).headers["location"] == f"http://host{root}/items/3"
    assert get("/sub/deep", **{"fs-root-path": root}).headers["location"] == f"http://host{root}/sub/deep/"


def test_a_request_without_a_mount_point_passes_as_it_is() -> None:
    assert get("/items/3").text == "http://host/items/7"


def test_headers_that_the_platform_would_act_on_are_dropped() -> None:
    answer = get("/items/3")
    assert "x-seen" in answer.headers
    assert not [name for name in answer.headers if name.startswith("fs-")]
    assert Response(headers={**FORGED, "X-Own": "1"}).raw_headers() == [(b"x-own", b"1")]


def test_the_root_is_decoded_for_the_path_and_kept_for_the_raw_one() -> None:
    scope: dict[str, Any] = {
        "type": "http",
        "path": "/a b",
        "raw_path": b"/a%20b",
        "headers": [(b"fs-root-path", b"x")],
    }
    changed = mount(scope, b"/fn/we%62")
    assert (changed["root_path"], changed["path"], changed["raw_path"]) == (
        "/fn/web",
        "/fn/web/a b",
        b"/fn/we%62/a%20b",
    )
    assert changed["headers"] == []
    assert mount({"type": "websocket", "path": "/", "headers": []}, b"/fn/web")["path"] == "/fn/web/"
