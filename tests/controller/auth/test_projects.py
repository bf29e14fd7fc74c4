"""Projects at a real controller: whose a name is, what a key of one project reaches of another, and what a removed
function leaves behind."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest

from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from tests.controller.auth.test_keys import anybody, bearer, error, lock, make
from tests.controller.conftest import BUNDLE_ID, ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until

SECRET = "sk_live_of_payments"


def project(controller: ControllerProcess, name: str, **quotas: Any) -> None:
    terms = {"quotas": quotas} if quotas else {}
    assert controller.http.put(f"/api/v1/projects/{name}", json=terms).status_code == 200


def deployed(client: httpx.Client, key: str, name: str, **fields: Any) -> httpx.Response:
    spec = {"name": name, "bundle": BUNDLE_ID, "entry": "handler:run", **fields}
    return client.post("/api/v1/functions", json=spec, headers=bearer(key))


def log(redis_server: RedisServer, function: str, version: int, text: str) -> None:
    line = LogLine(unix_ms=1, worker=WorkerId("w"), version=Version(version), stream="stdout", text=text)
    with redis_server.client() as client:
        client.xadd(keys.logs(FunctionName(function)), {"line": msgspec.json.encode(line)})


def logged(client: httpx.Client, key: str, function: str) -> list[str]:
    answer = client.get(f"/api/v1/functions/{function}/logs", headers=bearer(key))
    return [json.loads(line)["text"] for line in answer.text.splitlines()]


def shell_status(controller: ControllerProcess, key: str, function: str, version: int) -> int:
    """The status with which a shell's handshake is refused."""

    async def connect() -> int:
        url = f"{controller.url}/api/v1/functions/{function}/shell?version={version}&idle_s=60"
        async with aiohttp.ClientSession() as session:
            try:
                async with session.ws_connect(url, headers=bearer(key)):
                    return 101
            except aiohttp.WSServerHandshakeError as refused:
                return refused.status

    return asyncio.run(connect())


def test_two_projects_may_both_have_a_name(controller: ControllerProcess, node: HandNode) -> None:
    project(controller, "ml")
    controller.deploy("greet")
    lock(controller)
    ml = make(controller, "ml", ["deploy", "invoke"], project="ml")
    with anybody(controller) as client:
        assert client.get("/fn/greet", headers=bearer(ml)).status_code == 404, "the project has none yet"
        answer = deployed(client, ml, "greet").json()
        assert (answer["name"], answer["version"]) == ("ml.greet", 1)
        assert answer["url"] == f"{controller.url}/fn/ml.greet"
        for name in ("greet", "ml.greet", "%67reet"):
            called = client.get(f"/fn/{name}/below?x=1", headers=bearer(ml))
            assert called.status_code == 200, called.text
            assert called.json()["headers"]["fs-root-path"] == "/fn/ml.greet"
        assert client.get("/fn/default.greet", headers=bearer(ml)).status_code == 404
        (info,) = client.get("/api/v1/functions", headers=bearer(ml)).json()
        assert (info["name"], info["spec"]["project"]) == ("ml.greet", "ml")
        assert client.get("/api/v1/functions/greet/traffic", headers=bearer(ml)).json()["name"] == "ml.greet"
        document = client.get("/api/v1/functions/greet/openapi.json", headers=bearer(ml)).json()
        assert (document["info"]["title"], document["servers"]) == ("ml.greet", [{"url": answer["url"]}])
    for name in ("greet", "default.greet"):
        assert controller.http.get(f"/fn/{name}").json()["headers"]["fs-root-path"] == "/fn/greet"
    assert {one["name"] for one in controller.http.get("/api/v1/functions").json()} == {"greet", "ml.greet"}
    wait_until(lambda: len(controller.rows("ml.greet")) == 3, what="rows of ml.greet")
    wait_until(lambda: len(controller.rows("greet")) == 2, what="rows of greet")
    assert {row["project"] for row in controller.rows("ml.greet")} == {"ml"}


