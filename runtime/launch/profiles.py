"""Profiles of pooled workers: modules imported ahead of an assignment, and inherited environment variables.

A profile is imported when the node comes up. What takes seconds beside it is imported by a fork server of its own, once
a function needs it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping

INHERITED = (
    "PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHOME", "CUDA_VISIBLE_DEVICES",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT",
)  # fmt: skip
"""Variables of the daemon that a worker inherits. All others may be secrets."""
SPINS = "2000"
"""Rounds of 40 ns for which threads of libgomp, and so torch's, spin for more work before they sleep. By themselves
they spin for 300,000, on cores that other workers compute on: of two workers with a small model on two cores, each was
ten times as slow. Most gaps between the operations of a pass are shorter, so a model alone keeps its speed."""

PROFILES = {
    "python": (
        "httptools",
        "starlette.applications",
        "uvloop",
        "fleetstart.runtime.sdk.calls",
        "fleetstart.runtime.worker.lifecycle",
    ),
    "torch": (
        "torch",
        "tokenizers",
        "jinja2",
        "fleetstart.runtime.weights.weights",
        "fleetstart.runtime.llm.server.app",
    ),
}
"""Modules that every worker would otherwise import for itself; `torch` includes `python`."""
PRELOADS = {
    "transformers": (
        "transformers.modeling_utils",
        "fleetstart.runtime.llm.transformers_engine.loader",
        "fleetstart.runtime.pretrained.text",
        "fleetstart.runtime.pretrained.vision",
        "fleetstart.runtime.pretrained.speech",
    ),
    "vllm": ("fleetstart.runtime.llm.vllm_engine.loader", "fleetstart.runtime.llm.vllm_engine.warmup"),
}
"""Modules of libraries that some functions need. Each may be missing on a node."""


def warm_up(profile: str, preload: str = "") -> None:
    """Imports a profile's modules and runs each start's path once, because first runs are slow."""
    _import_profile(profile)
    for name in PRELOADS.get(preload, ()):
        with contextlib.suppress(ImportError, OSError):  # a library of C that a package looks for may be missing, too
            importlib.import_module(name)
    if preload == "transformers":
        importlib.import_module("fleetstart.runtime.pretrained.warmup").warm_up_pretrained()
    if preload == "vllm":
        importlib.import_module("fleetstart.runtime.llm.vllm_engine.warmup").warm_up_vllm()
    importlib.import_module("fleetstart.runtime.launch.warmup_call").warm_up_call_path()
    if profile == "torch":
        engines = importlib.import_module("fleetstart.runtime.llm.server.warmup")
        engines.warm_up_engine()
        if preload == "transformers":
            with importlib.import_module("fleetstart.runtime.pretrained.loading").quiet():
                engines.warm_up_engine("transformers")
        importlib.import_module("fleetstart.runtime.weights.warmup").warm_up_weights()


def _import_profile(profile: str) -> None:
    for name in (*PROFILES["python"], *(PROFILES["torch"] if profile == "torch" else ())):
        importlib.import_module(name)
    if profile == "torch":
        # No threads before a fork: only the forking one would exist in the child.
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        # The first product picks the kernels for this processor; the children inherit the choice.
        torch.ones(64, 64) @ torch.ones(64, 64)


def worker_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment of a pooled worker; the function's own variables are added on assignment."""
    inherited = {name: environment[name] for name in INHERITED if name in environment}
    if "OMP_WAIT_POLICY" not in inherited:
        inherited.setdefault("GOMP_SPINCOUNT", SPINS)
    # OpenBLAS, inside numpy, starts its threads when it is loaded, before any fork: it gets none.
    return {"LANG": "C.UTF-8"} | inherited | {"HOME": "/tmp", "TMPDIR": "/tmp", "OPENBLAS_NUM_THREADS": "1"}
