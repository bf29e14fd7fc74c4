"""Ray Serve as the peer, in a Python of its own: serves `hello` and, if given a model, `chat`, both scaled to zero.

Run by `peer.py`, never by hand. Asked {"replicas": APP}, it answers their number; the end of its input is its end.
Settings are the quickest that Ray offers for waking: no delay upwards, half a second between looks at the load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from typing import Any

os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_SERVE_LOG_TO_STDERR="0", RAY_AUTH_MODE="disabled")

import ray
from ray import serve

SCALING = {
    "min_replicas": 0,
    "initial_replicas": 0,
    "max_replicas": 1,
    "target_ongoing_requests": 16,
    "upscale_delay_s": 0,
    "downscale_delay_s": 2,
    "metrics_interval_s": 0.5,
    "look_back_period_s": 2,
}


@serve.deployment(autoscaling_config=SCALING, max_ongoing_requests=32, ray_actor_options={"num_cpus": 0})
class Hello:
    async def __call__(self, request: Any) -> dict[str, str]:
        value = await request.json()
        return {"message": f"Hello, {value.get('name', 'world')}!"}


@serve.deployment(autoscaling_config=SCALING, max_ongoing_requests=32, ray_actor_options={"num_cpus": 0})
class Chat:
    """Chat deployment: the same weights and arithmetic by transformers; one token, so that its end is the TTFT."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        from transformers import AutoTokenizer, LlamaForCausalLM

        torch.set_num_threads(threads)
        self.torch = torch
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    async def __call__(self, request: Any) -> dict[str, Any]:
        value = await request.json()
        return await asyncio.to_thread(self.generate, value["messages"], value["max_tokens"])

    def generate(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        encoded = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with self.torch.inference_mode():
            ids = self.model.generate(**encoded, max_new_tokens=max_tokens, do_sample=False)
        text = self.tokenizer.decode(ids[0, encoded["input_ids"].shape[1] :])
        return {"text": text, "prompt_tokens": encoded["input_ids"].shape[1]}


def replicas(app: str) -> int:
    status = serve.status().applications.get(app)
    if status is None:
        return 0
    return sum(number for one in status.deployments.values() for number in one.replica_states.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--temp-dir", required=True)
    parser.add_argument("--model", help="folder with the chat model")
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints where it likes; answers have their own descriptor
    began_s = time.monotonic()
    cores = len(os.sched_getaffinity(0))
    ray.init(
        num_cpus=cores,
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=200_000_000,
        _node_ip_address="127.0.0.1",
        _temp_dir=options.temp_dir,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": options.port})
        serve.run(Hello.bind(), name="hello", route_prefix="/hello", blocking=False)
        if options.model:
            serve.run(Chat.bind(options.model, cores), name="chat", route_prefix="/chat", blocking=False)
        ready = {"ray": ray.__version__, "boot_s": round(time.monotonic() - began_s, 1)}
        print(json.dumps(ready), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(replicas(json.loads(line)["replicas"])), file=answers, flush=True)
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
