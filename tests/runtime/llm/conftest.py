"""Models that several modules use, made once. Torch computes on one thread: its pool spins where cores are shared."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch

from tests.runtime.llm.models import Checkpoint, real_model, tiny
from tests.runtime.llm.stages import LAYERS

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_model() -> Checkpoint:
    return tiny()


@pytest.fixture(scope="session")
def chat_model() -> Checkpoint:
    return real_model()


@pytest.fixture(scope="module")
def model() -> Checkpoint:
    return tiny(num_hidden_layers=LAYERS)
