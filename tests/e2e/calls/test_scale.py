"""Scaling from zero and back: nothing runs or is billed between calls, and waking costs one fetch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from fleetstart.runtime.contract.billing.ledger import InvocationRow, PhaseRow
from fleetstart.runtime.contract.ids import CheckpointId, WorkerId
from fleetstart.runtime.contract.node.reports import SegmentReport
from tests.e2e.checkpoints import write_safetensors
from tests.e2e.load import loaded
from tests.e2e.systems import System
from tests.servers import wait_until

BRIEF = """
import time
from fleetstart.runtime import Scale, function

@function(memory="64MiB", scale=Scale(max=1, keep_alive_s=1))
def brief():
    time.sleep(0.02)
    return "awake"
"""

READER = """
import time
import torch
from fleetstart.runtime import Scale, function

@function(name="reader", weights="./weights", memory="512MiB", scale=Scale(max={most}, keep_alive_s={keep_alive_s}))
class Reader:
    def load(self, weights):
        self.total = sum(float(tensor.double().sum()) for tensor in weights.values())

    def __call__(self, nap_s: float = 0.0):
        time.sleep(nap_s)
        return self.total
"""
TENSORS, TENSOR_BYTES = 24, 1 << 20
TOTAL = sum(range(TENSORS)) * (TENSOR_BYTES // 4)


def start_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["fs-start"]


def workers(system: System, name: str) -> int:
    return len(system.info(name).workers)


def segments_of(system: System, checkpoint: CheckpointId | None) -> list[SegmentReport]:
    return [segment for segment in system.status().nodes[0].segments if segment.checkpoint == checkpoint]


def worker_of(system: System, response: httpx.Response) -> WorkerId:
    """The worker that served the call, once the call's row is there."""
    id = response.headers["x-request-id"]
    return wait_until(lambda: [row.worker for row in system.invocations() if row.id == id], what=f"the row of {id}")[0]


def phases_of(system: System, worker: WorkerId) -> set[str]:
    return {row.phase for row in system.ledger() if isinstance(row, PhaseRow) and row.worker == worker}


def asleep(system: System, name: str) -> bool:
    return workers(system, name) == 0


def test_after_its_keep_alive_a_function_has_no_process_and_costs_nothing(system: System) -> None:
    system.deploy(BRIEF, name="brief")
    system.fs("scale", "brief", "--keep-alive", "600")
    assert start_of(system.call("brief")) == "warm"
    assert start_of(system.call("brief")) == "hot"
    processes = system.worker_processes("brief")
    assert len(processes) == 1
    system.fs("scale", "brief", "--reset")
    wait_until(lambda: asleep(system, "brief"), 10, what="brief asleep")
    wait_until(lambda: not processes[0].alive, what="the end of its process")
    wait_until(
        lambda: {row.phase for row in system.phases("brief")} == {"start", "load", "execute", "idle"}, what="rows"
    )
    rows = system.phases("brief")
    # Idle time was the platform's own wish: it stands in the ledger, and costs nothing.
    assert sum(row.cost_nusd for row in rows) == 0
    system.fs("scale", "brief", "--keep-alive", "600")
    assert start_of(system.call("brief")) == "warm"
    assert start_of(system.call("brief")) == "hot"
    system.fs("scale", "brief", "--reset")
    wait_until(lambda: asleep(system, "brief"), 10, what="brief asleep")
    wait_until(lambda: len(system.phases("brief")) > len(rows), what="rows of its second life")
    wait_until(lambda: len(_calls(system, "brief")) == 4, what="its calls")
    assert sorted(row.start for row in _calls(system, "brief")) == ["hot", "hot", "warm", "warm"]


def test_an_idle_function_adds_no_rows(system: System) -> None:
    """A node writes its rows in order: those of a worker that came later prove that all earlier ones are there."""
    for name in ("still", "later"):
        system.deploy(BRIEF.replace("brief", name), name=name)
    system.ok("still")
    wait_until(lambda: asleep(system, "still"), 10, what="still asleep")
    _live_through(system, "later", lives=1)
    before = system.usage("still")
    assert {line.kind for line in before.lines} == {"invocation", "start", "load", "execute", "idle"}
    _live_through(system, "later", lives=2)
    assert system.usage("still").lines == before.lines


