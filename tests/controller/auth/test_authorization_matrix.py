"""Every kind of key tries every endpoint on its own things and on another tenant's: what it may not, it is refused, in
the words for what does not exist, and no answer holds a canary of another tenant."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from fleetstart.controller.api.endpoints import endpoints
from fleetstart.controller.api.openapi.endpoint import Endpoint
from fleetstart.controller.auth.route_rules import SOCKET
from tests.controller.auth.authorization_world import UNUSED, Key, Tenant, World, build, headers_of
from tests.controller.conftest import ControllerProcess, HandNode
from tests.servers import RedisServer

OWN, FOREIGN, NOWHERE = "own", "another tenant's", "nobody's"
BY_DIGEST = ("object", "checkpoint")
"""Objects are read by whoever knows their digest, which no key is told of another tenant (a canary here)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The object that a request is about."""

    whose: str
    path: dict[str, str]
    """Path parameters; without any the request is about all, or its query names the object."""
    query: dict[str, str]

    def url(self, pattern: str) -> str:
        for name, value in self.path.items():
            pattern = pattern.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
        return pattern


def targets(endpoint: Endpoint, world: World) -> Iterator[Target]:
    """The objects to try an endpoint on: each tenant's, removed and old ones too, and some that never were."""
    of_whom = ((OWN, world.alpha), (FOREIGN, world.beta))
    if not endpoint.kind or "{" not in endpoint.path:
        yield Target(whose="", path=_fixed(endpoint), query={})
        if "function" in endpoint.query:
            for whose, tenant in (*of_whom, (NOWHERE, _nobody(world.beta))):
                for name in (tenant.live, tenant.removed, tenant.again):
                    yield Target(whose=whose, path={}, query={"function": name})
        return
    for whose, tenant in of_whom:
        for values in _values(endpoint, tenant):
            yield Target(whose=whose, path=values, query={})
            if "version" in endpoint.query:
                yield Target(whose=whose, path=values, query={"version": "1"})
    for values in _values(endpoint, _nobody(world.beta)):
        yield Target(whose=NOWHERE, path=values, query={})


def _nobody(like: Tenant) -> Tenant:
    """Names of the shape of a tenant's, of things that never were, in that tenant's project."""
    return Tenant(
        project="gamma", live="beta.never", removed="gamma.never", again="beta.neither", secret="NEVER",
        volume="beta.never", invocation=UNUSED, lost="1" * 32, checkpoint="e" * 64, key="never",
        objects=[f"bundles/{'e' * 64}", f"checkpoints/{'e' * 64}/manifest.json", "ledger/1", "audit/1",
                 f"invocations/{like.invocation}/request"],
    )  # fmt: skip


def _values(endpoint: Endpoint, tenant: Tenant) -> list[dict[str, str]]:
    fixed, functions = _fixed(endpoint), (tenant.live, tenant.removed, tenant.again)
    match endpoint.kind:
        case "function" | "budget":
            name = "function" if endpoint.kind == "budget" else "name"
            return [{name: function, **fixed} for function in functions]
        case "invocation":
            return [{"id": tenant.invocation}, {"id": tenant.lost}]
        case "secret":
            return [{"project": tenant.project, "name": tenant.secret}]
        case "volume":
            return [{"name": tenant.volume}]
        case "upload":
            return [{"id": f"{tenant.project}:{tenant.checkpoint}"}]
        case "checkpoint":
            return [{"id": tenant.checkpoint, **fixed}]
        case "object":
            return [{"key": key} for key in tenant.objects]
        case "key":
            return [{"name": tenant.key}]
        case "project":
            return [{"name": tenant.project}]
        case "node":
            return [{"name": "node-1"}]
        case _:
            raise AssertionError(f"{endpoint.path}: nothing of the kind {endpoint.kind!r} to try")


def _fixed(endpoint: Endpoint) -> dict[str, str]:
    """Path parameters beside the name of the object."""
    values = {"alias": "prod", "object": "part-0", "month": "2026-11", "file": "app.js"}
    return {name: value for name, value in values.items() if f"{{{name}" in endpoint.path}


