"""Settings are read once; invalid ones are rejected by name."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fleetstart.prefetcher.config import _gpus, read_config
from fleetstart.prefetcher.daemon_parts import function_uids
from fleetstart.runtime.contract.process.environment import ConfigError

LEAST = {"FS_HOME": "/h", "FS_REDIS_URL": "unix:///r.sock", "FS_STORE": "/s"}


def test_defaults() -> None:
    config = read_config(LEAST)

    assert config.node == socket.gethostname()
    assert config.address == "127.0.0.1"
    assert config.pool_size == 1
    assert "python" in config.profiles
    assert config.memory_bytes > 0
    assert not config.parent_death
    assert config.keep_idle
    assert not read_config({**LEAST, "FS_KEEP_WEIGHTS": "0"}).keep_idle
    assert read_config(LEAST).rdma
    assert not read_config({**LEAST, "FS_RDMA": "0"}).rdma
    assert not config.watch_only
    assert read_config({**LEAST, "FS_LIMITS": "watched"}).watch_only
    assert config.cpu_limit == 0
    limited = read_config({**LEAST, "FS_CPU_LIMIT": "0.5"})
    assert (limited.cpu_limit, limited.worker_threads) == (0.5, 1)


def test_settings() -> None:
    config = read_config(
        {
            **LEAST,
            "FS_NODE_MEMORY": "2GiB",
            "FS_POOL_SIZE": "0",
            "FS_PROFILES": "python",
            "FS_REGION": "eu",
            "FS_LEAF": "rack-7",
        }
    )

    assert (config.region, config.leaf) == ("eu", "rack-7")
    assert (config.memory_bytes, config.pool_size, config.profiles) == (2 << 30, 0, ("python",))


def test_libraries_are_imported_ahead_where_that_is_asked_for() -> None:
    config = read_config({**LEAST, "FS_PROFILES": "python,torch:vllm"})
    assert (config.profiles, config.preloaded) == (("python", "torch"), ("torch:vllm",))
    assert read_config({**LEAST, "FS_PROFILES": "torch,torch:vllm"}).profiles == ("torch",)
    assert not read_config(LEAST).preloaded


def test_workers_inherit_no_setting_and_no_secret() -> None:
    config = read_config({**LEAST, "AWS_SECRET_ACCESS_KEY": "x", "PATH": "/bin", "PYTHONPATH": "/p", "OTHER": "y"})

    assert config.worker_env == {"PATH": "/bin", "PYTHONPATH": "/p"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("FS_HOME", ""),
        ("FS_STORE", ""),
        ("FS_REDIS_URL", "http://x"),
        ("FS_NODE_MEMORY", "much"),
        ("FS_POOL_SIZE", "-1"),
        ("FS_POOL_SIZE", "65"),
        ("FS_PROFILES", "python,fortran"),
        ("FS_FETCH_THREADS", "0"),
        ("FS_REGION", "EU West"),
        ("FS_LEAF", "rack 7"),
        ("FS_DEVICES", "gpu:2"),
        ("FS_DEVICES", "cpu:2x4TiB"),
        ("FS_LIMITS", "cgroups"),
        *(("FS_CPU_LIMIT", text) for text in ("0", "0.01", "two", "-1", "1e3", "9999")),
        ("FS_KEEP_WEIGHTS", "no"),
        ("FS_ISOLATION", "none"),
        ("FS_CONTAINER_ENGINE", "tcp://10.0.0.9:2375"),
        *(("FS_ISOLATION_UIDS", text) for text in ("1000", "0-9", "9-8", "1-4294967295", "a-b", "1-2-3")),
        ("FS_EGRESS_DENY", "redis.internal"),
        ("FS_EGRESS_ALLOW", "10.0.0.1/8"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_config({**LEAST, name: value})


def test_isolation_is_required_unless_it_is_said() -> None:
    assert not read_config(LEAST).best_effort
    assert not read_config({**LEAST, "FS_ISOLATION": "required"}).best_effort
    assert read_config({**LEAST, "FS_ISOLATION": "best-effort"}).best_effort


def test_each_function_has_a_user_id_unless_that_is_turned_off() -> None:
    assert read_config(LEAST).worker_uids == range(2_000_000_000, 2_000_065_536)
    assert read_config({**LEAST, "FS_ISOLATION_UIDS": "5000-5001"}).worker_uids == range(5000, 5002)
    assert not read_config({**LEAST, "FS_ISOLATION_UIDS": "none"}).worker_uids


def test_containers_are_offered_where_an_engine_is_named_and_have_user_ids_of_their_own() -> None:
    assert not [pool for pool in read_config(LEAST).profiles if "container" in pool]
    plain = read_config({**LEAST, "FS_ISOLATION_UIDS": "5000-5007"})
    named = read_config({**LEAST, "FS_ISOLATION_UIDS": "5000-5007", "FS_CONTAINER_ENGINE": "unix:///run/docker.sock"})
    assert "python+container" in named.profiles
    assert function_uids(plain) == range(5000, 5008)
    assert function_uids(named) == range(5000, 5006)


def test_cpu_devices_are_declared() -> None:
    assert read_config(LEAST).devices == ()
    assert read_config({**LEAST, "FS_NODE_MEMORY": "2GiB", "FS_DEVICES": "cpu:2x1GiB"}).devices == (1 << 30, 1 << 30)
    assert read_config(LEAST).find_gpus
    assert not read_config({**LEAST, "FS_DEVICES": "none"}).find_gpus


def test_gpus_are_counted_by_their_device_files(tmp_path: Path) -> None:
    assert _gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert _gpus({}, tmp_path) == 2
    assert _gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert _gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == _gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
