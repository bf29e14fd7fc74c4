"""Recovery from kill -9 of each part in turn, under a running load: no call lost, none billed twice."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
import pytest

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from tests.e2e.load import Answer, loaded
from tests.e2e.processes import Process
from tests.e2e.systems import System, error_in, isolation, running
from tests.servers import wait_until
from tests.stopwatch import Stopwatch

WHOLE_S = 5.0
"""How long the system may take until it is whole again, on cores that nothing else takes."""
SETTLED_S = 50.0
"""A killed gateway's calls are closed when it has been silent for 30 s."""

NAP = """
import time
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=2, scale=Scale(max=2, keep_alive_s=600), retries=2)
def nap():
    time.sleep(0.06)
    return "slept"
"""


@pytest.fixture(scope="module")
def napping() -> Iterator[System]:
    """One system for all kills: each leaves it whole, and the next must find it so."""
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy(NAP, name="nap")
        system.ok("nap")
        yield system


@pytest.mark.parametrize("kind", ["controller", "node", "redis", "worker", "forkserver"])
def test_a_killed_part_is_replaced_and_no_call_is_lost(napping: System, kind: str) -> None:
    system = napping
    open_before = system.open_invocations()
    with loaded(system, "nap") as load:
        load.wait_for(10)
        victim = _victim(system, kind)
        must_end = _below(system, victim)
        system.kill(victim)
        killed = Stopwatch()
        _wait_until_whole(system, victim)
        whole_s = killed.unhindered_s
        load.wait_for(10)
    assert whole_s < WHOLE_S
    _check_answers(load.answers)
    wait_until(lambda: not [process for process in must_end if process.alive], what="orphans")
    _check_ledger(system, load.answers, open_before)
    _check_orphans(system)


def test_everything_is_killed_at_once_amid_calls_that_end_in_a_moment(napping: System) -> None:
    """Quick calls are between their answer and their row most of the time: what was answered must still be billed."""
    system = napping
    system.deploy(NAP.replace("time.sleep(0.06)", "pass").replace("def nap", "def quick"), name="quick")
    with loaded(system, "quick") as load:
        load.wait_for(100)
        victims = [system.one(kind) for kind in ("controller", "redis", "node")]
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        for victim in victims:
            _wait_until_whole(system, victim)
        load.wait_for(100)
    _check_answers(load.answers)
    _check_ledger(system, load.answers)
    _check_orphans(system)
    assert {"nap", "quick"} <= {info.name for info in system.status().functions}


def test_the_supervisor_takes_everything_along_and_comes_back(own_system: System) -> None:
    system = own_system
    system.deploy(NAP, name="nap")
    with loaded(system, "nap", clients=2) as load:
        load.wait_for(4)
        former = system.processes()
        system.kill(system.one("supervisor"))
        wait_until(lambda: not [process for process in former if process.alive], what="orphans")
        assert system.processes() == []
        url = system.fs("up", "--port", system.url.rpartition(":")[2]).out.strip()
        assert url == system.url
        load.wait_for(4)
    _check_answers(load.answers)
    assert [info.name for info in system.status().functions] == ["nap"]
    _check_ledger(system, load.answers)


@pytest.mark.parametrize("retries", [0, 2])
def test_a_call_that_kills_its_worker_runs_as_often_as_its_function_says(napping: System, retries: int) -> None:
    name = f"poison-{retries}"
    napping.deploy(
        f"""
        import ctypes
        from fleetstart.runtime import Scale, function

        @function(memory="64MiB", scale=Scale(max=1, keep_alive_s=600), retries={retries})
        def poison(deadly: bool = False):
            if deadly:
                ctypes.string_at(0)  # not a signal to itself: process 1 of a namespace is spared those
            return "alive"
        """,
        name=name,
    )
    status, error = napping.failed(name, {"deadly": True}, timeout_s=20)
    assert (status, error.code) == (502, "worker_lost")
    assert "SIGSEGV" in error.message
    assert napping.ok(name, timeout_s=10) == "alive"
    (row,) = wait_until(
        lambda: [row for row in napping.invocations() if row.function == name and row.status == 502], what="its row"
    )
    assert row.attempts == 1 + retries
    assert row.billed_ms == 0


IDLE_KILLS = 15
COUNTED = """
import time
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=2, scale=Scale(max=1, keep_alive_s=600))
async def app(scope, receive, send):
    if scope["type"] != "http":
        return
    print("runs", scope["method"], flush=True)
    if scope["path"].endswith("/sleep"):
        time.sleep(60)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
"""


@pytest.mark.isolations(
    "namespaces", "container", why="the node reads calls for workers inside gVisor and hands them on"
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_call_whose_worker_died_idle_just_before_is_answered_by_another(napping: System, method: str) -> None:
    """It was never run, and the function has no retries: its node reads so from what the worker had entered."""
    name = f"idle-{method.lower()}"
    napping.deploy(COUNTED, name=name)
    for number in range(IDLE_KILLS):
        assert napping.http.request(method, f"/fn/{name}").status_code == 200
        (worker,) = wait_until(lambda: napping.worker_processes(name), what="a worker that is known")
        if number % 3:
            os.kill(worker.pid, signal.SIGKILL)
            answer = napping.http.request(method, f"/fn/{name}", timeout=20)
        else:
            answer = _call_into_a_dying_worker(napping, worker, method, name)
            assert answer.headers["fs-attempts"] == "2"
        assert answer.status_code == 200, answer.text
    wait_until(lambda: len(_runs(napping, name)) >= 2 * IDLE_KILLS, what="all lines of the log")
    assert len(_runs(napping, name)) == 2 * IDLE_KILLS


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_call_whose_worker_is_killed_in_the_handler_fails_and_has_run_once(napping: System, method: str) -> None:
    name = f"busy-{method.lower()}"
    napping.deploy(COUNTED, name=name)
    assert napping.http.request(method, f"/fn/{name}").status_code == 200
    (worker,) = wait_until(lambda: napping.worker_processes(name), what="a worker that is known")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.request, method, f"{napping.url}/fn/{name}/sleep", timeout=30, trust_env=False)
        wait_until(lambda: len(_runs(napping, name)) == 2, what="a handler that runs")
        os.kill(worker.pid, signal.SIGKILL)
        assert (answer.result().status_code, error_in(answer.result()).code) == (502, "worker_lost")
    assert napping.http.request(method, f"/fn/{name}").status_code == 200
    wait_until(lambda: len(_runs(napping, name)) >= 3, what="the run after it")
    assert len(_runs(napping, name)) == 3