def test_a_deploy_into_another_project_is_another_function_and_tells_nothing_of_others(
    controller: ControllerProcess,
) -> None:
    project(controller, "ml")
    project(controller, "payments")
    controller.deploy("shared", project="payments")
    lock(controller)
    ml = make(controller, "ml", ["deploy"], project="ml")
    with anybody(controller) as client:
        assert deployed(client, ml, "shared").json()["name"] == "ml.shared"
        for name in ("shared", "never"):
            told = error(deployed(client, ml, f"payments.{name}"))
            assert told["message"] == f"key ml is for project ml, and not for payments.{name}"
        for there in ("payments", "nowhere"):
            told = error(deployed(client, ml, "shared", project=there))
            assert told["message"] == f"key ml is for project ml, and not for {there}.shared"
        refused = deployed(client, ml, "ml.shared", project="payments")
        assert (refused.status_code, error(refused)["code"]) == (400, "invalid_spec")
        forecast = {"spec": {"name": "payments.shared", "bundle": BUNDLE_ID, "entry": "a:b"}, "segment_bytes": 0}
        assert client.post("/api/v1/forecast", json=forecast, headers=bearer(ml)).status_code == 403


def test_a_key_of_one_function_enters_no_project(controller: ControllerProcess, node: HandNode) -> None:
    project(controller, "payments")
    controller.http.put("/api/v1/secrets/payments/STRIPE_KEY", json={"value": SECRET}).raise_for_status()
    controller.deploy("tool")
    lock(controller)
    ci = make(controller, "ci", ["deploy", "invoke"], functions=["tool"])
    with anybody(controller) as client:
        for terms in ({"project": "payments"}, {"name": "payments.tool"}):
            refused = deployed(client, ci, **{"name": "tool", **terms}, secrets=["STRIPE_KEY"])
            assert (refused.status_code, error(refused)["code"]) == (403, "forbidden")
            assert error(refused)["message"] == "key ci is for functions tool, and not for payments.tool"
        refused = deployed(client, ci, "tool", secrets=["STRIPE_KEY"])
        assert error(refused)["message"] == "function tool: project default has no secret STRIPE_KEY"
        assert client.delete("/api/v1/functions/tool", headers=bearer(ci)).status_code == 200
        assert deployed(client, ci, "tool", project="payments", secrets=["STRIPE_KEY"]).status_code == 403


def test_a_key_warns_of_functions_that_do_not_exist(controller: ControllerProcess) -> None:
    project(controller, "ml")
    controller.deploy("greet", project="ml")
    lock(controller)

    def made(**terms: Any) -> dict[str, Any]:
        name = f"k{time.monotonic_ns()}"
        return dict(controller.http.post("/api/v1/keys", json={"name": name, "rights": ["invoke"], **terms}).json())

    assert made(functions=["greet"])["warning"] == "not deployed yet: greet; did you mean ml.greet?"
    assert made(functions=["other"])["warning"] == "not deployed yet: other; the key works for it from then on"
    good = made(functions=["greet"], project="ml")
    assert (good["info"]["functions"], good["warning"]) == (["ml.greet"], "")
    assert made(functions=["ml.greet", "default.hello"])["info"]["functions"] == ["hello", "ml.greet"]
    assert "hello is in default" in made(functions=["default.hello"], project="ml")["error"]["message"]


