"""Workers of a real daemon: a real Redis, store, fork server and processes."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections import Counter

import psutil

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName
from fleetstart.runtime.contract.sizes import MIB
from tests.prefetcher.nodes import CHUNK_BYTES, HELLO, Node, S3Server, Store, call, groups_of, spec_of
from tests.prefetcher.worker_nodes import newest_spare, wait_for_spare, workers_of
from tests.servers import wait_until

# ── a worker's life ────────────────────────────────────────────────────────────────────────────────


def test_an_ordered_worker_gets_ready_and_answers_those_who_know_its_token(node: Node, store: Store) -> None:
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))

    status = node.wait_for(worker, "ready")

    assert call(status, b'{"name": "you"}') == (200, b'"hello you"')
    assert call(status, token="guessed")[0] in (401, 403)
    assert status.start == "warm"
    assert status.timeline.phases[0].name == "start"


def test_a_spare_is_used_and_replaced(node: Node, store: Store) -> None:
    wait_for_spare(node)
    bundle = store.put_bundle({"handler.py": HELLO})

    status = node.wait_for(node.order(spec_of(bundle)), "ready")

    assert status.pooled
    wait_until(lambda: len(workers_of(node)) == 2, what="worker and new spare")


def test_a_spare_that_died_unnoticed_costs_no_start(node: Node, store: Store) -> None:
    """Its death and the order for a worker arrive together: whichever the daemon sees first, the worker gets ready."""
    assert node.process is not None
    bundle = store.put_bundle({"handler.py": HELLO})
    spare = wait_for_next_spare(node, before=0)
    for _ in range(5):
        os.kill(node.process.pid, signal.SIGSTOP)
        os.kill(spare, signal.SIGKILL)
        wait_until(functools.partial(is_gone, spare), what="its end")
        worker = node.order(spec_of(bundle))
        os.kill(node.process.pid, signal.SIGCONT)
        assert call(node.wait_for(worker, "ready"))[0] == 200
        node.take_back(worker)
        node.wait_for(worker, "gone")
        spare = wait_for_next_spare(node, before=spare)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid)


def wait_for_next_spare(node: Node, *, before: int) -> int:
    """The pid of a preforked worker other than the one before."""

    def newest() -> int:
        spare = newest_spare(node)
        return 0 if spare == before else spare

    return wait_until(newest, 20, what="another spare")


def test_a_function_with_the_network_has_a_process_of_its_own(node: Node, store: Store) -> None:
    wait_for_spare(node)

    status = node.wait_for(node.order(spec_of(store.put_bundle({"handler.py": HELLO}), network=True)), "ready")

    assert not status.pooled
    assert "net" not in status.isolation.split(",")
    assert call(status)[0] == 200


def test_a_drained_worker_finishes_its_call_and_goes(node: Node, store: Store) -> None:
    slow = "import time\ndef hello() -> str:\n    print('begun', flush=True)\n    time.sleep(0.7)\n    return 'done'\n"
    worker = node.order(spec_of(store.put_bundle({"handler.py": slow})))
    status = node.wait_for(worker, "ready")
    answers: list[tuple[int, bytes]] = []
    caller = threading.Thread(target=lambda: answers.append(call(status)))
    caller.start()
    wait_until(lambda: any(line.text == "begun" for line in node.log_lines("hello")), what="the call's first line")

    node.drain(worker)

    node.wait_for(worker, "draining", "gone")
    ended = node.wait_for(worker, "gone")
    caller.join()
    assert answers == [(200, b'"done"')]
    assert ended.error is None
    assert ended.endpoint == ended.token == ""
    node.take_back(worker)
    wait_until(lambda: node.status(worker) is None, what="forgotten status")


def test_taking_an_order_back_ends_its_worker(node: Node, store: Store) -> None:
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))
    node.wait_for(worker, "ready")
    wait_until(lambda: len(workers_of(node)) == 2, what="worker and spare")

    node.take_back(worker)

    wait_until(lambda: node.status(worker) is None, what="forgotten status")
    wait_until(lambda: len(workers_of(node)) == 1, what="the spare alone")


def test_an_order_is_found_without_its_message(node: Node, store: Store) -> None:
    node.wait_for(node.order(spec_of(store.put_bundle({"handler.py": HELLO})), publish=False), "ready")


def test_what_is_not_an_order_disturbs_nobody(node: Node, store: Store) -> None:
    node.client.hset(keys.desired(node.id), "w-bad", b"{not json")
    node.client.publish(keys.events_desired(node.id), b'{"worker": 7}')

    node.wait_for(node.order(spec_of(store.put_bundle({"handler.py": HELLO})), publish=False), "ready")


def test_an_order_taken_back_at_once_ends_as_gone(node: Node, store: Store) -> None:
    bundle = store.put_bundle({"handler.py": HELLO})
    for publish in (True, False):
        worker = node.order(spec_of(bundle), publish=publish)
        node.drain(worker)
        assert node.wait_for(worker, "gone").error is None
        node.take_back(worker)
        wait_until(lambda worker=worker: node.status(worker) is None, what="forgotten status")  # type: ignore[misc]


def test_twenty_workers_leave_no_descriptor_and_no_group_behind(node: Node, store: Store) -> None:
    wait_for_spare(node)
    assert node.process is not None
    daemon = psutil.Process(node.process.pid)
    bundle = store.put_bundle({"handler.py": HELLO})
    checkpoint = store.put_checkpoint(bytes(CHUNK_BYTES))

    def round_of(count: int) -> None:
        workers = [node.order(spec_of(bundle, weights=checkpoint)) for _ in range(count)]
        for worker in workers[::2]:
            node.wait_for(worker, "ready", deadline_s=60)
        for worker in workers:
            node.take_back(worker)
        for worker in workers:
            wait_until(lambda worker=worker: node.status(worker) is None, 30)  # type: ignore[misc]

    round_of(2)
    wait_until(lambda: len(workers_of(node)) == 1, what="the spare alone")
    before = daemon.num_fds()
    round_of(10)
    round_of(10)

    wait_until(lambda: len(workers_of(node)) == 1, what="the spare alone")
    # Connections to Redis that were opened for commands at the same time stay; one left by each worker would be twenty.
    wait_until(lambda: daemon.num_fds() <= before + 10, what="descriptors")
    wait_until(lambda: len(os.listdir(groups_of(node.epoch)[0])) <= before_groups(node) + 1, what="groups")
    wait_until(
        lambda: (report := node.report()) and report.memory_used_bytes == report.weights_memory.slab_bytes,
        what="used memory",
    )


def before_groups(node: Node) -> int:
    """Number of entries of a daemon's control group that are the kernel's own files."""
    folder = groups_of(node.epoch)[0]
    return sum(os.path.isfile(os.path.join(folder, name)) for name in os.listdir(folder))


# ── weights ────────────────────────────────────────────────────────────────────────────────────────


def test_ten_orders_for_one_checkpoint_fetch_each_byte_once(s3_node: Node, store: Store, s3_server: S3Server) -> None:
    checkpoint = store.put_checkpoint(os.urandom(12 * CHUNK_BYTES))
    bundle = store.put_bundle({"handler.py": HELLO})

    workers = [s3_node.order(spec_of(bundle, weights=checkpoint)) for _ in range(10)]

    statuses = [s3_node.wait_for(worker, "ready", deadline_s=60) for worker in workers]
    assert statuses[0].start == "cold"
    assert "fetch" in {phase.name for phase in statuses[0].timeline.phases}
    # Its handler does not use the weights: a worker may be ready before the last chunk has come.
    wait_until(
        lambda: (report := s3_node.report()) and [segment.state for segment in report.segments] == ["ready"],
        what="the whole segment",
    )
    gets = [line for line in s3_server.log().splitlines() if "GET" in line and "part-00000" in line]
    assert len(gets) == 12, "one request a chunk"
    later = s3_node.wait_for(s3_node.order(spec_of(bundle, weights=checkpoint)), "ready")
    assert later.start == "warm"
    assert "fetch" not in {phase.name for phase in later.timeline.phases}


def test_a_worker_without_its_weights_fails_and_says_why(node: Node, store: Store) -> None:
    bundle = store.put_bundle({"handler.py": HELLO})
    wait_for_spare(node)

    status = node.wait_for(node.order(spec_of(bundle, weights=CheckpointId("0" * 64))), "failed")

    assert status.error is not None
    assert status.error.code == "weights_missing"
    assert node.wait_for(node.order(spec_of(bundle)), "ready").pooled, "the spare was not wasted"


# ── what is written down ───────────────────────────────────────────────────────────────────────────


def test_the_ledger_has_each_phase_of_each_worker_once(node: Node, store: Store) -> None:
    good = node.order(
        spec_of(store.put_bundle({"handler.py": HELLO}), weights=store.put_checkpoint(os.urandom(CHUNK_BYTES)))
    )
    status = node.wait_for(good, "ready")
    call(status)
    bad = node.order(spec_of(store.put_bundle({"handler.py": "raise ValueError\ndef hello() -> str: ...\n"})))
    node.wait_for(bad, "failed")
    node.drain(good)
    node.wait_for(good, "gone")

    rows = wait_until(
        lambda: (found := node.ledger()) and {row.phase for row in found if row.worker == good} >= {"idle"} and found
    )

    assert rows
    phases = Counter(row.phase for row in rows if row.worker == good)
    assert {"start", "fetch", "load", "idle"} <= set(phases)
    assert {row.phase for row in rows if row.worker == bad} == {"start", "failed"}
    assert len({row.id for row in rows}) == len(rows)
    assert all(row.cost_nusd == 0 and row.memory_bytes == 256 * MIB for row in rows)


def test_prints_reach_the_log_of_their_function(node: Node, store: Store) -> None:
    code = (
        "import sys\n"
        "def say(text: str) -> str:\n"
        "    print(text)\n"
        "    sys.stderr.write('err ' + text + '\\n')\n"
        "    return ''\n"
    )
    spec = spec_of(store.put_bundle({"handler.py": code}), name=FunctionName("say"), entry="handler:say")
    worker = node.order(spec, version=7)
    call(node.wait_for(worker, "ready"), b'{"text": "b\xc3\xa4r"}')

    wait_until(lambda: any(line.text == "err bär" for line in node.log_lines("say")), what="the printed line")
    line = next(line for line in node.log_lines("say") if line.text == "bär")
    assert (line.worker, line.version, line.stream) == (worker, 7, "stdout")