def _call_into_a_dying_worker(system: System, worker: Process, method: str, name: str) -> httpx.Response:
    """Sends a call to a worker that is stopped, and so never reads it, and dies."""
    (info,) = [worker for worker in system.info(name).workers if worker.state == "ready"]
    port = int(info.endpoint.rpartition(":")[2])
    os.kill(worker.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.request, method, f"{system.url}/fn/{name}", timeout=30, trust_env=False)
        wait_until(lambda: _unread_bytes(port), what="a request that waits in the worker's socket")
        os.kill(worker.pid, signal.SIGKILL)
        return answer.result()


def _unread_bytes(port: int) -> int:
    """Bytes in the receive queues of the connections to a port."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [row for row in rows if row[3] == "01" and int(row[1].partition(":")[2], 16) == port]
    return sum(int(row[4].partition(":")[2], 16) for row in mine)


def _runs(system: System, name: str) -> list[str]:
    return [line.text for line in system.logs(name) if line.text.startswith("runs ")]


def test_a_stream_that_was_begun_ends_with_an_error_when_its_worker_dies(napping: System) -> None:
    napping.deploy(
        """
        import time
        from fleetstart.runtime import Scale, function

        @function(memory="64MiB", scale=Scale(max=1, keep_alive_s=600))
        def ticks():
            for number in range(1000):
                yield number
                time.sleep(0.02)
        """,
        name="ticks",
    )
    with napping.http.stream("POST", "/fn/ticks", json={}) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        napping.kill(napping.worker_processes("ticks")[0])
        rest = list(lines)
    assert any(line.startswith("event: error") for line in rest)
    assert "worker_lost" in "\n".join(rest)
    wait_until(lambda: napping.ok("nap") == "slept")


# ── what is killed, and what must follow ───────────────────────────────────────────────────────────


def _victim(system: System, kind: str) -> Process:
    return system.worker_processes("nap")[0] if kind == "worker" else system.one(kind)


def _below(system: System, victim: Process) -> list[Process]:
    """The victim and its descendants: what a death must take along."""
    found = [victim]
    everything = system.processes()
    for process in found:  # grows while it is walked
        found.extend(child for child in everything if child.parent == process.pid)
    return found


def _wait_until_whole(system: System, victim: Process) -> None:
    wait_until(lambda: _is_whole(system, victim), WHOLE_S + 10, what="a whole system")


def _is_whole(system: System, victim: Process) -> bool:
    """Every part is there, the victim's successor among them, known to the others, and a new call is answered."""
    try:
        response = system.call("nap", {}, timeout_s=10)
        status = system.status()
    except (httpx.TransportError, msgspec.DecodeError):
        return False
    node = status.nodes[0] if status.nodes else None
    parts = {kind: system.of_kind(kind) for kind in ("controller", "node", "redis", "forkserver")}
    return (
        response.status_code == 200
        and all(len(found) == 1 and found[0] != victim for found in parts.values())
        and (status.redis, status.leader) == ("ok", status.gateway)
        and node is not None
        and (node.pid, node.profiles) == (parts["node"][0].pid, system.env["FS_PROFILES"].split(","))
    )


def _check_answers(answers: list[Answer]) -> None:
    assert [answer for answer in answers if (answer.status, answer.text) != (200, '"slept"')] == []


def _check_ledger(system: System, answers: list[Answer], open_before: int = 0) -> None:
    """Each call once, whatever became of the process that had it first; and none is left open but those that a killed
    gateway had before."""
    asked = {answer.request for answer in answers}
    rows = _settled_rows(system, asked, lost=open_before + sum(answer.tries - 1 for answer in answers))
    counts = Counter(str(row.id) for row in rows)
    assert {request: counts[request] for request in asked if counts[request] != 1} == {}
    assert max(counts.values()) == 1
    assert {row.status for row in rows if row.id in asked} == {200}


def _settled_rows(system: System, asked: Set[str] = frozenset(), lost: int = 0) -> list[InvocationRow]:
    """The ledger's, once all that were asked are in it and nothing is under way.

    `lost`: tries that a killed gateway may have begun, which stay open for as long as a gateway may be silent.
    """

    def settled() -> bool:
        return asked <= {row.id for row in system.invocations()} and system.open_invocations() <= lost

    wait_until(settled, SETTLED_S, what="a settled ledger")
    return system.invocations()


def _check_orphans(system: System) -> None:
    """Every worker is either a child of the living fork server, and known to the node, or its spare. Those in sandboxes
    are no children of it; their own suites look for what is left of them."""
    server = system.one("forkserver")
    spares = 1
    wait_until(lambda: {worker.parent for worker in system.of_kind("worker")} <= {server.pid}, what="orphaned workers")
    wait_until(
        lambda: (
            len(system.of_kind("worker")) == spares + (len(system.live_workers()) if isolation() == "namespaces" else 0)
        ),
        what="workers that nobody knows",
    )
