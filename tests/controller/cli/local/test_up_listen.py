"""`fs up --listen`: other machines get in with TLS and a key, and by no other way."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest

from fleetstart.controller.cli.local.services import CONTROLLER
from tests.controller.cli.system import System
from tests.servers import wait_until
from tests.tls.certificates import self_signed

pytestmark = pytest.mark.e2e


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    system = System(tmp_path / "home")
    yield system
    system.down()
    system.assert_gone()


def test_other_machines_get_in_with_tls_and_a_key(system: System, tmp_path: Path) -> None:
    certificate, key_file = self_signed(tmp_path)
    tls = ("--tls-cert", certificate, "--tls-key", key_file)
    up = system.fs("up", "--port", "0", "--listen", "0.0.0.0:0", *tls, "--json")
    told = msgspec.json.decode(up.stdout)
    port = int(told["public_url"].rpartition(":")[2])
    assert told["public_url"] == f"https://0.0.0.0:{port}"
    assert "warning" not in up.stderr
    url = f"https://localhost:{port}"
    key = (system.home / "key").read_text().strip()
    shown = {"authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=certificate), trust_env=False) as http:
        healthy = http.get("/healthz")
        assert healthy.json() == {"ok": True}
        assert healthy.headers["strict-transport-security"] == "max-age=15552000"
        assert http.get("/api/v1/status").status_code == 401
        assert http.get("/api/v1/status", headers=shown).json()["access"] == "keys"
    local = httpx.get(f"{told['url']}/healthz", trust_env=False)  # this machine's, without TLS
    assert local.status_code == 200
    assert "strict-transport-security" not in local.headers
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"http://127.0.0.1:{port}/healthz", trust_env=False)
    system.kill(CONTROLLER)
    # The socket is the supervisor's: connections wait for the next controller. `fs` trusts what SSL_CERT_FILE names.
    env = {"FS_URL": url, "FS_KEY": key, "SSL_CERT_FILE": str(certificate)}
    assert msgspec.json.decode(system.fs("status", "--json", env=env).stdout)["access"] == "keys"
    untrusted = system.fs("status", code=4, env={**env, "SSL_CERT_FILE": ""}).stderr
    assert f"the certificate of {url} is not trusted: self-signed" in untrusted
    # A renewal is taken up without a restart.
    pid = system.services()[CONTROLLER].pid
    for renewed, path in zip(self_signed(tmp_path, name="renewed"), (certificate, key_file), strict=True):
        path.write_bytes(renewed.read_bytes())
    wait_until(lambda: ssl.get_server_certificate(("127.0.0.1", port)) == certificate.read_text(), 20, what="renewal")
    assert system.services()[CONTROLLER].pid == pid


def test_a_listening_address_without_tls_is_warned_of_and_with_open_refused(system: System, tmp_path: Path) -> None:
    certificate, _ = self_signed(tmp_path)
    refused = system.fs("up", "--listen", "0.0.0.0", "--open", code=1)
    assert "--open lets in without a key" in refused.stderr
    missing = system.fs("up", "--listen", "0.0.0.0", "--tls-cert", certificate, "--tls-key", "/nowhere", code=1)
    assert "the key /nowhere cannot be read: No such file" in missing.stderr
    alone = system.fs("up", "--listen", "0.0.0.0", "--tls-cert", certificate, code=1)
    assert "belong together" in alone.stderr
    assert not system.layout.run.exists()
    up = system.fs("up", "--port", "0", "--listen", "0.0.0.0:0")
    assert "has no TLS: keys, inputs and answers can be read on the way" in up.stderr
    assert "other machines reach it at http://0.0.0.0:" in up.stderr
