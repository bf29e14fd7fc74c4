"""A classifier as `save_pretrained` writes it. Small and random: that its numbers are right is what is looked at."""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "good", "bad", "film", "the", "end", "."]

folder = Path("mood/weights")
folder.mkdir()
(folder / "vocab.txt").write_text("\n".join(WORDS))
BertTokenizer.from_pretrained(folder, model_max_length=24).save_pretrained(folder)
torch.manual_seed(7)
config = BertConfig(
    vocab_size=len(WORDS), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
    max_position_embeddings=24, id2label={0: "sad", 1: "plain", 2: "glad"},
)  # fmt: skip
model = BertForSequenceClassification(config)
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.5)
model.save_pretrained(folder)
