"""Steps that a process takes before its weights are there: with the first stage of every family, on any device."""

from __future__ import annotations

import pytest
import torch

from fleetstart.runtime.llm.model.first_steps import BLOCKS, take_first_steps
from fleetstart.runtime.llm.model.torch_decoder import TorchDecoder
from tests.runtime.llm.batches import batch_of, some_tokens, table
from tests.runtime.llm.families import FAMILIES, family_model
from tests.runtime.llm.models import BLOCK_TOKENS, config_of, stage_of

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
@pytest.mark.parametrize("case", FAMILIES)
def test_a_first_stage_takes_them_and_computes_as_before(case: str, device: str) -> None:
    weights = family_model(case).weights

    def first_stage() -> TorchDecoder:
        return TorchDecoder(
            config_of(weights), stage_of(weights, 0, 1),
            device=torch.device(device), dtype=torch.float32, block_count=BLOCKS, block_tokens=BLOCK_TOKENS,
        )  # fmt: skip

    batch = batch_of([(some_tokens(20), 0, table(0, 20))])
    fresh, warm = first_stage(), first_stage()
    take_first_steps(warm)
    torch.testing.assert_close(warm.forward(batch), fresh.forward(batch))
