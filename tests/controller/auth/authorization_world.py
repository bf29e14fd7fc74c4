"""Two tenants at a real controller, with canary strings in all that one of them has, and a key of every kind.

`alpha` is the tenant that the limited keys belong to, `beta` the one that they must learn nothing of. Each canary is a
string that is nowhere else: an answer that holds one tells something of its owner.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec

from fleetstart.controller.auth.api_key import new_key_text
from fleetstart.runtime.contract import redis_keys as keys
from fleetstart.runtime.contract.billing.ledger import LogLine
from fleetstart.runtime.contract.ids import FunctionName, Version, WorkerId
from fleetstart.runtime.contract.weights.manifest import checkpoint_id
from tests.controller.auth.test_keys import bearer, lock, make
from tests.controller.conftest import ControllerProcess
from tests.controller.manifests import manifest, objects_of
from tests.controller.registry.test_volumes import folder, put
from tests.servers import RedisServer, wait_until

UNUSED = "0" * 32
"""An invocation that never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of one kind: its text, and what it may."""

    kind: str
    text: str
    rights: frozenset[str] = frozenset()
    """With those that they include; empty if it is not good at all."""
    project: str = ""
    functions: frozenset[str] = frozenset()

    @property
    def limited(self) -> bool:
        return bool(self.project or self.functions)

    def sees(self, tenant: str) -> bool:
        """True if something of that tenant may be shown to it."""
        return bool(self.rights) and (not self.limited or tenant == "alpha")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """What one project has, by name."""

    project: str
    live: str
    """A function with an old version 1, version 2 live."""
    removed: str
    again: str
    """A name that was removed and taken again."""
    secret: str
    volume: str
    invocation: str
    """Stored, of `live`."""
    lost: str
    """Stored, of `removed`."""
    objects: list[str]
    checkpoint: str
    key: str
    manifest: bytes = b""
    """Of its checkpoint, of which an upload is open."""


@dataclass(slots=True)
class World:
    controller: ControllerProcess
    alpha: Tenant
    beta: Tenant
    keys: list[Key]
    canaries: dict[str, set[str]] = field(default_factory=dict)
    """Canaries of each tenant that keys of others never see."""
    secrets: set[str] = field(default_factory=set)
    """Values that nobody ever sees."""

    def get(self, path: str) -> httpx.Response:
        """As an admin."""
        return self.controller.http.get(path)


def canary(tenant: str, what: str) -> str:
    return f"canary-{hashlib.sha256(f'{tenant} {what}'.encode()).hexdigest()[:20]}"


def build(controller: ControllerProcess, redis_server: RedisServer, tmp_path: Path) -> World:
    """The world; the controller's own client has an admin's key afterwards."""
    alpha, beta = (_tenant(controller, redis_server, tmp_path, name, seed) for seed, name in enumerate("ab", 11))
    lock(controller)
    world = World(controller, alpha, beta, _keys(controller))
    for tenant in (alpha, beta):
        name = tenant.project
        uploader = make(controller, f"uploads-of-{name}", ["deploy"], project=name)
        answer = controller.http.post("/api/v1/uploads", content=tenant.manifest, headers=bearer(uploader))
        answer.raise_for_status()
        world.canaries[name] = {canary(name, what) for what in ("env", "tag", "log", "answer", "old", "removed")}
        world.canaries[name] |= {tenant.invocation, tenant.lost, tenant.checkpoint, tenant.secret, tenant.volume}
        world.canaries[name] |= {part for key in tenant.objects for part in key.split("/") if len(part) == 64}
        world.secrets.add(canary(name, "secret"))
    return world


def _tenant(controller: ControllerProcess, redis_server: RedisServer, tmp_path: Path, letter: str, seed: int) -> Tenant:
    project = {"a": "alpha", "b": "beta"}[letter]
    http = controller.http
    http.put(f"/api/v1/projects/{project}", json={}).raise_for_status()
    secret = f"TOKEN_OF_{project.upper()}"
    http.put(f"/api/v1/secrets/{project}/{secret}", json={"value": canary(project, "secret")}).raise_for_status()
    volume = f"{project}.files"
    tree = put(controller, folder(tmp_path / project, {"file": canary(project, "file").encode()}), volume).version.tree
    weights = msgspec.json.encode(manifest(seed))
    for key, data in objects_of(weights).items():
        http.put(f"/api/v1/objects/{key}", content=data).raise_for_status()
    bundle = canary(project, "code").encode()
    code = hashlib.sha256(bundle).hexdigest()

    def deploy(name: str, what: str) -> None:
        http.put(f"/api/v1/objects/bundles/{code}", content=bundle).raise_for_status()
        spec = {
            "name": name, "project": project, "bundle": code, "entry": "handler:run", "schedule": "0 0 1 1 *",
            "env": {"CANARY": canary(project, what)}, "tags": {"team": canary(project, "tag")}, "secrets": [secret],
        }  # fmt: skip
        http.post("/api/v1/functions", json=spec).raise_for_status()

    def call(name: str) -> str:
        headers = {"prefer": "respond-async", "content-type": "text/plain"}
        accepted = http.post(f"/fn/{name}/echo", headers=headers, content=canary(project, "answer").encode())
        assert accepted.status_code == 202, accepted.text
        id = str(accepted.headers["x-request-id"])
        wait_until(lambda: http.get(f"/api/v1/invocations/{id}/result").status_code == 200, what="the answer")
        return id

    live, removed, again = (f"{project}.{name}" for name in ("live", "removed", "again"))
    for name in ("removed", "again"):
        deploy(name, "removed")
        log(redis_server, f"{project}.{name}", 1, canary(project, "removed"))
    lost = call(removed)
    for name in (removed, again):
        http.delete(f"/api/v1/functions/{name}").raise_for_status()
    deploy("again", "env")
    deploy("live", "old")
    deploy("live", "env")
    log(redis_server, live, 2, canary(project, "log"))
    http.put(f"/api/v1/functions/{live}/aliases/prod", json={"version": 1}).raise_for_status()
    http.put(f"/api/v1/budgets/{live}", json={"limit_nusd": 10**12, "per": "day"}).raise_for_status()
    return Tenant(
        project=project, live=live, removed=removed, again=again, secret=secret, volume=volume,
        invocation=call(live), lost=lost, checkpoint=checkpoint_id(weights), key=f"only-{project}",
        manifest=weights,
        objects=[f"bundles/{code}", *objects_of(weights), f"volumes/{tree}/manifest.json"],
    )  # fmt: skip


def log(redis_server: RedisServer, function: str, version: int, text: str) -> None:
    """A line of a worker, as its node writes it."""
    line = LogLine(unix_ms=1, worker=WorkerId("w"), version=Version(version), stream="stdout", text=text)
    with redis_server.client() as client:
        client.xadd(keys.logs(FunctionName(function)), {"line": msgspec.json.encode(line)})


def _keys(controller: ControllerProcess) -> list[Key]:
    includes = {
        "invoke": {"invoke"}, "read": {"read"}, "deploy": {"deploy", "read"}, "node": {"node"},
        "admin": {"invoke", "read", "deploy", "node", "admin"},
    }  # fmt: skip
    make(controller, "only-alpha", ["invoke"], project="alpha")
    make(controller, "only-beta", ["invoke"], project="beta")
    found = [Key(kind="none", text=""), Key(kind="unknown", text=new_key_text().text)]
    for limits, terms in (
        ("all", {}), ("alpha", {"project": "alpha"}),
        ("alpha.live", {"functions": ["alpha.live", "alpha.removed", "alpha.again"]}),
    ):  # fmt: skip
        for right, included in includes.items():
            kind = f"{right} of {limits}"
            text = make(controller, kind.replace(" ", "-"), [right], **terms)
            found.append(Key(
                kind=kind, text=text, rights=frozenset(included), project=str(terms.get("project", "")),
                functions=frozenset(terms.get("functions", ())),
            ))  # fmt: skip
    revoked = make(controller, "revoked", ["admin"])
    controller.http.delete("/api/v1/keys/revoked").raise_for_status()
    rotated = make(controller, "rotated", ["admin"])
    controller.http.post("/api/v1/keys/rotated/rotate", json={"grace_s": 0}).raise_for_status()
    expired = make(controller, "expired", ["admin"], expires_s=1)
    status = "/api/v1/status"
    wait_until(lambda: controller.http.get(status, headers=bearer(expired)).status_code == 401, what="its expiry")
    return [*found, *(Key(kind=kind, text=text) for kind, text in
                      (("revoked", revoked), ("rotated away", rotated), ("expired", expired)))]  # fmt: skip


def headers_of(key: Key) -> dict[str, str]:
    return bearer(key.text) if key.text else {}
