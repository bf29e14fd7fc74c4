"""A library that takes seconds to import: a fork server imports it once a function needs it; later starts have it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.prefetcher.processes.prefork_policy import is_preloaded
from fleetstart.runtime.contract.ids import FunctionName
from fleetstart.runtime.contract.sizes import MIB
from tests.prefetcher.nodes import Node, Store, call, spec_of
from tests.runner.late import late
from tests.servers import RedisServer, wait_until

late("transformers")

HANDLER = """
import sys
INHERITED = "transformers.modeling_utils" in sys.modules, "fleetstart.runtime.pretrained.text" in sys.modules

def hello():
    from huggingface_hub import constants
    return {"inherited": INHERITED, "offline": constants.HF_HUB_OFFLINE}
"""
ENDED = "a fork server that was not needed is ended"
WARM = "fork server warm"


@pytest.fixture
def torch_node(redis_server: RedisServer, store: Store, tmp_path: Path) -> Iterator[Node]:
    node = Node(redis_server, str(store.folder), tmp_path / "home", FS_PROFILES="torch")
    try:
        yield node.start()
    finally:
        node.close()


def test_the_first_start_is_served_by_the_profile_and_later_ones_find_the_library(
    torch_node: Node, store: Store
) -> None:
    node, spec = torch_node, spec_of(store.put_bundle({"handler.py": HANDLER}), profile="torch", preload="transformers")
    first = node.order(spec)
    assert json.loads(call(node.wait_for(first, "ready"))[1]) == {"inherited": [False, False], "offline": False}
    node.take_back(first)
    assert node.log().count(WARM) == 1

    wait_until(lambda: node.log().count(WARM) == 2, 60, what="the library's fork server")

    second = node.wait_for(node.order(spec), "ready")
    assert json.loads(call(second)[1]) == {"inherited": [True, True], "offline": False}
    report = node.report()
    assert report is not None
    assert report.profiles == ["torch"], "schedulers know of profiles only"
    assert report.preloaded_bytes > 64 * MIB

    node.take_back(second.worker)
    node.wait_for(second.worker, "gone")
    wait_until(lambda: node.lease().memory_used_bytes == 0, 10, what="the end of the worker")
    bundle = store.put_bundle({"handler.py": HANDLER})
    large = spec_of(bundle, name=FunctionName("large"), profile="torch", memory_bytes=report.memory_bytes)
    node.wait_for(node.order(large), "ready")
    assert ENDED in node.log(), "what needs the memory gets it"
    wait_until(lambda: node.lease().preloaded_bytes == 0, 10, what="the end of its memory")


def test_a_node_without_such_functions_never_imports_it(torch_node: Node, store: Store) -> None:
    status = torch_node.wait_for(
        torch_node.order(spec_of(store.put_bundle({"handler.py": HANDLER}), profile="torch")), "ready"
    )
    assert json.loads(call(status)[1])["inherited"] == [False, False]
    assert torch_node.log().count(WARM) == 1


@pytest.mark.parametrize(
    ("pool", "preloaded"), [("torch", False), ("torch+gvisor", False), ("torch:transformers", True)]
)
def test_names_of_pools_say_whether_a_library_is_in_them(pool: str, preloaded: bool) -> None:
    assert is_preloaded(pool) == preloaded
