"""Errands on the dashboard of a real system with keys: history, budgets, keys, secrets, async calls, nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser import Page
from tests.e2e.dashboard import dashboard, fill, go, rows, submit, submit_twice, told
from tests.e2e.systems import System, running
from tests.servers import wait_until

HANDLERS = """
import os
import time
from fleetstart.runtime import Scale, call, function

@function(memory="64MiB", timeout_s=60, scale=Scale(max=2))
def work(seconds: float = 0.0):
    time.sleep(seconds)
    return "worked"

@function(memory="64MiB", calls=["work"])
def delegate():
    return call("work")

@function(memory="64MiB", scale=Scale(max=1))
def dies():
    os._exit(1)

@function(memory="64MiB")
class Broken:
    def load(self, weights):
        raise OSError("no room")

    def __call__(self):
        return 1
"""
ASYNC = {"prefer": "respond-async"}


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    """A system with an admin's key, which its client, its `fs` and the browser show, and a dead letter."""
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy_file(system.source(HANDLERS, folder="errands"), "--no-probe")
        key = system.http.post("/api/v1/keys", json={"name": "owner", "rights": ["admin"]}).json()["key"]
        system.env["FS_KEY"] = key
        system.http.headers["authorization"] = f"Bearer {key}"
        assert system.http.post("/fn/dies", headers=ASYNC).status_code == 202
        yield system


@pytest.fixture
def page(system: System, tmp_path: Path) -> Iterator[Page]:
    with dashboard(system.url, tmp_path, system.env["FS_KEY"]) as page:
        yield page


def json_of(system: System, path: str) -> Any:
    return system.http.get(f"/api/v1/{path}").raise_for_status().json()


