"""A model served by our engine in a worker: the same life as any function's, over the same segment."""

from __future__ import annotations

import random
import struct
from math import prod
from typing import Any

import msgspec
import pytest

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.messages import StandBy, StoodBy, Wake, Woken
from fleetstart.runtime.contract.worker_headers import DRAINING_HEADER
from tests.runtime.segments import Segment
from tests.runtime.workers import Functions, Worker, until

pytest.importorskip("torch")

WORDS = ["<|end|>", "a", "b", "c", "d", "e", "f", "g"]
HIDDEN, HEADS, FFN, LAYERS = 16, 2, 32, 2


def tiny_model() -> Segment:
    """Two layers of noise over eight words: what it says means nothing, and is always the same."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (len(WORDS), HIDDEN)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (HIDDEN,), at + "post_attention_layernorm.weight": (HIDDEN,)}
        shapes |= {at + f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
        shapes |= {at + f"mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        shapes[at + "mlp.down_proj.weight"] = (HIDDEN, FFN)
    shapes["model.norm.weight"] = (HIDDEN,)
    noise = random.Random(7)
    contents = {}
    for name, shape in shapes.items():
        count = prod(shape)
        values = [1.0] * count if name.endswith("norm.weight") else [noise.gauss(0, 0.3) for _ in range(count)]
        contents[name] = struct.pack(f"<{count}f", *values)
    return Segment({name: ("F32", shape) for name, shape in shapes.items()}, files(), contents)


def files() -> dict[str, bytes]:
    config = {
        "model_type": "llama",
        "vocab_size": len(WORDS),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": FFN,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": 0,
    }
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return {"config.json": msgspec.json.encode(config), "tokenizer.json": tokenizer.to_str().encode()}


def assigned(functions: Functions, segment: Segment, **settings: Any) -> Worker:
    return functions.assigned(
        "",
        "chat",
        profile="torch",
        weights=CheckpointId("0" * 64),
        llm=LLMSettings(max_context_tokens=64, kv_memory_bytes=1 << 20),
        segment=segment.fds,
        concurrency=4,
        **settings,
    )


def test_a_model_streams_in_answers_and_drains(torch_functions: Functions) -> None:
    segment = tiny_model()
    worker = assigned(torch_functions, segment)
    segment.fill(*segment.chunks)
    worker.ready()
    asked = {"model": "f", "prompt": "a b c", "max_tokens": 8, "temperature": 0}
    answers = [worker.post(asked, path="v1/completions") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200], answers[0].text
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]
    asked = {"model": "f", "input": ["a b c", "a b c", "c"]}
    answer = worker.post(asked, path="v1/embeddings")
    assert answer.status_code == 200, answer.text
    same, again, other = (one["embedding"] for one in answer.json()["data"])
    assert same == pytest.approx(again, abs=1e-5)
    assert same != pytest.approx(other, abs=1e-2)
    assert sum(value * value for value in same) == pytest.approx(1, abs=1e-5)
    assert answer.json()["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    long = worker.post({"input": "a " * 65}, path="v1/embeddings")
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    worker.drain()
    assert worker.exit_status() == exit_codes.DRAINED


def test_a_model_stands_by_and_answers_alike_once_it_is_woken(torch_functions: Functions) -> None:
    segment = tiny_model()
    segment.fill(*segment.chunks)
    worker = assigned(torch_functions, segment)
    worker.ready()
    asked = {"model": "f", "prompt": "a b c", "max_tokens": 8, "temperature": 0}
    wanted = worker.post(asked, path="v1/completions").json()["choices"]
    for _ in range(2):
        worker.channel.send(StandBy())
        worker.next(StoodBy)
        refused = worker.post(asked, path="v1/completions")
        assert (refused.status_code, refused.headers[DRAINING_HEADER]) == (503, "1"), "its gateway calls another one"
        worker.channel.send(Wake())
        worker.next(Woken)
        assert worker.post(asked, path="v1/completions").json()["choices"] == wanted
    worker.channel.send(StandBy())
    worker.drain()
    assert worker.exit_status() == exit_codes.DRAINED


def test_a_call_is_finished_before_a_standby(torch_functions: Functions) -> None:
    segment = tiny_model()
    segment.fill(*segment.chunks)
    worker = assigned(torch_functions, segment)
    worker.ready()
    asked = {"model": "f", "prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True}
    with worker.client() as client, client.stream("POST", "v1/completions", json=asked) as response:
        lines = response.iter_lines()
        until(lambda: next(lines, ""), "the first token")
        worker.channel.send(StandBy())
        assert "data: [DONE]" in list(lines)
    worker.next(StoodBy)


def test_a_model_whose_weights_fail_tells_the_segments_error(torch_functions: Functions) -> None:
    segment = tiny_model()
    worker = assigned(torch_functions, segment)
    segment.fill(*segment.chunks[:1])
    segment.control.fail("checksum_mismatch", "chunk 1: not the bytes that were published")
    assert worker.start_error().code == "checksum_mismatch"
    assert worker.exit_status() == exit_codes.START_FAILED


def test_a_model_that_is_running_is_cut_off_after_the_grace(torch_functions: Functions) -> None:
    segment = tiny_model()
    segment.fill(*segment.chunks)
    worker = assigned(torch_functions, segment)
    worker.ready()
    asked = {"model": "f", "prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True}
    with worker.client() as client, client.stream("POST", "v1/completions", json=asked) as response:
        assert response.status_code == 200
        until(lambda: next(response.iter_bytes(), b""), "the first token")
        worker.drain(grace_s=0)
        assert worker.exit_status() == exit_codes.DRAINED
