"""Sentence embeddings: MiniLM as a BERT encoder in plain torch, straight over the mapped weights."""

import json
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from fleetstart.runtime import Scale, function

MAX_TOKENS = 256


@function(weights="./weights", memory="1GiB", timeout_s=60, scale=Scale(max=2, keep_alive_s=60))
class Embed:
    def load(self, weights):
        """Once a worker. Tensors are views of the node's memory: nothing is copied, a late one is waited for."""
        config = json.loads(weights.file("config.json"))
        self.layers = config["num_hidden_layers"]
        self.heads = config["num_attention_heads"]
        self.epsilon = config["layer_norm_eps"]
        self.tokenizer = Tokenizer.from_str(weights.file("tokenizer.json").decode())
        self.tokenizer.enable_truncation(MAX_TOKENS)
        self.tokenizer.enable_padding(pad_id=config["pad_token_id"], pad_token="[PAD]")
        self.weights: Mapping[str, torch.Tensor] = dict(weights)

    @torch.inference_mode()
    def __call__(self, texts: list[str]) -> dict[str, list[list[float]]]:
        """`{"texts": [...]}` → `{"embeddings": [[...], ...]}`, of length one each."""
        encodings = self.tokenizer.encode_batch(texts)
        tokens = torch.tensor([encoding.ids for encoding in encodings])
        mask = torch.tensor([encoding.attention_mask for encoding in encodings], dtype=torch.float32)
        hidden = self.encode(tokens, mask)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"embeddings": F.normalize(mean, dim=1).tolist()}

    def encode(self, tokens, mask):
        """tokens and mask [texts, length] → hidden states [texts, length, width]."""
        table = self.weights
        hidden = table["embeddings.word_embeddings.weight"][tokens]
        hidden = hidden + table["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        hidden = hidden + table["embeddings.token_type_embeddings.weight"][0]
        hidden = self.norm("embeddings.LayerNorm", hidden)
        seen = mask[:, None, None, :] > 0
        for layer in range(self.layers):
            prefix = f"encoder.layer.{layer}"
            query, key, value = (
                self.linear(f"{prefix}.attention.self.{part}", hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for part in ("query", "key", "value")
            )
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2).flatten(2)
            attended = self.linear(f"{prefix}.attention.output.dense", mixed)
            hidden = self.norm(f"{prefix}.attention.output.LayerNorm", hidden + attended)
            wide = F.gelu(self.linear(f"{prefix}.intermediate.dense", hidden))
            hidden = self.norm(f"{prefix}.output.LayerNorm", hidden + self.linear(f"{prefix}.output.dense", wide))
        return hidden

    def linear(self, name, hidden):
        return F.linear(hidden, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def norm(self, name, hidden):
        width = hidden.shape[-1:]
        return F.layer_norm(hidden, width, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.epsilon)
