"""Links between stages on different machines: TLS under the key of their pipeline. Hosts are network namespaces."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator

import pytest

from fleetstart.prefetcher.stage_links.pipeline_key import link_identity
from fleetstart.runtime.contract.identity import Identity, client_context
from fleetstart.runtime.contract.ids import PipelineId
from fleetstart.runtime.contract.weights.stage import Stage
from fleetstart.runtime.pipeline.frames import Hello, Message, StageLoaded, StepResult, send_frame
from fleetstart.runtime.pipeline.links import StageLinks
from tests.servers import wait_until
from tests.testbed.network import Network, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces")

PIPELINE = PipelineId("p")
CUTS = ((0, 1), (1, 2))
SECRET = "pipeline secret"
OWN = link_identity(PIPELINE, SECRET)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    made = Network(["a", "b"], prefix="10.78.0")
    yield made
    made.close()


class End:
    """One stage on a host, and what came over its links."""

    def __init__(self, network: Network, host: str, index: int, identity: Identity | None = OWN) -> None:
        self.network, self.host = network, host
        self.listener = network.socket(host)
        self.listener.bind((network.addresses[host], 0))
        self.listener.listen(16)
        self.address = self.listener.getsockname()
        self.frames: list[tuple[int, Message, bytes]] = []
        self.lost: list[tuple[int, str]] = []
        self.links = StageLinks(
            Stage(pipeline=PIPELINE, index=index, cuts=CUTS),
            SECRET,
            self.listener,
            lambda stage, message, payload: self.frames.append((stage, message, bytes(payload))),
            lambda stage, why: self.lost.append((stage, why)),
            identity,
        )

    def dial(self, other: End) -> socket.socket:
        link = self.network.socket(self.host)
        link.connect(other.address)
        return link

    def to(self, other: End) -> None:
        self.links.connect(other.links.stage.index, self.dial(other))


@contextlib.contextmanager
def two(network: Network, identity: Identity | None = OWN, host: str = "b") -> Iterator[tuple[End, End]]:
    first, second = End(network, "a", 0), End(network, host, 1, identity)
    try:
        first.to(second)
        second.to(first)
        yield first, second
    finally:
        first.links.close()
        second.links.close()


def test_frames_come_whole_over_encrypted_links(network: Network) -> None:
    payload = os.urandom(3_000_000)
    with two(network) as (first, second):
        assert first.links.wait(10)
        assert second.links.wait(10)
        assert all(isinstance(one.link, ssl.SSLSocket) for one in first.links._out.values())
        assert all(isinstance(link, ssl.SSLSocket) for link in first.links._in.values())
        first.links.send(1, StepResult(1), payload)
        second.links.send(0, StageLoaded())
        wait_until(lambda: second.frames == [(0, StepResult(1), payload)], 10, what="the payload")
        wait_until(lambda: first.frames == [(1, StageLoaded(), b"")], 10, what="the answer")
        second.links.close()
        wait_until(lambda: first.lost, 5, what="the loss")


def test_stages_on_one_machine_pay_nothing(network: Network) -> None:
    with two(network, host="a") as (first, _):
        assert first.links.wait(10)
        links = [*(one.link for one in first.links._out.values()), *first.links._in.values()]
        assert not any(isinstance(link, ssl.SSLSocket) for link in links)


@pytest.mark.parametrize(
    "identity",
    [link_identity(PIPELINE, "of another function"), link_identity(PipelineId("q"), "another"), None],
    ids=["another secret", "another pipeline", "none"],
)
def test_a_worker_of_another_function_has_no_link(network: Network, identity: Identity | None) -> None:
    with two(network, identity) as (first, second):
        wait_until(lambda: first.lost and second.lost, 10, what="refusals")
        assert not first.frames
        assert not second.frames


def test_the_secret_alone_in_clear_opens_nothing(network: Network) -> None:
    end, other = End(network, "a", 0), End(network, "b", 1)
    with contextlib.closing(end.links), contextlib.closing(other.links), other.dial(end) as stranger:
        with contextlib.suppress(OSError):
            send_frame(stranger, Hello(PIPELINE, 1, SECRET))
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):  # an alert of TLS
                pass
        assert not end.links._in


def test_the_key_without_the_secret_opens_nothing(network: Network) -> None:
    end, other = End(network, "a", 0), End(network, "b", 1)
    context = client_context(OWN, check_hostname=False)
    with contextlib.closing(end.links), contextlib.closing(other.links):
        with context.wrap_socket(other.dial(end)) as link:
            send_frame(link, Hello(PIPELINE, 1, "guess"))
            link.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert link.recv(1) == b""
        assert not end.links._in


def test_all_nodes_derive_the_same_key_and_other_secrets_another() -> None:
    assert link_identity(PIPELINE, SECRET) == OWN
    others = {link_identity(PIPELINE, "x").certificate, link_identity(PipelineId("q"), SECRET).certificate}
    assert len({OWN.certificate, *others}) == 3
    assert "PRIVATE" not in repr(OWN)


def test_a_lost_host_is_noticed_while_its_stage_is_still_starting(network: Network) -> None:
    """Its kernel has taken the connection, and no worker speaks yet."""
    first = End(network, "a", 0)
    with contextlib.closing(first.links), network.socket("b") as listener:
        listener.bind((network.addresses["b"], 0))
        listener.listen(1)
        link = network.socket("a")
        link.connect(listener.getsockname())
        first.links.connect(1, link)
        network.cut("b")
        try:
            wait_until(lambda: first.lost, 8, what="the loss")
        finally:
            network.mend("b")
