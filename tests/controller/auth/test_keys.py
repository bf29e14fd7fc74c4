"""Keys at a real controller: the first one shuts the door, and what each lets in; rotation, revocation, the ledger."""

from __future__ import annotations

import asyncio
import contextlib
from base64 import b64encode
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetstart.controller.auth.api_key import new_key_text
from fleetstart.runtime.contract import redis_keys as keys
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def make(controller: ControllerProcess, name: str, rights: list[str], **terms: Any) -> str:
    answer = controller.http.post("/api/v1/keys", json={"name": name, "rights": rights, **terms})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["key"])


def lock(controller: ControllerProcess) -> str:
    """The first key; the controller's client shows it from now on."""
    key = make(controller, "admin", ["admin"])
    controller.http.headers.update(bearer(key))
    return key


def anybody(controller: ControllerProcess) -> httpx.Client:
    return httpx.Client(base_url=controller.url, timeout=30)


def error(answer: httpx.Response) -> dict[str, Any]:
    return dict(answer.json()["error"])


def test_the_first_key_shuts_the_door(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    assert controller.http.get("/fn/hello").status_code == 200, "over loopback, as long as there is no key"
    for rights, terms in ((["invoke"], {}), (["admin"], {"functions": ["hello"]}), (["admin"], {"expires_s": 60})):
        refused = controller.http.post("/api/v1/keys", json={"name": "first", "rights": rights, **terms})
        assert refused.status_code == 400
        assert "the first key must be an admin's" in error(refused)["message"]
    lock(controller)
    with anybody(controller) as client:
        for method, path in (
            ("GET", "/fn/hello"), ("POST", "/fn/hello/x"), ("GET", "/fn/nobody"), ("GET", "/api/v1/functions"),
            ("GET", "/api/v1/status"), ("GET", "/openapi.json"), ("GET", "/metrics"),
            ("PUT", "/api/v1/objects/bundles/" + "0" * 64), ("DELETE", "/api/v1/functions/hello"),
            ("GET", "//fn/hello"), ("GET", "/fn//hello"), ("GET", "/%66n/hello"), ("GET", "/fn/%68ello"),
            ("GET", "/healthz/"), ("GET", "//healthz"), ("GET", "/healthz/../api/v1/keys"), ("OPTIONS", "/api/v1/keys"),
        ):  # fmt: skip
            url = httpx.URL(controller.url).copy_with(raw_path=path.encode())  # as it is, unmended
            answer = client.request(method, url, content=b"{}" if method in ("POST", "PUT") else None)
            assert answer.status_code == 401, f"{method} {path}"
            assert error(answer)["code"] == "unauthorized"
            assert answer.headers["www-authenticate"].startswith('Bearer realm="fleetstart"')
        assert client.get("/healthz").json() == {"ok": True}
        assert client.get("/ui/").status_code == 200, "it has no data in it, and asks for a key"
        beside = client.get(httpx.URL(controller.url).copy_with(raw_path=b"/ui/../api/v1/keys"))
        assert beside.status_code in (401, 404)
    assert controller.http.get("/fn/hello").status_code == 200
    assert controller.http.get("/api/v1/functions").status_code == 200


def test_what_keys_are_good_for(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.deploy("other")
    lock(controller)
    app = make(controller, "app", ["invoke"], functions=["hello"])
    reader = make(controller, "reader", ["read"])
    deployer = make(controller, "deployer", ["deploy"], functions=["other"])
    with anybody(controller) as client:
        assert client.get("/fn/hello", headers=bearer(app)).status_code == 200
        assert client.get("/fn/hello", headers={"fs-key": app}).status_code == 200
        for path in ("/fn/other", "/fn/nobody", "/fn/%6Fther", "/fn/other@1", "/fn/%256Fther", "/fn/other%2Fhello"):
            answer = client.get(path, headers=bearer(app))
            assert answer.status_code == 404, path
            assert "hello" in error(answer)["hint"] or "other" not in error(answer)["hint"]
        for path in ("/fn/hello/../other", "/fn/hello%2F..%2Fother", "/fn/hello/..%2f..%2fapi/v1/keys"):
            url = httpx.URL(controller.url).copy_with(raw_path=path.encode())
            answer = client.get(url, headers=bearer(app))
            assert answer.status_code in (200, 404), path
            assert answer.status_code == 404 or answer.headers["fs-version"] == "1"
        refused = client.get("/api/v1/functions", headers=bearer(app))
        assert refused.status_code == 403
        assert error(refused)["message"] == "key app may invoke; GET /api/v1/functions needs read"
        assert "--scope read" in error(refused)["hint"]
        assert client.get("/fn/hello", headers=bearer(reader)).status_code == 403
        assert len(client.get("/api/v1/functions", headers=bearer(reader)).json()) == 2
        assert client.delete("/api/v1/functions/hello", headers=bearer(reader)).status_code == 403
        assert client.get("/api/v1/keys", headers=bearer(reader)).status_code == 403
        headers = bearer(deployer)
        assert [one["name"] for one in client.get("/api/v1/functions", headers=headers).json()] == ["other"]
        assert client.get("/api/v1/status", headers=headers).json()["nodes"] == []
        assert client.get("/api/v1/functions/hello", headers=headers).status_code == 404
        assert client.put("/api/v1/functions/hello/scale", json=None, headers=headers).status_code == 404
        spec = controller.http.get("/api/v1/functions/other").json()["spec"]
        assert client.post("/api/v1/functions", json=spec, headers=headers).status_code == 200
        refused = client.post("/api/v1/functions", json={**spec, "name": "hello"}, headers=headers)
        assert (refused.status_code, error(refused)["code"]) == (403, "forbidden")
        assert client.get("/api/v1/checkpoints", headers=headers).status_code == 403


def test_a_limited_key_reads_what_is_about_its_own_functions(controller: ControllerProcess, node: HandNode) -> None:
    assert controller.http.put("/api/v1/projects/ml", json={}).status_code == 200
    for name in ("hello", "other", "ml.learn"):
        controller.deploy(name, schedule="0 0 1 1 *")
        assert controller.http.post(f"/fn/{name}", headers={"prefer": "respond-async, wait=20"}).status_code == 200
    lock(controller)
    readers = {
        make(controller, "one", ["read"], functions=["other"]): {"other"},
        make(controller, "ours", ["read"], project="ml"): {"ml.learn"},
        make(controller, "all", ["read"]): {"hello", "other", "ml.learn"},
    }
    wait_until(lambda: all(len(controller.rows(name)) == 1 for name in ("hello", "other", "ml.learn")))
    with anybody(controller) as client:
        for key, names in readers.items():
            client.headers.update(bearer(key))
            for path in ("/api/v1/async", "/api/v1/schedules"):
                assert {one["function"] for one in client.get(path).json()} == names, path
            assert {one["function"] for one in client.get("/api/v1/activity").json()["functions"]} == names
            told = [s for f in text_string_to_metric_families(client.get("/metrics").text) for s in f.samples]
            assert {s.labels["function"] for s in told if "function" in s.labels} == names
            assert all("function" in s.labels for s in told) == (len(names) == 1), "nothing about the system itself"
        refused = client.get("/api/v1/checkpoints", headers=bearer(next(iter(readers))))
        assert error(refused)["hint"] == "use a key that was made without --function and --project"


def test_a_call_is_booked_under_its_key_and_a_handler_does_not_see_it(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("hello")
    assert controller.http.get("/fn/hello", headers={"authorization": "Bearer sk-own"}).json()["headers"][
        "authorization"
    ] == "Bearer sk-own", "a handler's own affair"  # fmt: skip
    lock(controller)
    app = make(controller, "app", ["invoke"])
    with anybody(controller) as client:
        seen = client.get("/fn/hello", headers=bearer(app)).json()["headers"]
        assert "authorization" not in seen
        both = {"fs-key": app, "authorization": "Bearer sk-own"}
        seen = client.get("/fn/hello", headers=both).json()["headers"]
        assert (seen["authorization"], seen.get("fs-key")) == ("Bearer sk-own", None)
    wait_until(lambda: len(controller.rows("hello")) == 3)
    assert sorted(row["key"] for row in controller.rows("hello")) == ["", "app", "app"]
    lines = controller.http.get("/api/v1/usage", params={"by": "key", "function": "hello"}).json()["lines"]
    assert {line["key"]: line["rows"] for line in lines if line["key"]} == {"app": 2}


def test_rotation_and_revocation_are_heard_by_all_gateways(
    controller: ControllerProcess, node: HandNode, redis_url: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    controller.deploy("hello")
    lock(controller)
    second = ControllerProcess(tmp_path / "second", redis_url)
    second.http.headers.update(controller.http.headers)
    try:
        second.start()
        first_text = make(controller, "app", ["invoke"])

        def status(text: str) -> int:
            with anybody(second) as client:
                return client.get("/fn/hello", headers=bearer(text)).status_code

        wait_until(lambda: status(first_text) == 200)
        rotated = controller.http.post("/api/v1/keys/app/rotate", json={"grace_s": 600}).json()
        wait_until(lambda: status(rotated["key"]) == 200)
        assert status(first_text) == 200, "still in its grace period"
        assert rotated["info"]["old_until_unix_ms"] > 0
        again = controller.http.post("/api/v1/keys/app/rotate", json={"grace_s": 0}).json()
        wait_until(lambda: status(rotated["key"]) == 401)
        assert status(again["key"]) == 200
        assert controller.http.delete("/api/v1/keys/app").json()["state"] == "revoked"
        with anybody(controller) as client:
            assert client.get("/fn/hello", headers=bearer(again["key"])).status_code == 401, (
                "at once where it was asked"
            )
        wait_until(lambda: status(again["key"]) == 401)
        with anybody(second) as client:
            assert "was revoked" in error(client.get("/fn/hello", headers=bearer(again["key"])))["message"]
        redis_server.kill()
        assert status(again["key"]) == 401, "known without Redis"
        assert second.http.get("/fn/hello").status_code == 200
    finally:
        second.close()


def test_keys_are_kept_as_hashes_and_the_last_admin_stays(
    controller: ControllerProcess, redis_server: RedisServer
) -> None:
    text = lock(controller)
    made = make(controller, "app", ["invoke"], expires_s=3600)
    with redis_server.client() as client:
        stored: Any = client.hgetall(keys.KEYS)
    for one in (text, made):
        assert one.encode() not in b"".join(stored.values())
        assert one[14:57].encode() not in b"".join(stored.values())
    assert text not in controller.log()
    refused = controller.http.delete("/api/v1/keys/admin")
    assert refused.status_code == 400
    assert "the last admin key" in error(refused)["message"]
    shown = {one["name"]: one for one in controller.http.get("/api/v1/keys").json()}
    assert shown["app"]["state"] == "good"
    assert shown["app"]["expires_unix_ms"] > shown["app"]["created_unix_ms"]
    assert "key" not in shown["app"]
    assert controller.http.delete("/api/v1/keys/ap").status_code == 404
    assert "did you mean app?" in error(controller.http.delete("/api/v1/keys/ap"))["hint"]
    wait_until(
        lambda: {one["name"]: one["used_unix_ms"] for one in controller.http.get("/api/v1/keys").json()}["admin"]
    )
    again = controller.http.post("/api/v1/keys", json={"name": "app", "rights": ["invoke"]})
    assert (again.status_code, "exists already" in again.text) == (400, True)


@pytest.mark.parametrize(
    "body",
    [
        {"name": "local", "rights": ["read"]}, {"name": "A", "rights": ["read"]}, {"name": "a b", "rights": ["read"]},
        {"name": "x", "rights": []}, {"name": "x", "rights": ["root"]}, {"name": "x", "rights": ["read"], "id": "y"},
        {"name": "x", "rights": ["read"], "expires_s": -1}, {"name": "x", "rights": ["read"], "project": "nowhere"},
        {"name": "x", "rights": ["read"], "functions": ["../x"]}, {"name": "x", "rights": ["read"], "functions": 5},
    ],
)  # fmt: skip
def test_keys_that_make_no_sense(controller: ControllerProcess, body: dict[str, Any]) -> None:
    lock(controller)
    assert controller.http.post("/api/v1/keys", json=body).status_code == 400
    assert len(controller.http.get("/api/v1/keys").json()) == 1


def test_hostile_requests_are_refused_and_break_nothing(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    text = lock(controller)
    wrong = [
        "Bearer", "bearer", text, f"Basic {text}", f"Bearer {text}x", f"Bearer {text[:-1]}", "Bearer fs_",
        f"Bearer {text[:20]}{text[21:]}x", "Bearer " + "a" * 20_000, f"Bearer {new_key_text().text}",
        f"Bearer {text}, Bearer {text}", "Bearer fs_ü", f"Bearer {text.upper()}", "Bearer *", "Digest a=b",
    ]  # fmt: skip
    with anybody(controller) as client:
        for value in wrong:
            for path in ("/fn/hello", "/api/v1/status"):
                # A server may also close on a header that is too long for it.
                with contextlib.suppress(httpx.RemoteProtocolError):
                    answer = client.get(path, headers={b"authorization": value.encode("latin-1", "replace")})
                    assert answer.status_code in (400, 401, 431), value[:40]
                    assert text not in answer.text
        many = [("x-" + str(number), "y") for number in range(90)]
        assert client.get("/fn/hello", headers=many).status_code == 401
        answer = client.post("/fn/hello", headers=bearer("fs_x"), content=b"x" * (3 << 20))
        assert answer.status_code == 401, "a body that nobody wants does not keep the answer away"
        query = client.get("/fn/hello", params={"authorization": f"Bearer {text}", "key": text})
        assert query.status_code == 401
        basic = {"authorization": "Basic " + b64encode(f"me:{text}".encode()).decode(), "cookie": f"key={text}"}
        for path in ("/fn/hello", "/api/v1/status"):
            assert client.get(path, headers=basic).status_code == 401, "what a browser sends by itself"
    assert controller.http.get("/fn/hello").status_code == 200


def test_before_there_are_keys_other_sites_cannot_make_a_browser_deploy(controller: ControllerProcess) -> None:
    with anybody(controller) as client:
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, {"origin": "null"}):
            answer = client.post("/api/v1/keys", json={"name": "admin", "rights": ["admin"]}, headers=headers)
            assert (answer.status_code, error(answer)["code"]) == (403, "forbidden")
        assert client.get("/api/v1/status", headers={"origin": controller.url}).status_code == 200
    assert controller.http.get("/api/v1/keys").json() == []


def test_before_there_are_keys_other_sites_cannot_make_a_browser_call(
    controller: ControllerProcess, node: HandNode
) -> None:
    controller.deploy("closed")
    controller.deploy("shared", cors=["https://app.example"])
    with anybody(controller) as client:
        for headers in ({"origin": "https://evil.example"}, {"host": "evil.example"}, {"origin": "null"}):
            for function in ("closed", "shared"):
                answer = client.post(f"/fn/{function}", content=b"{}", headers=headers)
                assert (answer.status_code, error(answer)["code"]) == (403, "forbidden")
        assert client.post("/fn/closed", headers={"origin": controller.url}).status_code == 200
        assert client.post("/fn/shared", headers={"origin": "https://app.example"}).status_code == 200
        rebound = {"origin": "https://app.example", "host": "evil.example"}
        assert client.post("/fn/shared", headers=rebound).status_code == 403


def test_the_audit_log_tells_who_did_what_and_what_was_refused(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    lock(controller)
    ci = make(controller, "ci", ["deploy"], functions=["hello"])
    with anybody(controller) as client:
        client.put("/api/v1/functions/hello/scale", json={"max": 7}, headers=bearer(ci)).raise_for_status()
        for _ in range(5):
            assert client.delete("/api/v1/keys/admin", headers=bearer(ci)).status_code == 403
        assert client.get("/fn/hello").status_code == 401
    assert controller.http.put("/api/v1/functions/hello/scale", json={"max": -1}).status_code == 400

    def events() -> list[dict[str, Any]]:
        return list(reversed(controller.http.get("/api/v1/audit").json()))

    found = wait_until(lambda: events() if len(events()) >= 7 else [], what="seven lines")
    told = {(one["by"], one["verb"], one.get("object", ""), one["status"]) for one in found}
    assert told == {
        ("local", "function.deploy", "function hello", 200),
        ("local", "key.create", "key admin", 201),
        ("admin", "key.create", "key ci", 201),
        ("ci", "function.scale", "function hello", 200),
        ("ci", "key.revoke", "key admin", 403),
        ("", "invoke", "function hello", 401),
        ("admin", "function.scale", "function hello", 400),
    }
    deploy = next(one for one in found if one["verb"] == "function.deploy")
    assert "before" not in deploy
    assert len(deploy["after"]) == 12
    good = next(one for one in found if one["by"] == "ci" and one["status"] == 200)
    assert deploy["after"] == good["before"] != good["after"]
    bad = next(one for one in found if one["status"] == 400)
    assert (bad["before"], bad["code"]) == (bad["after"], "invalid_spec")
    assert all(one["address"] == "127.0.0.1" for one in found)
    assert {one["by"] for one in controller.http.get("/api/v1/audit", params={"by": "ci"}).json()} == {"ci"}
    assert ci not in str(found)


def test_a_websocket_needs_a_key_as_a_call_does(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    lock(controller)

    async def connect() -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(f"{controller.url}/fn/hello"):
            pass

    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        asyncio.run(connect())
    assert caught.value.status == 401


def test_a_browser_may_ask_without_a_key_whether_it_may_show_one(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello", cors=["https://app.example"])
    lock(controller)
    origin = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with anybody(controller) as client:
        asked = client.request("OPTIONS", "/fn/hello", headers=origin)
        assert (asked.status_code, asked.headers["access-control-allow-origin"]) == (204, "https://app.example")
        assert client.get("/fn/hello", headers={"origin": "https://app.example"}).status_code == 401


def test_what_came_of_an_async_call_is_for_those_who_may_call(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.deploy("other")
    lock(controller)
    app = make(controller, "app", ["invoke"], functions=["hello"])
    other = make(controller, "else", ["admin"], functions=["other"])
    with anybody(controller) as client:
        accepted = client.post("/fn/hello", headers={**bearer(app), "prefer": "respond-async"}, content=b"x")
        assert accepted.status_code == 202, accepted.text
        place = f"/api/v1/invocations/{accepted.headers['x-request-id']}"
        wait_until(lambda: client.get(f"{place}/result", headers=bearer(app)).status_code == 200)
        for method, end in (("GET", ""), ("GET", "/result"), ("GET", "/events"), ("DELETE", ""), ("POST", "/replay")):
            assert client.request(method, place + end, headers=bearer(other)).status_code == 404, end
            assert client.request(method, place + end).status_code == 401
        assert client.get("/api/v1/async", headers=bearer(other)).json() == []
        assert client.get("/api/v1/webhooks/secret", headers=bearer(other)).status_code == 403
    wait_until(lambda: [row["key"] for row in controller.rows("hello")] == ["app"])


@pytest.mark.parametrize("terms", [{}, {"expires_s": 2}])
def test_logs_are_followed_until_the_key_is_good_no_more(
    controller: ControllerProcess, node: HandNode, terms: dict[str, Any]
) -> None:
    controller.deploy("hello")
    lock(controller)
    reader = make(controller, "reader", ["read"], **terms)
    with (
        anybody(controller) as client,
        client.stream("GET", "/api/v1/functions/hello/logs?follow=1", headers=bearer(reader)) as logs,
    ):
        assert logs.status_code == 200
        if not terms:
            controller.http.delete("/api/v1/keys/reader").raise_for_status()
        assert logs.read() == b""
