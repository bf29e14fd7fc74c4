"""Models that several modules use, made once."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

from tests.runtime.llm.models import Checkpoint, real_model, tiny


@pytest.fixture(scope="session")
def tiny_model() -> Checkpoint:
    return tiny()


@pytest.fixture(scope="session")
def chat_model() -> Checkpoint:
    return real_model()
