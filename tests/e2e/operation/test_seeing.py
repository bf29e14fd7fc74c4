"""Observability of a real system: metrics of all its parts, logs that name their call, and the pages in a browser."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fleetstart.runtime.contract.billing.ledger import LogLine
from tests.browser import browsing, installed
from tests.e2e.systems import System, running
from tests.servers import wait_until

CHATTY = """
import os, sys, threading
from fleetstart.runtime import function

together = threading.Barrier(3)

@function(memory="64MiB", concurrency=4)
def chatty(name: str = "alone"):
    print("begin", name)
    if name != "alone":
        together.wait(30)
    print("end", name, file=sys.stderr)
    return name
"""
BROKEN = """
from fleetstart.runtime import function

@function(memory="64MiB")
class Broken:
    def load(self, weights):
        print("looking for the model")
        raise FileNotFoundError("model.bin")

    def __call__(self):
        return 1
"""
HOSTILE = """
from fleetstart.runtime import function

@function(memory="64MiB")
def hostile():
    print("<script>document.title='owned'</script><img src=x onerror=document.title='owned'>")
    raise RuntimeError("<img src=x onerror=document.title='owned'>")
"""

SPYING = """
from fleetstart.runtime import Response, function

PAGE = '''<!doctype html><title>a page of a function</title><body>looking<script>
const tried = async (look) => { try { return String(await look()); } catch (error) { return error.name; } };
(async () => {
  const told = {
    ran: "yes",
    origin: self.origin,
    storage: await tried(() => localStorage.getItem("key")),
    cookie: await tried(() => document.cookie),
    functions: await tried(async () => (await fetch("/api/v1/functions")).text()),
    key: await tried(async () => (await fetch("/api/v1/keys", {
      method: "POST", mode: "no-cors", body: '{"name": "mine", "rights": ["admin"]}'})).type),
    worker: await tried(() => navigator.serviceWorker.register("worker.js")),
    own: await tried(async () => (await fetch("?svg=false")).status),
  };
  document.body.textContent = JSON.stringify(told);
})();
</script>'''

@function(memory="64MiB", cors=["*"])
def spying(svg: bool = False):
    if svg:
        return Response('<svg xmlns="http://www.w3.org/2000/svg"><script>document.documentElement.setAttribute("told",'
                        'self.origin)</script></svg>', content_type="image/svg+xml")
    return Response(PAGE, content_type="text/html")
