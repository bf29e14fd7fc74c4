"""Backup and restore against a real Redis, with a controller that serves calls meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import redis

from fleetstart.controller.backup.file import BackupHeader, pack, unpack
from fleetstart.controller.backup.redis_state import read_state, running_parts, write_state
from fleetstart.controller.backup.tables import RecordsUnreadable, State, require_whole
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import Conflict
from fleetstart.runtime.contract.ids import NodeId
from tests.controller.auth.test_keys import anybody, bearer, lock, make
from tests.controller.backup.states import system
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


def through_a_file(state: State) -> State:
    read = unpack(pack(BackupHeader(created_unix_ms=1, release="0"), state))[1]
    require_whole(read)
    return read


def everything(client: redis.Redis) -> dict[bytes, Any]:
    found: Any = client.keys("*")
    return {key: client.dump(key) for key in sorted(found)}


def test_a_restore_into_an_empty_redis_is_read_back_and_a_second_one_changes_the_fence_alone(
    redis_server: RedisServer,
) -> None:
    with redis_server.client() as client:
        write_state(client, through_a_file(system()))
        once = read_state(client)
        assert once == {**system(), keys.FENCE: {"": b"4"}, keys.LEDGER_HORIZON: {"": b"21"}}
        assert client.zscore(keys.LEDGER_IDS, "call-40") == 40
        write_state(client, through_a_file(system()))
        assert read_state(client) == {**once, keys.FENCE: {"": b"5"}}


def test_the_ledger_goes_on_behind_its_segments_even_if_the_clock_does_not(redis_server: RedisServer) -> None:
    far = 1 << 45
    backup = system()
    backup[keys.LEDGER] = {f"{far}-0": backup[keys.LEDGER]["40-0"]}
    with redis_server.client() as client:
        write_state(client, backup)
        client.delete(keys.LEDGER)
        del backup[keys.LEDGER]
        write_state(client, backup)
        info: Any = client.xinfo_stream(keys.LEDGER)
        assert (info["length"], info["last-generated-id"]) == (0, b"20-0")


def test_what_cannot_be_restored_changes_nothing(redis_server: RedisServer) -> None:
    with redis_server.client() as client:
        write_state(client, system())
        client.hset(keys.KEYS, "odd", "{of a later release")
        before = everything(client)
        with pytest.raises(RecordsUnreadable, match="odd"):
            write_state(client, system())
        client.hdel(keys.KEYS, "odd")
        client.set(keys.gateway("g1"), "{}")
        with pytest.raises(Conflict, match="controller g1"):
            write_state(client, system())
        client.delete(keys.gateway("g1"))
        assert {**before, b"fs:keys": client.dump(keys.KEYS)} == everything(client)


def test_a_system_comes_back_with_its_functions_rows_numbers_and_revocations(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    lock(controller)
    app, ci = make(controller, "app", ["invoke"]), make(controller, "ci", ["invoke"])
    controller.deploy("hello")
    controller.deploy("hello", concurrency=2)
    stop, served = threading.Event(), [0]

    def load() -> None:
        with anybody(controller) as client:
            while not stop.is_set():
                assert client.get("/fn/hello", headers=bearer(app)).status_code == 200
                served[0] += 1

    caller = threading.Thread(target=load)
    caller.start()
    with redis_server.client() as client:
        wait_until(lambda: served[0] > 20)
        backup = through_a_file(read_state(client))
        wait_until(lambda: served[0] > 40)
        stop.set()
        caller.join()
        assert controller.http.delete("/api/v1/keys/app").is_success
        controller.deploy("hello", concurrency=3)
        before = everything(client)
        with pytest.raises(Conflict, match="the system runs: controller"):
            write_state(client, backup)
        # Of workers, which end once they have had no call for a while.
        theirs = {keys.desired(NodeId("node-1")).encode(), keys.observed(NodeId("node-1")).encode()}
        assert before.keys() - theirs <= everything(client).keys()
        wait_until(lambda: len(controller.rows("hello")) == served[0])
        controller.kill()
        node.close()
        wait_until(lambda: not running_parts(client), 20, what="leases")
        write_state(client, backup)
        again = HandNode(redis_server, "node-2").start()
        try:
            controller.start()
            assert controller.http.get("/fn/hello").headers["fs-version"] == "2", "as it was backed up"
            wait_until(lambda: len(controller.rows("hello")) == served[0] + 1, what="all rows, and one more")
            with anybody(controller) as stranger:
                assert stranger.get("/fn/hello", headers=bearer(app)).status_code == 401, "revoked after the backup"
                assert stranger.get("/fn/hello", headers=bearer(ci)).status_code == 200
            assert controller.deploy("hello", concurrency=4)["version"] == 4, "3 was given"

            controller.kill()
            again.close()
            client.flushall()
            write_state(client, backup)
            again = HandNode(redis_server, "node-3").start()
            controller.start()
            assert controller.http.get("/fn/hello").headers["fs-version"] == "2"
            known = len(backup[keys.LEDGER])
            wait_until(lambda: len(controller.rows("hello")) > known, what="rows that the journal knew")
            ids = [row["id"] for row in controller.rows("hello")]
            assert len({*ids}) == len(ids), "once each"
        finally:
            again.close()
