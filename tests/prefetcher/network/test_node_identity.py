"""The node's certificate: when it is renewed, by whom, and what a removed node is told."""

from __future__ import annotations

import asyncio
import datetime
import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.identity.certificates import BACKDATED, LIFE, requested_key
from fleetstart.prefetcher.config import read_config
from fleetstart.prefetcher.daemon_parts import open_node_certificate
from fleetstart.prefetcher.network import node_identity as node_identity_module
from fleetstart.prefetcher.network.node_identity import (
    NodeCertificate,
    NodeRemoved,
    RenewalFailed,
    open_certificate,
    renewal_due_s,
)
from fleetstart.runtime.contract.identity import read_identity, write_identity
from fleetstart.runtime.contract.process.environment import ConfigError
from tests.tls.identities import JOIN, NOW, authority, node_identity

AUTHORITY = authority()
AWAY = "http://127.0.0.1:9"


class Server:
    """A controller, as far as a renewal goes."""

    def __init__(self) -> None:
        self.status = 200
        self.asked = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked += 1
                answer: dict[str, object] = {"error": {"message": "it was removed", "hint": "join"}}
                if outer.status == 200:
                    key = requested_key(asked["request"])
                    answer = {"certificate": AUTHORITY.node_certificate(asked["node"], JOIN, key, NOW)}
                data = json.dumps(answer).encode()
                self.send_response(outer.status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def opened(path: Path, *servers: str, needed: bool = False) -> NodeCertificate | None:
    return asyncio.run(open_certificate("vm2", path, servers, needed=needed, stopped=lambda: False))


@given(st.floats(-1e6, 1e6))
def test_a_certificate_is_renewed_at_half_of_its_life(after_s: float) -> None:
    certificate = node_identity(AUTHORITY).certificate
    due_s = renewal_due_s(certificate, NOW.timestamp() + after_s)
    half_s = (LIFE - BACKDATED).total_seconds() / 2
    assert due_s == pytest.approx(max(0.0, half_s - after_s), abs=1.0)


def test_a_start_renews_and_writes_it(server: Server, tmp_path: Path) -> None:
    path, before = tmp_path / "node" / "identity.json", node_identity(AUTHORITY)
    write_identity(path, before)
    certificate = opened(path, AWAY, server.url)
    assert certificate is not None
    assert certificate.identity.certificate != before.certificate
    assert certificate.identity.key == before.key
    assert read_identity(path) == certificate.identity
    assert path.stat().st_mode & 0o777 == 0o600
    assert isinstance(certificate.context(), ssl.SSLContext)


def test_a_start_goes_on_with_what_it_has_while_no_controller_answers(server: Server, tmp_path: Path) -> None:
    path, before = tmp_path / "identity.json", node_identity(AUTHORITY)
    write_identity(path, before)
    server.status = 503
    certificate = opened(path, server.url, AWAY)
    assert certificate is not None
    assert certificate.identity == before
    with pytest.raises(RenewalFailed, match=r"127\.0\.0\.1:9"):
        asyncio.run(certificate.renew())
    alone = opened(path)
    assert alone is not None
    with pytest.raises(RenewalFailed, match="FS_URL"):
        asyncio.run(alone.renew())


def test_a_removed_node_does_not_start_and_one_that_runs_ends(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "identity.json"
    write_identity(path, node_identity(AUTHORITY, now=NOW - LIFE))
    server.status = 403
    with pytest.raises(NodeRemoved, match="it was removed; join"):
        opened(path, server.url)
    expired = NodeCertificate("vm2", path, node_identity(AUTHORITY, now=NOW - LIFE), [server.url])
    with pytest.raises(NodeRemoved):
        asyncio.run(expired.run())


def test_an_expired_certificate_is_renewed_by_itself(server: Server, tmp_path: Path) -> None:
    old = node_identity(AUTHORITY, now=NOW - 3 * LIFE)
    certificate = NodeCertificate("vm2", tmp_path / "identity.json", old, [server.url])
    before = certificate.context()

    async def run() -> None:
        renewing = asyncio.create_task(certificate.run())
        async with asyncio.timeout(20):
            while certificate.identity == old:
                await asyncio.sleep(0.005)
        renewing.cancel()

    asyncio.run(run())
    assert certificate.context() is not before
    assert renewal_due_s(certificate.identity.certificate, NOW.timestamp()) > datetime.timedelta(hours=11).seconds
    assert server.asked == 1


def test_a_node_has_no_certificate_until_it_joins(tmp_path: Path) -> None:
    assert opened(tmp_path / "identity.json") is None
    (tmp_path / "identity.json").write_text('{"certificate": "half')
    assert opened(tmp_path / "identity.json") is None


def test_a_node_waits_for_the_file_that_its_controller_writes(server: Server, tmp_path: Path) -> None:
    path, written = tmp_path / "identity.json", node_identity(AUTHORITY)
    threading.Timer(0.1, write_identity, (path, written)).start()
    certificate = opened(path, server.url, needed=True)
    assert certificate is not None
    assert certificate.identity.key == written.key


def test_a_node_that_others_reach_does_not_start_without_a_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_identity_module, "APPEARS_S", 0.01)
    settings = {"FS_HOME": str(tmp_path), "FS_REDIS_URL": "unix:///nowhere", "FS_STORE": str(tmp_path)}
    reached = {**settings, "FS_NODE_ADDRESS": "10.79.0.1"}

    async def start(env: dict[str, str]) -> NodeCertificate | None:
        return await open_node_certificate(read_config(env), asyncio.Event())

    with pytest.raises(ConfigError, match=r"FS_NODE_ADDRESS=10\.79\.0\.1 .* no certificate: join the system"):
        asyncio.run(start(reached))
    assert asyncio.run(start(settings)) is None
    assert asyncio.run(start({**reached, "FS_LINKS": "plain"})) is None
    with pytest.raises(ConfigError, match="FS_LINKS='off' must be tls or plain"):
        read_config({**reached, "FS_LINKS": "off"})
