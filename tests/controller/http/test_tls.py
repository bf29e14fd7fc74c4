"""TLS files that cannot be used are refused with an error that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetstart.controller.http.tls import server_context
from fleetstart.runtime.contract.process.environment import ConfigError
from tests.certificates import self_signed


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
