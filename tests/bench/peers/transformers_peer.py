"""transformers as the peer, in a Python of its own: generates greedily with the same weights.

Run by `peer.py`, never by hand. Asked {"prompts", "new", "threads"}, it answers how long the first token took and how
long those after it; the end of its input is its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

import torch
import transformers
from transformers import LlamaForCausalLM

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def generate(model: Any, ids: torch.Tensor, new: int) -> tuple[torch.Tensor, float]:
    began_s = time.perf_counter()
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
    if ids.is_cuda:
        torch.cuda.synchronize()
    return found[:, ids.shape[1] :], time.perf_counter() - began_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--temp-dir", help="every peer is given one; this needs none")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--dtype", required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print where they like; answers have their own descriptor
    model = LlamaForCausalLM.from_pretrained(options.model, dtype=DTYPES[options.dtype]).eval().to(options.device)
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": options.dtype}
    print(json.dumps(about), file=answers, flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        torch.set_num_threads(question["threads"])
        ids = torch.tensor(question["prompts"], device=options.device)
        tokens, first_s = generate(model, ids, 1)
        rest_s = 0.0
        if question["new"] > 1:
            tokens, whole_s = generate(model, ids, question["new"])
            rest_s = whole_s - first_s
        answer = {"first_s": first_s, "rest_s": rest_s, "tokens": tokens.tolist()}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
