"""Which lines `fs logs` shows, and what it refuses; and the scripts of `fs completion`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from fleetstart.controller.cli.api_client import ApiClient
from fleetstart.controller.cli.commands.logs import PIPE_MS, SEARCHED, LogFilter, _compiled, format_line, searched
from fleetstart.controller.cli.output import OK, USAGE
from fleetstart.controller.cli.root import run
from fleetstart.runtime.contract.billing.ledger import InvocationRow, InvocationTrace, LogLine
from fleetstart.runtime.contract.ids import FunctionName, InvocationId, Version, WorkerId
from fleetstart.runtime.contract.timeline import Timeline

MS = 1_000_000


def line(unix_ms: int, text: str = "hello", worker: str = "w-1") -> LogLine:
    return LogLine(unix_ms=unix_ms, worker=WorkerId(worker), version=Version(1), stream="stdout", text=text)


def trace(*phases: tuple[Any, int, int]) -> InvocationTrace:
    timeline = Timeline(origin_unix_ns=1000 * MS)
    for name, begun_ms, ended_ms in phases:
        timeline.add(name, begun_ms * MS, ended_ms * MS)
    row = InvocationRow(
        id=InvocationId("inv-1"), function=FunctionName("f"), version=Version(1), worker=WorkerId("w-1"), status=200,
        accepted_unix_ms=1000, queue_ms=0, billed_ms=1, memory_bytes=1, cost_nusd=0,
    )  # fmt: skip
    return InvocationTrace(row=row, timeline=timeline)


def test_filters_let_pass_what_all_of_them_want() -> None:
    wanted = LogFilter(pattern=_compiled("wor+ld"), since_unix_ms=500)
    assert wanted.passes(line(500, "hello worrld"))
    assert not wanted.passes(line(499, "hello world"))
    assert not wanted.passes(line(500, "hello"))


def test_a_request_has_the_lines_that_its_worker_printed_meanwhile() -> None:
    wanted = LogFilter(trace=trace(("queue", 0, 10), ("execute", 10, 20), ("respond", 20, 30)))
    assert [wanted.passes(line(at)) for at in (1009, 1010, 1030 + PIPE_MS, 1031 + PIPE_MS)] == [
        False, True, True, False
    ]  # fmt: skip
    assert not wanted.passes(line(1015, worker="w-2"))
    assert not LogFilter(trace=trace(("queue", 0, 10))).passes(line(1005)), "it never ran"


class Log(ApiClient):
    """A server with one log, of which each request that follows sees more."""

    def __init__(self, *logs: list[LogLine]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.asked: list[int] = []
        self._logs = iter(logs)

    def log_lines(self, name: str, *, tail: int, follow: bool) -> Iterator[LogLine]:
        self.asked.append(tail)
        yield from next(self._logs)[-tail:]


def test_a_followed_search_begins_with_the_last_matches_of_all_lines_and_neither_doubles_nor_loses_one() -> None:
    past = [line(1000, "match 0"), *(line(2000 + number) for number in range(500)), line(2500, "match 1")]
    meanwhile = [line(2500, "match 2"), line(2499, "match 3, by another node's clock"), line(2501)]
    wanted = LogFilter(pattern=_compiled("match"))
    for tail, begins in ((100, 0), (1, 1), (0, 2)):
        with Log(past, past[200:] + meanwhile, [*past, *meanwhile, line(2600, "match 4")]) as log:
            shown = list(islice(searched(log, "f", wanted, tail, follow=True), 5 - begins))
        assert [found.text[:7] for found in shown] == [f"match {number}" for number in range(begins, 5)]
        assert log.asked[:2] == [SEARCHED, SEARCHED]


def test_a_search_that_does_not_follow_ends() -> None:
    with Log([line(1, "match"), line(2)]) as log:
        assert list(searched(log, "f", LogFilter(pattern=_compiled("match")), 100, follow=False)) == [line(1, "match")]


def test_a_line_has_its_time_in_utc_and_its_date_if_that_is_not_today() -> None:
    """So that it can be given to --since."""
    shown = format_line(line(1_795_824_000_000), now_s=1_795_910_399.0)  # the first second of a day, and the last one
    assert shown == "00:00:00.000 w-1@1   hello"
    assert format_line(line(1_795_823_999_999), now_s=1_795_824_000.0) == "2026-11-27 23:59:59.999 w-1@1   hello"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--grep", "("], "not a regular expression"),
        (["--grep", "a" + "(" * 5000], "not a regular expression"),
        (["--since", "yesterday"], "neither an age"),
        (["-f", "--request", "inv-1"], "without --follow"),
    ],
)
def test_filters_that_make_no_sense_are_wrong_usage(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["logs", "f", "--url", "http://127.0.0.1:1", *options]) == USAGE
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["completion", shell]) == OK
    assert "_FS_COMPLETE" in capsys.readouterr().out
    assert run(["completion", shell, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["shell"] == shell


def test_verbs_and_options_are_completed() -> None:
    def completed(words: str, index: int) -> list[str]:
        env = {"_FS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(index)}
        argv = [sys.executable, "-m", "fleetstart.controller.cli"]
        result = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=30, check=True)
        return [found.partition(",")[2] for found in result.stdout.split()]

    assert completed("fs ro", 1) == ["rollback"]
    assert completed("fs deploy --can", 2) == ["--canary"]
