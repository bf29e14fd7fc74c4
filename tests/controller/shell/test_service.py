"""Where a shell is put."""

from __future__ import annotations

import pytest

from fleetstart.controller.shell.service import select_node
from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.function.spec import FunctionSpec
from fleetstart.runtime.contract.ids import BundleId, FunctionName, NodeId
from fleetstart.runtime.contract.node.reports import NodeReport
from fleetstart.runtime.contract.sizes import GIB

SPEC = FunctionSpec(name=FunctionName("f"), bundle=BundleId("0" * 64), entry="m:f", memory_bytes=2 * GIB)


def node(name: str, *, gib: int = 8, used_gib: int = 0, profiles: tuple[str, ...] = ("python",)) -> NodeReport:
    return NodeReport(
        node=NodeId(name), epoch="e", address="127.0.0.1", memory_bytes=gib * GIB, memory_used_bytes=used_gib * GIB,
        cpus=1, profiles=list(profiles),
    )  # fmt: skip


def test_the_roomiest_node_that_can_takes_it() -> None:
    nodes = [node("a", used_gib=7), node("b", used_gib=5), node("c", profiles=("torch",)), node("d", used_gib=6)]
    assert select_node(SPEC, nodes).node == "b"


def test_a_node_full_of_what_may_give_way_is_asked() -> None:
    assert select_node(SPEC, [node("a", used_gib=8)]).node == "a"


@pytest.mark.parametrize(
    ("nodes", "says"),
    [
        ([], "there is no node"),
        ([node("a", profiles=()), node("b", profiles=("torch",))], "no node has profile python ready, neither of a, b"),
        ([node("a", gib=1)], "it needs 2048 MiB, and the roomiest, a, has 1024 MiB in all"),
    ],
)
def test_where_there_is_none_it_is_said_why(nodes: list[NodeReport], says: str) -> None:
    with pytest.raises(Unavailable, match=says):
        select_node(SPEC, nodes)
