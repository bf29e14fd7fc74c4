"""Deploys of bad input: a clear error with its code, and nothing has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.checkpoints import torch_zip, write_safetensors
from tests.e2e.systems import System
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.usefixtures("unharmed")

WEIGHED = """
import torch
from fleetstart.runtime import Scale, function

@function(name="{name}", weights="./weights", memory="512MiB", scale=Scale(max=1, keep_alive_s={keep_alive_s}))
class Sum:
    def load(self, weights):
        self.sums = {{name: float(tensor.double().sum()) for name, tensor in weights.items()}}

    def __call__(self):
        return self.sums
"""


def weighed(system: System, name: str, *, keep_alive_s: float = 600) -> Path:
    """A handler that wants ./weights; the folder is its own."""
    return system.source(WEIGHED.format(name=name, keep_alive_s=keep_alive_s), folder=name)


def deployed(system: System) -> list[str]:
    return [info.name for info in system.status().functions]


# ── refused at deploy ──────────────────────────────────────────────────────────────────────────────


def test_a_file_without_a_handler(system: System) -> None:
    error = system.refused(system.source("def plain():\n    return 1\n", folder="plain"))
    assert error.code == "no_handler"
    assert "handler.py" in error.message
    assert "plain" not in deployed(system)


def test_a_syntax_error_is_told_with_its_line(system: System) -> None:
    text = "from fleetstart.runtime import function\n\n@function\ndef broken(:\n    pass\n"
    error = system.refused(system.source(text, folder="broken"))
    assert error.code == "syntax_error"
    assert "handler.py:4" in error.message


def test_a_file_that_is_not_there(system: System) -> None:
    ran = system.fs("deploy", str(system.root / "nowhere.py"), "--json", code=None)
    assert ran.code in (1, 3)
    assert "nowhere.py" in ran.error.message


def test_missing_weights(system: System) -> None:
    error = system.refused(weighed(system, "unweighed"))
    assert error.code == "weights_missing"
    assert "weights" in error.message
    assert "unweighed" not in deployed(system)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_is_refused_by_name_and_by_content_and_never_opened(system: System, file: str) -> None:
    name = "pickled-" + file.partition(".")[2]
    handler = weighed(system, name)
    evidence = system.root / f"opened-{name}"
    (handler.parent / "weights").mkdir(exist_ok=True)
    (handler.parent / "weights" / file).write_bytes(torch_zip(evidence))
    error = system.refused(handler)
    assert error.code == "pickle_refused"
    assert file in error.message
    assert "safetensors" in error.hint  # how to convert it
    assert not evidence.exists()
    assert name not in deployed(system)


def test_a_truncated_checkpoint(system: System) -> None:
    handler = weighed(system, "truncated")
    file = write_safetensors(handler.parent / "weights" / "model.safetensors")
    whole = file.stat().st_size
    os.truncate(file, whole - 1000)
    error = system.refused(handler)
    assert error.code == "checkpoint_invalid"
    assert str(whole) in error.message
    assert str(whole - 1000) in error.message


def test_a_bundle_that_is_too_big(system: System) -> None:
    text = """
    from fleetstart.runtime import function

    @function(include=["data/*"])
    def stuffed():
        return 1
    """
    handler = system.source(text, folder="stuffed")
    (handler.parent / "data").mkdir()
    with (handler.parent / "data" / "huge.bin").open("wb") as huge:
        huge.truncate(65 << 20)
    error = system.refused(handler)
    assert error.code == "too_large"
    assert "huge.bin" in error.message
    assert "stuffed" not in deployed(system)


def test_a_spec_that_asks_for_the_impossible(system: System) -> None:
    error = system.refused(
        system.source("from fleetstart.runtime import function\n@function(memory='-1')\ndef f(): ...\n", folder="f")
    )
    assert error.code == "invalid_spec"


# ── found out when the weights are fetched ─────────────────────────────────────────────────────────


def part_of(system: System, name: str) -> Path:
    """The file in the store that holds the function's weights."""
    checkpoint = system.info(name).spec.weights
    assert checkpoint is not None
    return next((system.home / "store" / "checkpoints" / checkpoint).glob("*.safetensors"))


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 0xFF]))


def test_a_wrong_checksum_in_the_store(system: System) -> None:
    handler = weighed(system, "flipped")
    write_safetensors(handler.parent / "weights" / "model.safetensors", tensors=9)
    system.deploy_file(handler, "--no-probe")
    part = part_of(system, "flipped")
    middle = part.stat().st_size // 2
    flip(part, middle)
    watch = Stopwatch()
    status, error = system.failed("flipped", {}, timeout_s=30)
    assert (status, error.code) == (502, "checksum_mismatch")
    assert watch.unhindered_s < 15
    assert "chunk" in error.message
    # Nothing of the broken copy is kept: as soon as the store is right, a deploy gives it another chance.
    flip(part, middle)
    system.deploy_file(handler, "--no-probe")
    assert system.ok("flipped", {}, timeout_s=30)["layers.2.weight"] == 2.0 * 64 * 1024
    system.fs("rm", "flipped", "--yes")


def test_a_part_that_was_cut_in_the_store(system: System) -> None:
    handler = weighed(system, "cut")
    write_safetensors(handler.parent / "weights" / "model.safetensors", tensors=10)
    system.deploy_file(handler, "--no-probe")
    part = part_of(system, "cut")
    os.truncate(part, part.stat().st_size - 5000)
    status, error = system.failed("cut", {}, timeout_s=30)
    assert error.code in ("store_error", "checkpoint_invalid"), error
    assert status in (400, 502)
    assert part.name in error.message
    # The same deploy again mends the store: what is not whole there is sent again.
    system.deploy_file(handler, "--no-probe")
    assert system.ok("cut", {}, timeout_s=30)["layers.3.weight"] == 3.0 * 64 * 1024
    system.fs("rm", "cut", "--yes")
