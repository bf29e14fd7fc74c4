"""TLS files that cannot be used are refused with an error that names the file; renewed ones are taken."""

from __future__ import annotations

import shutil
import ssl
from pathlib import Path

import pytest

from fleetstart.controller.http.tls import RenewedCertificate, server_context
from fleetstart.runtime.contract.process.environment import ConfigError
from tests.tls.certificates import self_signed


def test_a_certificate_with_its_key_is_taken(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    assert server_context(str(certificate), str(key))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    _, other = self_signed(tmp_path, name="other")
    locked_certificate, locked = self_signed(tmp_path, name="locked", passphrase=b"secret")
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    for pair, told in (
        ((tmp_path / "none.pem", key), "the certificate .*none.pem cannot be read: No such file"),
        ((certificate, tmp_path), "the key .* cannot be read: Is a directory"),
        ((certificate, other), "the key .*other.key is not that of the certificate .*server.pem"),
        ((text, key), "text.pem and .*server.key must be PEM files"),
        ((locked_certificate, locked), "the key .*locked.key is encrypted"),
    ):
        with pytest.raises(ConfigError, match=told):
            server_context(*map(str, pair))


def test_handshakes_after_a_renewal_show_the_new_certificate(tmp_path: Path) -> None:
    live = self_signed(tmp_path, name="live")
    first, second = live[0].read_text(), self_signed(tmp_path, name="renewed")
    followed = RenewedCertificate(*map(str, live))
    assert shown(followed.context, "localhost") == first
    # Written one after the other: between the two, the pair does not fit, and the old one is served.
    shutil.copy(second[0], live[0])
    followed.look()
    assert shown(followed.context, "localhost") == first
    shutil.copy(second[1], live[1])
    followed.look()
    assert shown(followed.context, "localhost") == second[0].read_text()
    assert shown(followed.context, None) == second[0].read_text(), "a client that names no server"
    live[1].unlink()
    followed.look()
    assert shown(followed.context, "localhost") == second[0].read_text()


def test_a_certificate_behind_a_link_is_followed(tmp_path: Path) -> None:
    """As ACME clients do it: `live/` holds links, and a renewal turns them to other files."""
    for name in ("1", "2"):
        self_signed(tmp_path, name=name)
    links = tmp_path / "cert.pem", tmp_path / "cert.key"
    links[0].symlink_to("1.pem")
    links[1].symlink_to("1.key")
    followed = RenewedCertificate(*map(str, links))
    for link, target in zip(links, ("2.pem", "2.key"), strict=True):
        link.unlink()
        link.symlink_to(target)
    followed.look()
    assert shown(followed.context, "localhost") == (tmp_path / "2.pem").read_text()


def shown(server: ssl.SSLContext, name: str | None) -> str:
    """The certificate that a client gets in a handshake, as PEM."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(to_client, to_server, server_hostname=name)
    answers = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (asks, answers, asks, answers):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    der = asks.getpeercert(binary_form=True)
    assert der is not None
    return ssl.DER_cert_to_PEM_cert(der)
