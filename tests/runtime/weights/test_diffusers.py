"""The recipe for diffusers in the documentation: its handler paints what the pipeline itself paints."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.docs.pages import blocks
from tests.runner.late import late
from tests.runtime.saved_models import segment_of

diffusers = late("diffusers")


@pytest.fixture
def unet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
    torch.manual_seed(0)
    model = diffusers.UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(16, 32), norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    model.save_pretrained(tmp_path / "unet")
    return tmp_path / "unet"


@pytest.mark.slow
def test_the_documented_handler_paints_what_the_pipeline_paints(unet: Path) -> None:
    (block,) = [block for block in blocks("docs/models.md", "python") if block.file == "painter/handler.py"]
    module: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec", dont_inherit=True), module)
    files = {"config.json": (unet / "config.json").read_bytes()}
    weights = segment_of(load_file(unet / "diffusion_pytorch_model.safetensors"), files).attach()
    painter = module["Painter"]()
    painter.load(weights)
    found = painter(seed=3, steps=2)

    plain = diffusers.DDIMPipeline(diffusers.UNet2DModel.from_pretrained(unet), diffusers.DDIMScheduler())
    wanted = plain(generator=torch.Generator().manual_seed(3), num_inference_steps=2).images[0]
    assert numpy.array_equal(numpy.asarray(Image.open(io.BytesIO(found))), numpy.asarray(wanted))
    places = {tensor.data_ptr() for tensor in weights.values()}
    assert {parameter.data_ptr() for parameter in painter.pipeline.unet.parameters()} == places