def body_of(endpoint: Endpoint, target: Target, world: World) -> Any:
    """A body that would do harm to the target, if it were let through."""
    foreign = world.beta if target.whose != OWN else world.alpha
    by_path = {
        "/api/v1/functions": {"name": foreign.live, "bundle": "0" * 64, "entry": "h:f", "secrets": [foreign.secret]},
        "/api/v1/forecast": {"spec": {"name": foreign.live, "bundle": "0" * 64, "entry": "h:f"}},
        "/api/v1/functions/{name}/aliases/{alias}": {"version": 1},
        "/api/v1/functions/{name}/split": [{"version": 1, "percent": 100}],
        "/api/v1/functions/{name}/rollback": {"version": 1},
        "/api/v1/functions/{name}/scale": {"max": 1},
        "/api/v1/secrets/{project}/{name}": {"value": "overwritten"},
        "/api/v1/budgets/{function}": {"limit_nusd": 1, "per": "day"},
        "/api/v1/keys": {"name": "made-by-a-stranger", "rights": ["admin"]},
        "/api/v1/keys/{name}/rotate": {"grace_s": 0},
        "/api/v1/volumes/{name}/versions": {"tree": "0" * 64, "base": 0},
        "/api/v1/volumes/{name}/prune": {"keep": 1},
        "/api/v1/prices": {},
        "/api/v1/nodes/join": {"name": "stranger"},
    }
    return by_path.get(endpoint.path, {})


def denied(endpoint: Endpoint, key: Key, target: Target) -> set[int] | None:
    """The statuses of a refusal; None if the key may send the request."""
    if endpoint.permission == "open":
        return None
    if not key.rights:
        return {401}
    if endpoint.permission != "key" and endpoint.permission not in key.rights:
        return {403, 404}
    if endpoint.unlimited and key.limited:
        return {403}
    if key.limited and target.whose in (FOREIGN, NOWHERE) and target.path and endpoint.kind not in BY_DIGEST:
        return {403, 404}
    return None


def changes(endpoint: Endpoint) -> bool:
    return endpoint.method not in ("GET", "HEAD")


def send(client: httpx.Client, endpoint: Endpoint, key: Key, target: Target, world: World) -> httpx.Response:
    json = body_of(endpoint, target, world) if endpoint.method in ("POST", "PUT") else None
    method = "GET" if endpoint.method == SOCKET else endpoint.method
    sent = headers_of(key)
    if endpoint.method == SOCKET:
        sent |= {"connection": "upgrade", "upgrade": "websocket", "sec-websocket-version": "13",
                 "sec-websocket-key": "AAAAAAAAAAAAAAAAAAAAAA=="}  # fmt: skip
    return client.request(method, target.url(endpoint.path), params=target.query, json=json, headers=sent)


def leaks(answer: httpx.Response, key: Key, world: World) -> set[str]:
    """Canaries in the answer that the key must not see, but for those that the request itself named."""
    shown = answer.text + repr(answer.headers.multi_items())
    foreign = {word for name in ("alpha", "beta") if not key.sees(name) for word in world.canaries[name]}
    asked = str(answer.request.url)
    return {word for word in foreign | world.secrets if word in shown and word not in asked}


def _told(answer: httpx.Response, target: Target) -> str:
    """What the answer tells, without the request's id, the names that it sent, and hints, which are of own things."""
    shown = f"{answer.status_code} {_REQUEST.sub('', _HINT.sub('', answer.text))}"
    for name in sorted({*target.path.values(), *target.query.values()}, key=len, reverse=True):
        shown = shown.replace(name, "NAME")
    return re.sub(r"\d{10,}", "TIME", shown)


_HINT = re.compile(r'"hint":"[^"]*"')
_REQUEST = re.compile(r'"request_id":"[^"]*"')


def state_of(world: World) -> dict[str, str]:
    """All that an admin is told of the two tenants."""
    paths = ["/api/v1/secrets", "/api/v1/volumes", "/api/v1/budgets", "/api/v1/keys", "/api/v1/prices",
             "/api/v1/checkpoints", "/api/v1/schedules", "/api/v1/uploads"]  # fmt: skip
    for tenant in (world.alpha, world.beta):
        paths += [f"/api/v1/projects?of={tenant.project}", f"/api/v1/invocations/{tenant.invocation}/result"]
        for name in (tenant.live, tenant.again):
            paths += [f"/api/v1/functions/{name}{end}" for end in ("/versions", "/traffic", "/logs")]
        paths += [f"/api/v1/objects/{key}" for key in tenant.objects]
    found = {path: world.get(path) for path in paths}
    assert all(answer.status_code == 200 for answer in found.values()), found
    return {path: _without_uses(answer) for path, answer in found.items()}