def test_a_bar_of_the_history_leads_to_the_calls_and_events_of_its_time(system: System, page: Page) -> None:
    for name, status in (("work", 200), ("broken", 500), ("work", 200)):  # one on each side, if a minute ends meanwhile
        assert system.http.post(f"/fn/{name}", json={}).status_code == status
    wait_until(lambda: json_of(system, "history?range=1h&function=broken")["total"]["failed"], what="the failed call")
    failures = [one for one in json_of(system, "events?function=broken") if one["kind"] == "failure"]
    last = max(failures, key=lambda one: int(one["unix_ms"]))
    minute_ms = last["unix_ms"] // 60_000 * 60_000  # that of the call, which failed a moment later
    go(page, "history?range=1h", "Calls that waited for a start", "a start failed")
    bar = f"[...document.querySelectorAll('a.bar-link')].find((one) => one.href.baseVal.endsWith('at={minute_ms}'))"
    wait_until(lambda: page.run(f"/failed [1-9]/.test({bar}?.textContent)"), what="the bar of the failed call")
    page.run(f"{bar}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    page.shows("with an error")
    wait_until(lambda: any("\t200\twork\t" in row for row in shown(page)), what="the call that went well")
    assert page.run("document.querySelectorAll('a.bar-link.chosen').length") == 4, "the same time in each chart"
    events = page.run("document.querySelector('#moment').parentElement.innerText")
    assert ": OSError: no room" in last["text"]
    assert last["text"] in events
    assert re.search(r"\nbroken\t1\t1\t", events), "the functions of that time, those with failures first"
    page.run("[...document.querySelectorAll('#moment a')].find((one) => one.innerText === 'with an error').click()")
    wait_until(lambda: shown(page) and not any("\t200\t" in row for row in shown(page)), what="errors alone")
    assert any("start_failed" in row for row in shown(page))
    page.run("[...document.querySelectorAll('a')].find((one) => one.innerText === 'On a page of their own').click()")
    page.shows("Of all time")
    wait_until(lambda: "start_failed" in page.text, what="the call on a page of its own")
    fill(page, "find-calls", function="work")
    submit(page, "find-calls")
    wait_until(lambda: "start_failed" not in page.text, what="calls of one function")
    go(page, "f/work", "version 1, deployed")
    page.run("[...document.querySelectorAll('.choices a')].find((one) => one.innerText === 'history').click()")
    page.shows("of work")


def test_a_call_shows_the_functions_that_it_called_and_they_show_their_caller(system: System, page: Page) -> None:
    request = system.http.post("/fn/delegate", json={}).raise_for_status().headers["x-request-id"]
    path = f"invocations/{request}"
    wait_until(lambda: system.http.get(f"/api/v1/{path}").status_code == 200, what="the trace")
    [one] = json_of(system, path)["called"]
    go(page, f"i/{request}", "Calls of other functions", one["id"])
    go(page, f"i/{one['id']}", "called by", request)


def shown(page: Page) -> list[str]:
    """The invocations of the chosen time."""
    return [
        row
        for row in page.run("[...document.querySelector('#moment').parentElement.querySelectorAll('tbody tr')]"
                            ".map((row) => row.innerText)")
        if "inv-" in row
    ]  # fmt: skip


def test_a_budget_is_set_changed_and_removed(system: System, page: Page) -> None:
    go(page, "usage", "No budgets are set.")
    fill(page, "set-budget", function="work", usd="5", per="day", alert="50")
    submit(page, "set-budget")
    page.shows("$5.00")
    [budget] = json_of(system, "budgets")
    assert (budget["limit_nusd"], budget["per"], budget["alert_percent"]) == (5 * 10**9, "day", 50)
    fill(page, "change-budget", "work", usd="7.5")
    submit(page, "change-budget", "work")
    page.shows("$7.50")
    [budget] = json_of(system, "budgets")
    assert (budget["limit_nusd"], budget["per"], budget["alert_percent"]) == (7_500_000_000, "day", 50)
    fill(page, "set-budget", function="nothing")
    submit(page, "set-budget")
    page.shows("function nothing does not exist")
    submit_twice(page, "remove-budget", "work")
    page.shows("No budgets are set.")
    assert json_of(system, "budgets") == []


def test_a_secret_is_set_and_removed(system: System, page: Page) -> None:
    go(page, "access", "No secrets yet.")
    fill(page, "set-secret", name="TOKEN", value="s3cret-value")
    submit(page, "set-secret")
    wait_until(lambda: rows(page, "Secrets"), what="the secret")
    assert "s3cret-value" not in page.run("document.documentElement.outerHTML")
    assert [one["name"] for one in json_of(system, "secrets")] == ["TOKEN"]
    submit_twice(page, "remove-secret", "TOKEN")
    page.shows("No secrets yet.")
    assert json_of(system, "secrets") == []


def test_a_long_list_is_shown_in_pages(system: System, page: Page) -> None:
    names = [f"LONG_{number}" for number in range(55)]
    for name in names:
        system.http.put(f"/api/v1/secrets/default/{name}", json={"value": "s3cret-value"}).raise_for_status()
    go(page, "access", "Show 55")
    assert len(rows(page, "Secrets")) == 50
    page.run("[...document.querySelectorAll('a')].find((one) => one.innerText === 'Show 55').click()")
    wait_until(lambda: len(rows(page, "Secrets")) == 55, what="all of them")
    for name in names:
        system.http.delete(f"/api/v1/secrets/default/{name}").raise_for_status()
    page.shows("No secrets yet.")


def test_a_key_is_made_rotated_and_revoked(system: System, page: Page) -> None:
    go(page, "access", "API keys")
    fill(page, "make-key", name="ci", right="invoke", functions="work")
    submit(page, "make-key")
    first = key_in(page, "make-key")
    assert call(system, first) == 200
    wait_until(lambda: any(row.startswith("ci") for row in rows(page, "API keys")), what="the key in the list")
    fill(page, "rotate-key", key="ci", grace="0")
    submit(page, "rotate-key")
    second = key_in(page, "rotate-key")
    wait_until(lambda: (call(system, first), call(system, second)) == (401, 200), what="the new text alone")
    submit_twice(page, "revoke-key", "ci")
    wait_until(lambda: any("revoked" in row for row in rows(page, "API keys")), what="the key revoked")
    wait_until(lambda: call(system, second) == 401, what="the key to be refused")


def key_in(page: Page, act: str) -> str:
    wait_until(lambda: "shown only once" in told(page, act).lower(), what="the key's text")
    found = re.search(r"fs_\S+", told(page, act))
    assert found is not None
    return found[0]


def call(system: System, key: str) -> int:
    answer = httpx.post(f"{system.url}/fn/work", json={}, headers={"authorization": f"Bearer {key}"}, trust_env=False)
    return answer.status_code


def test_an_async_call_is_cancelled_and_a_dead_letter_runs_again(system: System, page: Page) -> None:
    accepted = system.http.post("/fn/work", json={"seconds": 50}, headers=ASYNC)
    invocation = accepted.headers["x-request-id"]
    go(page, "calls?kind=async", invocation[:20])
    submit(page, "cancel", invocation)
    wait_until(lambda: json_of(system, f"invocations/{invocation}")["status"] == "cancelled", what="the cancelled call")
    submit_when_there(page, "redrive", invocation)
    wait_until(lambda: json_of(system, f"invocations/{invocation}")["status"] != "cancelled", what="the call again")
    submit_when_there(page, "cancel", invocation)
    wait_until(lambda: json_of(system, f"invocations/{invocation}")["status"] == "cancelled", what="the cancelled call")
    wait_until(lambda: json_of(system, "async?dead=1"), 40, what="a dead letter")
    [dead] = json_of(system, "async?dead=1")
    go(page, "calls?kind=dead", "dead letter")
    submit_when_there(page, "redrive", dead["id"])
    page.shows("No dead letters")
    assert json_of(system, f"invocations/{dead['id']}")["runs"] > dead["runs"]


def submit_when_there(page: Page, act: str, about: str) -> None:
    form = f'form[data-act={act}][data-args*="{about}"]'
    wait_until(lambda: page.run(f"Boolean(document.querySelector('{form}'))"), what=f"a form to {act} {about}")
    submit(page, act, about)


def test_a_node_is_drained_and_gets_workers_again(system: System, page: Page) -> None:
    [node] = [one["node"] for one in json_of(system, "status")["nodes"]]
    go(page, "nodes", "Storage tiers")
    submit_twice(page, "drain", node)
    page.shows("draining: gets no workers")
    assert json_of(system, "status")["draining"] == [node]
    submit_when_there(page, "undrain", node)
    wait_until(lambda: "draining: gets no workers" not in page.text, what="the node in service")
    assert json_of(system, "status")["draining"] == []
