"""Certificates: that of the authority, and those that it signs for nodes and controllers. Pure, but for new keys.

X.509 by the `cryptography` library; ECDSA on P-256. Of a node's request only the key is taken: names and dates are the
authority's.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Sequence

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID

from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.identity import CONTROLLER, NODE, Identity, node_host, role_uri

AUTHORITY_LIFE = datetime.timedelta(days=3650)
LIFE = datetime.timedelta(hours=24)
"""Of a node's or controller's certificate: it is renewed by itself at its half, so a controller may be away for as long
as twelve hours; and a stolen key of a node that was not removed is good for a day."""
BACKDATED = datetime.timedelta(hours=1)
"""A clock that is late by as much still takes a certificate that was just made."""
REQUEST_MAX_CHARS = 8192

Key = ec.EllipticCurvePrivateKey


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def key_text(key: Key) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def new_authority(now: datetime.datetime) -> tuple[str, str]:
    """Certificate and key of a new authority, as PEM."""
    key = new_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fleetstart nodes and controllers")])
    public = key.public_key()
    certificate = (
        _builder(name, name, public, now, AUTHORITY_LIFE)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, SHA256())
    )
    return _text(certificate), key_text(key)


class Authority:
    """The authority, with its key."""

    def __init__(self, certificate: str, key: str) -> None:
        """Errors: ValueError, if they are no PEM of a certificate and its key."""
        self.certificate = certificate
        self._certificate = x509.load_pem_x509_certificate(certificate.encode())
        loaded = load_pem_private_key(key.encode(), None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise ValueError("the authority's key is of another kind")
        self._key = loaded

    def node_certificate(self, node: str, id: str, public: ec.EllipticCurvePublicKey, now: datetime.datetime) -> str:
        names: list[x509.GeneralName] = [
            x509.DNSName(node_host(node, id)),
            x509.UniformResourceIdentifier(role_uri(NODE, node)),
        ]
        return self._signed(node, names, public, now)

    def controller_identity(self, name: str, now: datetime.datetime) -> Identity:
        """A new key and its certificate, for a controller that has this authority."""
        key = new_key()
        names = [x509.UniformResourceIdentifier(role_uri(CONTROLLER, name))]
        certificate = self._signed(name, names, key.public_key(), now)
        return Identity(certificate=certificate, key=key_text(key), authority=self.certificate)

    def _signed(
        self, name: str, names: Sequence[x509.GeneralName], public: ec.EllipticCurvePublicKey, now: datetime.datetime
    ) -> str:
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
        authority = self._key.public_key()
        certificate = (
            _builder(subject, self._certificate.subject, public, now, LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority), critical=False)
            .sign(self._key, SHA256())
        )
        return _text(certificate)


def new_request(name: str) -> tuple[str, str]:
    """A new key, and the request for its certificate: both PEM."""
    key = new_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    request = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, SHA256())
    return key_text(key), request.public_bytes(Encoding.PEM).decode()


def requested_key(request: str) -> ec.EllipticCurvePublicKey:
    """The public key of a request (PEM) whose sender has the private one. Errors: InvalidInput."""
    advice = "`fs node join` makes one"
    if len(request) > REQUEST_MAX_CHARS:
        raise InvalidInput(
            f"a request for a certificate has {REQUEST_MAX_CHARS} characters at most, got {len(request)}", hint=advice
        )
    try:
        parsed = x509.load_pem_x509_csr(request.encode())
        valid, public = parsed.is_signature_valid, parsed.public_key()
    except (ValueError, InvalidSignature, UnicodeEncodeError) as error:
        raise InvalidInput("this is no request for a certificate (PKCS #10 in PEM)", hint=advice) from error
    if not isinstance(public, ec.EllipticCurvePublicKey) or not isinstance(public.curve, ec.SECP256R1):
        raise InvalidInput("a node's key must be of the curve P-256", hint=advice)
    if not valid:
        raise InvalidInput("the request for a certificate is not signed by its own key", hint=advice)
    return public


def key_digest(public: ec.EllipticCurvePublicKey) -> str:
    return hashlib.sha256(public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def digest_of(key: str) -> str:
    """Digest of the public half of a private key (PEM); empty if it is none."""
    try:
        public = load_pem_private_key(key.encode(), None).public_key()
    except ValueError:
        return ""
    return key_digest(public) if isinstance(public, ec.EllipticCurvePublicKey) else ""


def expiry_unix_ms(certificate: str) -> int:
    ends = x509.load_pem_x509_certificate(certificate.encode()).not_valid_after_utc
    return round(ends.timestamp() * 1000)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    now: datetime.datetime,
    life: datetime.timedelta,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _text(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()
