"""Keys, projects, secrets and the audit log as a person uses them, on a whole system; order matters, as in a life."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from fleetstart.controller.auth.api_key import new_key_text
from tests.browser import browsing
from tests.e2e.systems import System, running
from tests.servers import wait_until

pytestmark = pytest.mark.e2e

TOKEN = "hf_s3cret-Ünicode-and-long"
HANDLER = """
import os
from fleetstart.runtime import Scale, function

TOKEN = os.environ["HF_TOKEN"]
print("loaded with", TOKEN)

@function(secrets=["HF_TOKEN"], memory="128MiB", scale=Scale(max=2))
def uses(fail: bool = False) -> dict[str, int]:
    if fail:
        raise ValueError(f"{TOKEN} was not taken")
    print("called with", os.environ["HF_TOKEN"])
    return {"length": len(os.environ["HF_TOKEN"])}
"""
PLAIN = """
from fleetstart.runtime import function

@function(memory="128MiB")
def plain() -> dict[str, bool]:
    return {"ok": True}
"""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        yield system


def fs(system: System, *arguments: str, key: str = "", text: str = "") -> Any:
    """The JSON that a verb prints; with a key, from another FS_HOME and without this one's."""
    import subprocess

    from tests.e2e.systems import CLI_TIMEOUT_S, FS

    other = {"FS_HOME": str(system.root / "elsewhere"), "FS_URL": system.url, "FS_KEY": key} if key else {}
    done = subprocess.run(
        [*FS, *arguments, "--json"], env={**system.env, **other}, input=text, capture_output=True, text=True,
        timeout=CLI_TIMEOUT_S, cwd=system.root,
    )  # fmt: skip
    return json.loads(done.stdout) if done.returncode == 0 else json.loads(done.stderr.splitlines()[-1])["error"]


