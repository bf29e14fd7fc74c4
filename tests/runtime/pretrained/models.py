"""Small random models of transformers as `save_pretrained` writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from tokenizers import pre_tokenizers

from tests.runner.late import late

transformers = late("transformers")

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
    _save_tokenizer(folder)
    return folder


TEXT_FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {}, "distilbert": {"dim": 32, "n_heads": 2, "hidden_dim": 64, "n_layers": 2},
    "roberta": {"max_position_embeddings": 25}, "mpnet": {"max_position_embeddings": 26},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "modernbert": {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3},
    "gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 24}, "qwen2": {"num_key_value_heads": 2},
    "llama": {"num_key_value_heads": 2},
}  # fmt: skip
"""Families with what makes them small."""


def save_family(folder: Path, family: str, auto: str, dtype: torch.dtype = torch.float32) -> Path:
    """A random model of a family, of the class that an auto class has for it."""
    torch.manual_seed(0)
    settings = {**SMALL, "pad_token_id": 0, "embedding_size": 16, "num_labels": 3, **TEXT_FAMILIES[family]}
    model = getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(family, **settings))
    _randomise(model)
    model.to(dtype).save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = transformers.BertTokenizer.from_pretrained(folder, model_max_length=SMALL["max_position_embeddings"])
    tokenizer.save_pretrained(folder)


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


def save_whisper(folder: Path) -> Path:
    """A Whisper that writes bytes."""
    marks = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|transcribe|>", "<|translate|>", "<|notimestamps|>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    end = marks[0]
    tokenizer = transformers.WhisperTokenizer(
        vocab={letter: number for number, letter in enumerate(letters)}, merges=[],
        unk_token=end, bos_token=end, eos_token=end,
    )  # fmt: skip
    tokenizer.add_tokens(marks[1:], special_tokens=True)
    tokenizer.save_pretrained(folder)
    numbers = tokenizer.convert_tokens_to_ids(marks)
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, max_target_positions=32,
        decoder_start_token_id=numbers[1], eos_token_id=numbers[0], pad_token_id=numbers[0], bos_token_id=numbers[0],
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    _randomise(model)
    model.generation_config.max_length = 24
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor().save_pretrained(folder)
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
