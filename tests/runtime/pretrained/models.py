"""Small random models of transformers as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "good",
    "bad",
    "film",
    "cat",
    "sat",
    "on",
    "the",
    "mat",
    ".",
)
SMALL: dict[str, Any] = {
    "vocab_size": len(WORDS), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 64, "max_position_embeddings": 24,
}  # fmt: skip
LETTERS = "|ABCDEFGHIJKLMNOPQRSTUVWXYZ'"


def save_text_model(folder: Path, kind: str, **changes: Any) -> Path:
    """A BERT of a class that transformers has, with a tokenizer of few words. Every weight is random."""
    torch.manual_seed(0)
    model = getattr(transformers, kind)(transformers.BertConfig(**(SMALL | changes)))
    _randomise(model)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizer.from_pretrained(
        folder, model_max_length=SMALL["max_position_embeddings"]
    ).save_pretrained(folder)
    return folder


def save_listener(folder: Path) -> Path:
    """A Wav2Vec2 that spells letters."""
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=len(LETTERS) + 2, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        conv_dim=(16, 16), conv_kernel=(10, 8), conv_stride=(10, 8), num_feat_extract_layers=2,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, pad_token_id=len(LETTERS) + 1,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config)
    _randomise(model)
    model.save_pretrained(folder)
    names = [*LETTERS, "<unk>", "<pad>"]
    table = ", ".join(f'"{name}": {number}' for number, name in enumerate(names))
    (folder / "vocab.json").write_text(f"{{{table}}}")
    transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), bos_token=None, eos_token=None).save_pretrained(
        folder
    )
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def save_viewer(folder: Path) -> Path:
    """A ViT that tells seven kinds of pictures apart."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        id2label={number: f"kind {number}" for number in range(7)},
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config)
    _randomise(model)
    model.save_pretrained(folder)
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)
    return folder


def _randomise(model: Any) -> None:
    """Larger weights than a fresh model has, so that different inputs get clearly different answers."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
