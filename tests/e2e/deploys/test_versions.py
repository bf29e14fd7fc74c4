"""Versions: failed deploys spoil no call; canaries, aliases and rollbacks move calls; rehearsals change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.e2e.load import loaded
from tests.e2e.systems import System, running
from tests.servers import wait_until

GOOD = """
from fleetstart.runtime import Scale, function

@function(memory="64MiB", concurrency=2, scale=Scale(max=2, keep_alive_s=600))
def steady():
    return NUMBER
"""
BROKEN = """
from fleetstart.runtime import function

@function(memory="64MiB")
class Steady:
    def load(self, weights):
        print("looking for the table")
        raise RuntimeError("the table is not there")

    def __call__(self):
        return 2
"""
UNWELL = """
from fleetstart.runtime import function

async def app(scope, receive, send):
    status = 200 if scope["path"] == scope["root_path"] + "/" else CODE
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b"STATE"})

steady = function(memory="64MiB", probe="/ready", start_timeout_s=TIME_S)(app)
"""
TALKS = """
import time
from fleetstart.runtime import function

@function(memory="64MiB")
def talks(word: str):
    print(word, flush=True)
    time.sleep(0.2)
"""


@pytest.fixture(scope="module")
def versioned() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python"}) as system:
        yield system


def good(number: int) -> str:
    return GOOD.replace("NUMBER", str(number))


def unwell_app(status: int, state: str, *, start_timeout_s: int) -> str:
    """An app that answers so when it is asked how it is."""
    return UNWELL.replace("CODE", str(status)).replace("STATE", state).replace("TIME_S", str(start_timeout_s))


def test_a_first_version_whose_load_raises_fails_the_deploy_with_its_traceback(versioned: System) -> None:
    broken = versioned.source(
        """
        from fleetstart.runtime import function

        @function(memory="64MiB")
        class Firstling:
            def load(self):
                raise KeyError("no such layer")

            def __call__(self) -> int:
                return 1
        """,
        folder="firstling",
    )
    for _ in range(2):  # what never started is no success the second time, either
        ran = versioned.fs("deploy", str(broken), code=1)
        assert "Traceback" in ran.err
        assert "KeyError: 'no such layer'" in ran.err
        assert "firstling@1 does not start" in ran.err
    said = versioned.fs("deploy", str(broken), "--no-probe").err
    assert "firstling@1 is live already" in said
    assert "its last start failed" in said
    # The node reports the end of the second try's worker a moment after its failure.
    wait_until(lambda: "failed to start" in versioned.fs("ls").out)
    assert "firstling: its last start failed" in versioned.fs("ls").out
    assert "no such layer" in versioned.fs("ls").out
    assert versioned.failed("firstling")[0] == 500
    assert "firstling: its last start failed" in versioned.fs("trace", "firstling").err
    broken.write_text(broken.read_text().replace('raise KeyError("no such layer")', "pass"))
    assert "firstling@2 deployed" in versioned.fs("deploy", str(broken)).err
    assert versioned.call("firstling").headers["fs-start"] == "hot", "the worker that was tried serves"
    assert "firstling: its last" not in versioned.fs("ls").out


def test_a_deploy_that_cannot_start_says_why_and_spoils_no_call(versioned: System) -> None:
    versioned.deploy(good(1), name="steady")
    with loaded(versioned, "steady") as load:
        load.wait_for(5)
        broken = versioned.source(BROKEN, folder="broken")
        ran = versioned.fs("deploy", str(broken), "--name", "steady", code=1)
        load.wait_for(5)
    assert {(answer.status, answer.text) for answer in load.answers} == {(200, "1")}
    assert "steady@2 gets no calls" in ran.err
    assert "the table is not there" in ran.err
    assert "looking for the table" in ran.err, "what its worker printed"
    assert "steady@1 keeps serving" in ran.err
    assert ran.out == ""
    listed = versioned.fs("versions", "steady").out
    assert "rejected" in listed
    assert "live" in listed
    # It stops costing: nobody tries it any more.
    wait_until(lambda: {worker.version for worker in versioned.info("steady").workers} == {1}, what="the end of it")


def test_an_app_that_is_not_well_gets_no_calls_until_it_is(versioned: System) -> None:
    versioned.deploy(good(1), name="app")
    assert versioned.ok("app") == 1
    unwell = versioned.source(unwell_app(503, "no database", start_timeout_s=4), folder="unwell")
    refused = versioned.refused(unwell, "--name", "app")
    assert "GET /ready answered 503: no database" in refused.message
    assert versioned.ok("app") == 1
    well = versioned.source(unwell_app(204, "", start_timeout_s=60), folder="well")
    versioned.deploy_file(well, "--name", "app")
    assert versioned.call("app").headers["fs-version"] == "3"


def test_canary_alias_and_rollback_move_calls(versioned: System) -> None:
    versioned.deploy(good(1), name="moving")
    assert versioned.ok("moving") == 1
    versioned.deploy(good(2), name="moving", options=("--canary", "50%"))
    assert {versioned.ok("moving") for _ in range(40)} == {1, 2}
    versioned.fs("split", "moving", "2=100")
    assert {versioned.ok("moving") for _ in range(10)} == {2}
    versioned.deploy(good(3), name="moving", options=("--alias", "staging"))
    assert (versioned.ok("moving"), versioned.ok("moving@staging"), versioned.ok("moving@1")) == (2, 3, 1)
    assert "to version 1" in versioned.fs("rollback", "moving").err
    assert versioned.ok("moving") == 1
    versioned.fs("alias", "moving", "live", "staging")
    assert versioned.ok("moving") == 3
    assert versioned.fs("alias", "moving", "prod", "9", code=3).err.count("no version 9") == 1


def test_scale_changes_workers_without_a_deploy(versioned: System) -> None:
    versioned.deploy(good(1), name="scaled")
    assert "min 2, max 2" in versioned.fs("scale", "scaled", "--min", "2").out
    wait_until(lambda: len(versioned.info("scaled").workers) == 2, what="workers that nobody called")
    versioned.fs("scale", "scaled", "--reset")
    assert versioned.info("scaled").version == 1


def test_a_rehearsal_says_what_would_be_sent_and_sends_nothing(versioned: System) -> None:
    source = versioned.source(good(7), folder="rehearsed")
    ran = versioned.fs("deploy", str(source), "--name", "rehearsed", "--dry-run")
    assert "of it to send" in ran.out
    assert "would be version 1" in ran.out
    assert "a single worker" in ran.out
    assert "a second of a call" in ran.out
    assert versioned.call("rehearsed").status_code == 404
    versioned.deploy_file(source, "--name", "rehearsed")
    ran = versioned.fs("deploy", str(source), "--name", "rehearsed", "--dry-run", "--json")
    (found,) = json.loads(ran.out)
    assert (found["new_bundle_bytes"], found["forecast"]["live"], found["forecast"]["changes"]) == (0, 1, False)
    huge = versioned.fs("deploy", str(source), "--name", "rehearsed", "--memory", "900GiB", "--dry-run", code=1)
    assert "nothing was started" in huge.out


def test_config_says_where_the_live_version_differs(versioned: System) -> None:
    handler = versioned.source(good(1).replace("steady", "flagged"), folder="flagged")
    versioned.deploy_file(handler, "--no-probe", "--concurrency", "8", "--env", "MODE=fast")
    shown = json.loads(versioned.fs("config", "show", str(handler), "--json").out)["flagged"]
    assert {name: one["live"] for name, one in shown.items() if "live" in one} == {
        "concurrency": 8,
        "env.MODE": "fast",
    }
    (line,) = (line for line in versioned.fs("config", "show", str(handler)).out.splitlines() if "concurrency" in line)
    assert line.split()[-1] == "8"
    assert "LIVE" not in versioned.fs("config", "show", str(handler), "--concurrency", "8", "--env", "MODE=fast").out


def test_logs_are_found_by_pattern_age_and_request(versioned: System) -> None:
    versioned.deploy(TALKS, name="talks")
    ids = [versioned.call("talks", {"word": word}).headers["x-request-id"] for word in ("apple", "pear")]
    wait_until(lambda: {"apple", "pear"} <= set(versioned.fs("logs", "talks").out.split()), what="its lines")
    assert "apple" not in versioned.fs("logs", "talks", "--grep", "^pea").out
    assert "apple" in versioned.fs("logs", "talks", "--request", ids[0]).out
    assert "apple" not in versioned.fs("logs", "talks", "--request", ids[1]).out
    assert versioned.fs("logs", "talks", "--since", "2100-01-01").out == ""
