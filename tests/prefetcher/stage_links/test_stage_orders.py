"""Orders of pipeline stages at a real daemon: links, peers, growth, drain, and malformed orders."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator

import msgspec
import pytest

from fleetstart.prefetcher.stage_links.stage_links import StageSockets
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.ids import BundleId, PipelineId, Version, WorkerId, new_worker_id
from fleetstart.runtime.contract.node.orders import NO_PEER, WorkerOrder
from fleetstart.runtime.contract.node.reports import SegmentReport
from fleetstart.runtime.contract.weights.stage import Stage
from tests.prefetcher.nodes import Node, Store, spec_of
from tests.prefetcher.stages import LAYERS, Model
from tests.servers import wait_until

CUTS = ((0, 2), (2, 5), (5, LAYERS))
HANDLER = "def hello():\n    return 'hello'\n"


@pytest.fixture
def model(store: Store) -> Model:
    return Model(store)


@pytest.fixture
def bundle(store: Store) -> BundleId:
    return store.put_bundle({"handler.py": HANDLER})


@pytest.fixture
def other() -> Iterator[socket.socket]:
    """An address at which the order claims that another node's stage listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        yield listener


def order(node: Node, model: Model, bundle: BundleId, index: int, *peers: str, **fields: object) -> WorkerId:
    made = WorkerOrder(
        worker=new_worker_id(),
        node=node.id,
        epoch=node.epoch,
        version=Version(1),
        spec=spec_of(bundle, weights=model.checkpoint),
        ordered_unix_ns=time.time_ns(),
        stage=Stage(pipeline=PipelineId("p"), index=index, cuts=CUTS),
        secret="word",
        peers=peers or ("",) * len(CUTS),
    )
    node.write(msgspec.structs.replace(made, **fields))
    return made.worker


def change(node: Node, worker: WorkerId, **fields: object) -> None:
    node.write(msgspec.structs.replace(node.ordered(worker), **fields))


def segment(node: Node, model: Model) -> SegmentReport | None:
    return next((one for one in node.lease().segments if one.checkpoint == model.checkpoint), None)


def there(node: Node, model: Model) -> set[int]:
    found = segment(node, model)
    return {chunk for begin, end in found.ranges for chunk in range(begin, end)} if found is not None else set()


def address(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


def test_two_stages_of_one_pipeline_live_on_a_node(
    node: Node, model: Model, bundle: BundleId, other: socket.socket
) -> None:
    idle = len(node.descendants())
    stages = [order(node, model, bundle, index) for index in (0, 1)]
    links = [node.wait_for(worker, "ready").link for worker in stages]
    assert len(set(links)) == 2
    wait_until(lambda: there(node, model) == model.chunks(0, 5), what="chunks of both stages, and no others")
    first, second = (node.status(worker) for worker in stages)
    assert first is not None
    assert second is not None
    assert (first.whole, bool(first.endpoint)) == (False, True)
    assert (second.whole, second.endpoint, second.token) == (False, "", ""), "calls come to the first alone"

    for worker in stages:  # told twice, as when a publication and a full read cross
        for _ in range(2):
            change(node, worker, peers=(*links, address(other)))
    with contextlib.ExitStack() as stack:
        connected = [stack.enter_context(other.accept()[0]) for _ in stages]

        change(node, stages[0], grow=True)
        wait_until(lambda: there(node, model) == model.everything, what="the rest of the checkpoint")
        for worker in stages:
            node.drain(worker)
        for worker in stages:
            node.wait_for(worker, "gone")
        for link in connected:
            link.settimeout(10)
            assert link.recv(1) == b"", "the connection goes with its worker"
    other.settimeout(0.3)
    with pytest.raises(TimeoutError):  # one each was enough
        other.accept()
    for worker in stages:
        node.take_back(worker)
    wait_until(lambda: len(node.descendants()) == idle, what="end of the workers")
    wait_until(lambda: all(node.status(worker) is None for worker in stages), what="forgotten statuses")


UNREACHABLE = (
    "127.0.0.1:1",
    "nonsense",
    "127.0.0.1:port",
    "127.0.0.1:99999",
    "[::1",
    "no.such.invalid:5",
    ":",
    NO_PEER,
)


@pytest.mark.parametrize("address", UNREACHABLE)
def test_a_peer_that_cannot_be_reached_is_a_connection_that_is_dead(address: str) -> None:
    """So the stage that has it learns what it learns of a stage that dies later."""
    connected: dict[int, socket.socket] = {}

    async def tell() -> None:
        stage = Stage(pipeline=PipelineId("p"), index=1, cuts=CUTS)
        sockets = StageSockets(stage, "127.0.0.1", connected.__setitem__, lambda index, why: None)
        try:
            sockets.connect_peers(("", sockets.link, address))
            await asyncio.to_thread(wait_until, lambda: connected, what="a connection")
        finally:
            sockets.close()

    asyncio.run(tell())
    assert connected.keys() == {2}
    with connected[2] as link, pytest.raises(BrokenPipeError):
        link.sendall(b"hello")


def test_peers_that_nobody_can_reach_harm_neither_stage_nor_node(node: Node, model: Model, bundle: BundleId) -> None:
    worker = order(node, model, bundle, 1, *UNREACHABLE)
    node.wait_for(worker, "ready")
    wait_until(lambda: there(node, model) == model.chunks(2, 5), what="chunks of the stage")
    wait_until(lambda: node.log().count("could not be reached") >= 2 * (len(UNREACHABLE) - 2), what="all tries")
    node.drain(worker)
    node.wait_for(worker, "gone")
    assert "never retrieved" not in node.log()


WRONG: tuple[object, ...] = (
    {"pipeline": "p", "index": 3, "cuts": [[0, 2], [2, 5], [5, 8]]},
    {"pipeline": "p", "index": -1, "cuts": [[0, 8]]},
    {"pipeline": "p", "index": 0, "cuts": [[0, 2], [3, 8]]},
    {"pipeline": "p", "index": 0, "cuts": [[0, 0], [0, 8]]},
    {"pipeline": "p", "index": 0, "cuts": []},
    {"pipeline": "p", "index": "0", "cuts": [[0, 8]]},
    "all of it",
)


def test_orders_of_stages_that_cannot_be_are_not_run_and_others_are(node: Node, model: Model, bundle: BundleId) -> None:
    worker = order(node, model, bundle, 0)
    for number, stage in enumerate(WRONG):
        raw = msgspec.to_builtins(node.ordered(worker)) | {"stage": stage, "worker": f"w-{number}"}
        node.client.hset(keys.desired(node.id), f"w-{number}", msgspec.json.encode(raw))
    node.wait_for(worker, "ready")
    wait_until(lambda: node.log().count("cannot decode an order") >= len(WRONG), what="complaints of all")
    assert not any(node.status(WorkerId(f"w-{number}")) for number in range(len(WRONG)))


def test_a_stage_beyond_the_model_has_nothing_to_fetch_and_ends_when_it_is_told(
    node: Node, model: Model, bundle: BundleId
) -> None:
    cuts = ((0, LAYERS), (LAYERS, 2 * LAYERS))
    worker = order(node, model, bundle, 0, "", "", stage=Stage(pipeline=PipelineId("p"), index=1, cuts=cuts))
    status = node.wait_for(worker, "ready", "failed")
    if status.state == "ready":
        node.drain(worker)
        node.wait_for(worker, "gone")
    assert not there(node, model)
