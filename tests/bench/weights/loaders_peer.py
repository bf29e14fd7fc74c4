"""Peer loaders, in a Python of their own. None of them verifies what it read.

Run by `loaders.py`, never by hand. Each is called as its documentation calls it, with its defaults, but for what is
said here. A question's `device` is where tensors go, the CPU unless it is given.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any

import torch
from forked import Load, serve

PACKAGES = ("torch", "safetensors", "fastsafetensors", "instanttensor", "tensorizer", "runai-model-streamer")


def safetensors(question: Any) -> Load:
    from safetensors.torch import load_file

    return lambda: load_file(question["path"], device=_device(question)).items()


def torch_load(question: Any) -> Load:
    return lambda: torch.load(question["path"], weights_only=True).items()


def torch_mmap(question: Any) -> Load:
    return lambda: torch.load(question["path"], weights_only=True, mmap=True).items()


def fastsafetensors(question: Any) -> Load:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device=_device(question), nogds=True)
    _KEPT.append(loader)

    def load() -> Any:
        loader.add_filenames({0: [question["path"]]})
        buffer = loader.copy_files_to_device()
        _KEPT.append(buffer)
        return ((name, buffer.get_tensor(name)) for name in loader.get_keys())

    return load


def tensorizer(question: Any) -> Load:
    """tensorizer with a reader a core: more read no faster here."""
    from tensorizer import TensorDeserializer

    def load() -> Any:
        deserializer = TensorDeserializer(question["path"], device="cpu", num_readers=os.cpu_count())
        _KEPT.append(deserializer)
        return deserializer.items()

    return load


def runai_streamer(question: Any) -> Load:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(question["path"])
            for name, tensor in streamer.get_tensors():
                yield name, tensor.to(_device(question))

    return load


def instanttensor(question: Any) -> Load:
    """instanttensor, which loads to GPUs alone."""
    from instanttensor import safe_open

    def load() -> Any:
        with safe_open(question["path"], framework="pt", device=_device(question)) as file:
            yield from file.tensors()

    return load


def save(question: Any) -> Any:
    """The checkpoint in the loader's own format."""
    from safetensors.torch import load_file

    tensors = load_file(question["source"])
    if question["format"] == "torch":
        torch.save(tensors, question["target"])
    else:
        from tensorizer import TensorSerializer

        serializer = TensorSerializer(question["target"])
        serializer.write_state_dict(tensors)
        serializer.close()
    return {"saved": question["format"]}


_KEPT: list[Any] = []
"""What holds the memory under the tensors."""


def _device(question: Any) -> str:
    return "cuda:0" if question.get("device") == "cuda" else "cpu"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    loaders = {
        "safetensors": safetensors,
        "torch.load": torch_load,
        "torch.load mmap": torch_mmap,
        "fastsafetensors": fastsafetensors,
        "InstantTensor": instanttensor,
        "tensorizer": tensorizer,
        "Run:ai streamer": runai_streamer,
    }
    serve({package: _version(package) for package in PACKAGES}, loaders, {"save": save})
