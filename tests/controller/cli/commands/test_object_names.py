"""A name is sent as it was typed: what comes after # or ? in it is no other part of the URL, and .. no other path."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetstart.controller.cli.root import run
from tests.servers import AppServer, serving


class Asked:
    """Knows nothing, and keeps the path of each request."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


@pytest.fixture(scope="module")
def server(asked: Asked) -> Iterator[AppServer]:
    with serving(asked) as server:
        yield server


@pytest.mark.parametrize("name", ["app#old", "app?x", "../keys/app"])
@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("key revoke", "/api/v1/keys/NAME"),
        ("key rotate", "/api/v1/keys/NAME/rotate"),
        ("budget rm", "/api/v1/budgets/NAME"),
        ("budget set --usd 1 --per day", "/api/v1/budgets/NAME"),
        ("node drain", "/api/v1/nodes/NAME/drain"),
        ("node drain --undo", "/api/v1/nodes/NAME/drain"),
        ("node remove --force", "/api/v1/nodes/NAME"),
        ("invoice", "/api/v1/invoices/NAME"),
        ("rm -y", "/api/v1/functions/NAME"),
        ("secret rm", "/api/v1/secrets/default/NAME"),
        ("project rm", "/api/v1/projects/NAME"),
        ("volume rm", "/api/v1/volumes/NAME"),
    ],
)
def test_no_other_object_is_meant(
    server: AppServer, asked: Asked, tmp_path: Path, command: str, path: str, name: str
) -> None:
    asked.paths.clear()
    run(["--home", str(tmp_path), *command.split(), name, "--url", server.url])
    assert asked.paths[:1] == [path.replace("NAME", name)]
