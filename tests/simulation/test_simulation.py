"""The simulation itself: a seed is a run, byte for byte."""

from __future__ import annotations

import subprocess
import sys

FOUND = {
    2: "a second try of its own write deleted an async call's answer",
    3: "a revoked key was good again after a crash of Redis",
    27: "an answer that Redis refused was forgotten, and its call ran again",
    31: "calls of a lost gateway stayed open after a step of the clock, and kept workers were billed wrongly",
    79: "a clock that was off made calls wait for a worker that was expected in 1,250 s",
    109: "the same, from another node",
    138: "a killed Redis had statuses again that their node had forgotten",
    1044: "a step back of Redis' clock made a restarted node its own twin",
    1102: "a stored 503 was taken for the answer of a call that was to run again",
    2081: "a revocation was acknowledged before it was on the disk",
    2101: "deaths of serving workers were failed starts for a controller that had been away",
    3019: "a gateway that could not go on with another one's call wrote that one's row",
    3161: "rows that Redis took while it was asked what it had on its disk were not written again after its crash",
    3305: "a new scheduler ordered workers before it had read what the last one had ordered",
    10029: "a call that Redis lost is restored from the object store",
    50284: "a node started a worker again that had ended, when Redis had its order again; its rows were dropped",
    50491: "a status that came during the first read of all kept its worker's order out of the view",
    1000853: "orders whose write was done, but not answered, were made a second time, beyond max",
    1011701: "a call that went on with another one, whose claim had ended, made that one give up with a row of its own",
    1013106: "an answer was taken from a worker after its call had been closed as one of a lost gateway, under its id",
    1013821: "a call that Redis lost was left for ten minutes, as Redis' clock was behind that of the object store",
    924374272: "a waiting call kept the id of one that it had failed to take over, whose row was written",
    924534370: "a gateway that had come back refused calls for a second, as prices were tried again only then",
    1000000131: "a scheduler read all of Redis 75 times a second while that took no write",
    1000005109: "a fence that a crash of Redis had lost was above the next one, which was given within a second",
    1000000544: "a node that had been started again was ordered 200 workers of its earlier start in a second",
    2000020048: "an answer was sent under the id of a call that had given up as its key was taken, whose row says 499",
    2001001957: "the same, before that row was written",
    2500003079: "an async call whose gateway ended while its answer was being stored had succeeded, without an answer",
    11284976138: "a start failed while a clock was a minute ahead, and no other was tried until that minute was over",
    11287095822: "a call that hung until its deadline left others 4 ms to wait, and they were refused",
    11295243029: "a gateway whose clock was an hour ahead expected a start in 500 s, and refused its call",
    11303694936: "an answer to be stored later was not, as another gateway went on with the call at a lost worker",
    11280529279: "a node that had come back since the last read was given up, and its worker ended under a call",
}
"""Seeds that have failed, and what they found."""


def simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280)


def test_seeds_that_have_found_something_hold() -> None:
    done = simulate("--all", "--only", ",".join(map(str, FOUND)))
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]


def test_a_seed_whose_process_dies_has_failed_and_all_others_are_run() -> None:
    code = """
import os, signal
from tests.simulation.batches import BATCH, Outcome, outcomes

def work(seed):
    if seed in (2, BATCH + 3):
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 5:
        raise RuntimeError("of the simulation itself")
    return Outcome(seed, "", False)

found = list(outcomes(range(3 * BATCH), work, float("inf")))
assert [one.seed for one in found] == list(range(3 * BATCH))
assert [one.seed for one in found if one.failed] == [2, 5, BATCH + 3], found
assert "ended with -9" in found[2].text and "ended with 1" in found[5].text
assert not list(outcomes(range(9), work, 0.0))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "RuntimeError: of the simulation itself" in done.stderr


def test_the_same_seed_gives_the_same_trace_byte_for_byte() -> None:
    one, other = (simulate("--from", "11", "--seeds", "2", "--all", "--digest") for _ in range(2))
    digests = [line for line in one.stdout.splitlines() if line[0].isdigit()]
    assert len(digests) == 2, one.stderr
    assert len({line.split()[1] for line in digests}) == 2, "another seed is another run"
    assert digests == [line for line in other.stdout.splitlines() if line[0].isdigit()]
