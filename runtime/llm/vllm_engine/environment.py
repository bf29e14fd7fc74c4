"""Settings that vLLM reads from the environment, for an engine inside a worker. Set before its first import."""

from __future__ import annotations

import logging
import os

VARIABLES = {
    # The engine runs in the worker's own thread: a process of its own would import everything again.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The worker's cores are the node's choice (its control group), and some sandboxes refuse to change it.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Our sampling is a processor of logits as the first model runner has them.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Tokens are chosen by ours; FlashInfer's sampler would only be imported, and compiled where it is not.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # A worker has a loopback of its own and nothing else; vLLM would look for its address on the internet.
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    # Its configuration of logging takes as long as three layers; the worker has its own.
    "VLLM_CONFIGURE_LOGGING": "0",
    # Only our plugin is registered, by name: those of other packages would be run in every start.
    "VLLM_PLUGINS": "fleetstart",
}


def prepare_environment() -> None:
    """Sets the variables that are not set; what a function's `env` says wins."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm").setLevel(logging.ERROR)
