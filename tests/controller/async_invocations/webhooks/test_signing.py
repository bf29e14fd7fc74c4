"""Webhooks: what they say, how they are signed, where they may not go, and that they arrive in the end."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st

from fleetstart.controller.async_invocations.webhooks import lookups, signing
from fleetstart.controller.async_invocations.webhooks.http_client import WebhookClient
from fleetstart.controller.async_invocations.webhooks.signing import WebhookRefused
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.errors import InvalidInput, Refused
from tests.controller.async_invocations.conftest import Client, Receiver
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, serving, wait_until
from tests.tls.certificates import self_signed

LOOPBACK = (ipaddress.ip_network("127.0.0.0/8"),)


# ── the signature ──────────────────────────────────────────────────────────────────────────────────


def test_the_signature_is_the_one_of_standard_webhooks() -> None:
    """A verifier of theirs, not ours."""
    secrets = [signing.new_secret(), signing.new_secret()]
    body = b'{"type":"invocation.succeeded"}'
    headers = signing.headers(secrets, "inv-1", int(time.time()), body)
    for secret in secrets:  # the new one, and the one that was rotated
        assert standardwebhooks.Webhook(secret).verify(body, headers) == {"type": "invocation.succeeded"}
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(secret).verify(body + b" ", headers)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(signing.new_secret()).verify(body, headers)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_another_body_has_another_signature(one: bytes, other: bytes) -> None:
    secret = signing.PREFIX + "AAAA"
    same = signing.signature(secret, "id", 1, one) == signing.signature(secret, "id", 1, other)
    assert same == (one == other)


# ── where it may go ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "[::1]", "[::]", "[fe80::1]", "[fd00:ec2::254]", "[::ffff:127.0.0.1]", "[2002:7f00:1::]",
        "[64:ff9b::a9fe:a9fe]", "[ff02::1]",
    ],
)  # fmt: skip
def test_what_only_we_can_reach_is_refused(address: str) -> None:
    with pytest.raises(WebhookRefused):
        signing.check_url(f"https://{address}/hook", ())


@given(st.ip_addresses())
def test_whatever_is_accepted_is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    try:
        signing.check_address("host", address, ())
    except WebhookRefused:
        return
    assert address.is_global
    assert not address.is_multicast


@pytest.mark.parametrize("url", ["http://93.184.216.34/x", "https://[2606:2800:220:1::1]:8443/", "https://example.com"])
def test_public_addresses_and_names_pass(url: str) -> None:
    assert signing.check_url(url, ()) == url


@pytest.mark.parametrize(
    "url",
    ["", "example.com", "file:///etc/passwd", "http://", "http://user:pw@example.com", "http://exa mple.com",
     "http://example.com:99999", "http://[::1", "https://example.com/" + "x" * 3000, "http://example.com:0/"],
)  # fmt: skip
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput):
        signing.check_url(url, ())


@given(st.text(max_size=60))
def test_any_text_is_a_url_or_refused(text: str) -> None:
    try:
        signing.check_url(text, ())
    except Refused:
        return


@pytest.mark.parametrize("host", ["localhost", "2130706433", "127.1", "0x7f.0.0.1", "127.0.0.1", "[::1]"])
def test_however_an_address_is_written_it_is_not_connected_to(host: str) -> None:
    async def post() -> tuple[int, str]:
        http = WebhookClient(())
        try:
            return await http.post(f"http://{host}:9/", {}, b"{}")
        finally:
            await http.close()

    status, error = asyncio.run(post())
    assert status == 0
    assert "not a public address" in error
    bare = host.strip("[]")
    assert f"{bare} is {bare}" not in error


def test_the_public_address_of_the_platform_is_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A translated address, which no interface of the machine has: only the name of the system leads to it."""
    real = socket.getaddrinfo

    def looked_up(host: str, *args: Any, **options: Any) -> Any:
        return real("1.1.1.1" if host in ("fleet.example", "alias.example") else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)

    async def post(host: str, allowed: str = "") -> str:
        networks = (ipaddress.ip_network(allowed),) if allowed else ()
        http = WebhookClient(networks, ("https://fleet.example:7443",))
        try:
            async with asyncio.timeout(0.5 if allowed else 20):  # what is allowed is tried, and not answered
                return (await http.post(f"http://{host}:9/", {}, b"{}"))[1]
        except TimeoutError:
            return "tried"
        finally:
            await http.close()

    for host in ("fleet.example", "alias.example", "1.1.1.1"):
        assert "is an address of this system" in asyncio.run(post(host)), host
        assert "is an address of this system" not in asyncio.run(post(host, "1.1.1.1/32"))


