"""Warm-up of the engine: the fork server loads and calls a model of one layer, so that workers inherit a warm path.

Half of a worker's time between assignment and ready was first-time work: late imports of libraries, regular
expressions, torch's operator tables, pages copied from its parent. The engine's thread has ended when this returns.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping

import msgspec
import torch
import uvloop

from ...contract.function.spec import EngineName, LLMSettings
from ...contract.sizes import MIB
from ...contract.weights.token_table import EMPTY, FILE, HEAD, MAGIC, PIECE, AddedToken, RestOfTokenizer
from ...worker_io.asgi import Message
from ...worker_io.hidden_gpus import gpus_hidden
from .app import create_app

DEADLINE_S = 20.0
_WIDTH = 32
_BYTES = 256
_CALLS = 6
_TEMPLATE = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ bos_token + 'a' }}
{% endif %}{{ '<s>' + message['role'] + '\\n' + message['content'] | trim + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ 'b' }}{% endif %}"""
_CONFIG = {
    "model_type": "llama", "vocab_size": _BYTES, "hidden_size": _WIDTH, "intermediate_size": _WIDTH,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip


class _TinyWeights(Mapping[str, torch.Tensor]):
    """Weights of a model of one layer."""

    def __init__(self) -> None:
        narrow = torch.zeros(16, _WIDTH, dtype=torch.float16)
        square = torch.zeros(_WIDTH, _WIDTH, dtype=torch.float16)
        vector = torch.ones(_WIDTH, dtype=torch.float16)
        layer = {
            "input_layernorm": vector, "self_attn.q_proj": square, "self_attn.k_proj": narrow,
            "self_attn.v_proj": narrow, "self_attn.o_proj": square, "post_attention_layernorm": vector,
            "mlp.gate_proj": square, "mlp.up_proj": square, "mlp.down_proj": square,
        }  # fmt: skip
        self._tensors = {f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()}
        self._tensors["model.embed_tokens.weight"] = torch.zeros(_BYTES, _WIDTH, dtype=torch.float16)
        self._tensors["model.norm.weight"] = vector
        self._files = {
            "config.json": msgspec.json.encode(_CONFIG),
            "generation_config.json": b'{"eos_token_id":1}',
            "tokenizer_config.json": b'{"bos_token":"<s>"}',
            "chat_template.jinja": _TEMPLATE.encode(),
            FILE: _table(),
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def file(self, name: str) -> bytes:
        return self._files[name]


def _table() -> bytes:
    """Token table with one token for each byte and no merges."""
    texts = [chr(_BYTES + byte).encode() for byte in range(_BYTES)]
    offsets = array("I", (2 * number for number in range(_BYTES + 1)))
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "<s>", "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "model": {"type": "WordLevel", "vocab": {PIECE: 0}, "unk_token": PIECE},
    }
    rest = msgspec.json.encode(RestOfTokenizer(tokenizer, {"<s>": AddedToken(0, True)}))
    head = HEAD.pack(MAGIC, _BYTES, 1, 2 * _BYTES, len(rest), 0)
    symbols, slots = array("I", range(_BYTES)), array("I", [EMPTY] * 4)
    return b"".join((head, symbols.tobytes(), offsets.tobytes(), slots.tobytes(), *texts, rest))


def warm_up_engine(engine: EngineName = "native") -> None:
    """Loads and calls the model on the CPU. Errors: RuntimeError if the engine fails here, as it would in every
    worker."""
    loop = uvloop.new_event_loop()
    try:
        with gpus_hidden():
            loop.run_until_complete(asyncio.wait_for(_serve_calls(engine), DEADLINE_S))
    finally:
        loop.close()


async def _serve_calls(engine: EngineName) -> None:
    settings = LLMSettings(engine=engine, max_batch=2, max_context_tokens=256, kv_memory_bytes=MIB)
    for _ in range(2):  # the second load runs code that the first has specialised
        # One thread: the decoder's helper threads would not survive a fork.
        app = create_app(_TinyWeights(), settings, name="warm-up", threads=1)
        try:
            for call in range(_CALLS):
                status = await _call(app, stream=call % 2 == 0, temperature=call % 3 / 2)
                if status != 200:
                    raise RuntimeError(f"the engine answers {status} here")
        finally:
            app.close()


async def _call(app: object, *, stream: bool, temperature: float) -> int:
    messages = [{"role": "user", "content": "Is this a warm-up?"}]
    value = {"messages": messages, "stream": stream, "temperature": temperature, "top_p": 0.9, "max_tokens": 4}
    bodies = [msgspec.json.encode(value)]
    status = 0

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await asyncio.Event().wait()  # the client stays connected
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    await app(scope, receive, send)  # type: ignore[operator]
    return status
