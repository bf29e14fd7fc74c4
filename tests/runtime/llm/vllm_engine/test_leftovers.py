"""vLLM's engine leaves no file behind, also where its process is killed once it is built."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.server.engines import load_engine
from tests.runtime.llm.engine.test_adapter_engines import attached, base_of, named, wanted_of
from tests.runtime.llm.engine.test_inference_engine import SETTINGS
from tests.runtime.llm.models import run, tokens_of

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test"),
]


def test_its_files_are_gone_when_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def left() -> list[str]:  # torch's cache has one name for all processes of a user
        return [file.name for file in tmp_path.iterdir() if not file.name.startswith("torchinductor_")]

    weights, adapters = attached(base_of())
    engine = load_engine(weights, LLMSettings(engine="vllm", **SETTINGS), threads=1, adapters=adapters).engine
    assert left() == []
    wanted = wanted_of(base_of())
    for _ in range(2):
        assert tokens_of(run(engine, [named("sql")])[0]) == wanted["sql"]
        engine.release()
        engine.regain()
        assert left() == []
    engine.close()
