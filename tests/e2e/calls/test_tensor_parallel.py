"""A language model that is split over the two CPU devices of a node: placed, called, one of its processes killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.systems import System
from tests.runner.late import late
from tests.servers import wait_until

models, safetensors = late("tests.runtime.llm.models"), late("safetensors.torch")

HANDLER = """
from fleetstart.runtime import LLM

{name} = LLM(weights="./weights", {settings}memory="512MiB", max_context=512, kv_memory="16MiB")
"""
ASKED: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 440, "temperature": 0}

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.isolations("namespaces", why="models that are split over devices are of functions in namespaces"),
]


def handler(folder: Path, name: str, settings: str, **shape: int) -> Path:
    """A small random Llama in a folder of its own, with a handler."""
    made = models.tiny(**shape)
    weights = folder / name / "weights"
    weights.mkdir(parents=True)
    safetensors.save_file({key: tensor.clone() for key, tensor in made.items()}, weights / "model.safetensors")
    for file, data in made._files.items():
        (weights / file).write_bytes(data)
    path = folder / name / "handler.py"
    path.write_text(HANDLER.format(name=name, settings=settings))
    return path


@pytest.fixture(scope="module")
def split(system: System, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("split")
    for name, settings in (("split", "tensor_parallel_size=2, "), ("whole", "")):
        ran = system.fs("deploy", str(handler(folder, name, settings)), "--keep-alive", "600", "--no-probe")
        assert ("engine native (it splits the model over 2 devices)" in ran.err) == (name == "split"), ran.err
    yield system
    system.fs("scale", "split", "--keep-alive", "1")
    wait_until(lambda: not any(reserved(system)), what="the end of the reservation")


def reserved(system: System) -> list[int]:
    (node,) = system.status().nodes
    return [device.reserved_bytes for device in node.devices]


def streamed(system: System) -> Iterator[str]:
    """The pieces of a streamed answer."""
    with system.http.stream("POST", "/fn/split/v1/completions", json=ASKED | {"stream": True}, timeout=120) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                said = msgspec.json.decode(line.removeprefix("data: "))
                assert "error" not in said, said
                yield from (choice["text"] for choice in said.get("choices", ()))  # the last event is the bill


def text_of(system: System, name: str) -> str:
    return str(system.ok(name, ASKED, path="/v1/completions", timeout_s=120)["choices"][0]["text"])


def test_it_answers_as_one_device_does_and_has_both(split: System) -> None:
    assert text_of(split, "split") == text_of(split, "whole")
    wait_until(lambda: all(reserved(split)), what="both devices in the node's report")
    (worker,) = split.worker_processes("split")
    assert len([child for child in split.of_kind("child") if child.parent == worker.pid]) == 1


def test_a_stream_goes_on_when_one_of_its_processes_is_killed(split: System) -> None:
    wanted = text_of(split, "split")
    (worker,) = split.worker_processes("split")
    (rank,) = [child for child in split.of_kind("child") if child.parent == worker.pid]
    pieces = streamed(split)
    text = next(pieces)
    split.kill(rank)
    wait_until(lambda: not worker.alive, what="the end of its group")
    assert text + "".join(pieces) == wanted
    said = [line.text for line in split.logs("split")]
    assert any("rank 1 was killed by SIGKILL: this worker ends" in text for text in said), said


@pytest.mark.parametrize(
    ("settings", "shape", "reason"),
    [
        (
            "tensor_parallel_size=3, ",
            {},
            "the model cannot be split over 3 devices: num_key_value_heads 2 is no multiple of 3",
        ),
        ('tensor_parallel_size=2, engine="transformers", ', {}, "engine='transformers' names another"),
        ('tensor_parallel_size=2, gpu="cpu", ', {}, "tensor_parallel_size=2 needs 2 whole devices, and gpu asks for"),
        (
            "tensor_parallel_size=4, ",
            {"num_attention_heads": 4, "num_key_value_heads": 4},
            "each worker asks for 4 devices (gpu='4'), which no node has",
        ),
        ("tensor_parallel_size=2, network=True, ", {}, "connect on a loopback of their own"),
        ("tensor_parallel_size=0, ", {}, "tensor_parallel_size=0 is no number of devices"),
    ],
)
def test_what_cannot_be_split_is_refused_at_the_deploy(
    system: System, tmp_path: Path, settings: str, shape: dict[str, int], reason: str
) -> None:
    error = system.refused(handler(tmp_path, "never", settings, **shape))
    assert reason in error.message, error.message
