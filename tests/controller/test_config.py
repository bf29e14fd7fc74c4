"""Settings: defaults, and refusals that name the variable."""

from __future__ import annotations

import pytest

from fleetstart.controller.config import read_config
from fleetstart.runtime.contract.process.environment import ConfigError


def test_defaults() -> None:
    config = read_config({"FS_HOME": "/h"})
    assert (config.host, config.port, config.url) == ("127.0.0.1", 7433, "http://127.0.0.1:7433")
    assert config.redis_url == "unix:///h/redis.sock"
    assert config.max_body_bytes == 64 * 1024 * 1024
    assert config.listen_fd is None


@pytest.mark.parametrize(("name", "value"), [("FS_PORT", "x"), ("FS_PORT", "70000"), ("FS_MAX_BODY", "-1")])
def test_numbers_are_checked(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_config({name: value})
