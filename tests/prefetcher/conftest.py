"""Fixtures: stores, a model in a store, an S3 server, and a node daemon as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetstart.prefetcher.fetch import fetcher
from fleetstart.prefetcher.sources.base import Source
from fleetstart.prefetcher.sources.folder import FolderSource
from fleetstart.prefetcher.stage_links import relay_sender
from fleetstart.prefetcher.stage_links.relay import Relays
from tests.prefetcher.nodes import Node, S3Server, Store
from tests.prefetcher.relays import at_work
from tests.prefetcher.stages import Gated, Model
from tests.servers import RedisServer, wait_until


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store in a folder of a bucket, so that an S3 server can serve it."""
    return Store(tmp_path / "buckets" / "weights")


@pytest.fixture
def model(store: Store) -> Model:
    return Model(store)


@pytest.fixture
def gated(store: Store, monkeypatch: pytest.MonkeyPatch) -> Gated:
    monkeypatch.setattr(fetcher, "RETRY_DELAYS_S", (0.01, 0.01, 0.01))
    return Gated(store.folder)


@pytest.fixture
def s3_server(store: Store) -> Iterator[S3Server]:
    server = S3Server(store.folder.parent)
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture(params=["file", "s3"])
def source(request: pytest.FixtureRequest, store: Store) -> Source:
    """The same store through each implementation."""
    if request.param == "file":
        return FolderSource(store.folder)
    server: S3Server = request.getfixturevalue("s3_server")
    request.getfixturevalue("aws")
    monkeypatch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    from fleetstart.prefetcher.sources.s3 import S3Source

    return S3Source(bucket="weights")


@pytest.fixture
def node(redis_server: RedisServer, store: Store, tmp_path: Path) -> Iterator[Node]:
    """A running node daemon."""
    node = Node(redis_server, str(store.folder), tmp_path / "home")
    try:
        yield node.start()
    finally:
        node.close()


@pytest.fixture
def s3_node(redis_server: RedisServer, store: Store, s3_server: S3Server, tmp_path: Path) -> Iterator[Node]:
    env = {
        "AWS_ENDPOINT_URL": s3_server.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    node = Node(redis_server, "s3://weights", tmp_path / "home", **env)
    try:
        yield node.start()
    finally:
        node.close()


@pytest.fixture
def relays(s3_server: S3Server, aws: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Relays]:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    relays = Relays("weights")
    yield relays
    relays.close()
    # The links of tests have one name: one that still ends would take the objects of the next.
    wait_until(lambda: not at_work("relay-"), what="the end of all links")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_sender, "ACK_TIMEOUT_S", 0.3)
    monkeypatch.setattr(relay_sender, "IDLE_CHECK_S", 0.1)
