"""Seals a worker order's secrets for the order's node (`contract.node.sealed_secrets`).

Done once, when the worker is ordered: it gets the values of that moment, and keeps them. If sealing fails (the secret
was removed, the master key is another one, the node published no key), the order carries the reason and the worker's
start fails with it.
"""

from __future__ import annotations

import logging
import os
from base64 import b64decode, b64encode

import msgspec

from fleetstart.runtime.contract.errors import FleetError, StartFailed
from fleetstart.runtime.contract.node.orders import WorkerOrder
from fleetstart.runtime.contract.node.sealed_secrets import INFO, NONCE_BYTES, Sealed, bound_to

from ..state.view import View
from .deploy_policy import SECRETS_MAX_BYTES
from .secret_encryption import SecretCipher

log = logging.getLogger(__name__)


class SecretSealer:
    def __init__(self, view: View, cipher: SecretCipher) -> None:
        self._view = view
        self._cipher = cipher

    def __call__(self, order: WorkerOrder) -> WorkerOrder:
        """Returns the order with its secrets sealed; unchanged if it needs none, or has them."""
        if not order.spec.secrets or order.sealed is not None or order.wanted != "run":
            return order
        try:
            sealed = self._sealed(order)
        except FleetError as error:
            sealed = Sealed(error=f"{error.message}; {error.hint}" if error.hint else error.message)
        except Exception as error:  # one function's secrets must not stop the orders of others
            log.exception("secrets cannot be sealed", extra={"function": order.spec.name})
            sealed = Sealed(error=f"its secrets cannot be sealed: {type(error).__name__}")
        return msgspec.structs.replace(order, sealed=sealed)

    def _sealed(self, order: WorkerOrder) -> Sealed:
        project = order.spec.home
        values = {}
        for name in order.spec.secrets:
            record = self._view.access.secret(project, name)
            if record is None:
                raise StartFailed(f"secret {name} of project {project} was removed: fs secret set {name}")
            values[name] = self._cipher.decrypt(record)
        if sum(len(value.encode()) for value in values.values()) > SECRETS_MAX_BYTES:
            raise StartFailed(f"the secrets of {order.spec.name} have more than {SECRETS_MAX_BYTES} bytes together")
        node = self._view.nodes.get(order.node)
        if node is None or node.report.epoch != order.epoch or not node.report.public_key:
            raise StartFailed(f"node {order.node} has published no key to seal secrets for")
        return seal_values(values, node.report.public_key, bound_to(order.worker, order.node, order.epoch))


def seal_values(values: dict[str, str], public_key: str, bound: bytes) -> Sealed:
    """Encrypts the values for the holder of `public_key` (X25519, HKDF, AES-GCM). Errors: StartFailed if it is none."""
    # Late: most systems have no secrets, and this is half of what a controller imports.
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    own = X25519PrivateKey.generate()
    try:
        theirs = b64decode(public_key, validate=True)
        shared = own.exchange(X25519PublicKey.from_public_bytes(theirs))
    except ValueError as error:
        raise StartFailed(f"the node's public key cannot seal secrets: {error}") from error
    ours = own.public_key().public_bytes_raw()
    key = HKDF(algorithm=SHA256(), length=32, salt=ours + theirs, info=INFO).derive(shared)
    nonce = os.urandom(NONCE_BYTES)
    box = nonce + AESGCM(key).encrypt(nonce, msgspec.json.encode(values), bound)
    return Sealed(public=b64encode(ours).decode(), box=b64encode(box).decode())
