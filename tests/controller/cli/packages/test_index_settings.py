"""A build sees the machine's index settings and no secret."""

from __future__ import annotations

from pathlib import Path

from fleetstart.controller.cli.packages.index_settings import build_environment, pip_settings


def test_a_build_sees_no_secret_and_nothing_of_the_platform() -> None:
    env = {"PATH": "/bin", "HF_TOKEN": "x", "FS_KEY": "y", "UV_TOKEN": "z", "UV_OFFLINE": "1", "AWS_SECRET": "s"}
    built = build_environment(env, {}, secrets=["UV_TOKEN"])
    assert built["PATH"] == "/bin"
    assert built["UV_OFFLINE"] == "1"
    assert not {"HF_TOKEN", "FS_KEY", "UV_TOKEN", "AWS_SECRET"} & built.keys()


def test_settings_of_pip_are_passed_on_in_the_names_of_uv() -> None:
    pip = {"index-url": "https://a/simple", "extra-index-url": "https://b\nhttps://c", "find-links": "/w /x"}
    built = build_environment({}, pip)
    assert built["UV_DEFAULT_INDEX"] == "https://a/simple"
    assert built["UV_INDEX"] == "https://b https://c"
    assert built["UV_FIND_LINKS"] == "/w,/x"
    assert built["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    assert build_environment({"UV_INDEX_STRATEGY": "first-index"}, pip)["UV_INDEX_STRATEGY"] == "first-index"
    assert "UV_INDEX_STRATEGY" not in build_environment({}, {"index-url": "https://a/simple"})


def test_settings_of_uv_win_over_those_of_pip() -> None:
    built = build_environment({"UV_INDEX_URL": "https://u"}, {"index-url": "https://a"})
    assert "UV_DEFAULT_INDEX" not in built
    assert built["UV_INDEX_URL"] == "https://u"


def test_a_variable_wins_over_the_file_of_pip(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://file\ntimeout = 9\n[install]\nno-index = true\n")
    found = pip_settings({"PIP_CONFIG_FILE": str(config), "PIP_INDEX_URL": "https://variable"}, tmp_path)
    assert found["index-url"] == "https://variable"
    assert found["timeout"] == "9"
    assert found["no-index"] == "true"
