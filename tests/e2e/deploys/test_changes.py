"""Changes under a running load: a deploy, a removal, a shutdown, and a Redis that does not answer."""

from __future__ import annotations

import http.client
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from fleetstart.runtime.contract.billing.ledger import InvocationRow
from tests.e2e.load import loaded
from tests.e2e.systems import System, running
from tests.servers import wait_until
from tests.stopwatch import Stopwatch

SLEEPS = """
import time
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=2, scale=Scale(max=2, keep_alive_s=600))
def sleeps(nap_s: float = 0.05):
    time.sleep(nap_s)
    return NUMBER
"""


@pytest.fixture(scope="module")
def changing() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        yield system


def version(number: int) -> str:
    return SLEEPS.replace("NUMBER", str(number))


def test_a_deploy_under_load_loses_no_call_and_never_goes_back(changing: System) -> None:
    changing.deploy(version(1), name="moving")
    with loaded(changing, "moving") as load:
        load.wait_for(10)
        for number in (2, 3):
            changing.deploy(version(number), name="moving")
            load.wait_for(20)
    assert {answer.status for answer in load.answers} == {200}
    assert {answer.tries for answer in load.answers} == {1}
    assert {answer.text for answer in load.answers} == {"1", "2", "3"}
    begun = sorted(load.answers, key=lambda answer: answer.began_s)
    assert begun[-1].text == "3"
    # The workers of former versions are drained, not kept.
    wait_until(lambda: len(changing.of_kind("worker")) <= 2 + 1, what="the end of former workers")
    assert changing.ok("moving@1") == 1


def test_a_removal_under_load_answers_404_and_ends_the_workers(changing: System) -> None:
    changing.deploy(version(1), name="leaving")
    with loaded(changing, "leaving") as load:
        load.wait_for(10)
        processes = changing.worker_processes("leaving")
        changing.fs("rm", "leaving", "--yes")
        load.wait_for(10)
    assert {answer.status for answer in load.answers} == {200, 404}
    wait_until(lambda: not [process for process in processes if process.alive], what="the end of its workers")
    # The name is free, its bill stays, and its numbers go on.
    wait_until(lambda: _bill(changing, "leaving"), what="its bill")
    assert _bill(changing, "leaving") == ["invocation"]
    changing.deploy(version(5), name="leaving")
    assert changing.ok("leaving") == 5
    assert changing.info("leaving").version == 2


def test_hot_calls_do_not_need_redis(changing: System) -> None:
    """Stopped, not killed: connections stay open and nothing comes. Calls must not even notice."""
    changing.deploy(version(1), name="hot")
    assert changing.ok("hot") == 1
    redis = changing.one("redis")
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        watch = Stopwatch()
        sent: list[str] = []
        while watch.elapsed_s < 4 or len(sent) <= 50:
            response = changing.call("hot", {"nap_s": 0.0}, timeout_s=5)
            assert response.status_code == 200, response.text
            sent.append(response.headers["x-request-id"])
    finally:
        os.kill(redis.pid, signal.SIGCONT)
    # Every call is in the ledger once Redis is back.
    wait_until(lambda: set(sent) <= {str(row.id) for row in changing.invocations()}, 15, what="all rows")
    ids = [row.id for row in changing.invocations()]
    assert len(ids) == len(set(ids))
    wait_until(lambda: changing.status().redis == "ok", what="redis ok")
    assert changing.ok("hot") == 1
    assert not any(changing.deaths().values())


def test_a_function_that_fits_no_node_is_told_so_at_once(changing: System) -> None:
    handler = changing.source(version(1), folder="giant")
    said = changing.fs("deploy", str(handler), "--name", "giant", "--no-probe", "--memory", "900GiB").err
    assert "a worker needs 921600 MiB, and the largest node has" in said
    watch = Stopwatch()
    status, error = changing.failed("giant", {}, timeout_s=20)
    assert (status, error.code) == (503, "unavailable")
    assert "921600 MiB" in error.message
    assert watch.unhindered_s < 5


def test_a_client_that_leaves_cancels_its_wait_and_its_work(changing: System) -> None:
    """More clients than slots, all of which leave: the slots are free again as soon as their naps end."""
    changing.deploy(version(1), name="left", options=("--max", "1", "--concurrency", "1"))
    assert changing.ok("left") == 1
    served = _begun(changing, "left", nap_s=4.0)
    wait_until(lambda: changing.info("left").running == 1, what="a call that is served")
    queued = [_begun(changing, "left", nap_s=4.0) for _ in range(5)]
    wait_until(lambda: changing.info("left").queued == 5, what="calls that wait")
    for connection in queued:
        connection.close()
    wait_until(lambda: changing.info("left").queued == 0, what="an empty queue")
    served.close()
    assert changing.ok("left", timeout_s=20) == 1
    rows = wait_until(
        lambda: [rows for rows in [_rows(changing, "left", 499)] if len(rows) == 6], what="six calls that were left"
    )[0]
    assert sorted(row.attempts for row in rows) == [0] * 5 + [1], "one nap was under way, five were taken back unserved"
    assert [row.billed_ms for row in rows if not row.attempts] == [0] * 5


def test_large_bodies_and_answers_pass_whole(changing: System) -> None:
    text = """
    from fleetstart.runtime import function

    async def echo(scope, receive, send):
        total, more = 0, True
        while more:
            message = await receive()
            total += len(message.get("body", b""))
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-got", b"%d" % total)]})
        for _ in range(100):
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    app = function(memory="256MiB")(echo)
    """
    changing.deploy(text, name="echo")
    with changing.http.stream("POST", "/fn/echo", content=bytes(60 << 20), timeout=60) as response:
        assert response.headers["x-got"] == str(60 << 20)
        assert sum(len(block) for block in response.iter_bytes()) == 100 << 20


def test_down_lets_calls_end_and_up_brings_everything_back(own_system: System) -> None:
    system = own_system
    system.deploy(version(7), name="kept")
    assert system.ok("kept") == 7
    answers: list[object] = []
    slow = threading.Thread(target=lambda: answers.append(system.ok("kept", {"nap_s": 1.0}, timeout_s=20)))
    slow.start()
    wait_until(lambda: system.info("kept").running == 1, what="a running call")
    system.down()
    slow.join()
    assert answers == [7]
    assert system.litter() == []
    system.up()
    assert system.ok("kept", timeout_s=20) == 7
    wait_until(lambda: len(system.invocations()) == 3, what="three calls in the ledger")
    assert {row.status for row in system.invocations()} == {200}


def test_two_ups_make_one_system(own_system: System) -> None:
    before = {kind: own_system.of_kind(kind) for kind in ("supervisor", "controller", "node", "redis")}
    with ThreadPoolExecutor(2) as pool:
        urls = {ran.out.strip() for ran in pool.map(lambda _: own_system.fs("up", "--port", "0"), range(2))}
    assert urls == {own_system.url}
    assert {kind: own_system.of_kind(kind) for kind in before} == before


def _begun(system: System, name: str, *, nap_s: float) -> http.client.HTTPConnection:
    """A call whose answer nobody has read yet."""
    host, _, port = system.url.removeprefix("http://").partition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    connection.request("POST", f"/fn/{name}", f'{{"nap_s": {nap_s}}}', {"content-type": "application/json"})
    return connection


def _bill(system: System, name: str) -> list[str]:
    """The bill's lines for calls."""
    return [line.kind for line in system.usage(name).lines if line.kind == "invocation"]


def _rows(system: System, name: str, status: int) -> list[InvocationRow]:
    return [row for row in system.invocations() if row.function == name and row.status == status]
