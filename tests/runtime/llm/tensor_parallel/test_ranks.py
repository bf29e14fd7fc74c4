"""A model that is split over two CPU devices, in a worker and its child, as a node starts them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from fleetstart.runtime.contract.function.spec import LLMSettings
from fleetstart.runtime.contract.ids import CheckpointId
from fleetstart.runtime.contract.node import exit_codes
from fleetstart.runtime.contract.node.devices import DeviceId, DeviceRequest
from fleetstart.runtime.contract.node.messages import DeviceBinding
from tests.runtime.llm.server.test_llm_worker import tiny_model
from tests.runtime.segments import Segment
from tests.runtime.workers import Functions, Worker, alive, until
from tests.stopwatch import Stopwatch

pytest.importorskip("torch")

ASKED = {"model": "f", "prompt": "a b c", "max_tokens": 8, "temperature": 0}
DRAWN = ASKED | {"temperature": 1.0, "seed": 5}
END_S = 1.0


def bound(count: int) -> DeviceBinding:
    cores = sorted(os.sched_getaffinity(0))
    each = tuple((cores[index % len(cores)],) for index in range(count))
    return DeviceBinding(
        devices=tuple(DeviceId(f"cpu:{index}") for index in range(count)),
        cores=tuple(sorted({core for own in each for core in own})),
        cores_of=each,
    )


def assigned(functions: Functions, segment: Segment, ranks: int, devices: int | None = None) -> Worker:
    split: dict[str, Any] = {"gpu": DeviceRequest(count=ranks)} if ranks > 1 else {}
    return functions.assigned(
        "",
        "chat",
        profile="torch",
        weights=CheckpointId("0" * 64),
        llm=LLMSettings(max_context_tokens=64, kv_memory_bytes=1 << 20, tensor_parallel_size=ranks),
        segment=segment.fds,
        concurrency=4,
        binding=bound(devices or ranks) if ranks > 1 else None,
        **split,
    )


def ready(functions: Functions, segment: Segment, ranks: int) -> Worker:
    worker = assigned(functions, segment, ranks)
    segment.fill(*segment.chunks)
    worker.ready()
    return worker


def children(pid: int) -> list[int]:
    listings = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for listing in listings for child in listing.read_text().split()]


def test_two_ranks_answer_as_one_device_does(torch_functions: Functions) -> None:
    segment = tiny_model()
    worker, one = ready(torch_functions, segment, 2), ready(torch_functions, segment, 1)
    for asked, path in ((ASKED, "v1/completions"), (DRAWN, "v1/completions"), ({"input": ["a b"]}, "v1/embeddings")):
        got, wanted = worker.post(asked, path=path), one.post(asked, path=path)
        assert (got.status_code, wanted.status_code) == (200, 200), got.text
        if "input" in asked:
            assert got.json()["data"][0]["embedding"] == pytest.approx(wanted.json()["data"][0]["embedding"], abs=1e-5)
        else:
            assert got.json()["choices"] == wanted.json()["choices"]
    (rank,) = children(worker.pid)
    assert os.sched_getaffinity(rank) == set(bound(2).cores_of[1])
    assert os.sched_getaffinity(worker.pid) == set(bound(2).cores_of[0])
    worker.drain()
    assert worker.exit_status() == exit_codes.DRAINED
    until(lambda: not alive(rank), "the end of the other rank")


def test_a_rank_that_is_killed_ends_the_group(torch_functions: Functions) -> None:
    worker = ready(torch_functions, tiny_model(), 2)
    (rank,) = children(worker.pid)
    watch = Stopwatch()
    os.kill(rank, signal.SIGKILL)
    assert worker.exit_status() == exit_codes.RANK_LOST
    assert watch.unhindered_s < END_S
    assert "the model's group of 2 ranks is lost: rank 1 was killed by SIGKILL: this worker ends" in worker.log()


def test_the_other_ranks_end_with_the_worker(torch_functions: Functions) -> None:
    worker = ready(torch_functions, tiny_model(), 2)
    (rank,) = children(worker.pid)
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.exit_status() == -signal.SIGKILL
    until(lambda: not alive(rank), "the end of the other rank")


def test_a_rank_that_is_killed_while_it_loads_ends_the_start(torch_functions: Functions) -> None:
    worker = assigned(torch_functions, tiny_model(), 2)  # whose weights do not come
    (rank,) = until(lambda: children(worker.pid), "the other rank")
    os.kill(rank, signal.SIGKILL)
    assert worker.exit_status() == exit_codes.RANK_LOST


def test_a_model_that_does_not_divide_fails_its_start_with_the_reason(torch_functions: Functions) -> None:
    segment = tiny_model()
    worker = assigned(torch_functions, segment, 3)
    segment.fill(*segment.chunks)
    error = worker.start_error()
    assert (error.code, error.message) == (
        "invalid_spec", "llm: tensor_parallel_size=3: num_attention_heads 2 is no multiple of 3"
    )  # fmt: skip
    assert worker.exit_status() == exit_codes.START_FAILED


def test_fewer_devices_than_ranks_fail_the_start(torch_functions: Functions) -> None:
    worker = assigned(torch_functions, tiny_model(), 2, devices=1)
    error = worker.start_error()
    assert error.message == "llm: tensor_parallel_size=2 takes 2 devices, and the worker has 1"
