"""Warm-up of a fork server that has imported transformers: loads and runs a tiny model, as each start does.

The first load compiles a thousand patterns of renamings and imports the modules of a model. Forked workers
inherit both.
"""

from __future__ import annotations

import torch
import transformers
from transformers.utils import logging

from ..worker_io.hidden_gpus import gpus_hidden
from .loading import load_model


def warm_up_pretrained() -> None:
    """Loads and runs the model."""
    logging.disable_progress_bar()
    config = transformers.BertConfig(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        max_position_embeddings=8,
    )
    with gpus_hidden():
        model = load_model(transformers.BertModel(config).state_dict(), config, kinds=("MODEL_MAPPING",))
        with torch.inference_mode():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), attention_mask=torch.ones(1, 2, dtype=torch.int64))
    logging.enable_progress_bar()  # the workers of other handlers may want it