def everything_written(system: System) -> bytes:
    """Redis as it lies on the disk, all logs, the store."""
    with system.redis() as client:
        client.execute_command("BGREWRITEAOF")

        def rewrites() -> bool:
            info = client.info("persistence")
            return bool(info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"])

        wait_until(lambda: not rewrites(), what="files of Redis that stay")
    found = b""
    for folder in ("redis", "logs", "store", "journal"):
        for path in sorted((system.home / folder).rglob("*")):
            if path.is_file():
                found += path.read_bytes()
    return found


def test_a_secret_reaches_its_worker_and_nothing_else(system: System) -> None:
    handler = system.source(HANDLER, folder="uses")
    assert fs(system, "deploy", str(handler))["message"] == "function uses: project default has no secret HF_TOKEN"
    fs(system, "secret", "set", "HF_TOKE", text="something else")
    assert fs(system, "deploy", str(handler))["hint"] == "did you mean HF_TOKE?"
    fs(system, "secret", "rm", "HF_TOKE")
    assert fs(system, "secret", "set", "HF_TOKEN", text=TOKEN + "\n")["used_by"] == []
    fs(system, "deploy", str(handler))
    assert system.ok("uses", {}) == {"length": len(TOKEN)}
    status, error = system.failed("uses", {"fail": True})
    assert (status, error.code) == (500, "handler_error")
    assert "*** was not taken" in error.message

    def lines() -> list[str]:
        return [line.text for line in system.logs("uses")]

    wait_until(lambda: any("*** was not taken" in line for line in lines()), what="the traceback")
    assert "loaded with ***" in lines()
    assert "called with ***" in lines()
    written = everything_written(system)
    assert b"loaded with ***" in written
    assert TOKEN.encode() not in written
    assert json.dumps(TOKEN)[1:-1].encode() not in written
    assert stat.S_IMODE((system.home / "master.key").stat().st_mode) == 0o600


def test_a_changed_secret_is_for_new_workers_and_one_in_use_stays(system: System) -> None:
    changed = fs(system, "secret", "set", "HF_TOKEN", text="another one")
    assert (changed["used_by"], changed["running"]) == (["uses"], 1)
    assert system.ok("uses", {}) == {"length": len(TOKEN)}, "its worker keeps what it started with"
    assert fs(system, "secret", "rekey")["secrets"] == 1
    ended = {worker.worker for worker in system.info("uses").workers}
    for worker in system.worker_processes("uses"):
        system.kill(worker)
    wait_until(lambda: not ended & {worker.worker for worker in system.info("uses").workers}, what="its node's report")
    assert system.ok("uses", {}) == {"length": len("another one")}
    refused = fs(system, "secret", "rm", "HF_TOKEN")
    assert "is used by uses" in refused["message"]


def test_projects_have_quotas_and_their_own_bill(system: System) -> None:
    plain = system.source(PLAIN, folder="plain")
    assert "does not exist" in fs(system, "deploy", str(plain), "--project", "ml")["message"]
    fs(system, "project", "create", "ml")
    fs(system, "project", "quota", "ml", "--workers", "2", "--functions", "1")
    refused = fs(system, "deploy", str(plain), "--project", "ml", "--max", "4")
    assert (refused["code"], "may have 2 workers" in refused["message"]) == ("quota_exceeded", True)
    (deployed,) = fs(system, "deploy", str(plain), "--project", "ml", "--max", "2")
    assert (deployed["name"], deployed["url"]) == ("ml.plain", f"{system.url}/fn/ml.plain")
    assert fs(system, "scale", "ml.plain", "--max", "3")["code"] == "quota_exceeded"
    assert system.ok("ml.plain") == {"ok": True}
    assert system.failed("plain")[0] == 404, "the name is the project's own"
    assert "has functions: ml.plain" in fs(system, "project", "rm", "ml")["message"]

    def of_ml() -> int:
        lines = fs(system, "usage", "--by", "project,phase")["lines"]
        return sum(line["rows"] for line in lines if (line["project"], line["kind"]) == ("ml", "invocation"))

    wait_until(lambda: of_ml() == 1, what="a row of the project's")
    fs(system, "project", "quota", "ml", "--calls-per-s", "1", "--workers", "none")
    answers = [system.call("ml.plain") for _ in range(20)]
    limited = [answer for answer in answers if answer.status_code == 429]
    assert limited
    assert limited[0].json()["error"]["code"] == "rate_limited"
    assert int(limited[0].headers["retry-after"]) >= 1
    fs(system, "project", "quota", "ml", "--calls-per-s", "none")
    stored = {one["name"]: (one["objects"], one["store_bytes"]) for one in fs(system, "project", "ls")}
    assert stored["ml"] == (0, 0)
    assert min(stored["default"]) > 0, "what was sent without a key is the default project's"


def test_the_first_key_is_kept_for_this_machine_and_others_show_theirs(system: System) -> None:
    made = fs(system, "key", "create", "admin", "--scope", "admin")
    kept = system.home / "key"
    assert kept.read_text().strip() == made["key"]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert system.call("ml.plain").status_code == 401
    assert {one["name"] for one in fs(system, "ls")} == {"uses", "ml.plain"}
    app = fs(system, "key", "create", "app", "--scope", "invoke", "--function", "ml.plain")["key"]
    ml = fs(system, "key", "create", "ci", "--scope", "deploy", "--scope", "invoke", "--project", "ml")["key"]
    assert system.ok("plain", authorization=f"Bearer {app}") == {"ok": True}
    assert system.failed("uses", {}, authorization=f"Bearer {app}")[0] == 404
    assert [one["name"] for one in fs(system, "ls", key=ml)] == ["ml.plain"]
    assert [one["name"] for one in fs(system, "project", "ls", key=ml)] == ["ml"]
    assert fs(system, "secret", "ls", key=ml) == []
    assert fs(system, "secret", "set", "HF_TOKEN", key=ml, text="stolen")["code"] == "not_found"
    assert fs(system, "logs", "uses", key=ml)["code"] == "not_found"
    assert fs(system, "deploy", str(system.root / "src/plain/handler.py"), "--max", "2", key=ml)[0]["created"] is False
    told = fs(system, "deploy", str(system.root / "src/uses/handler.py"), key=ml)["message"]
    assert told == "function ml.uses: project ml has no secret HF_TOKEN", "not that there is a function uses"
    assert fs(system, "invoke", "plain", key=ml)["body"] == {"ok": True}
    assert fs(system, "audit", key=ml)["code"] == "forbidden"
    assert "without --function and --project" in fs(system, "nodes", key=ml)["hint"]
    client = openai.OpenAI(base_url=f"{system.url}/fn/plain/v1", api_key=app, max_retries=0)
    client.models.list()  # the handler takes any path: it was let in
    client = openai.OpenAI(base_url=f"{system.url}/fn/uses/v1", api_key="sk-wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()

    def by_key() -> dict[str, int]:
        return {line["key"]: line["rows"] for line in fs(system, "usage", "--by", "key")["lines"]}

    wait_until(lambda: by_key().get("app", 0) >= 1, what="a row of the key's")


def test_a_rotated_local_key_is_kept_and_a_lost_one_is_told_of(system: System) -> None:
    rotated = fs(system, "key", "rotate", "admin", "--grace", "0s")
    assert (system.home / "key").read_text().strip() == rotated["key"]
    assert len(fs(system, "key", "ls")) == 3
    assert fs(system, "key", "revoke", "app")["state"] == "revoked"
    assert fs(system, "key", "revoke", "admin")["code"] == "invalid_input"
    moved = (system.home / "key").rename(system.home / "key.away")
    assert fs(system, "ls")["code"] == "unauthorized"
    again = system.fs("up", code=1)
    assert "FS_KEY" in again.err
    moved.rename(system.home / "key")
    system.http.headers["authorization"] = f"Bearer {rotated['key']}"


def test_a_key_is_entered_on_the_dashboard(system: System, tmp_path: Path) -> None:
    admin = (system.home / "key").read_text().strip()
    ml = fs(system, "key", "create", "reader", "--scope", "read", "--project", "ml")["key"]
    unknown = new_key_text().text
    mistyped = admin[:-1] + ("A" if admin[-1] != "A" else "B")
    with browsing(tmp_path / "profile") as page:
        page.open(f"{system.url}/ui/")
        page.shows("An API key is needed, and none was sent.")
        page.shows("API key needed")
        for text, told in ((mistyped, "The key is malformed"), (unknown, "The key is unknown to this system.")):
            page.type(text)
            page.shows(told)
        page.screenshot(tmp_path / "wrong.png")
        page.type(admin)
        page.shows("live")
        for text in ("uses", "plain", "Latest invocations"):
            page.shows(text)
        assert "API key" not in page.text
        page.screenshot(tmp_path / "right.png")
        page.run("location.hash = '#/nodes'")
        page.shows("host memory")
        page.run("location.hash = '#/usage'")
        page.shows("By function and phase")
        assert admin not in page.run("document.documentElement.outerHTML + JSON.stringify({...localStorage})")
        page.open("about:blank")
        page.open(f"{system.url}/ui/")
        page.shows("none was sent")  # it was kept nowhere
        page.type(ml)
        page.shows("ml.plain")
        page.shows("live")
        assert "uses" not in page.text
        assert "No node" not in page.text, "there is one, which is none of this key's business"
        page.run("location.hash = '#/nodes'")
        page.shows("limited to some functions")
        page.screenshot(tmp_path / "limited.png")
        assert not [one for one in page.complaints if "401" not in one], page.complaints


def test_the_audit_log_names_who_did_what(system: System) -> None:
    events = fs(system, "audit")
    told = {(one["by"], one["verb"], one.get("object", "")) for one in events if one["status"] < 300}
    assert {
        ("local", "secret.set", "secret default/HF_TOKEN"), ("local", "function.deploy", "function uses"),
        ("local", "project.set", "project ml"), ("admin", "key.rotate", "key admin"),
        ("admin", "key.revoke", "key app"), ("ci", "function.deploy", "function ml.plain"),
    } <= told  # fmt: skip

    def refused() -> set[tuple[str, int]]:
        return {(one["by"], one["status"]) for one in fs(system, "audit") if one["status"] in (401, 403, 404)}

    # Rejections are written behind the requests.
    wait_until(lambda: {("", 401), ("ci", 403), ("app", 404)} <= refused(), what="the rejected requests")
    assert TOKEN not in json.dumps(events)
    assert "fs_" not in json.dumps(events)


def test_what_is_reached_by_others_does_not_start_without_keys(tmp_path: Path) -> None:
    import subprocess
    import sys

    from tests.servers import RedisServer, free_port

    redis_server = RedisServer(tmp_path / "redis")
    redis_server.start()
    try:
        env = {
            "FS_HOME": str(tmp_path), "FS_REDIS_URL": redis_server.url, "FS_HOST": "0.0.0.0",
            "FS_PORT": str(free_port()), "PATH": "/usr/bin:/bin",
        }  # fmt: skip
        argv = [sys.executable, "-m", "fleetstart.controller"]
        ran = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=30)
        assert ran.returncode == 2
        assert "`fs up --redis URL` makes the first key" in ran.stderr.splitlines()[-1]
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{env['FS_PORT']}/healthz", trust_env=False)
    finally:
        redis_server.close()
