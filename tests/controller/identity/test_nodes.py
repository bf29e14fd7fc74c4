"""Nodes that the system vouches for, in a real Redis: join, renewal, removal, tokens, another master key."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from fleetstart.controller.auth.secret_encryption import SecretCipher
from fleetstart.controller.identity import nodes
from fleetstart.controller.identity.certificates import digest_of, key_digest, new_request, requested_key
from fleetstart.controller.identity.nodes import NodeIdentities
from fleetstart.controller.identity.peer_keys import NodePeerKeys
from fleetstart.controller.state.access_records import Credential, KeyRecord
from fleetstart.controller.state.cas_hash import CasHash
from fleetstart.controller.state.identity_records import PeerKeyRecord
from fleetstart.controller.state.redis_client import connect
from fleetstart.controller.state.sync import StateSync
from fleetstart.controller.state.view import View
from fleetstart.prefetcher.workers.secrets import SecretDecryptor
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import FleetError, Forbidden
from fleetstart.runtime.contract.ids import NodeId
from fleetstart.runtime.contract.node.reports import NodeReport
from tests.servers import RedisServer


class Controllers:
    """Two controllers of one home, on one Redis."""

    def __init__(self, redis_url: str, home: Path) -> None:
        self.client = connect(redis_url)
        self.states = [StateSync(self.client, View()) for _ in range(2)]
        self.cipher = SecretCipher(home, "")
        self.one, self.two = (NodeIdentities(state, self.cipher) for state in self.states)

    async def __aenter__(self) -> Controllers:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()


def test_a_node_joins_renews_and_is_removed(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with Controllers(redis_url, tmp_path) as controllers:
            key, request = new_request("vm2")
            assert digest_of(key) == key_digest(requested_key(request))
            certificate, authority = await controllers.one.join("vm2", request)
            assert (await controllers.two.authority()).certificate == authority, "one authority for all controllers"
            record = controllers.states[0].view.identities[NodeId("vm2")]
            assert record.key_sha256 == key_digest(requested_key(request))
            assert await controllers.two.renew("vm2", request) == certificate, "made a moment ago"
            monkeypatch.setattr(nodes, "SAME_S", -1.0)
            renewed = await controllers.two.renew("vm2", request)
            assert renewed != certificate
            monkeypatch.undo()
            assert await controllers.one.renew("vm2", request) == renewed
            with pytest.raises(Forbidden, match="this key is not that of node vm2"):
                await controllers.one.renew("vm2", new_request("vm2")[1])
            with pytest.raises(Forbidden, match="node vm3"):
                await controllers.one.renew("vm3", request)
            await controllers.two.join("vm2", new_request("vm2")[1])
            with pytest.raises(Forbidden, match="another machine has its name"):
                await controllers.one.renew("vm2", request)
            await controllers.one.remove("vm2")
            assert not controllers.states[0].view.identities
            with pytest.raises(Forbidden, match="it was removed"):
                await controllers.two.renew("vm2", request)
            await controllers.one.remove("vm2")

    asyncio.run(run())


def test_redis_alone_signs_nothing(redis_url: str, redis_server: RedisServer, tmp_path: Path) -> None:
    async def run() -> None:
        async with Controllers(redis_url, tmp_path / "own") as controllers:
            (tmp_path / "own").mkdir()
            await controllers.one.join("vm2", new_request("vm2")[1])
            stranger = NodeIdentities(controllers.states[0], SecretCipher(tmp_path, ""))
            with pytest.raises(FleetError, match="master key"):
                await stranger.authority()

    asyncio.run(run())
    with redis_server.client() as client:
        stored = b"".join(client.hvals(keys.AUTHORITY) + client.hvals(keys.NODES_IDENTITIES))
    assert b"PRIVATE" not in stored


def test_the_authority_outlives_another_master_key(redis_url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with Controllers(redis_url, tmp_path) as controllers:
            _, request = new_request("vm2")
            _, authority = await controllers.one.join("vm2", request)
            controllers.cipher.add_master_key()
            await controllers.one.reencrypt()
            controllers.cipher.drop_old_keys(await controllers.two.masters())
            assert (await controllers.two.authority()).certificate == authority
            await controllers.two.renew("vm2", request)

    asyncio.run(run())


def test_a_rekey_without_an_authority_makes_none(redis_url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with Controllers(redis_url, tmp_path) as controllers:
            await controllers.one.reencrypt()
            assert not await controllers.client.exists(keys.AUTHORITY)

    asyncio.run(run())


@pytest.mark.parametrize("readable", [True, False], ids=["its key", "the key of another home"])
def test_grants_outlive_a_rekey(redis_url: str, tmp_path: Path, readable: bool) -> None:
    """The node has its key already: with another one, the grants of fetches under way would be refused."""
    other = tmp_path / "other"
    other.mkdir()

    async def run() -> None:
        async with Controllers(redis_url, tmp_path) as controllers:
            node, view = NodeReport(
                node=NodeId("a"), epoch="e1", address="", memory_bytes=0, memory_used_bytes=0, cpus=1,
                public_key=SecretDecryptor().public_key,
            ), View()  # fmt: skip
            cipher = controllers.cipher if readable else SecretCipher(other, "")
            made = NodePeerKeys(view, cipher).make(node)
            assert made is not None
            view.peer_keys = {node.node: made.record}
            before = NodePeerKeys(view, cipher).key(node.node, "e1")
            await CasHash(controllers.states[0], keys.PEER_KEYS, PeerKeyRecord).change("a", lambda _: made.record)
            controllers.cipher.add_master_key()
            await controllers.one.reencrypt()
            controllers.cipher.drop_old_keys(await controllers.one.masters())
            after = NodePeerKeys(controllers.states[0].view, SecretCipher(tmp_path, "")).key(node.node, "e1")
            assert after == (before if readable else None)

    asyncio.run(run())


def test_of_many_joins_with_one_token_one_succeeds(redis_url: str, tmp_path: Path) -> None:
    async def run() -> None:
        async with Controllers(redis_url, tmp_path) as controllers:
            token = KeyRecord(
                name="node-1",
                rights=["node"],
                credentials=[Credential(id="i", sha256="s", created_unix_ms=1)],
                created_unix_ms=1,
                created_by="local",
            )
            await CasHash(controllers.states[0], keys.KEYS, KeyRecord).change("node-1", lambda _: token)
            uses = [identities.use_token("node-1") for identities in (controllers.one, controllers.two) * 5]
            outcomes = await asyncio.gather(*uses, return_exceptions=True)
            assert sum(outcome is None for outcome in outcomes) == 1
            assert all("used already" in str(outcome) for outcome in outcomes if outcome is not None)

    asyncio.run(run())
