"""Handlers that raise, hang, die, eat memory and flood: the right error in time, and nobody else notices."""

from __future__ import annotations

import psutil
import pytest

from tests.e2e.systems import System
from tests.servers import wait_until
from tests.stopwatch import Stopwatch

pytestmark = pytest.mark.usefixtures("unharmed")

HEAD = """
import asyncio, os, time
from fleetstart.runtime import Scale, function

"""
ONE = 'memory="64MiB", concurrency=1, scale=Scale(max=1, keep_alive_s=60)'


def test_a_handler_that_raises_is_told_with_its_line(system: System) -> None:
    text = HEAD + "@function(memory='64MiB')\ndef raises():\n    return {}['no such key']\n"
    system.deploy(text, name="raises")
    status, error = system.failed("raises", {})
    line = text.splitlines().index("    return {}['no such key']") + 1
    assert (status, error.code) == (500, "handler_error")
    assert "KeyError" in error.message
    assert f"handler.py:{line}" in error.message
    wait_until(lambda: any("Traceback" in entry.text for entry in system.logs("raises")), what="a traceback in the log")


HANGS = {
    "hangs": "def hangs(hang: bool = False):\n    while hang:\n        time.sleep(0.1)\n    return 'free'\n",
    "spins": "def spins(hang: bool = False):\n    while hang:\n        pass\n    return 'free'\n",
    "blocks": "async def blocks(hang: bool = False):\n    if hang:\n        time.sleep(3600)\n    return 'free'\n",
    "awaits": "async def awaits(hang: bool = False):\n    await asyncio.sleep(3600 * hang)\n    return 'free'\n",
}


@pytest.mark.parametrize("name", HANGS)
def test_a_handler_that_hangs_ends_at_its_deadline_and_frees_its_slot(system: System, name: str) -> None:
    system.deploy(f"{HEAD}@function(timeout_s=1.0, {ONE})\n{HANGS[name]}", name=name)
    wait_until(
        lambda: system.call(name, {}, timeout_s=20).status_code == 200, 20, what="its first worker, within its second"
    )
    watch = Stopwatch()
    status, error = system.failed(name, {"hang": True}, timeout_s=20)
    assert (status, error.code) == (504, "deadline_exceeded")
    assert watch.elapsed_s > 0.9
    assert watch.unhindered_s < 3
    assert " s " in error.message + " "
    assert "`timeout_s`" in error.hint
    if name == "spins":
        late = wait_until(lambda: [line.text for line in system.logs(name) if "deadline" in line.text], what="a line")
        assert "still runs" in late[0], "said at once, not only when the worker ends"
    # Its only slot is held by the call that does not end; the worker is ended instead, and another one comes.
    wait_until(lambda: system.call(name, {}, timeout_s=20).status_code == 200, 10, what="a free slot")


def test_a_handler_that_ends_its_process(system: System) -> None:
    text = (
        HEAD
        + f"@function({ONE})\ndef leaves(code: int = 0):\n    if code:\n        os._exit(code)\n    return 'here'\n"
    )
    system.deploy(text, name="leaves")
    status, error = system.failed("leaves", {"code": 7}, timeout_s=20)
    assert (status, error.code) == (502, "worker_lost")
    assert "exit code 7" in error.message
    assert system.ok("leaves", {}, timeout_s=20) == "here"


def test_a_handler_that_raises_system_exit_ends_its_call_alone(system: System) -> None:
    text = (
        HEAD
        + f"@function({ONE})\ndef exits(code: int = 0):\n    if code:\n        raise SystemExit(code)\n    return 0\n"
    )
    system.deploy(text, name="exits")
    system.ok("exits", {})
    before = system.worker_processes("exits")
    status, error = system.failed("exits", {"code": 3})
    assert (status, error.code) == (500, "handler_error")
    system.ok("exits", {})
    assert system.worker_processes("exits") == before


def test_a_handler_that_allocates_without_end(system: System) -> None:
    text = (
        HEAD + f"@function({ONE})\ndef eats(much: bool = False):\n    kept = []\n"
        "    while much:\n        kept.append(bytearray(os.urandom(1 << 20)))\n    return 'thin'\n"
    )
    system.deploy(text, name="eats")
    status, error = system.failed("eats", {"much": True}, timeout_s=30)
    assert (status, error.code) == (500, "out_of_memory")
    assert "64 MiB" in error.message
    assert system.ok("eats", {}, timeout_s=20) == "thin"


def test_a_handler_that_fills_its_tmp(system: System) -> None:
    """Files in /tmp are memory; the file system says that it is full before the worker's limit is reached."""
    text = (
        HEAD + f"@function({ONE})\ndef fills():\n    with open('/tmp/big', 'wb') as big:\n"
        "        while True:\n            big.write(bytes(1 << 20))\n"
    )
    system.deploy(text, name="fills")
    status, error = system.failed("fills", {}, timeout_s=30)
    assert status == 500
    assert error.code in ("handler_error", "out_of_memory")


