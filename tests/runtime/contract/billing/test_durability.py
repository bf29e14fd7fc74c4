from __future__ import annotations

from pathlib import Path

import pytest
import redis

from fleetstart.runtime.contract.billing.durability import on_disk
from tests.servers import RedisServer


def test_what_a_server_says_to_waitaof(tmp_path: Path) -> None:
    """Servers with a log, without one, and without the command; a replica, which takes no writes, is none of these."""
    said: dict[str, object] = {}
    for name, options in {
        "log": (), "no log": ("--appendonly", "no"), "old": ("--rename-command", "WAITAOF", ""),
    }.items():  # fmt: skip
        server = RedisServer(tmp_path / name.replace(" ", "-"), *options)
        server.start()
        with server.client() as client:
            client.set("k", 1)
            try:
                said[name] = client.execute_command("WAITAOF", 1, 0, 5_000)
            except redis.ResponseError as error:
                said[name] = error
            if name == "log":
                client.replicaof("127.0.0.1", "1")
                with pytest.raises(redis.ResponseError) as refused:
                    client.execute_command("WAITAOF", 1, 0, 5_000)
                said["replica"] = refused.value
        server.close()
    assert [on_disk(said[name]) for name in ("log", "no log", "old")] == ["yes", "cannot tell", "cannot tell"]
    with pytest.raises(redis.ResponseError, match="replica"):
        on_disk(said["replica"])


@pytest.mark.parametrize("error", [redis.ResponseError("NOPERM this user has no permissions"), OSError("cut")])
def test_other_errors_confirm_nothing(error: Exception) -> None:
    with pytest.raises(type(error)):
        on_disk(error)


def test_a_timeout_is_not_yet() -> None:
    assert on_disk([0, 0]) == "not yet"
