"""Keys of a pipeline, derived from the secret that the controller gave to the nodes of its stages.

Each node derives the same certificate and key for the links of its stage (`runtime.pipeline.link_encryption`), and
gives them to its own worker alone. Ed25519 signatures are a function of key and text, so all stages have the same
bytes.
"""

from __future__ import annotations

import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from fleetstart.runtime.contract.identity import Identity
from fleetstart.runtime.contract.ids import PipelineId

KEY_BYTES = 32
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, tzinfo=datetime.UTC)
"""The key ends with its pipeline; no clock decides about it."""


def derived(secret: str, purpose: bytes) -> bytes:
    """A key for one purpose, which tells nothing of the secret or of keys for others."""
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=purpose).derive(secret.encode())


def link_identity(pipeline: PipelineId, secret: str) -> Identity:
    """Identity of all stages of a pipeline. It is its own authority."""
    key = Ed25519PrivateKey.from_private_bytes(derived(secret, b"fleetstart stage link 1"))
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, f"pipeline {pipeline}"[:64])])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, None)
    )
    text = certificate.public_bytes(Encoding.PEM).decode()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return Identity(certificate=text, key=private, authority=text)
