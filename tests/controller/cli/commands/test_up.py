"""`fs up` and `fs node join`: what they make of files that an earlier system has left."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from fleetstart.controller.cli.commands import node, up
from fleetstart.controller.cli.home import HomeLayout, ServiceRecord
from fleetstart.controller.cli.local import join
from fleetstart.controller.cli.local.join import JoinRecord
from fleetstart.runtime.contract.errors import StartFailed


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HomeLayout:
    """A home whose supervisor was killed, after a while in which its services had ended often."""
    layout = HomeLayout(tmp_path)
    layout.create()
    died = ServiceRecord(pid=1, deaths=up.DEATHS_MAX)
    layout.services.write_bytes(msgspec.json.encode({"controller": died, "node": died}))
    for module in (up, join):
        monkeypatch.setattr(module, "DEADLINE_S", 0.01)
    for module in (up, node):
        monkeypatch.setattr(module, "_spawn", lambda *_: SimpleNamespace(poll=lambda: None, pid=os.getpid()))
    return layout


def test_deaths_that_a_killed_supervisor_had_counted_are_none_of_the_next_start(layout: HomeLayout) -> None:
    """`fs up` failed with "the controller ended 5 times while starting", and the system came up all the same."""
    with pytest.raises(StartFailed, match="the supervisor was not ready"):
        up._start(layout, [], {"FS_REDIS_URL": ""}, "")


def test_nor_are_they_of_the_next_start_of_a_node(layout: HomeLayout, redis_url: str) -> None:
    record = JoinRecord(url="", redis_url=redis_url, store="", node="vm", address="")
    with pytest.raises(StartFailed, match="the node was not in"):
        node._start([], layout, {}, record)
