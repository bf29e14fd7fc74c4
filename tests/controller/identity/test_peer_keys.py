"""Peer keys: sealed for their node, encrypted for controllers, and of no use anywhere else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from fleetstart.controller.auth.secret_encryption import SecretCipher
from fleetstart.controller.identity.peer_keys import NodePeerKeys
from fleetstart.controller.state.view import View
from fleetstart.prefetcher.workers.secrets import SecretDecryptor
from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import PEER_KEY_BYTES, SealedPeerKey
from fleetstart.runtime.contract.node.reports import NodeReport


def report(node: str, decryptor: SecretDecryptor, epoch: str = "e1") -> NodeReport:
    return NodeReport(
        node=NodeId(node), epoch=epoch, address="", memory_bytes=0, memory_used_bytes=0, cpus=1,
        public_key=decryptor.public_key,
    )  # fmt: skip


def opened(sealed: SealedPeerKey, node: str, decryptor: SecretDecryptor) -> bytes:
    """The key as its node reads it."""
    return decryptor.peer_key(sealed.sealed, NodeId(node), sealed.epoch)


def test_the_node_and_any_controller_of_the_home_have_the_same_key(tmp_path: Path) -> None:
    view, decryptor = View(), SecretDecryptor()
    made = NodePeerKeys(view, SecretCipher(tmp_path, "")).make(report("a", decryptor))
    assert made is not None
    view.peer_keys = {NodeId("a"): made.record}
    key = NodePeerKeys(view, SecretCipher(tmp_path, "")).key(NodeId("a"), "e1")
    assert key is not None
    assert len(key) == PEER_KEY_BYTES
    assert key == opened(made.sealed, "a", decryptor)
    assert key.hex().encode() not in msgspec.json.encode(made.record) + msgspec.json.encode(made.sealed)


def test_another_node_cannot_open_it_and_a_moved_one_opens_for_nobody(tmp_path: Path) -> None:
    view, own, other = View(), SecretDecryptor(), SecretDecryptor()
    keys = NodePeerKeys(view, SecretCipher(tmp_path, ""))
    made = keys.make(report("a", own))
    assert made is not None
    for node, decryptor in (("a", other), ("b", own)):
        with pytest.raises(StartFailed, match="does not open"):
            opened(made.sealed, node, decryptor)
    view.peer_keys = {NodeId("b"): made.record, NodeId("c"): msgspec.structs.replace(made.record, node="c")}
    assert keys.key(NodeId("b"), "e1") is None
    assert keys.key(NodeId("c"), "e1") is None
    view.peer_keys = {NodeId("a"): msgspec.structs.replace(made.record, epoch="e2")}
    assert keys.key(NodeId("a"), "e2") is None, "a key is of one start of the daemon"


def test_a_key_of_another_master_key_is_none(tmp_path: Path) -> None:
    view, decryptor = View(), SecretDecryptor()
    for home in ("one", "two"):
        (tmp_path / home).mkdir()
    made = NodePeerKeys(view, SecretCipher(tmp_path / "one", "")).make(report("a", decryptor))
    assert made is not None
    view.peer_keys = {NodeId("a"): made.record}
    assert NodePeerKeys(view, SecretCipher(tmp_path / "two", "")).key(NodeId("a"), "e1") is None


def test_a_node_whose_public_key_is_none_gets_no_key(tmp_path: Path) -> None:
    broken = msgspec.structs.replace(report("a", SecretDecryptor()), public_key="not base64")
    assert NodePeerKeys(View(), SecretCipher(tmp_path, "")).make(broken) is None
