"""The daemon as a process, and failures around it: Redis, fork server, parent, its own end."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import psutil

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.node.reports import NodeReport
from tests.prefetcher.nodes import HELLO, Node, Store, call, groups_of, spec_of
from tests.servers import RedisServer, wait_until


def test_workers_outlive_redis_and_their_statuses_come_back_with_it(
    node: Node, store: Store, redis_server: RedisServer
) -> None:
    bundle = store.put_bundle({"handler.py": HELLO})
    worker = node.order(spec_of(bundle))
    status = node.wait_for(worker, "ready")

    node.client.delete(keys.observed(node.id))
    node.client.execute_command("WAITAOF", 1, 0, 5000)
    redis_server.kill()
    assert call(status) == (200, b'"hello world"')
    redis_server.start()

    again = node.wait_for(worker, "ready")
    assert (again.endpoint, again.token) == (status.endpoint, status.token)
    assert node.wait_for(node.order(spec_of(bundle)), "ready").state == "ready"


def test_a_status_that_arrives_after_its_deletion_is_deleted_again(node: Node, store: Store) -> None:
    """Sent over a connection that was cut off, whose kernel sends it again once the network is mended."""
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))
    node.wait_for(worker, "ready")
    late: Any = node.client.hget(keys.observed(node.id), worker)
    node.take_back(worker)
    wait_until(lambda: node.status(worker) is None, 30, what="the deletion of its status")
    node.client.hset(keys.observed(node.id), worker, late)
    wait_until(lambda: node.status(worker) is None, 30, what="the deletion of a status that came late")


def test_a_daemon_waits_for_a_redis_that_is_not_there_yet(
    redis_server: RedisServer, store: Store, tmp_path: Path
) -> None:
    redis_server.kill()
    node = Node(redis_server, str(store.folder), tmp_path / "home")
    try:
        node.start(wait=False)
        wait_until(lambda: "retrying" in node.log() or "fork server warm" in node.log(), 30)
        redis_server.start()
        wait_until(node.warm, 30, what="lease")
        node.wait_for(node.order(spec_of(store.put_bundle({"handler.py": HELLO}))), "ready")
    finally:
        node.close()


def test_a_killed_fork_server_takes_its_workers_and_comes_back(node: Node, store: Store) -> None:
    bundle = store.put_bundle({"handler.py": HELLO})
    worker = node.order(spec_of(bundle))
    node.wait_for(worker, "ready")
    assert node.process is not None
    (server,) = psutil.Process(node.process.pid).children()

    server.kill()

    status = node.wait_for(worker, "failed")
    assert status.error is not None
    assert "fork server" in status.error.message or "SIGKILL" in status.error.message
    node.wait_for(node.order(spec_of(bundle)), "ready")


def test_kill_9_of_the_daemon_leaves_no_process_and_its_successor_no_group(node: Node, store: Store) -> None:
    bundle = store.put_bundle({"handler.py": HELLO})
    old = node.order(spec_of(bundle))
    node.wait_for(old, "ready")
    epoch = node.epoch
    below = node.descendants()
    assert len(below) >= 2

    node.kill()
    wait_until(lambda: not any(process.is_running() for process in below), what="processes of a dead daemon")
    node.start()

    assert node.epoch != epoch
    status = node.wait_for(old, "gone")
    assert status.error is None
    assert not groups_of(epoch)
    node.wait_for(node.order(spec_of(bundle)), "ready")


def test_a_daemon_dies_with_its_parent_if_told_to(node: Node) -> None:
    node.kill()
    code = "import subprocess, sys; print(subprocess.Popen([sys.executable, *sys.argv[1:]]).pid, flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, "-m", "fleetstart.prefetcher"],
        env=node.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    pid = int(parent.stdout.readline())
    wait_until(lambda: (report := node.report()) and report.pid == pid and report.profiles, 30, what="lease")
    below = psutil.Process(pid).children(recursive=True)

    parent.kill()

    wait_until(lambda: not any(process.is_running() for process in below), what="its fork server and spares")
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    parent.wait()
    parent.stdin.close()
    parent.stdout.close()


def test_an_order_of_an_earlier_epoch_is_refused(node: Node, store: Store) -> None:
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})), epoch="1.1.before")

    assert node.wait_for(worker, "gone").endpoint == ""
    node.take_back(worker)
    wait_until(lambda: node.status(worker) is None, what="forgotten status")


def test_sigterm_ends_everything_in_order(node: Node, store: Store) -> None:
    worker = node.order(spec_of(store.put_bundle({"handler.py": HELLO})))
    node.wait_for(worker, "ready")
    epoch, below = node.epoch, node.descendants()

    assert node.stop() == 0

    wait_until(lambda: not any(process.is_running() for process in below), what="what it forked")
    assert node.report() is None
    assert node.client.exists(keys.observed(node.id)) == 0
    assert not groups_of(epoch)
    assert "Traceback" not in node.log()


def test_a_second_daemon_of_the_same_name_is_refused(node: Node) -> None:
    twin = Node(node.server, node.store, node.home.parent / "twin")
    twin.start(wait=False)
    assert twin.process is not None

    assert twin.process.wait(20) == 1
    assert "node node-1 is alive already, at 127.0.0.1" in twin.log()
    assert "another name with FS_NODE" in twin.log()
    twin.close()


def test_a_name_on_another_machine_is_taken_as_long_as_its_lease_is_renewed(node: Node) -> None:
    assert node.process is not None
    node.kill()
    left = msgspec.json.decode(node.client.get(keys.node(node.id)) or b"", type=NodeReport)
    elsewhere = msgspec.json.encode(msgspec.structs.replace(left, machine="another"))
    ends = threading.Event()

    def renew() -> None:
        while not ends.wait(0.2):
            node.client.set(keys.node(node.id), elsewhere, px=3000)

    node.client.set(keys.node(node.id), elsewhere, px=3000)
    renewing = threading.Thread(target=renew)
    renewing.start()
    try:
        node.start(wait=False)
        assert node.process.wait(20) == 1
        assert "is alive already" in node.log()
    finally:
        ends.set()
        renewing.join()
    node.start()  # that lease ends, and the name is free
