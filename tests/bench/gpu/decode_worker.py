"""Process of one engine for `decode`: loads the model in a folder, then answers how long a batch decodes.

Arguments: FOLDER ENGINE DEVICE. Asked {"batch", "prompt_tokens", "new_tokens"}, it answers with the seconds to the last
request's first token, the tokens beyond each request's first one, and the seconds that these took.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.llm.engine.generation import Request
from fleetstart.runtime.llm.engine.sampler import SamplingParams
from fleetstart.runtime.llm.server.engines import load_engine
from tests.runtime.llm.models import Checkpoint

BATCH, CONTEXT_TOKENS = 64, 1152
KV_BYTES = {"cuda": 16 << 30, "cpu": 256 << 20}
LETTERS = 40000
"""Tokens of which prompts are made: the vocabulary of the example has more."""

Decode = Callable[[int, int, int], dict[str, Any]]


_numbers = itertools.count()


def prompts(batch: int, tokens: int) -> list[list[int]]:
    """Prompts that no earlier call has had, so that no engine finds the beginning of one in its cache."""
    first = next(_numbers) * 7919
    return [[(first + row * 131 + place * 17) % LETTERS for place in range(tokens)] for row in range(batch)]


def ours(folder: Path, engine: Any, device: str) -> Decode:
    """Engine as a worker has it."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".jinja")}
    settings = LLMSettings(
        engine=engine,
        dtype="auto",
        max_batch=BATCH,
        max_context_tokens=CONTEXT_TOKENS,
        kv_memory_bytes=KV_BYTES[device],
    )
    model = load_engine(Checkpoint(in_one_piece(folder / "model.safetensors", device), files), settings, threads=0)
    torch.set_num_threads(model.torch_threads)

    def generate_s(several: list[list[int]], new: int) -> float:
        greedy, running = SamplingParams(temperature=0), model.engine
        began_s = time.perf_counter()
        for one in several:
            running.add(Request(tokens=one, max_new_tokens=new, sampling=greedy, ignore_eos=True))
        while not running.idle:
            running.step()
        return time.perf_counter() - began_s

    return _beyond_first(generate_s)


def in_one_piece(path: Path, device: str) -> dict[str, torch.Tensor]:
    """A file's tensors on the device, one behind the other, as a load brings them there."""
    header, begin = read_header(path)
    whole = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)[begin:].to(device)
    return {
        name: whole[entry["data_offsets"][0] : entry["data_offsets"][1]].view(torch.float16).view(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's header, and where its data begin."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(size)), 8 + size


def vllm(folder: Path, device: str) -> Decode:
    """vLLM's own `LLM`."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(folder),
        max_model_len=CONTEXT_TOKENS,
        max_num_seqs=BATCH,
        kv_cache_memory_bytes=KV_BYTES[device],
        enable_prefix_caching=False,
        enforce_eager=device == "cpu",
        disable_log_stats=True,
    )

    def generate_s(several: list[list[int]], new: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        llm.generate([{"prompt_token_ids": one} for one in several], params, use_tqdm=False)
        return time.perf_counter() - began_s

    return _beyond_first(generate_s)


def _beyond_first(generate_s: Callable[[list[list[int]], int], float]) -> Decode:
    """Measures a batch beyond its first tokens, which are those of a run of its own: prompts of one request are
    computed beside tokens of others, in either engine."""

    def decode(batch: int, prompt: int, new: int) -> dict[str, Any]:
        first_s = generate_s(prompts(batch, prompt), 1)
        whole_s = generate_s(prompts(batch, prompt), new)
        return {"first_s": first_s, "tokens": batch * (new - 1), "decode_s": whole_s - first_s}

    return decode


def main() -> None:
    folder, engine, device = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like; answers have their own descriptor
    by_itself = engine.endswith("by itself")
    decode = vllm(folder, device) if by_itself else ours(folder, engine, device)
    about = {"torch": torch.__version__} | ({"vllm": version("vllm")} if "vllm" in engine else {})
    for batch in (1, 8, BATCH):  # kernels are chosen and compiled, and steps captured, on first use
        decode(batch, 4, 16)
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        answer = decode(question["batch"], question["prompt_tokens"], question["new_tokens"])
        print(json.dumps(answer), file=answers, flush=True)
    os._exit(0)  # threads of engines need not be waited for


if __name__ == "__main__":
    main()
