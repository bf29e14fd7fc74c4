"""The management API of a real controller, and what a deploy refuses."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from fleetstart.controller.api.app import _unforeseen
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.ids import CheckpointId, FunctionName, Version, WorkerId
from fleetstart.runtime.contract.weights.manifest import Manifest, Part, TensorEntry, checkpoint_id, manifest_bytes
from tests.controller.conftest import BUNDLE, BUNDLE_ID, ControllerProcess, HandNode
from tests.servers import RedisServer, wait_until

PART = b"h" * 64 + b"d" * 4096


def manifest() -> bytes:
    return manifest_bytes(
        Manifest(
            chunk_bytes=4096,
            total_bytes=4096,
            parts=[Part("part-0", 64, 4096, 0)],
            chunks=[1],
            tensors={"w": TensorEntry(0, 4096, "U8", (4096,), 0)},
        )
    )


CHECKPOINT: CheckpointId = checkpoint_id(manifest())


def put(controller: ControllerProcess, key: str, data: bytes) -> Any:
    return controller.http.put(f"/api/v1/objects/{key}", content=data)


def deploy(controller: ControllerProcess, **fields: Any) -> Any:
    spec = {"name": "f", "bundle": BUNDLE_ID, "entry": "handler:run", **fields}
    return controller.http.post("/api/v1/functions", json=spec)


def error(answer: Any) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_health_needs_nothing(controller: ControllerProcess) -> None:
    assert controller.http.get("/healthz").json() == {"ok": True}


def test_objects_are_published_only_when_they_are_what_their_key_says(controller: ControllerProcess) -> None:
    key = f"bundles/{BUNDLE_ID}"
    assert controller.http.head(f"/api/v1/objects/{key}").status_code == 404
    assert error(put(controller, key, BUNDLE + b"?")) == (400, "invalid_input")
    assert controller.http.head(f"/api/v1/objects/{key}").status_code == 404
    assert put(controller, key, BUNDLE).status_code == 201
    head = controller.http.head(f"/api/v1/objects/{key}")
    assert (head.status_code, int(head.headers["content-length"])) == (200, len(BUNDLE))
    store = controller.home / "store"
    assert (store / key).read_bytes() == BUNDLE
    assert not list((store / ".incoming").iterdir())


def test_a_large_object_is_streamed(controller: ControllerProcess) -> None:
    data = bytes(range(256)) * 65536  # four times FS_MAX_BODY, which is for calls
    digest = hashlib.sha256(data).hexdigest()
    assert put(controller, f"bundles/{digest}", data).status_code == 201
    assert (controller.home / "store" / "bundles" / digest).stat().st_size == len(data)


@pytest.mark.parametrize(
    "key",
    [
        "x",
        "bundles/short",
        f"bundles/{BUNDLE_ID}/more",
        f"bundles/{BUNDLE_ID.upper()}",
        f"checkpoints/{BUNDLE_ID}/..%2f..%2fx",
        f"checkpoints/{BUNDLE_ID}/.hidden",
        f"checkpoints/{BUNDLE_ID}/a/b",
        "..%2f..%2fetc%2fpasswd",
        f"bundles/{BUNDLE_ID}%00",
        f"bundles/{BUNDLE_ID}%0a",
    ],
)
def test_no_key_leads_out_of_the_store(controller: ControllerProcess, key: str) -> None:
    before = sorted(controller.home.parent.rglob("*"))
    assert put(controller, key, b"data").status_code in (400, 404)
    after = sorted(controller.home.parent.rglob("*"))
    assert [path for path in after if path not in before and path.name not in ("controller.log",)] == []


def test_a_deploy_names_what_is_missing(controller: ControllerProcess) -> None:
    assert error(deploy(controller)) == (400, "invalid_spec")
    put(controller, f"bundles/{BUNDLE_ID}", BUNDLE)
    answer = deploy(controller, weights=CHECKPOINT)
    assert error(answer) == (400, "weights_missing")
    assert "fs deploy" in answer.json()["error"]["hint"]
    assert error(put(controller, f"checkpoints/{CHECKPOINT}/manifest.json", b"{}")) == (400, "invalid_input")
    stored = controller.home / "store" / "checkpoints" / CHECKPOINT
    stored.mkdir(parents=True)
    (stored / "manifest.json").write_bytes(manifest())
    answer = deploy(controller, weights=CHECKPOINT)
    assert error(answer) == (400, "weights_missing")
    assert "part-0" in answer.json()["error"]["message"]
    put(controller, f"checkpoints/{CHECKPOINT}/part-0", PART[:-1])
    answer = deploy(controller, weights=CHECKPOINT)
    assert error(answer) == (400, "checkpoint_invalid")
    assert "4,159" in answer.json()["error"]["message"]
    assert "4,160" in answer.json()["error"]["message"]
    (stored / "part-0").unlink()  # what is there is never written over
    put(controller, f"checkpoints/{CHECKPOINT}/part-0", PART)
    assert deploy(controller, weights=CHECKPOINT).status_code == 200
    (stored / "manifest.json").write_bytes(b"{}")
    assert error(deploy(controller, weights=CHECKPOINT)) == (400, "checkpoint_invalid")


def test_the_version_of_an_llm_knows_what_its_stages_weigh(
    controller: ControllerProcess, redis_server: RedisServer
) -> None:
    put(controller, f"bundles/{BUNDLE_ID}", BUNDLE)
    stored = controller.home / "store" / "checkpoints" / CHECKPOINT
    stored.mkdir(parents=True)
    (stored / "manifest.json").write_bytes(manifest())
    put(controller, f"checkpoints/{CHECKPOINT}/part-0", PART)
    layouts = []
    with redis_server.client() as client:
        for name, llm in (("plain", None), ("chat", {"max_batch": 2})):
            assert deploy(controller, name=name, weights=CHECKPOINT, llm=llm).status_code == 200
            raw: Any = client.hget(keys.versions(FunctionName(name)), "1")
            layouts.append(json.loads(raw)["layout"])
    assert layouts == [None, {"ends_bytes": 4096, "layer_bytes": [], "layer_chunks": [], "ends_chunks": [[0, 1]]}]


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{", b'{"name": "f"}', b"\xff", b"[" * 10_000, b'{"name": "../x", "bundle": "b", "entry": "a:b"}'],
)
def test_a_spec_that_is_none_is_refused(controller: ControllerProcess, body: bytes) -> None:
    assert error(controller.http.post("/api/v1/functions", content=body)) == (400, "invalid_spec")


def test_versions_are_immutable_and_equal_specs_are_one(controller: ControllerProcess) -> None:
    first, again = controller.deploy("hello"), controller.deploy("hello")
    assert (first["version"], first["created"], again["version"], again["created"]) == (1, True, 1, False)
    assert first["url"] == f"{controller.url}/fn/hello"
    second, third = controller.deploy("hello", env={"A": "1"}), controller.deploy("hello")
    assert (second["version"], third["version"]) == (2, 3)
    assert [f["version"] for f in controller.http.get("/api/v1/functions").json()] == [3]


def test_deploys_at_the_same_time_get_different_versions(controller: ControllerProcess) -> None:
    controller.deploy("race")
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda i=i: got.append(controller.deploy("race", env={"N": str(i)})["version"]))
        for i in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(got) == [2, 3, 4, 5, 6, 7]


def test_status_tells_the_whole_system(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    controller.http.get("/fn/hello")
    status = wait_until(lambda: (s := controller.http.get("/api/v1/status").json())["nodes"] and s)
    assert status["redis"] == "ok"
    assert status["leader"] == status["gateway"]
    assert status["nodes"][0]["node"] == "node-1"
    worker = status["functions"][0]["workers"][0]
    assert worker["state"] == "ready"
    assert not worker["token"], "a worker's secret is for gateways only"


def test_unknown_things_are_404_and_wrong_methods_405(controller: ControllerProcess) -> None:
    for path in ("/api/v1/functions/no", "/api/v1/functions/no/logs", "/api/v1/invocations/no", "/nothing"):
        assert error(controller.http.get(path)) == (404, "not_found")
    assert controller.http.delete("/api/v1/functions/no").status_code == 404
    assert controller.http.post("/api/v1/status").status_code == 405
    assert error(controller.http.get("/api/v1/invocations?limit=-1")) == (400, "invalid_input")


def test_what_goes_wrong_unforeseen_is_in_the_log_and_its_words_are_not_in_the_answer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = Request({"type": "http", "method": "GET", "path": "/api/v1/x", "headers": [], "query_string": b""})
    response = asyncio.run(_unforeseen(request, RuntimeError("secret words")))
    assert response.status_code == 500
    assert json.loads(bytes(response.body))["error"]["code"] == "internal"
    assert b"secret" not in response.body
    (record,) = caplog.records
    assert record.exc_info is not None


def test_a_controller_that_has_not_read_redis_says_so_instead_of_not_found(tmp_path: Path) -> None:
    controller = ControllerProcess(tmp_path / "home", f"unix://{tmp_path}/nobody.sock")
    try:
        controller.spawn()
        wait_until(lambda: controller.answers("/healthz"), 20, what="controller without Redis")
        for path in ("/api/v1/functions", "/api/v1/functions/f", "/api/v1/functions/f/logs"):
            assert error(controller.http.get(path)) == (503, "unavailable")
        assert controller.http.get("/api/v1/status").json()["redis"] != "ok"
    finally:
        controller.close()


def test_a_restarted_controller_knows_its_functions_from_its_first_answer(controller: ControllerProcess) -> None:
    put(controller, f"bundles/{BUNDLE_ID}", BUNDLE)
    deploy(controller)
    controller.kill()
    controller.spawn()
    assert [f["name"] for f in controller.http.get("/api/v1/functions").json()] == ["f"]


def test_usage_is_the_sum_of_the_rows(controller: ControllerProcess, node: HandNode) -> None:
    controller.deploy("hello")
    bills = [int(controller.http.get("/fn/hello/sleep?s=0.02").headers["fs-billed-ms"]) for _ in range(5)]
    wait_until(lambda: len(controller.rows("hello")) == 5)
    usage = controller.http.get("/api/v1/usage", params={"function": "hello"}).json()
    line = usage["lines"][0]
    assert (line["kind"], line["rows"], line["duration_ms"]) == ("invocation", 5, sum(bills))
    assert usage["total_nusd"] == sum(row["cost_nusd"] for row in controller.rows("hello"))
    later = controller.http.get("/api/v1/usage", params={"since_unix_ms": usage["until_unix_ms"] + 60_000}).json()
    assert later["lines"] == []
    assert len(controller.http.get("/api/v1/invocations?limit=2").json()) == 2


def test_logs_are_tailed_and_followed(controller: ControllerProcess, redis_server: RedisServer) -> None:
    controller.deploy("hello")
    with redis_server.client() as client:

        def say(text: str) -> None:
            line = LogLine(unix_ms=1, worker=WorkerId("w"), version=Version(1), stream="stdout", text=text)
            client.xadd(keys.logs("hello"), {"line": json.dumps(_plain(line))})  # type: ignore[arg-type]

        for i in range(5):
            say(f"line {i}")
        tail = controller.http.get("/api/v1/functions/hello/logs?tail=2").text.splitlines()
        assert [json.loads(line)["text"] for line in tail] == ["line 3", "line 4"]
        with controller.http.stream("GET", "/api/v1/functions/hello/logs?tail=1&follow=1") as answer:
            lines = answer.iter_lines()
            assert json.loads(next(lines))["text"] == "line 4"
            say("line 5")
            assert json.loads(next(lines))["text"] == "line 5"


def _plain(line: LogLine) -> dict[str, Any]:
    return {name: getattr(line, name) for name in line.__struct_fields__}


def test_openapi_describes_what_is_routed(controller: ControllerProcess) -> None:
    document = controller.http.get("/openapi.json").json()
    assert document["openapi"] == "3.1.0"
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method in operations:
            names = dict.fromkeys(("name", "id", "key", "function", "alias", "project", "object"), "no")
            url = path.format(month="2026-11", **names)
            answer = controller.http.request(method, url)
            assert answer.status_code != 405
            assert answer.status_code < 500 or path == "/readyz"