"""


def called(system: System, name: str, request: str, body: Any = None) -> httpx.Response:
    """Under an id of ours."""
    return system.http.post(f"/fn/{name}", json=body, headers={"x-request-id": request})


@pytest.fixture(scope="module")
def seen() -> Iterator[System]:
    """Three functions, each called: some calls share a worker, some fail, one never gets a worker."""
    with running(env={"FS_PROFILES": "python", "FS_LOG_FORMAT": "json"}) as system:
        for name, text in (("chatty", CHATTY), ("broken", BROKEN), ("hostile", HOSTILE)):
            system.deploy(text, name=name)
        system.ok("chatty", timeout_s=30)
        with ThreadPoolExecutor(3) as pool:
            names = [f"call-{number}" for number in range(3)]
            answers = list(pool.map(lambda name: called(system, "chatty", name, {"name": name}), names))
        assert [answer.json() for answer in answers] == names
        assert called(system, "broken", "lost-1").status_code == 500
        assert called(system, "hostile", "evil-1").status_code == 500
        wait_until(lambda: len(system.invocations()) == 6, what="rows")
        yield system


def metrics(system: System) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = system.http.get("/metrics").text
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(system: System, name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(
        count for (known, of), count in metrics(system).items() if known == f"fleetstart_{name}" and wanted <= of
    )


def test_metrics_tell_of_all_parts(seen: System) -> None:
    for name, labels, count in (
        ("invocations_total", {"function": "chatty", "status": "200"}, 4),
        ("invocation_errors_total", {"function": "hostile", "code": "handler_error"}, 1),
        ("refusals_total", {"code": "start_failed"}, 1),
        ("worker_failures_total", {"function": "broken", "when": "starting"}, 3),
        ("cold_start_seconds_count", {"phase": "start", "start": "warm", "tier": "host"}, 2),
    ):
        wait_until(partial(_shows, seen, name, labels, count), what=f"{count} of {name} {labels}")
    wait_until(lambda: value(seen, "waived_milliseconds_total", phase="start") > 0, what="the node's report")
    wait_until(lambda: value(seen, "node_memory_bytes") > 0, what="the node's memory")


def _shows(system: System, name: str, labels: dict[str, str], count: int) -> bool:
    return value(system, name, **labels) == count


def _has_lines(system: System, name: str) -> bool:
    return len(lines(system, "chatty", name)) >= 2


def test_calls_that_share_a_worker_have_their_own_lines(seen: System) -> None:
    for name in ("call-0", "call-1", "call-2"):
        wait_until(partial(_has_lines, seen, name), what=f"the lines of {name}")
        found = [(line.stream, line.text) for line in lines(seen, "chatty", name)]
        assert found == [("stdout", f"begin {name}"), ("stderr", f"end {name}")]


def lines(system: System, function: str, request: str) -> list[LogLine]:
    out = system.fs("logs", function, "--request", request, "--json").out
    return [msgspec.json.decode(line, type=LogLine) for line in out.splitlines()]


def test_logs_of_a_worker_that_never_started_are_kept(seen: System) -> None:
    wait_until(lambda: seen.fs("logs", "broken").out.count("worker failed to start") == 3, what="three ends in the log")
    out = seen.fs("logs", "broken").out
    assert out.count("looking for the model") == 3
    assert "FileNotFoundError: model.bin" in out
    found = [line.text for line in lines(seen, "broken", "lost-1")]
    assert found.count("looking for the model") == 3, "its call is known, though it met no worker"


def test_the_parts_write_json_with_the_request_they_act_for(seen: System) -> None:
    node_log = seen.home / "logs" / "node.log"
    wait_until(lambda: node_log.read_text().count('"worker failed to start"') == 3, what="three ends in the node's log")
    written: dict[str, list[dict[str, object]]] = {}
    for part in ("controller", "node", "supervisor"):
        text = (seen.home / "logs" / f"{part}.log").read_text()
        written[part] = [json.loads(line) for line in text.splitlines()]
        assert {line["service"] for line in written[part]} == {part}
    [evil] = {line["request"] for line in written["controller"] if line.get("client_request") == "evil-1"}
    of_call = [line for line in written["controller"] if line.get("request") == evil]
    assert [line["message"] for line in of_call] == ["worker ordered", "an invocation failed"]
    failed = of_call[-1]
    assert (failed["status"], failed["error"]) == (500, "handler_error")
    assert re.fullmatch("[0-9a-f]{32}", str(failed["trace"]))
    ended = [line for line in written["node"] if line["message"] == "worker failed to start"]
    lost = seen.http.get("/api/v1/invocations/lost-1").json()["row"]["id"]
    assert [line["request"] for line in ended] == [lost] * 3


def test_the_dashboard_is_where_fs_says(seen: System) -> None:
    assert seen.fs("dashboard").out.strip() == f"{seen.url}/ui/"
    assert json.loads(seen.fs("dashboard", "--json").out) == {"url": f"{seen.url}/ui/"}


PAGES = {
    "": ("chatty", "broken", "hostile", "Latest invocations"),
    "f/broken": ("FileNotFoundError: model.bin", "looking for the model", "start_failed"),
    "i/evil-1": (
        "handler_error",
        "Timeline",
        "Placement decision",
        "&lt;script&gt;document.title='owned'&lt;/script&gt;",
    ),
    "nodes": ("host memory", "object store", "Memory:"),
    "usage": ("By function and phase", "waived", "invocation"),
}


@pytest.mark.parametrize(("page", "texts"), PAGES.items())
def test_pages_in_a_browser(seen: System, page: str, texts: tuple[str, ...], tmp_path: Path) -> None:
    options = "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --enable-logging=stderr --dump-dom"
    arguments = [*options.split(), "--virtual-time-budget=3000", f"--user-data-dir={tmp_path}"]
    with installed() as (browser, env):
        argv = [browser, *arguments, f"{seen.url}/ui/#/{page}"]
        shown = subprocess.run(argv, capture_output=True, text=True, timeout=150, check=True, env=env)
    for text in texts:
        assert text in shown.stdout, text
    assert "<title>owned" not in shown.stdout
    assert '<span id="state" role="status" class="live">live</span>' in shown.stdout
    assert not re.search(r"CONSOLE.*(Uncaught|Refused|violates|Error)", shown.stderr), shown.stderr


def test_a_page_of_a_function_has_an_origin_of_its_own(seen: System, tmp_path: Path) -> None:
    seen.deploy(SPYING, name="spying")
    with browsing(tmp_path) as page:
        page.open(f"{seen.url}/ui/")
        page.run("localStorage.setItem('key', 'fs_of_the_dashboard')")
        assert page.run("localStorage.getItem('key')") == "fs_of_the_dashboard"
        page.open(f"{seen.url}/fn/spying")
        page.shows("ran")
        told = json.loads(page.text)
        assert told == {
            "ran": "yes", "origin": "null", "storage": "SecurityError", "cookie": "SecurityError",
            "functions": "TypeError", "key": "opaque", "worker": told["worker"], "own": "200",
        }  # fmt: skip
        assert told["worker"].endswith("Error")
        page.open(f"{seen.url}/fn/spying?svg=true")
        assert page.run("document.documentElement.getAttribute('told')") == "null"
    assert json.loads(seen.fs("key", "ls", "--json").out) == [], "it was sent, and refused"
