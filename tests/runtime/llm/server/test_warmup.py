"""The fork server's rehearsal of the engine: it works, and leaves nothing that a fork must not copy."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from fleetstart.runtime.contract.function.spec import EngineName
from fleetstart.runtime.llm.server import served_models, warmup

NO_VLLM = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test")


@pytest.mark.parametrize("engine", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
def test_it_serves_and_leaves_no_thread(engine: EngineName) -> None:
    if engine == "transformers":
        pytest.importorskip("transformers.modeling_utils")  # it may leave a thread of its own, which is not counted
    before = threading.enumerate()
    warmup.warm_up_engine(engine)
    assert threading.enumerate() == before


def test_it_says_when_the_engine_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models.ServedModels, "adapter_of", lambda self, model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        warmup.warm_up_engine()


@pytest.mark.parametrize("before", [None, "0,1"])
def test_it_sees_no_gpu_meanwhile(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    # A build with CUDA; asking its driver would end the test.
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1 / 0, raising=False)
    warmup.warm_up_engine()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    assert "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


FORKS = """
import os, sys
from fleetstart.runtime.launch.profiles import warm_up
warm_up("torch", sys.argv[1])
import torch
assert not torch.cuda.is_initialized()
opened = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
assert not any("nvidia" in os.readlink(path) for path in opened if os.path.lexists(path)), opened
pid = os.fork()
if pid == 0:
    try:
        if "transformers" in sys.modules:
            assert sys.modules["transformers.utils.import_utils"].is_torch_cuda_available()
        print(torch.zeros(1, device="cuda").device, flush=True)
    finally:
        os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("preload", ["", "transformers", pytest.param("vllm", marks=[pytest.mark.vllm, NO_VLLM])])
def test_workers_that_a_warm_fork_server_forks_have_the_gpu(preload: str) -> None:
    ran = subprocess.run([sys.executable, "-c", FORKS, preload], capture_output=True, text=True, timeout=120)
    assert ran.stdout.split()[-1:] == ["cuda:0"], ran.stderr[-4000:]


COMPILES = """
import os, sys, traceback
from fleetstart.runtime.launch.profiles import warm_up
warm_up("torch", "vllm")
pid = os.fork()
if pid == 0:
    try:
        from fleetstart.runtime.contract.function.spec import LLMSettings
        from fleetstart.runtime.llm.engine.generation import Request
        from fleetstart.runtime.llm.vllm_engine import loader, warmup
        from triton import knobs
        found = []
        knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
        settings = LLMSettings(engine="vllm", max_batch=8, max_context_tokens=256, kv_memory_bytes=8 << 20)
        engine = loader.load_model(warmup._TinyWeights(), settings, threads=1).engine
        engine.add(Request(tokens=[2, 3], max_new_tokens=2))
        while not engine.idle:
            engine.step()
        print("found", *found, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
os.waitpid(pid, 0)
"""


@pytest.mark.gpu
@pytest.mark.vllm
@NO_VLLM
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_worker_finds_the_kernels_that_the_fork_server_has_tried(tmp_path: Path) -> None:
    empty = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILES]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=empty)
    _, found, hits = ran.stdout.rpartition("found ")
    assert found, ran.stderr[-4000:]
    assert set(hits.split()) == {"True"}, "the engine of the trial compiled others"
