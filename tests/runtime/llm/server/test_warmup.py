"""The fork server's rehearsal of the engine: it works, and leaves nothing that a fork must not copy."""

from __future__ import annotations

import threading

import pytest
import torch

from fleetstart.runtime.contract.function.spec import EngineName
from fleetstart.runtime.llm.server import served_models, warmup


@pytest.mark.parametrize("engine", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_it_serves_and_leaves_no_thread(monkeypatch: pytest.MonkeyPatch, engine: EngineName) -> None:
    if engine == "transformers":
        pytest.importorskip("transformers.modeling_utils")  # it may leave a thread of its own, which is not counted
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    before = threading.enumerate()
    warmup.warm_up_engine(engine)
    assert threading.enumerate() == before


def test_it_says_when_the_engine_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.setattr(served_models.ServedModels, "adapter_of", lambda self, model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warmup.warm_up_engine()


def test_it_never_asks_for_a_gpu_where_there_could_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(warmup, "create_app", lambda *_, **__: 1 / 0)
    warmup.warm_up_engine()
