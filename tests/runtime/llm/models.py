"""Models for tests: a tiny random Llama in memory, the real one from disk, and engines over both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from fleetstart.runtime.contract.weights.decoder_config import DecoderConfig, read_config
from fleetstart.runtime.contract.weights.quantization import INT8_CONFIG
from fleetstart.runtime.llm.engine.block_pool import BlockPool
from fleetstart.runtime.llm.engine.engine import Engine
from fleetstart.runtime.llm.engine.generation import Request, TokenDelta
from fleetstart.runtime.llm.engine.inference_engine import InferenceEngine
from fleetstart.runtime.llm.engine.runner import Decoder, LocalRunner
from fleetstart.runtime.llm.engine.scheduler import Scheduler
from fleetstart.runtime.llm.model.layers import StageWeights, gather
from fleetstart.runtime.llm.model.native_decoder import NativeDecoder
from fleetstart.runtime.llm.model.torch_decoder import TorchDecoder
from fleetstart.runtime.llm.model.weights import ModelWeights
from fleetstart.runtime.llm.text.tokenizer import Tokenizer as OurTokenizer

ROOT = Path(__file__).parents[3]
REAL = ROOT / "examples/chat/weights"
SPECIAL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BLOCK_TOKENS = 16
CONTEXT_TOKENS = 512

TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "eos_token_id": 1,
}  # fmt: skip


class Checkpoint(dict[str, Tensor]):
    """Weights by name with files beside them, as a segment gives them."""

    def __init__(self, tensors: dict[str, Tensor], files: dict[str, bytes]) -> None:
        super().__init__(tensors)
        self._files = files

    def file(self, name: str) -> bytes:
        return self._files[name]

    def names(self) -> list[str]:
        """Of the files."""
        return list(self._files)


def byte_tokenizer(*more: str, special: bool = True) -> bytes:
    """tokenizer.json with a token a byte and no merges: half a character is easy to come by.

    `more`: added tokens after the letters, special ones or not.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *letters, *more])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=special) for token in more])
    return tokenizer.to_str().encode()


def tiny(*, dtype: torch.dtype = torch.float16, seed: int = 0, **changes: Any) -> Checkpoint:
    """Noise in the shape of a Llama, with every shape unlike the others, always the same for one seed."""
    fields = TINY | changes
    noise = torch.Generator().manual_seed(seed)
    hidden, ffn, head_dim = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    q_width, kv_width = fields["num_attention_heads"] * head_dim, fields["num_key_value_heads"] * head_dim
    shapes = {"model.embed_tokens": (fields["vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(fields["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm": (hidden,), at + "post_attention_layernorm": (hidden,)}
        shapes |= {at + "self_attn.q_proj": (q_width, hidden), at + "self_attn.o_proj": (hidden, q_width)}
        shapes |= {at + "self_attn.k_proj": (kv_width, hidden), at + "self_attn.v_proj": (kv_width, hidden)}
        shapes |= {at + "mlp.gate_proj": (ffn, hidden), at + "mlp.up_proj": (ffn, hidden)}
        shapes |= {at + "mlp.down_proj": (hidden, ffn)}
    if not fields["tie_word_embeddings"]:
        shapes["lm_head"] = (fields["vocab_size"], hidden)
    tensors = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=noise) * 0.3
        tensors[f"{name}.weight"] = (values + 1.0 if "norm" in name else values).to(dtype)
    files = {
        "config.json": msgspec.json.encode(fields),
        "tokenizer.json": byte_tokenizer(),
        "generation_config.json": b'{"eos_token_id": 1, "do_sample": false}',
        "chat_template.jinja": TEMPLATE.encode(),
        "tokenizer_config.json": b"{}",
    }
    return Checkpoint(tensors, files)


def in_int8(weights: Checkpoint) -> Checkpoint:
    """The checkpoint with its layers' matrices in int8, a factor for each row, as `fs weights quantize` writes them."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        tensors[name] = tensor
        if ".layers." in name and tensor.dim() == 2:
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor.float() / scale).round().to(torch.int8)
            tensors[name + "_scale"] = scale
    files = {name: weights.file(name) for name in weights.names()}
    config = msgspec.json.decode(files["config.json"]) | {"quantization_config": INT8_CONFIG}
    return Checkpoint(tensors, files | {"config.json": msgspec.json.encode(config)})


def real_model() -> Checkpoint:
    """SmolLM2-135M-Instruct as the example's set-up step converts it; skips without it."""
    if not (REAL / "model.safetensors").exists():
        pytest.skip(f"no model in {REAL}: `make models` converts it")
    from safetensors.torch import load_file

    files = {path.name: path.read_bytes() for path in REAL.iterdir() if path.suffix in (".json", ".jinja")}
    return Checkpoint(load_file(REAL / "model.safetensors"), files)


def config_of(weights: ModelWeights, context: int = CONTEXT_TOKENS) -> DecoderConfig:
    config = read_config(weights.file("config.json"), weights.file("generation_config.json"))
    return replace(config, context_tokens=min(context, config.max_positions))


def stage_of(weights: ModelWeights, first: int = 0, end: int | None = None) -> StageWeights:
    config = config_of(weights)
    return gather(weights, config, first, config.layer_count if end is None else end)


def native(
    weights: ModelWeights,
    *,
    blocks: int = 64,
    threads: int = 1,
    isa: str = "auto",
    kv: str = "fp32",
    context: int = CONTEXT_TOKENS,
) -> NativeDecoder:
    return NativeDecoder(
        config_of(weights, context), stage_of(weights),
        kv_dtype=kv, block_count=blocks, block_tokens=BLOCK_TOKENS, threads=threads, isa=isa,
    )  # fmt: skip


def plain(
    weights: ModelWeights,
    *,
    blocks: int = 64,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    context: int = CONTEXT_TOKENS,
) -> TorchDecoder:
    return TorchDecoder(
        config_of(weights, context), stage_of(weights),
        device=torch.device(device), dtype=dtype, block_count=blocks, block_tokens=BLOCK_TOKENS,
    )  # fmt: skip


def engine(
    weights: ModelWeights,
    decoder: Decoder,
    *,
    blocks: int = 64,
    max_batch: int = 8,
    token_budget: int = 256,
    context_tokens: int = CONTEXT_TOKENS,
    share_prefixes: bool = False,
) -> Engine:
    scheduler = Scheduler(
        BlockPool(blocks, BLOCK_TOKENS),
        max_batch=max_batch,
        token_budget=token_budget,
        context_tokens=context_tokens,
        share_prefixes=share_prefixes,
    )
    return Engine(
        LocalRunner(decoder), scheduler, OurTokenizer(weights.file("tokenizer.json")), config_of(weights).eos_ids
    )


def run(engine: InferenceEngine, requests: list[Request]) -> list[list[TokenDelta]]:
    """Every request's deltas, in its order; all are added before the first step."""
    ids = [engine.add(request) for request in requests]
    deltas: dict[int, list[TokenDelta]] = {id: [] for id in ids}
    while not engine.idle:
        for delta in engine.step():
            deltas[delta.id].append(delta)
    return [deltas[id] for id in ids]


def tokens_of(deltas: list[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.tokens]


def text_of(deltas: list[TokenDelta]) -> str:
    return "".join(delta.text for delta in deltas)
