"""Worker without overlap: a fresh Python process, its imports, all weights bound, a prefill, one after another.

Started once a node has the whole checkpoint in its memory (`ours`). Says when each step had ended, and ends.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import msgspec

DEADLINE_S = 300.0


def main() -> None:
    question: Any = json.loads(sys.argv[1])
    ended: dict[str, int] = {"python": time.monotonic_ns()}
    from fleetstart.runtime.contract.function.spec import LLMSettings
    from fleetstart.runtime.llm.engine.generation import Request
    from fleetstart.runtime.llm.engine.sampler import SamplingParams
    from fleetstart.runtime.llm.model.loader import load_model
    from fleetstart.runtime.weights.weights import Weights
    from tests.bench.weights.descriptors import ask_descriptors

    ended["import"] = time.monotonic_ns()
    descriptors = ask_descriptors(question["socket"], question["checkpoint"])
    weights = Weights.attach(*descriptors, deadline_ns=time.monotonic_ns() + int(DEADLINE_S * 1e9))
    model = load_model(weights, msgspec.convert(question["settings"], LLMSettings), threads=question["threads"])
    ended["load"] = time.monotonic_ns()
    assert model.chat_template is not None
    text = model.chat_template.render([{"role": "user", "content": question["prompt"]}])
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    model.engine.add(Request(tokens=tokens, max_new_tokens=8, sampling=SamplingParams(temperature=0), ignore_eos=True))
    said = ""
    while not said and not model.engine.idle:
        said = "".join(delta.text for delta in model.engine.step())
    ended["execute"] = time.monotonic_ns()
    print(json.dumps({"ended": ended, "text": said}), flush=True)


if __name__ == "__main__":
    main()
