"""Decrypts the secrets of workers on their node.

The private half of the node's key exists only in this process's memory, and ends with it, as do the orders that were
sealed for it. Values reach a worker over its own socket, and are redacted in its log lines and errors.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleetstart.runtime.contract.errors import StartFailed
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.peers import PEER_KEY_NAME, peer_key_bound_to
from fleetstart.runtime.contract.node.sealed_secrets import INFO, NONCE_BYTES, Sealed, bound_to


class SecretDecryptor:
    """The node's key pair (X25519), new for each start of the daemon."""

    def __init__(self) -> None:
        self._private = X25519PrivateKey.generate()
        self._public = self._private.public_key().public_bytes_raw()
        self.public_key = b64encode(self._public).decode()

    def decrypt(self, order: WorkerOrder) -> dict[str, str]:
        """Secrets by name, all that the function asks for. Errors: StartFailed, whose message holds no value."""
        wanted = order.spec.secrets
        if not wanted:
            return {}
        sealed = order.sealed
        if sealed is None or sealed.error:
            raise StartFailed(
                sealed.error if sealed is not None else "the worker's secrets did not come with its order"
            )
        values = self._open_box(sealed, bound_to(order.worker, order.node, order.epoch), "the worker's secrets do")
        if missing := [name for name in wanted if name not in values]:
            raise StartFailed(f"secret {missing[0]} did not come with the worker's order")
        return {name: values[name] for name in wanted}

    def peer_key(self, sealed: Sealed, node: NodeId, epoch: str) -> bytes:
        """The key that grants to read from this node are signed with. Errors: StartFailed."""
        values = self._open_box(sealed, peer_key_bound_to(node, epoch), "the key of peers' grants does")
        try:
            return bytes.fromhex(values[PEER_KEY_NAME])
        except (KeyError, ValueError) as error:
            raise StartFailed("the key of peers' grants is none") from error

    def _open_box(self, sealed: Sealed, bound: bytes, what: str) -> Mapping[str, str]:
        try:
            theirs = b64decode(sealed.public, validate=True)
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(theirs))
            key = HKDF(algorithm=SHA256(), length=32, salt=theirs + self._public, info=INFO).derive(shared)
            box = b64decode(sealed.box, validate=True)
            data = AESGCM(key).decrypt(box[:NONCE_BYTES], box[NONCE_BYTES:], bound)
            return msgspec.json.decode(data, type=dict[str, str])
        except (InvalidTag, ValueError) as error:
            raise StartFailed(f"{what} not open: sealed for another order or node") from error
