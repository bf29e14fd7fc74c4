"""Identities for tests, of an authority that is made on the spot."""

from __future__ import annotations

import datetime

from cryptography.hazmat.primitives.asymmetric import ec

from fleetstart.controller.identity.certificates import Authority, key_text, new_authority, new_key
from fleetstart.runtime.contract.identity import Identity

NOW = datetime.datetime.now(datetime.UTC)
JOIN = "4a1b"


def authority(now: datetime.datetime = NOW) -> Authority:
    return Authority(*new_authority(now))


def node_identity(
    of: Authority,
    node: str = "vm2",
    *,
    id: str = JOIN,
    now: datetime.datetime = NOW,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> Identity:
    own = key or new_key()
    certificate = of.node_certificate(node, id, own.public_key(), now)
    return Identity(certificate=certificate, key=key_text(own), authority=of.certificate)
