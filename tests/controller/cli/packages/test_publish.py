"""A layer depends on its lock alone, and is built and sent once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from fleetstart.controller.cli.packages.publish import PublishedLayer, publish_layer
from fleetstart.controller.cli.packages.requirements import find_requirements
from tests.wheels import index, make_wheel


class Memory:
    """A store that keeps sizes."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def object_size(self, key: str) -> int | None:
        return self.sizes.get(key)

    def put_object(self, key: str, content: Iterator[bytes] | bytes, size_bytes: int) -> None:
        self.sizes[key] = sum(map(len, [content] if isinstance(content, bytes) else content))
        assert self.sizes[key] == size_bytes


def publish(
    store: Memory, machine: Path, wheels: Path, *wanted: str, upgrade: bool = False
) -> tuple[PublishedLayer, list[str]]:
    needed = find_requirements(list(wanted), "greet", machine)
    assert needed is not None
    log: list[str] = []
    environ = {**os.environ, **index(wheels)}
    done = publish_layer(
        needed, store, cache=machine, environ=environ, log=log.append, progress=lambda *_: None, upgrade=upgrade
    )
    return done, log


def test_two_machines_build_the_same_layer_and_the_second_sends_nothing(tmp_path: Path) -> None:
    wheels, store = tmp_path / "wheels", Memory()
    make_wheel(wheels, "shape", "1.0", {"shape/__init__.py": "NAMES = {'a', 'b', 'c'} & {'b', 'c'}\n"})
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    first, log = publish(store, tmp_path / "one", wheels, "shape")
    assert first.uploaded_bytes
    assert "Compiling bytecode" in log
    second, _ = publish(store, tmp_path / "two", wheels, "shape==1.0")
    assert (second.layer.id, second.uploaded_bytes) == (first.layer.id, 0)
    again, log = publish(store, tmp_path / "two", wheels, "shape==1.0")
    assert (again.layer.id, again.uploaded_bytes, log) == (first.layer.id, 0, [])
    assert first.layer.packages == ["shape==1.0"]
    assert first.layer.modules == ["shape"]


def test_open_versions_stay_until_they_are_looked_for_again(tmp_path: Path) -> None:
    wheels, store = tmp_path / "wheels", Memory()
    make_wheel(wheels, "shape", "1.0", {"shape.py": "V = 1\n"})
    first, _ = publish(store, tmp_path, wheels, "shape")
    make_wheel(wheels, "shape", "2.0", {"shape.py": "V = 2\n"})
    assert publish(store, tmp_path, wheels, "shape")[0].layer == first.layer
    newer, _ = publish(store, tmp_path, wheels, "shape", upgrade=True)
    assert newer.layer.packages == ["shape==2.0"]
    assert publish(store, tmp_path, wheels, "shape")[0].layer == newer.layer, "the newer one is remembered"


def test_another_list_with_the_same_lock_is_not_built(tmp_path: Path) -> None:
    wheels, store = tmp_path / "wheels", Memory()
    make_wheel(wheels, "shape", "1.0", {"shape.py": ""})
    first, _ = publish(store, tmp_path, wheels, "shape")
    second, log = publish(store, tmp_path, wheels, "shape>=1")
    assert second.layer == first.layer
    assert "Compiling bytecode" not in log
