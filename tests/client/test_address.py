from __future__ import annotations

from pathlib import Path

import pytest

from fleetstart.client.address import Address, find_address
from fleetstart.client.errors import Unauthorized, Unreachable


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "endpoint").write_text("http://127.0.0.1:7433\n")
    (tmp_path / "key").write_text("fs_home\n")
    return tmp_path


def test_what_is_given_comes_before_the_environment_and_that_before_the_home(home: Path) -> None:
    environ = {"FS_HOME": str(home), "FS_URL": "https://fleet.example/", "FS_KEY": "fs_env"}
    assert find_address("models.example:80", "fs_given", environ) == Address("http://models.example:80", "fs_given")
    assert find_address(None, None, environ) == Address("https://fleet.example", "fs_env")
    assert find_address(None, None, {"FS_HOME": str(home)}) == Address("http://127.0.0.1:7433", "fs_home")


def test_the_key_of_a_home_is_sent_to_its_own_server_only(home: Path) -> None:
    environ = {"FS_HOME": str(home)}
    assert find_address("https://fleet.example", None, environ).key == ""
    assert find_address("http://127.0.0.1:7433/", None, environ).key == "fs_home"
    assert find_address(None, "", environ).key == ""


def test_without_a_server_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(Unreachable) as raised:
        find_address(None, None, {"FS_HOME": str(tmp_path)})
    assert "fs up" in raised.value.hint


def test_a_key_that_cannot_be_one_is_not_sent(home: Path) -> None:
    with pytest.raises(Unauthorized):
        find_address(None, "fs_\n1", {"FS_HOME": str(home)})