def test_slow_lookups_have_a_deadline_and_hold_up_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups, "LOOKUP_S", 0.05)
    slow = threading.Event()
    waiting: list[str] = []
    real = socket.getaddrinfo

    def looked_up(host: str, *args: Any, **options: Any) -> Any:
        if host.endswith(".slow"):
            waiting.append(host)
            slow.wait(30)
        if host == "absent":
            raise socket.gaierror
        return real("127.0.0.1", *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)

    async def scenario() -> None:
        names = lookups.NameLookups(())
        found = await asyncio.gather(
            *(names.resolve(f"{number}.slow", 80, project="a") for number in range(2 * lookups.THREADS)),
            return_exceptions=True,
        )
        with pytest.raises(socket.gaierror):
            await names.resolve("absent", 80, project="b")
        assert {type(one) for one in found} == {TimeoutError}
        assert len(waiting) <= lookups.THREADS_OF_ONE
        async with asyncio.timeout(5):
            assert await asyncio.get_running_loop().getaddrinfo("other", 80), "with the threads of everybody else"
            assert await names.resolve("quick", 80, project="b")
        slow.set()
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(TimeoutError):
                    assert await names.resolve("quick", 80, project="a")
                    break
        names.close()

    asyncio.run(scenario())


def test_a_receiver_over_tls_without_a_certificate_of_an_authority_is_not_posted_to(
    receiver: Receiver, tmp_path: Path
) -> None:
    certificate, key = self_signed(tmp_path)

    async def post(url: str) -> tuple[int, str]:
        http = WebhookClient(LOOPBACK)
        try:
            return await http.post(url, {}, b"{}")
        finally:
            await http.close()

    with serving(receiver, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as server:
        status, error = asyncio.run(post(server.url.replace("http:", "https:")))
    assert status == 0
    assert "CERTIFICATE_VERIFY_FAILED" in error


# ── that it arrives ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def allowing(redis_url: str, tmp_path: Any) -> Iterator[ControllerProcess]:
    process = ControllerProcess(tmp_path / "home", redis_url, FS_WEBHOOK_ALLOW="127.0.0.0/8")
    try:
        yield process.start()
    finally:
        process.close()


def test_a_webhook_is_delivered_again_after_errors_and_redirects(
    allowing: ControllerProcess, node: HandNode, hook: str, receiver: Receiver
) -> None:
    allowing.deploy("hello")
    calls = Client(allowing)
    receiver.answers = [503, 302]
    invocation = calls.accepted("hello/echo", b"payload", fs_webhook=hook)
    taken = wait_until(lambda: found if (found := calls.get(invocation))["delivery"]
                       and found["delivery"]["state"] == "delivered" else None, 20)  # fmt: skip
    assert taken is not None
    assert taken["delivery"]["tries"] == 3
    assert [path for _, _, path in receiver.got] == ["/hook"] * 3, "redirects are not followed"
    headers, raw, _ = receiver.got[-1]
    body = msgspec.json.decode(raw)
    assert headers["webhook-id"] == invocation
    assert body["type"] == "invocation.succeeded"
    assert body["data"]["id"] == invocation
    assert body["data"]["result"]["body"] == "payload"
    assert len({one["webhook-id"] for one, _, _ in receiver.got}) == 1
    secret = allowing.http.get("/api/v1/webhooks/secret").json()["secret"]
    expected = signing.signature(secret, invocation, int(headers["webhook-timestamp"]), raw)
    assert headers["webhook-signature"] == expected
    rotated = allowing.http.post("/api/v1/webhooks/secret").json()
    assert rotated["secret"] != secret
    assert rotated["old_until_unix_ms"] > 1000 * time.time()
    again = allowing.http.post(f"/api/v1/invocations/{invocation}/redeliver")
    assert again.status_code == 200
    wait_until(lambda: len(receiver.got) == 4)
    assert verified_by(receiver.got[-1], rotated["secret"], secret) == {rotated["secret"], secret}, (
        "for a day both sign"
    )
    last = allowing.http.post("/api/v1/webhooks/secret", json={"grace_s": 0}).json()
    assert last["old_until_unix_ms"] == 0
    allowing.http.post(f"/api/v1/invocations/{invocation}/redeliver")
    wait_until(lambda: len(receiver.got) == 5)
    assert verified_by(receiver.got[-1], last["secret"], rotated["secret"], secret) == {last["secret"]}


def test_a_webhook_survives_the_kill_of_its_controller(
    allowing: ControllerProcess, node: HandNode, hook: str, receiver: Receiver
) -> None:
    allowing.deploy("hello")
    calls = Client(allowing)
    receiver.answers = [500]
    invocation = calls.accepted("hello/echo", fs_webhook=hook)
    wait_until(lambda: receiver.got)
    allowing.kill()
    allowing.start()
    wait_until(lambda: len(receiver.got) >= 2, 45, what="another delivery")
    wait_until(lambda: calls.get(invocation)["delivery"]["state"] == "delivered")


def test_a_name_that_leads_to_ourselves_is_not_called(
    controller: ControllerProcess, node: HandNode, calls: Client, hook: str, receiver: Receiver
) -> None:
    controller.deploy("hello")
    invocation = calls.accepted("hello/echo", fs_webhook=hook.replace("127.0.0.1", "localhost"))
    found = wait_until(lambda: got if (got := calls.get(invocation))["delivery"] and got["delivery"].get("error")
                       else None)  # fmt: skip
    assert found is not None
    assert "not a public address" in found["delivery"]["error"]
    assert receiver.got == []
    refused = calls.post("hello/echo", fs_webhook=hook)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "webhook_refused"


def test_secrets_do_not_lie_about(allowing: ControllerProcess, redis_server: RedisServer) -> None:
    secret = secret_of(allowing)
    assert secret.startswith("whsec_")
    assert secret_of(allowing) == secret
    assert secret not in allowing.log()
    with redis_server.client() as client:
        assert secret not in str(client.hgetall(keys.WEBHOOK_SECRETS)), "not in Redis in clear, either"
        client.hset(keys.WEBHOOK_SECRETS, "default", "whsec_MDEyMw==")
        assert secret_of(allowing) == "whsec_MDEyMw==", "one that was kept in clear is read"
        assert b"whsec_" not in (client.hget(keys.WEBHOOK_SECRETS, "default") or b"whsec_"), "and encrypted"
    assert secret_of(allowing) == "whsec_MDEyMw=="


def test_another_master_key_is_told_and_another_secret_mends_it(
    allowing: ControllerProcess, node: HandNode, hook: str, receiver: Receiver
) -> None:
    allowing.deploy("hello")
    calls = Client(allowing)
    allowing.http.get("/api/v1/webhooks/secret")
    first = allowing.http.post("/api/v1/webhooks/secret").json()["secret"]
    assert allowing.http.post("/api/v1/secrets/rekey").json()["secrets"] == 1
    after = allowing.http.get("/api/v1/webhooks/secret").json()
    assert (after["secret"], after["old_until_unix_ms"] > 0) == (first, True), "both are encrypted anew with the others"
    (allowing.home / "master.key").unlink()
    lost = allowing.http.get("/api/v1/webhooks/secret")
    assert lost.json()["error"]["code"] == "vault_closed"
    assert "fs webhooks secret --rotate" in lost.json()["error"]["hint"]
    invocation = calls.accepted("hello/echo", fs_webhook=hook)
    failed = wait_until(lambda: delivery if (delivery := calls.get(invocation)["delivery"]) and delivery.get("error")
                        else None)  # fmt: skip
    assert failed is not None
    assert "master key" in failed["error"]
    assert first != allowing.http.post("/api/v1/webhooks/secret").json()["secret"]
    wait_until(lambda: calls.get(invocation)["delivery"]["state"] == "delivered", 30)


def test_a_project_has_a_secret_of_its_own_with_keys_and_without(
    allowing: ControllerProcess, node: HandNode, hook: str, receiver: Receiver
) -> None:
    assert allowing.http.put("/api/v1/projects/ml", json={}).status_code == 200
    allowing.deploy("hello")
    allowing.deploy("ml.learn")
    calls = Client(allowing)

    def signed_with(name: str) -> str:
        receiver.got.clear()
        calls.accepted(f"{name}/echo", fs_webhook=hook)
        headers, raw, _ = wait_until(lambda: receiver.got and receiver.got[0]) or ({}, b"", "")
        for project in ("default", "ml"):
            signature = signing.signature(
                secret_of(allowing, project), headers["webhook-id"], int(headers["webhook-timestamp"]), raw
            )
            if signature == headers["webhook-signature"]:
                return project
        return "none that is shown"

    assert (signed_with("hello"), signed_with("ml.learn")) == ("default", "ml")
    admin = allowing.http.post("/api/v1/keys", json={"name": "admin", "rights": ["admin"]}).json()["key"]
    allowing.http.headers["authorization"] = f"Bearer {admin}"
    assert (signed_with("hello"), signed_with("ml.learn")) == ("default", "ml")
    unknown = allowing.http.get("/api/v1/webhooks/secret", params={"project": "mll"})
    assert (unknown.status_code, unknown.json()["error"]["hint"]) == (404, "did you mean ml?")


def verified_by(delivery: tuple[dict[str, str], bytes, str], *secrets: str) -> set[str]:
    """Those of the secrets with which a receiver takes the delivery."""
    headers, body, _ = delivery
    found = set()
    for secret in secrets:
        with contextlib.suppress(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(secret).verify(body, headers)
            found.add(secret)
    return found


def secret_of(controller: ControllerProcess, project: str = "default") -> str:
    answer = controller.http.get("/api/v1/webhooks/secret", params={"project": project})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["secret"])
