"""Workers of a real daemon that crash, exceed limits or never start: their errors, and what is left of them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import msgspec
import pytest

from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.node.orders import WorkerStatus
from fleetstart.runtime.contract.sizes import MIB
from tests.prefetcher.nodes import HELLO, Node, Store, call, spec_of
from tests.prefetcher.worker_nodes import wait_for_spare, workers_of
from tests.servers import RedisServer, wait_until


def test_a_killed_worker_is_reported_with_its_signal(node: Node, store: Store) -> None:
    wait_for_spare(node)
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))
    node.wait_for(worker, "ready")
    wait_until(lambda: len(workers_of(node)) == 2, what="worker and spare")
    # The first spare became the worker, so it is the older one.
    mine = min(workers_of(node), key=lambda process: process.create_time())

    mine.send_signal(signal.SIGKILL)

    status = node.wait_for(worker, "failed")
    assert status.error is not None
    assert status.error.code == "worker_lost"
    assert "SIGKILL" in status.error.message
    wait_until(lambda: any("SIGKILL" in line.text for line in node.log_lines("hello")), what="the line that says so")


ENTERS = """
import time
def hello(sleeps: bool = False) -> str:
    if sleeps:
        print("entered", flush=True)
        time.sleep(60)
    return "done"
"""


@pytest.mark.parametrize("sleeps", [False, True])
def test_a_killed_worker_is_reported_with_the_calls_that_it_had_entered(node: Node, store: Store, sleeps: bool) -> None:
    wait_for_spare(node)
    worker = node.order(spec_of(store.put_bundle({"handler.py": ENTERS})))
    status = node.wait_for(worker, "ready")
    wait_until(lambda: len(workers_of(node)) == 2, what="worker and spare")
    mine = min(workers_of(node), key=lambda process: process.create_time())
    assert call(status, request="inv-first") == (200, b'"done"')
    if sleeps:
        body = b'{"sleeps": true}'
        threading.Thread(target=_call_quietly, args=(status, body, "inv-second"), daemon=True).start()
        wait_until(lambda: any(line.text == "entered" for line in node.log_lines("hello")), what="an entered call")

    mine.send_signal(signal.SIGKILL)

    entered = node.wait_for(worker, "failed").entered
    assert entered is not None
    assert entered.count == 1 + sleeps
    assert not entered.excludes("inv-first", 0)
    assert entered.excludes("inv-second", 1) == (not sleeps)


PRIVATE = "held.append(b'x' * 1_000_000)"
SHARED = "held.append(mmap.mmap(-1, 1_000_000)); held[-1].write(b'x' * 1_000_000)"


@pytest.mark.parametrize(("groups", "takes"), [(True, PRIVATE), (False, PRIVATE), (False, SHARED)])
def test_a_memory_hog_is_ended_as_out_of_memory(
    redis_server: RedisServer, store: Store, tmp_path: Path, groups: bool, takes: str
) -> None:
    env = {} if groups else {"FS_LIMITS": "watched"}
    node = Node(redis_server, str(store.folder), tmp_path / "home", **env).start()
    try:
        hog = f"import mmap\nheld = []\ndef hello() -> str:\n    while True:\n        {takes}\n"
        worker = node.order(spec_of(store.put_bundle({"handler.py": hog}), memory_bytes=128 * MIB))
        status = node.wait_for(worker, "ready")
        threading.Thread(target=_call_quietly, args=(status,), daemon=True).start()

        ended = node.wait_for(worker, "failed")

        assert ended.error is not None
        assert ended.error.code == "out_of_memory"
        assert "128 MiB" in ended.error.message
        report = node.report()
        assert report is not None
        assert report.limits == "watched" or groups
        (row,) = wait_until(lambda: [row for row in node.ledger() if row.phase == "load"], what="the row of its load")
        measured = report.limits != "watched"
        assert ((row.cpu_ms is not None), (row.memory_peak_bytes is not None)) == (measured, measured)
        fine = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))
        assert call(node.wait_for(fine, "ready"))[0] == 200
    finally:
        node.close()


def _call_quietly(status: WorkerStatus, body: bytes = b"", request: str = "") -> None:
    try:
        call(status, body, request=request)
    except OSError:
        return


def test_a_module_that_raises_fails_with_its_message_and_its_traceback_in_the_log(node: Node, store: Store) -> None:
    broken = "def hello() -> str:\n    return ''\nraise RuntimeError('no such thing')\n"

    worker = node.order(spec_of(store.put_bundle({"handler.py": broken})))

    status = node.wait_for(worker, "failed")
    assert status.error is not None
    assert status.error.code == "start_failed"
    assert "no such thing" in status.error.message
    lines = wait_until(lambda: [line for line in node.log_lines("hello") if line.stream == "system"], what="log")
    texts = [line.text for line in node.log_lines("hello")]
    assert any("RuntimeError: no such thing" in text for text in texts)
    assert "failed to start" in lines[-1].text


def test_a_start_that_hangs_ends_at_its_own_deadline(node: Node, store: Store) -> None:
    hangs = "import time\ntime.sleep(1000)\ndef hello() -> str:\n    return ''\n"

    worker = node.order(spec_of(store.put_bundle({"handler.py": hangs}), start_timeout_s=1.0))

    status = node.wait_for(worker, "failed")
    assert status.error is not None
    assert status.error.code == "start_failed"
    assert "1 s" in status.error.message


def test_more_than_the_node_has_is_refused_with_the_figures(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    node = Node(redis_server, str(store.folder), tmp_path / "home", FS_NODE_MEMORY="300MiB").start()
    try:
        bundle = store.put_bundle({"handler.py": HELLO})
        first = node.order(spec_of(bundle))
        node.wait_for(first, "ready")

        status = node.wait_for(node.order(spec_of(bundle)), "failed")

        assert status.error is not None
        assert status.error.code == "unavailable"
        assert f"{300 * MIB:,}" in status.error.message
        node.take_back(first)
        wait_until(lambda: node.status(first) is None)
        node.wait_for(node.order(spec_of(bundle)), "ready")
    finally:
        node.close()


def test_a_profile_that_the_node_lacks_is_named(node: Node, store: Store) -> None:
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO}), profile="torch"))

    status = node.wait_for(worker, "failed")
    assert status.error is not None
    assert status.error.code == "unavailable"
    assert "no workers of torch; it has python" in status.error.message


def test_a_worker_sees_no_setting_and_no_secret_of_its_node(s3_node: Node, store: Store) -> None:
    code = "import os\ndef hello() -> list[str]:\n    return sorted(os.environ) + os.listdir('/run')\n"
    worker = s3_node.order(spec_of(store.put_bundle({"handler.py": code}), env={"MINE": "1"}))

    answer = call(s3_node.wait_for(worker, "ready"))

    names = msgspec.json.decode(answer[1], type=list[str])
    assert "MINE" in names
    assert not [name for name in names if name.startswith(("AWS_", "FS_"))]


FORGES = """
import os

def hello():
    for message in (b'{"type":"whole"}', b'{"type":"ready","timeline":{}}', b'{"type":"pooled","started_ns":1}'):
        for _ in range(20):
            os.write(3, message)
    return "said"
"""


def test_what_a_function_says_in_its_workers_name_changes_nothing(node: Node, store: Store) -> None:
    worker = node.order(spec_of(store.put_bundle({"handler.py": FORGES}), name=FunctionName("forges")))
    status = node.wait_for(worker, "ready")
    for _ in range(2):
        assert call(status)[0] == 200
    node.drain(worker)
    assert node.wait_for(worker, "gone").timeline == status.timeline
    node.stop()
    (line,) = node.log_lines("forges")
    assert "worker ready" in line.text
