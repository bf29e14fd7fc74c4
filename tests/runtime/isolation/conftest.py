"""Needs of the tests of isolation: skips those that the machine cannot run."""

from __future__ import annotations

import pytest

from tests.runtime.workers import ForkServerProcess


@pytest.fixture
def needs_namespaces(python_server: ForkServerProcess) -> None:
    if not python_server.warm.isolation:
        pytest.skip(f"this machine refuses namespaces: {python_server.warm.refused}")
