"""Grants: signed by the holder's key, bound to reader, epoch and checkpoint, renewed before they end."""

from __future__ import annotations

from fleetstart.controller.peers.grants import GRANT_MS, RENEW_MS, granted, still_valid
from fleetstart.controller.peers.sources import ChosenHolder, PeerNode
from fleetstart.runtime.contract.ids import CheckpointId, NodeId
from fleetstart.runtime.contract.node.peers import Peer, grant_secret

HOLDER = PeerNode(node=NodeId("a"), epoch="e1", address="10.0.0.1:7000", transports=("rdma", "tcp"))
KEY = b"k" * 32
NOW_MS = 1_800_000_000_000


def grant(now_ms: int = NOW_MS, holder: PeerNode = HOLDER, end: int = 8) -> Peer:
    return granted(ChosenHolder(holder.node, ((0, end),)), holder, NodeId("r"), CheckpointId("c"), KEY, now_ms)


def valid(now_ms: int, holder: PeerNode = HOLDER, end: int = 8) -> bool:
    """True if the grant of `NOW_MS` still says what is."""
    return still_valid([grant()], [ChosenHolder(holder.node, ((0, end),))], {holder.node: holder}, now_ms)


def test_a_grant_is_of_one_reader_epoch_and_checkpoint_for_some_minutes() -> None:
    peer = grant()
    assert (peer.grant.reader, peer.grant.epoch, peer.grant.checkpoint) == ("r", "e1", "c")
    assert peer.grant.expires_unix_ms == NOW_MS + GRANT_MS
    assert peer.secret == grant_secret(peer.grant, KEY)
    assert (peer.address, peer.transports, peer.ranges) == ("10.0.0.1:7000", ("rdma", "tcp"), ((0, 8),))


def test_an_order_stays_while_its_grants_last_and_say_what_is() -> None:
    assert valid(NOW_MS + 1_000)
    assert not still_valid([grant()], [], {}, NOW_MS)
    assert not valid(NOW_MS, end=9)
    restarted = PeerNode(node=HOLDER.node, epoch="e2", address=HOLDER.address, transports=HOLDER.transports)
    assert not valid(NOW_MS, holder=restarted)


def test_a_grant_is_renewed_before_it_ends_and_after_the_clock_stepped_back() -> None:
    almost = NOW_MS + GRANT_MS - RENEW_MS
    assert valid(almost - 1)
    assert not valid(almost)
    hour_ago = NOW_MS - 3_600_000
    assert not valid(hour_ago)