def test_a_name_that_is_taken_again_starts_clean(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    project(controller, "a")
    controller.http.put("/api/v1/secrets/a/TOKEN", json={"value": SECRET}).raise_for_status()
    controller.deploy("shared", project="a", env={"OLD": "of the first"}, secrets=["TOKEN"])
    lock(controller)
    first, second = (make(controller, name, ["deploy", "invoke"], project="a") for name in ("first", "second"))
    code = f"/api/v1/objects/bundles/{BUNDLE_ID}"
    with anybody(controller) as client:
        assert client.post("/fn/shared@1", headers=bearer(first)).status_code == 200
        log(redis_server, "a.shared", 1, "a line of the first")
        assert logged(client, first, "shared") == ["a line of the first"]
        assert deployed(client, first, "shared", env={"OLD": "again"}).json()["version"] == 2
        assert client.delete("/api/v1/functions/shared", headers=bearer(first)).status_code == 200
        assert client.get(code, headers=bearer(first)).status_code == 404, "no other function needs that bundle"
        with redis_server.client() as redis:
            left = {key.decode() for key in redis.keys("*a.shared*") if not key.startswith(b"fs:history:")}
            assert left == {"fs:logs:a.shared"}, "an empty stream, for the last lines of draining workers"
            assert redis.xlen("fs:logs:a.shared") == 0
            assert 0 < redis.ttl("fs:logs:a.shared") <= 2 * 86_400
        assert client.post("/fn/shared@1", headers=bearer(second)).status_code == 404
        assert client.put(code, content=(b"a bundle, as far as the controller looks into it"), headers=bearer(second))
        taken = deployed(client, second, "shared", env={"NEW": "1"}).json()
        assert (taken["name"], taken["version"], taken["created"]) == ("a.shared", 3, True)
        log(redis_server, "a.shared", 2, "a late line of the first")
        log(redis_server, "a.shared", 3, "a line of the second")
        assert logged(client, second, "shared") == ["a line of the second"]
        (version,) = client.get("/api/v1/functions/shared/versions", headers=bearer(second)).json()
        assert (version["version"], version["spec"]["env"]) == (3, {"NEW": "1"})
        for old in (1, 2):
            for name in ("shared", "a.shared"):
                refused = client.post(f"/fn/{name}@{old}", headers=bearer(second))
                assert (refused.status_code, error(refused)["message"]) == (
                    404,
                    f"function a.shared has no version {old}",
                )
            assert shell_status(controller, second, "shared", old) == 404
            for method, path, body in (
                ("POST", "rollback", {"version": old}), ("PUT", "aliases/prod", {"version": old}),
                ("PUT", "split", [{"version": old, "percent": 100}]),
            ):  # fmt: skip
                answer = client.request(method, f"/api/v1/functions/shared/{path}", json=body, headers=bearer(second))
                assert answer.status_code == 404, path
        assert client.post("/fn/shared@3", headers=bearer(second)).status_code == 200


def test_another_project_takes_nothing_of_a_removed_function(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer
) -> None:
    for name in ("a", "b"):
        project(controller, name)
    controller.deploy("shared", project="a", env={"OLD": "of a"})
    controller.deploy("other", project="a")
    lock(controller)
    b = make(controller, "b", ["deploy", "invoke"], project="b")
    log(redis_server, "a.shared", 1, "a line of a")
    assert controller.http.delete("/api/v1/functions/a.shared").status_code == 200
    assert controller.http.get(f"/api/v1/objects/bundles/{BUNDLE_ID}").status_code == 200, "a.other still needs it"
    with anybody(controller) as client:
        assert deployed(client, b, "shared").json()["version"] == 1
        assert client.post("/fn/shared@1", headers=bearer(b)).json()["headers"]["fs-root-path"] == "/fn/b.shared@1"
        (version,) = client.get("/api/v1/functions/shared/versions", headers=bearer(b)).json()
        assert version["spec"]["env"] == {}
        assert logged(client, b, "shared") == []
        for path in ("", "/versions", "/logs", "/traffic"):
            assert client.get(f"/api/v1/functions/a.shared{path}", headers=bearer(b)).status_code == 404
        assert shell_status(controller, b, "a.shared", 1) == 404


def test_a_key_of_some_functions_hears_nothing_of_other_projects(controller: ControllerProcess) -> None:
    for name in ("ml", "payments"):
        project(controller, name)
        controller.http.put(f"/api/v1/secrets/{name}/KEY_OF_{name.upper()}", json={"value": SECRET}).raise_for_status()
        controller.deploy("tool", project=name, secrets=[f"KEY_OF_{name.upper()}"])
    controller.deploy("other", project="ml", secrets=["KEY_OF_ML"])
    controller.deploy("tool")
    lock(controller)
    of_default = make(controller, "d", ["deploy"], functions=["tool"])
    of_ml = make(controller, "m", ["deploy"], functions=["ml.tool"])
    with anybody(controller) as client:
        assert client.get("/api/v1/secrets", headers=bearer(of_default)).json() == []
        (secret,) = client.get("/api/v1/secrets", headers=bearer(of_ml)).json()
        assert (secret["name"], secret["used_by"]) == ("KEY_OF_ML", ["ml.tool"])
        for key, name, functions in ((of_default, "default", ["tool"]), (of_ml, "ml", ["ml.tool"])):
            (shown,) = client.get("/api/v1/projects", headers=bearer(key)).json()
            assert (shown["name"], shown["functions"]) == (name, functions)
            status = client.get("/api/v1/status?probe=1", headers=bearer(key)).json()
            assert [one["name"] for one in status["functions"]] == functions
            assert (status["redis"], status["store"], status["store_problem"]) == ("ok", "", "")
        seen = "".join(
            client.get(path, headers=bearer(of_default)).text
            for path in ("/api/v1/functions", "/api/v1/status", "/api/v1/projects", "/api/v1/secrets", "/metrics",
                         "/api/v1/usage", "/api/v1/budgets", "/api/v1/schedules", "/api/v1/async", "/api/v1/activity")
        )  # fmt: skip
        assert "payments" not in seen
        assert "ml.tool" not in seen


@pytest.mark.parametrize("limits", [{"functions": ["tool"]}, {"project": "default"}])
def test_status_tells_a_limited_key_nothing_of_redis(
    controller: ControllerProcess, redis_server: RedisServer, limits: dict[str, Any]
) -> None:
    controller.deploy("tool")
    lock(controller)
    limited = make(controller, "limited", ["read"], **limits)
    redis_server.kill()

    def state(headers: dict[str, str]) -> str:
        with anybody(controller) as client:
            return str(client.get("/api/v1/status?probe=1", headers=headers).json()["redis"])

    wait_until(lambda: state(bearer(limited)) == "unavailable", what="the outage")
    assert len(state({"authorization": controller.http.headers["authorization"]})) > len("unavailable")


def test_the_nodes_whole_network_is_a_right_of_its_own(controller: ControllerProcess) -> None:
    """`network=True` passes by each list, and by what nodes deny: the platform, metadata services, other machines."""
    with anybody(controller) as client:
        controller.deploy("hello")
        spec = {"name": "open", "bundle": BUNDLE_ID, "entry": "handler:run", "network": True}
        assert controller.http.post("/api/v1/functions", json=spec).is_success, (
            "over loopback, as long as there is no key"
        )
        lock(controller)
        project(controller, "ml")
        deployer, wide = make(controller, "ci", ["deploy"], project="ml"), make(controller, "wide", ["deploy"])
        for key, name in ((deployer, "ml.scraper"), (wide, "scraper")):
            answer = deployed(client, key, name, network=True)
            assert answer.status_code == 403
            assert "network=True" in error(answer)["message"]
            assert "fs project quota" in error(answer)["hint"]
        assert deployed(client, deployer, "ml.scraper", network=["api.example.com"]).is_success

        assert controller.http.put("/api/v1/projects/ml", json={"network": "any"}).json()["network"] == "any"
        assert deployed(client, deployer, "ml.scraper", network=True).is_success
        assert deployed(client, wide, "scraper", network=True).status_code == 403
        project(controller, "ml", workers=50)
        networks = {one["name"]: one["network"] for one in controller.http.get("/api/v1/projects").json()}
        assert networks == {"default": "listed", "ml": "any"}, "quotas leave it as it was"
        controller.http.put("/api/v1/projects/ml", json={"network": "listed"})
        assert deployed(client, deployer, "ml.again", network=True).status_code == 403
        assert controller.http.post("/api/v1/functions", json={**spec, "name": "mine"}).is_success, "an admin's key"
