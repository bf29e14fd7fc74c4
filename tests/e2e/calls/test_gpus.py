"""Functions on the GPU of a whole system: bound, shared, short of memory, given back; models say what the CPU says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import pytest
import torch

from fleetstart.runtime.contract.sizes import GIB
from tests.bench.coldstart.models import EXAMPLE, QUICK_NOISE, write_noise
from tests.e2e.systems import System, running
from tests.servers import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.isolations("namespaces", why="containers get GPUs by CDI, which a machine has to be set up for"),
]

HOLDS = """
import torch
from fleetstart.runtime import Scale, function


@function(gpu="{share}", memory="2GiB", concurrency=1, scale=Scale(max={most}, keep_alive_s=600))
class {name}:
    def load(self, weights):
        self.held = torch.zeros({held} << 30, dtype=torch.uint8, device="cuda")

    def __call__(self, seconds: float = 0.0):
        import time
        time.sleep(seconds)
        return {{"device": str(self.held.device), "gpu": torch.cuda.get_device_name(), "last": int(self.held[-1])}}
"""
MODELS = """
from fleetstart.runtime import LLM, Scale

whole = LLM(weights="./weights", dtype="fp32", gpu="8GiB", kv_memory="256MiB", scale=Scale(max=1, keep_alive_s=600))
theirs = LLM(weights="./weights", dtype="fp32", engine="transformers", gpu="8GiB", memory="4GiB",
             scale=Scale(max=1, keep_alive_s=600))
cpu = LLM(weights="./weights", dtype="fp32", memory="1GiB", scale=Scale(max=1, keep_alive_s=600))
"""
RESTS = """
from fleetstart.runtime import LLM, Scale

resting = LLM(weights="./weights", dtype="fp32", engine="{engine}", gpu="8GiB", kv_memory="4GiB", memory="4GiB",
              scale=Scale(max=1, keep_alive_s=0.3, standby_s=600))
"""
PROMPT = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def gpus() -> Iterator[System]:
    with running(env={"FS_PROFILES": "torch"}) as system:
        yield system


def reserved(system: System) -> int:
    (node,) = system.status().nodes
    return sum(device.reserved_bytes for device in node.devices)


def test_a_function_computes_on_its_gpu_until_it_ends(gpus: System) -> None:
    gpus.deploy(HOLDS.format(name="Whole", share="4GiB", held=1, most=1), name="whole")
    answer = gpus.ok("whole", timeout_s=60)
    assert answer == {"device": "cuda:0", "gpu": torch.cuda.get_device_name(), "last": 0}
    wait_until(lambda: reserved(gpus) == 4 * GIB, what="the reservation in the node's report")
    (row,) = wait_until(lambda: [row for row in gpus.invocations() if row.function == "whole"], what="its row")
    assert row.device_type
    assert row.device_bytes == 4 * GIB
    gpus.fs("rm", "whole", "--yes")
    wait_until(lambda: not reserved(gpus), what="the end of the reservation")


def test_two_workers_share_one_gpu(gpus: System) -> None:
    gpus.deploy(HOLDS.format(name="Shared", share="4GiB", held=2, most=2), name="shared")
    gpus.fs("scale", "shared", "--min", "2")
    wait_until(lambda: reserved(gpus) == 8 * GIB, what="two shares")
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda _: gpus.call("shared", {"seconds": 1.0}, timeout_s=60), range(2)))
    assert [answer.json()["device"] for answer in answers] == ["cuda:0"] * 2
    rows = wait_until(
        lambda: (found := [row for row in gpus.invocations() if row.function == "shared"])[1:] and found,
        what="their rows",
    )
    assert len({row.worker for row in rows}) == 2
    gpus.fs("rm", "shared", "--yes")


def test_a_worker_that_lacks_its_gpus_memory_is_started_with_more(gpus: System) -> None:
    gpus.deploy(HOLDS.format(name="Hungry", share="2GiB", held=2, most=1), name="hungry", options=("--no-probe",))
    assert gpus.ok("hungry", timeout_s=120)["device"] == "cuda:0"
    lines = [line.text for line in gpus.logs("hungry")]
    assert any("out of device memory on cuda:0" in line for line in lines), lines
    gpus.fs("rm", "hungry", "--yes")


def test_a_language_model_says_on_the_gpu_what_it_says_on_the_cpu(gpus: System, tmp_path: Path) -> None:
    if not (EXAMPLE / "weights" / "tokenizer.json").exists():
        pytest.skip("examples/chat/weights is not there: `make models` makes it")
    write_noise(tmp_path / "weights", QUICK_NOISE)
    (tmp_path / "handler.py").write_text(MODELS)
    gpus.deploy_file(tmp_path / "handler.py", "--no-probe")
    said = {}
    for name in ("cpu", "whole", "theirs"):
        answer = gpus.call(name, PROMPT, timeout_s=120)
        assert answer.status_code == 200, answer.text
        said[name] = answer.json()["text"]
    assert said["whole"] == said["cpu"]
    assert said["theirs"] == said["cpu"]
    (node,) = gpus.status().nodes
    assert any(device.load_bytes_per_s > 0 for device in node.devices)
    for name in said:
        gpus.fs("rm", name, "--yes")


@pytest.mark.parametrize("engine", ["native", "transformers"])
def test_a_model_that_stands_by_gives_its_gpu_back(gpus: System, tmp_path: Path, engine: str) -> None:
    torch.cuda.mem_get_info()  # this process's own context, which takes a while
    write_noise(tmp_path / "weights", QUICK_NOISE)
    (tmp_path / "handler.py").write_text(RESTS.format(engine=engine))
    gpus.deploy_file(tmp_path / "handler.py", "--no-probe")
    try:
        started = gpus.call("resting", PROMPT, timeout_s=120)
        assert started.status_code == 200, started.text
        for _ in range(2):
            # KV memory and weights; right after a wake-up the states shown can be those before it.
            given_back = partial(_has_more_than, torch.cuda.mem_get_info()[0] + GIB // 4)
            wait_until(lambda: _states(gpus, "resting") == ["standby"], what="standby")
            wait_until(lambda: not reserved(gpus), what="the end of the reservation")
            wait_until(given_back, what="the memory that the model gives back")
            woken = gpus.call("resting", PROMPT, timeout_s=120)
            assert (woken.status_code, woken.headers["fs-start"]) == (200, "standby"), woken.text
            assert woken.json()["text"] == started.json()["text"]
    finally:
        gpus.fs("rm", "resting", "--yes")


def _has_more_than(free_bytes: int) -> bool:
    return torch.cuda.mem_get_info()[0] > free_bytes


def _states(system: System, name: str) -> list[str]:
    [shown] = [one for one in msgspec.json.decode(system.fs("ls", "--json").out) if one["name"] == name]
    return [worker["state"] for worker in shown["workers"]]
