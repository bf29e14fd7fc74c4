from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.native.neighbours import Child, Start, spawn


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(code, *fds)` runs Python code in a process of its own, with the descriptors as `sys.argv[1:]`."""
    children: list[Child] = []

    def run(code: str, *descriptors: int) -> Child:
        children.append(spawn(code, *descriptors))
        return children[-1]

    yield run
    for child in children:
        child.kill()
        child.communicate(timeout=10)