def _without_uses(answer: httpx.Response) -> str:
    if answer.request.url.path == "/api/v1/keys":
        return str([{**one, "used_unix_ms": 0} for one in answer.json()])
    if answer.request.url.path.endswith("/versions"):  # an idle worker ends, on a busy machine before this is over
        return str([{**one, "workers": 0} for one in answer.json()])
    if answer.request.url.path == "/api/v1/secrets":
        return str([{**one, "running": 0} for one in answer.json()])
    return answer.text


@pytest.mark.timeout(400)
def test_no_key_does_or_sees_more_than_its_own(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer, tmp_path: Path
) -> None:
    world = build(controller, redis_server, tmp_path)
    before = state_of(world)
    tried: Counter[str] = Counter()
    wrong: list[str] = []
    with httpx.Client(base_url=controller.url, timeout=30) as client:
        for endpoint in endpoints():
            for key in world.keys:
                told: dict[str, set[str]] = {}
                for target in targets(endpoint, world):
                    refusal = denied(endpoint, key, target)
                    if refusal is None and changes(endpoint):
                        tried["allowed changes, which other tests make"] += 1
                        continue
                    answer = send(client, endpoint, key, target, world)
                    tried["refused" if refusal else "allowed"] += 1
                    cell = f"{key.kind}: {endpoint.method} {answer.request.url.raw_path.decode()}: {answer.status_code}"
                    if refusal is not None and answer.status_code not in refusal:
                        wrong.append(f"{cell}, expected {sorted(refusal)}")
                    if refusal is None and target.whose == OWN and answer.status_code in (401, 403):
                        wrong.append(f"{cell}, of its own: {answer.text[:200]}")
                    if found := leaks(answer, key, world):
                        wrong.append(f"{cell} holds {sorted(found)}")
                    compared = key.limited and endpoint.permission in {"key", *key.rights} and not endpoint.unlimited
                    if compared and endpoint.kind not in BY_DIGEST and target.whose in (FOREIGN, NOWHERE):
                        told.setdefault(target.whose, set()).add(_told(answer, target))
                if told.get(FOREIGN) != told.get(NOWHERE):
                    wrong.append(f"{key.kind}: {endpoint.method} {endpoint.path} tells {told}: existence shows")
    assert not wrong, "\n".join([f"{len(wrong)} of {dict(tried)}", *wrong[:60]])
    after = state_of(world)
    changed = {path: (before[path], after[path]) for path in before if before[path] != after[path]}
    assert changed == {}, "nobody changed anything"
    assert tried["refused"] > 2000, dict(tried)


@pytest.mark.timeout(400)
def test_no_key_calls_more_than_its_own(
    controller: ControllerProcess, node: HandNode, redis_server: RedisServer, tmp_path: Path
) -> None:
    world = build(controller, redis_server, tmp_path)
    wrong: list[str] = []
    with httpx.Client(base_url=controller.url, timeout=30) as client:
        for key in world.keys:
            for tenant in (world.alpha, world.beta):
                for path in (
                    tenant.live, f"{tenant.live}@1", f"{tenant.live}@prod", f"{tenant.live}/echo", tenant.removed,
                    f"{tenant.removed}@1", f"{tenant.again}@1", tenant.live.replace(".", "%2E"),
                ):  # fmt: skip
                    for extra in ({}, {"prefer": "respond-async"}, {"idempotency-key": path}):
                        answer = client.post(f"/fn/{path}", headers={**headers_of(key), **extra}, content=b"x")
                        may = "invoke" in key.rights and key.sees(tenant.project)
                        there = not path.startswith((tenant.removed, f"{tenant.again}@1"))
                        expected = {200, 202} if may and there else {404} if may else {401, 403, 404}
                        cell = f"{key.kind}: /fn/{path} {extra}: {answer.status_code}"
                        if answer.status_code not in expected:
                            wrong.append(f"{cell}, expected {sorted(expected)}: {answer.text[:150]}")
                        if found := leaks(answer, key, world):
                            wrong.append(f"{cell} holds {sorted(found)}")
    assert not wrong, "\n".join(wrong[:60])
