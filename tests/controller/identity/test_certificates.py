"""Certificates: what both ends of a link take, and what they refuse. Handshakes are real, and in memory."""

from __future__ import annotations

import datetime
import ssl
from base64 import encodebytes

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.identity.certificates import (
    LIFE,
    REQUEST_MAX_CHARS,
    Authority,
    key_digest,
    key_text,
    new_request,
    requested_key,
)
from fleetstart.runtime.contract.errors import InvalidInput
from fleetstart.runtime.contract.identity import (
    CONTROLLER,
    NODE,
    Identity,
    client_context,
    node_host,
    role_of,
    server_context,
)
from tests.tls.identities import JOIN, NOW, authority, node_identity

HOUR = datetime.timedelta(hours=1)
HOST = node_host("vm2", JOIN)


def shake(server: Identity, client: Identity, host: str = HOST) -> tuple[str, str]:
    """Roles that server and client see. Errors: ssl.SSLError, whoever refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    serving = server_context(server).wrap_bio(to_server, to_client, server_side=True)
    calling = client_context(client).wrap_bio(to_client, to_server, server_hostname=host)
    done = set()
    for _ in range(10):
        for end in (calling, serving):
            try:
                end.do_handshake()
                done.add(end)
            except ssl.SSLWantReadError:
                pass
        if len(done) == 2:
            return role_of(serving.getpeercert()), role_of(calling.getpeercert())
    raise AssertionError("no end of the handshake")


def controller(of: Authority, now: datetime.datetime = NOW) -> Identity:
    return of.controller_identity("gw-1", now)


def test_a_controller_and_a_node_know_each_other() -> None:
    own = authority()
    assert shake(node_identity(own), controller(own)) == (CONTROLLER, NODE)
    assert role_of({}) == role_of(None) == ""


@pytest.mark.parametrize("host", [node_host("vm3", JOIN), node_host("vm2", "another join"), "10.0.0.5"])
def test_a_node_is_not_another_one_nor_what_it_was_before_it_joined_again(host: str) -> None:
    own = authority()
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch|IP address mismatch"):
        shake(node_identity(own), controller(own), host)


def test_certificates_of_another_authority_are_refused_by_both() -> None:
    own, other = authority(), authority()
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake(node_identity(other), controller(own))
    mixed = controller(other)
    trusting = Identity(certificate=mixed.certificate, key=mixed.key, authority=own.certificate)
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        shake(node_identity(own), trusting)


def test_expired_certificates_are_refused_by_both() -> None:
    own, before = authority(NOW - 3 * LIFE), NOW - LIFE - HOUR
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake(node_identity(own, now=before), controller(own))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake(node_identity(own), controller(own, before))


@pytest.mark.parametrize("minutes", [-55, 55])
def test_a_clock_may_be_wrong_by_most_of_an_hour(minutes: int) -> None:
    """The clock of the one that signs is ahead of that of the one that checks, or behind it."""
    skewed = NOW + datetime.timedelta(minutes=minutes)
    own = authority(skewed)
    shake(node_identity(own, now=skewed), controller(own, skewed))


def test_a_node_signs_for_nobody() -> None:
    """A certificate that a node's key signed is not taken, although the authority vouches for that key."""
    own, node_key, forged_key = (
        authority(),
        ec.generate_private_key(ec.SECP256R1()),
        ec.generate_private_key(ec.SECP256R1()),
    )
    node = node_identity(own, key=node_key)
    name = x509.load_pem_x509_certificate(node.certificate.encode()).subject
    forged = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(forged_key.public_key())
        .serial_number(7)
        .not_valid_before(NOW - HOUR)
        .not_valid_after(NOW + HOUR)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(node_host("vm9", JOIN))]), critical=False)
        .sign(node_key, SHA256())
    )
    chain = forged.public_bytes(Encoding.PEM).decode() + node.certificate
    identity = Identity(certificate=chain, key=key_text(forged_key), authority=own.certificate)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(identity, controller(own), node_host("vm9", JOIN))


def test_a_request_is_read_for_its_key_alone() -> None:
    key, request = new_request("a name that nobody reads")
    assert "PRIVATE KEY" in key
    public = requested_key(request)
    assert key_digest(public) == key_digest(requested_key(request))
    assert key_digest(public) != key_digest(requested_key(new_request("vm2")[1]))


def _request(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> str:
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM).decode()


def _wrongly_signed() -> str:
    """A request of which a bit of the signature was changed."""
    made = x509.load_pem_x509_csr(_request(ec.generate_private_key(ec.SECP256R1())).encode())
    data = bytearray(made.public_bytes(Encoding.DER))
    data[-1] ^= 1
    body = encodebytes(bytes(data)).decode()
    return f"-----BEGIN CERTIFICATE REQUEST-----\n{body}-----END CERTIFICATE REQUEST-----\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----\n",
        _request(ec.generate_private_key(ec.SECP384R1())),
        _request(rsa.generate_private_key(65537, 2048)),
        _wrongly_signed(),
        "x" * (REQUEST_MAX_CHARS + 1),
        "\udc80",
    ],
    ids=["empty", "text", "short", "another curve", "rsa", "wrongly signed", "long", "no text"],
)
def test_other_requests_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        requested_key(text)


@given(st.text(max_size=300))
def test_any_text_is_a_request_or_invalid_input(text: str) -> None:
    with pytest.raises(InvalidInput):
        requested_key(text)


@given(st.text(min_size=1, max_size=253, alphabet="abcXYZ019._-"))
def test_a_host_name_fits_into_a_certificate_whatever_the_node_is_called(node: str) -> None:
    host = node_host(node, JOIN)
    assert host != node_host(node, "other")
    assert all(0 < len(label) < 64 for label in host.split("."))


def test_no_identity_shows_its_key() -> None:
    identity = node_identity(authority())
    assert "PRIVATE" not in f"{identity!r} {identity}"
