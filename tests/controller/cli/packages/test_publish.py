"""A layer depends on its lock alone, and is built and sent once."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from fleetstart.controller.cli.packages.build import UNPACK_LIMITS
from fleetstart.controller.cli.packages.publish import PublishedLayer, publish_layer
from fleetstart.controller.cli.packages.requirements import find_requirements
from fleetstart.controller.cli.packages.unpacking import UnpackLimits
from fleetstart.runtime.contract.errors import BuildFailed
from fleetstart.runtime.contract.sizes import MIB
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
    store: Memory,
    machine: Path,
    wheels: Path,
    *wanted: str,
    upgrade: bool = False,
    cache: Path | None = None,
    limits: UnpackLimits = UNPACK_LIMITS,
) -> tuple[PublishedLayer, list[str]]:
    needed = find_requirements(list(wanted), "greet", machine)
    assert needed is not None
    log: list[str] = []
    environ = {**os.environ, **index(wheels), **({"UV_CACHE_DIR": str(cache)} if cache is not None else {})}
    done = publish_layer(
        needed,
        store,
        cache=machine,
        environ=environ,
        log=log.append,
        progress=lambda *_: None,
        upgrade=upgrade,
        limits=limits,
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


def write_bomb(wheels: Path, files: Iterable[tuple[str, int]]) -> None:
    """A wheel of zeros, which is small."""
    wheels.mkdir()
    info = "bomb-1.0.dist-info"
    with zipfile.ZipFile(wheels / "bomb-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as wheel:
        for name, size_bytes in files:
            with wheel.open(name, "w", force_zip64=True) as file:
                for _ in range(size_bytes // MIB):
                    file.write(bytes(MIB))
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: bomb\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/RECORD,,\n")


BOMBS: dict[str, tuple[list[tuple[str, int]], UnpackLimits, str]] = {
    "one large file": ([("big.bin", 800 * MIB)], UnpackLimits(size_bytes=64 * MIB), "67,108,864 bytes"),
    "large files": (
        [(f"{number}.bin", 40 * MIB) for number in range(20)],
        UnpackLimits(size_bytes=64 * MIB),
        "67,108,864 bytes",
    ),
    "many files": ([(f"a{number}.txt", 0) for number in range(30_000)], UnpackLimits(names=500), "500 files"),
    "many folders": ([(f"a{number}/", 0) for number in range(30_000)], UnpackLimits(names=500), "500 folders"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOMBS)
def test_a_wheel_that_unpacks_to_too_much_ends_the_build_and_leaves_nothing(tmp_path: Path, kind: str) -> None:
    files, limits, most = BOMBS[kind]
    write_bomb(tmp_path / "wheels", files)
    (tmp_path / "machine").mkdir()
    for _ in range(2):  # and what is left of uv's cache is whole
        with pytest.raises(BuildFailed) as failed:
            publish(Memory(), tmp_path / "machine", tmp_path / "wheels", "bomb", cache=tmp_path / "uv", limits=limits)
        assert f"more than {most}" in failed.value.message
        assert "layer" in failed.value.message
    assert list((tmp_path / "machine" / "layers").iterdir()) == []
    left = list((tmp_path / "uv").rglob("*"))
    assert len(left) < 50, "what uv's cache has of its own"
    assert sum(path.stat().st_size for path in left) < MIB
