"""Hidden GPUs: no question of a library reaches the driver, and no answer stays."""

from __future__ import annotations

import os
from unittest.mock import Mock

import pytest
import torch

from fleetstart.runtime.worker_io.hidden_gpus import gpus_hidden


@pytest.mark.slow  # imports transformers
def test_answers_about_gpus_are_asked_anew_afterwards() -> None:
    library = pytest.importorskip("transformers.utils.import_utils")
    with gpus_hidden():
        assert not library.is_torch_cuda_available()
        assert library.is_torch_cuda_available.cache_info().currsize == 1
    assert library.is_torch_cuda_available.cache_info().currsize == 0


@pytest.mark.slow  # imports transformers
def test_whether_a_graph_is_captured_is_not_asked_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks it for each mask of attention, and forks of a process whose driver has started have no GPU."""
    library = pytest.importorskip("transformers.utils.import_utils")
    asked = Mock(return_value=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", asked)
    with gpus_hidden():
        assert not library.is_tracing()
    asked.assert_not_called()
    assert not library.is_tracing()
    asked.assert_called_once()


def test_the_environment_is_as_before_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    with pytest.raises(KeyError, match=r"^''$"), gpus_hidden():
        raise KeyError(os.environ["CUDA_VISIBLE_DEVICES"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ
