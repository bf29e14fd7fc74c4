"""Async calls, keys, schedules and replays against a whole system, by `fs` and by HTTP; and kills of its parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.systems import System, running
from tests.servers import wait_until

HANDLER = """
import os, time
from fleetstart.runtime import context, function, Scale

@function(memory="64MiB", concurrency=4, scale=Scale(max=1, keep_alive_s=600))
def work(word: str = "you", sleep_s: float = 0.0, die: bool = False):
    deadline = time.monotonic() + sleep_s
    print("begun", word, flush=True)
    while time.monotonic() < deadline:
        if context.cancelled:
            return None
        time.sleep(0.02)
    if die:
        os._exit(3)
    print("ended", word, flush=True)
    return {"word": word}

@function(memory="64MiB", schedule="* * * * *", timezone="Europe/Berlin")
def tick():
    return "tock"

@function(memory="64MiB")
def count(n: int = 3):
    for i in range(n):
        yield {"i": i}
"""
ASYNC = {"prefer": "respond-async"}


@pytest.fixture(scope="module")
def live() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        system.deploy_file(system.source(HANDLER, folder="work"))
        yield system


def begun(system: System, name: str, body: Any, **headers: str) -> str:
    # A connection of its own: one that was kept may be that of a gateway that was killed.
    url, headers = f"{system.url}/fn/{name}", {**ASYNC, **headers}
    answer = httpx.post(url, json=body, headers=headers, trust_env=False, timeout=60)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


def ended(system: System, invocation: str, wait_s: int = 30) -> dict[str, Any]:
    answer = system.http.get(f"/api/v1/invocations/{invocation}", headers={"prefer": f"wait={wait_s}"})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def printed(system: System, text: str) -> bool:
    return any(line.text == text for line in system.logs("work"))


def test_an_async_call_from_the_command_line(live: System) -> None:
    invocation = live.fs("invoke", "work", '{"word": "Ada"}', "--async").out.strip()
    assert ended(live, invocation)["result"] == {"word": "Ada"}
    shown = live.fs("invocations", "get", invocation).out
    assert "succeeded" in shown
    assert json.loads(shown.splitlines()[-1]) == {"word": "Ada"}
    assert json.loads(live.fs("invocations", "get", invocation, "--result").out) == {"word": "Ada"}
    assert invocation in live.fs("invocations", "ls", "--function", "work").out
    waited = live.fs("invoke", "work", '{"word": "Bob"}', "--async", "--wait")
    assert json.loads(waited.out) == {"word": "Bob"}
    assert "succeeded" in waited.err
    assert live.fs("invocations", "get", "inv-none", code=3).err
    plain = live.call("work", {"word": "plain"}).headers["x-request-id"]
    wait_until(lambda: live.http.get(f"/api/v1/invocations/{plain}").status_code == 200)
    assert "keep_requests" in live.fs("replay", plain, code=3).err
    assert "did you mean" in live.fs("invoke", "wurk", "--async", code=3).err
    again = live.fs("replay", invocation)
    assert again.out.strip() == "the answers are the same"


def test_a_replay_shows_how_another_version_differs(live: System) -> None:
    source = """
    from fleetstart.runtime import function

    @function(memory="64MiB", keep_requests=True)
    def kin(word: str = "you"):
        return {"said": ANSWER}
    """
    live.deploy(source.replace("ANSWER", "word"), name="kin")
    past = live.call("kin", {"word": "hello"}).headers["x-request-id"]
    wait_until(lambda: live.http.get(f"/api/v1/invocations/{past}").json().get("origin") == "sync")
    live.deploy(source.replace("ANSWER", "word.upper()"), name="kin")
    differs = live.fs("replay", past, code=1).out
    assert '-  "said": "hello"' in differs
    assert '+  "said": "HELLO"' in differs
    same = json.loads(live.fs("replay", past, "--version", "1", "--json").out)
    assert (same["same_answer"], same["now"]["version"]) == (True, 1)


def test_a_replay_of_a_failed_call_does_not_differ_by_its_id(live: System) -> None:
    source = """
    from fleetstart.runtime import function

    @function(memory="64MiB", keep_requests=True)
    def fails():
        raise ValueError("on purpose")
    """
    live.deploy(source, name="fails")
    past = live.call("fails").headers["x-request-id"]
    wait_until(lambda: live.http.get(f"/api/v1/invocations/{past}").json().get("origin") == "sync")
    assert live.fs("replay", past).out.strip() == "the answers are the same"


def test_cancelling_ends_the_work_itself(live: System) -> None:
    invocation = begun(live, "work", {"word": "long", "sleep_s": 600})
    wait_until(lambda: printed(live, "begun long"), 20)
    ran = live.fs("invocations", "cancel", invocation)
    assert "cancel" in ran.out
    assert ended(live, invocation)["status"] == "cancelled"
    wait_until(lambda: live.info("work").running == 0)
    assert live.ok("work", {"word": "next"}) == {"word": "next"}
    assert not printed(live, "ended long")


def test_events_are_numbered_and_kept(live: System) -> None:
    invocation = begun(live, "count", {"n": 3})
    text = live.http.get(f"/api/v1/invocations/{invocation}/events", headers={"last-event-id": "1-1"}).text
    ids = [line for line in text.splitlines() if line.startswith("id: ")]
    assert ids[0] == "id: 1-2"
    assert '"i":0' not in text.replace(" ", "")
    assert '"i":2' in text.replace(" ", "")
    assert "event: invocation" in text


def keyed(system: System, body: Any) -> httpx.Response:
    return system.http.post("/fn/work", json=body, headers={"idempotency-key": "k-1"})


def test_a_call_with_a_key_runs_once(live: System) -> None:
    first = keyed(live, {"word": "key"})
    again = keyed(live, {"word": "key"})
    assert again.content == first.content
    assert again.headers["idempotent-replayed"] == "true"
    assert keyed(live, {"word": "other"}).status_code == 409
    wait_until(lambda: printed(live, "ended key"))
    assert [line.text for line in live.logs("work")].count("begun key") == 1


def test_a_scheduled_function_is_listed_with_its_next_moment(live: System) -> None:
    found = {one["function"]: one for one in json.loads(live.fs("schedules", "--json").out)}
    assert found["tick"]["timezone"] == "Europe/Berlin"
    assert found["tick"]["next_unix_ms"] % 60_000 == 0
    assert "* * * * *" in live.fs("schedules").out


def test_what_was_accepted_survives_the_kill_of_every_part(live: System) -> None:
    """The worker under it, the controller, and Redis: each is killed while it runs; it is answered and billed once."""
    held = begun(live, "work", {"word": "held", "sleep_s": 3})
    wait_until(lambda: printed(live, "begun held"), 20)
    live.kill(live.one("controller"))
    queued = [begun(live, "work", {"word": f"q{number}"}) for number in range(3)]
    live.kill(live.one("redis"))
    wait_until(lambda: _answers(live), 20)
    for process in live.worker_processes("work"):
        live.kill(process)
    assert ended(live, held, 60)["result"] == {"word": "held"}
    for number, invocation in enumerate(queued):
        assert ended(live, invocation, 60)["result"] == {"word": f"q{number}"}
    wanted = {held, *queued}
    wait_until(lambda: wanted <= {row.id.partition(".")[0] for row in live.invocations() if row.status == 200}, 20)
    good = [row.id.partition(".")[0] for row in live.invocations() if row.status == 200]
    assert [good.count(invocation) for invocation in wanted] == [1] * 4


def _answers(system: System) -> bool:
    return system.http.get("/api/v1/invocations").status_code == 200
