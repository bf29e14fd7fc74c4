"""Peer keys: what leave to read a node's memory is signed with, one for each start of a node's daemon.

A key is made by the controller that schedules. Redis has it twice: sealed for the node, as the secrets of workers are,
and encrypted under the master key, so that any controller can sign. Redis alone signs nothing, and a node knows its own
key only. `fs secret rekey` encrypts them anew. A key that cannot be decrypted any more, because the master key is
another one, is replaced: the grants that it signed end with it, and orders under way get new ones.
"""

from __future__ import annotations

import logging
import os
import time

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.peers import PEER_KEY_BYTES, PEER_KEY_NAME, SealedPeerKey, peer_key_bound_to
from fleetstart.runtime.contract.node.reports import NodeReport

from ..auth.secret_encryption import SecretCipher, SecretCipherError
from ..auth.secret_sealing import seal_values
from ..peers.pool import MadePeerKey
from ..state.access_records import SecretRecord
from ..state.identity_records import PeerKeyRecord
from ..state.view import View

log = logging.getLogger(__name__)


class NodePeerKeys:
    """The peer keys of living nodes."""

    def __init__(self, view: View, cipher: SecretCipher) -> None:
        self._view = view
        self._cipher = cipher
        self._decrypted: dict[NodeId, tuple[PeerKeyRecord, bytes | None]] = {}

    def key(self, node: NodeId, epoch: str) -> bytes | None:
        """The node's key; None if there is none for this epoch that this controller can use."""
        record = self._view.peer_keys.get(node)
        if record is None or record.node != node or record.epoch != epoch:
            return None
        known = self._decrypted.get(node)
        if known is None or known[0] != record:
            known = self._decrypted[node] = record, self._decrypt(record)
        return known[1]

    def make(self, report: NodeReport) -> MadePeerKey | None:
        """A new key for the node's daemon; None, and the log says why, if it cannot be sealed or encrypted."""
        secret = os.urandom(PEER_KEY_BYTES).hex()
        name = _name(report.node, report.epoch)
        try:
            sealed = seal_values(
                {PEER_KEY_NAME: secret}, report.public_key, peer_key_bound_to(report.node, report.epoch)
            )
            box, master = self._cipher.encrypt("", name, secret)
        except (StartFailed, SecretCipherError) as error:
            log.warning("a peer key cannot be made", extra={"node": report.node, "error": error.message})
            return None
        now_unix_ms = time.time_ns() // 1_000_000
        record = SecretRecord(
            name=name, project="", box=box, master=master, size_bytes=len(secret), created_unix_ms=now_unix_ms,
            updated_unix_ms=now_unix_ms, updated_by="",
        )  # fmt: skip
        return MadePeerKey(
            PeerKeyRecord(node=report.node, epoch=report.epoch, key=record),
            SealedPeerKey(epoch=report.epoch, sealed=sealed),
        )

    def _decrypt(self, record: PeerKeyRecord) -> bytes | None:
        if record.key.name != _name(record.node, record.epoch) or record.key.project:
            return None  # another node's key, moved here in Redis
        try:
            return bytes.fromhex(self._cipher.decrypt(record.key))
        except (SecretCipherError, ValueError) as error:
            log.warning("a peer key does not decrypt", extra={"node": record.node, "error": str(error)})
            return None


def _name(node: str, epoch: str) -> str:
    """What the encrypted key is bound to, beside no project: no secret of a function can have it."""
    return f"peer-key:{node}:{epoch}"