def test_ten_calls_to_a_cold_function_fetch_its_weights_once(system: System) -> None:
    handler = system.source(READER.format(most=2, keep_alive_s=600), folder="reader")
    write_safetensors(handler.parent / "weights" / "model.safetensors", tensors=TENSORS, tensor_bytes=TENSOR_BYTES)
    system.deploy_file(handler, "--no-probe")
    read_before = _bytes_read(system)
    with ThreadPoolExecutor(10) as pool:
        responses = list(pool.map(lambda _: system.call("reader", {"nap_s": 0.05}), range(10)))
    assert [response.json() for response in responses] == [TOTAL] * 10
    assert {start_of(response) for response in responses} <= {"cold", "warm", "hot"}
    starts = [worker.start for worker in system.info("reader").workers]
    assert sorted(starts) in (["cold"], ["cold", "cold"], ["cold", "warm"])
    checkpoint = system.info("reader").spec.weights
    segments = wait_until(lambda: segments_of(system, checkpoint), what="the segment in the node's report")
    assert len(segments) == 1
    wait_until(lambda: segments_of(system, checkpoint)[0].state == "ready", what="a ready segment")
    (segment,) = segments_of(system, checkpoint)
    assert segment.ready_bytes == segment.size_bytes
    wait_until(lambda: system.phases("reader", "fetch"), what="a fetch in the ledger")
    read = _bytes_read(system) - read_before
    assert 1.0 <= read / (TENSORS * TENSOR_BYTES) < 1.2

    # Asleep, its weights stay in the node's memory: the next wake is warm and fetches nothing.
    system.fs("scale", "reader", "--keep-alive", "0.5")
    wait_until(lambda: asleep(system, "reader"), 15, what="reader asleep")
    system.fs("scale", "reader", "--reset")
    woken = system.call("reader")
    assert start_of(woken) == "warm"
    assert start_of(system.call("reader")) == "hot"
    worker = worker_of(system, woken)
    wait_until(lambda: phases_of(system, worker) >= {"start", "load"}, what="the rows of the worker that woke")
    assert "fetch" not in phases_of(system, worker)
    assert (_bytes_read(system) - read_before) / (TENSORS * TENSOR_BYTES) < 1.3
    system.fs("rm", "reader", "--yes")


def test_more_calls_than_one_worker_takes_bring_more_workers_up_to_its_max(system: System) -> None:
    text = """
    import time
    from fleetstart.runtime import Scale, function

    @function(memory="64MiB", scale=Scale(max=3, keep_alive_s=1))
    def crowd():
        time.sleep(0.3)
        return "done"
    """
    system.deploy(text, name="crowd")
    with loaded(system, "crowd", clients=9) as load:
        wait_until(lambda: len(system.worker_processes("crowd")) == 3, 20, what="three workers")
        load.wait_for(9)
    assert {(answer.status, answer.text) for answer in load.answers} == {(200, '"done"')}
    wait_until(lambda: len(system.phases("crowd", "start")) == 3, what="the rows of three starts")
    wait_until(lambda: asleep(system, "crowd"), 15, what="crowd asleep")
    assert len(system.phases("crowd", "start")) == 3


def _live_through(system: System, name: str, *, lives: int) -> None:
    """Woken and asleep again, and the rows of the whole life of that worker, the `lives`th one, are in the ledger."""
    system.ok(name)
    wait_until(lambda: asleep(system, name), 10, what=f"{name} asleep")
    wait_until(lambda: len(system.phases(name, "load")) == lives, what=f"the rows of {name}")
    wait_until(lambda: len(_calls(system, name)) == lives, what=f"the call of {name}")


def _calls(system: System, name: str) -> list[InvocationRow]:
    return [row for row in system.invocations() if row.function == name]


def _bytes_read(system: System) -> int:
    """Bytes that the node has read so far, from files and pipes: a fetch from the folder store shows in them."""
    io = Path(f"/proc/{system.one('node').pid}/io").read_text()
    return int(io.split()[1])