@pytest.mark.isolations("namespaces", "container", why="threads inside gVisor are memory, which ends first")
def test_threads_and_children_without_end_stay_in_their_worker(system: System) -> None:
    text = (
        HEAD + "import threading\n\n"
        f"@function(timeout_s=30.0, {ONE})\ndef swarms():\n    count = 0\n    for _ in range(10):\n"
        "        if os.fork() == 0:\n            time.sleep(3600)\n"
        "    try:\n        while True:\n"
        "            threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()\n            count += 1\n"
        "    except RuntimeError:\n        return count\n"
    )
    system.deploy(text, name="swarms")
    assert 400 < system.ok("swarms", {}, timeout_s=20) < 600
    (worker,) = system.worker_processes("swarms")
    children = psutil.Process(worker.pid).children()
    assert len(children) == 10
    system.fs("rm", "swarms", "--yes")
    wait_until(lambda: not any(child.is_running() for child in children), what="the end of the worker's children")


def test_a_module_that_raises_is_given_up_after_three_tries_and_healed_by_a_deploy(system: System) -> None:
    system.deploy(HEAD + "raise RuntimeError('no such luck')\n\n@function\ndef unlucky(): ...\n", name="unlucky")
    status, error = system.failed("unlucky", {}, timeout_s=30)
    assert (status, error.code) == (500, "start_failed")
    assert "no such luck" in error.message
    assert "handler.py:5" in error.message
    wait_until(lambda: len(system.phases("unlucky", "failed")) == 3, what="three failed starts in the ledger")
    assert all(row.cost_nusd == 0 for row in system.phases("unlucky"))
    watch = Stopwatch()
    assert system.failed("unlucky", {})[1].code == "start_failed"
    assert watch.unhindered_s < 1
    assert system.info("unlucky").broken is not None
    system.deploy(HEAD + "@function\ndef unlucky():\n    return 'lucky'\n", name="unlucky")
    watch = Stopwatch()
    assert system.ok("unlucky", {}, timeout_s=20) == "lucky"
    assert watch.unhindered_s < 3
    assert len(system.phases("unlucky", "failed")) == 3


def test_a_bad_version_does_not_hurt_the_calls_of_the_good_one_before_it(system: System) -> None:
    system.deploy(HEAD + f"@function({ONE})\ndef shaky():\n    return 1\n", name="shaky")
    assert system.ok("shaky", {}) == 1
    with pytest.raises(AssertionError, match=r"shaky@2 gets no calls: OSError: bad day \(handler.py:5\)"):
        system.deploy(HEAD + f"raise OSError('bad day')\n@function({ONE})\ndef shaky():\n    return 2\n", name="shaky")
    assert system.ok("shaky", {}, timeout_s=20) == 1
    assert system.failed("shaky@2", {}, timeout_s=30)[1].code == "start_failed"


def test_a_start_that_never_ends(system: System) -> None:
    text = HEAD + "time.sleep(3600)\n\n@function(start_timeout_s=1.0, timeout_s=30.0)\ndef late(): ...\n"
    system.deploy(text, name="late")
    watch = Stopwatch()
    status, error = system.failed("late", {}, timeout_s=40)
    assert (status, error.code) == (500, "start_failed")
    assert "1 s" in error.message
    assert watch.unhindered_s < 12


def test_a_handler_that_prints_without_end(system: System) -> None:
    lines = 40_000
    text = HEAD + f"@function({ONE})\ndef floods():\n    for _ in range({lines}):\n        print('x' * 200)\n"
    system.deploy(text, name="floods")
    # It is not slowed down by whoever reads: at the rate at which lines are kept it would take longer than that.
    system.ok("floods", {}, timeout_s=30)
    wait_until(lambda: "lines dropped" in str(system.logs("floods", tail=10_000)), what="a word on what was dropped")
    assert len(system.logs("floods", tail=10_000)) < lines / 2
    with system.redis() as client:
        assert int(client.info("memory")["used_memory"]) < 64 << 20


def test_a_handler_that_prints_one_endless_line_and_bytes_that_are_no_text(system: System) -> None:
    text = (
        HEAD + f"@function({ONE})\ndef mumbles():\n    os.write(1, b'\\xff\\x00\\x1b[2J' + b'y' * (1 << 20))\n"
        "    return 'done'\n"
    )
    system.deploy(text, name="mumbles")
    assert system.ok("mumbles", {}, timeout_s=20) == "done"
    lines = wait_until(lambda: [line for line in system.logs("mumbles") if "yyy" in line.text], what="its log")
    assert all(len(line.text) <= 16 * 1024 + 8 for line in lines)


def test_answers_that_have_no_json_form(system: System) -> None:
    system.deploy(HEAD + f"@function({ONE})\ndef odd():\n    return object()\n", name="odd")
    status, error = system.failed("odd", {})
    assert (status, error.code) == (500, "handler_error")
    assert "object" in error.message


def test_input_that_does_not_fit_the_signature(system: System) -> None:
    system.deploy(HEAD + f"@function({ONE})\ndef typed(count: int):\n    return count + 1\n", name="typed")
    assert system.ok("typed", {"count": 1}) == 2
    for body in ({"count": "many"}, {}, {"count": 1, "colour": "red"}):
        status, error = system.failed("typed", body)
        assert (status, error.code) == (400, "invalid_input"), (body, error)
    response = system.http.post("/fn/typed", content=b'{"count": ', headers={"content-type": "application/json"})
    assert response.status_code == 400
