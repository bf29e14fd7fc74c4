"""`fs logs`: log lines of a function's workers, and the platform's lines about them."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from urllib.parse import quote

import click

from fleetstart.runtime.contract.billing.ledger import InvocationTrace, LogLine
from fleetstart.runtime.contract.errors import NotFound, Unavailable

from .. import output, units
from ..api_client import ApiClient, find_server, suggest_function
from ..completions import function_names
from ..root import verb

RECONNECT_S = 10.0
"""How long a followed log is retried without its server: a restarted controller is back within 5 s."""
PAUSE_S = 0.2
SEARCHED = 10_000
"""Lines that a filter searches: as many as the server returns."""
PIPE_MS = 50
"""Longest time of a line from its worker to the node, which timestamps it."""


@click.command
@click.argument("name", shell_complete=function_names)
@click.option("-f", "--follow", is_flag=True, help="Follow new lines, until ctrl-C.")
@click.option(
    "--tail", default=100, show_default=True, type=click.IntRange(0, 100_000), help="Number of lines to begin with."
)
@click.option("--since", metavar="AGE|DATE", help="Only newer lines: 90s, 15m, 24h, 7d or 2026-01-31.")
@click.option("--grep", "pattern", metavar="REGEX", help="Only lines that match.")
@click.option("--request", "invocation", metavar="INVOCATION", help="Only lines of this invocation.")
@verb()
@click.pass_obj
def command(
    home: Path,
    *,
    name: str,
    follow: bool,
    tail: int,
    since: str | None,
    pattern: str | None,
    invocation: str | None,
    url: str | None,
    as_json: bool,
) -> None:
    """Show the log lines of a function's workers, oldest first.

    Lines of workers that never became ready are included, with the reason. Times are UTC. With a filter, --tail counts
    matching lines of the last 10,000. Lines printed by Python code name their invocation; of other lines (native
    libraries), --request shows those that its worker printed while the invocation ran.

    \b
    fs logs hello -f
    fs logs hello --since 15m --grep Traceback
    fs logs hello --request inv-8b8a53c0e4b14c9f7a6d
    """
    if follow and invocation:
        raise click.UsageError("--request is for an invocation that has ended: give it without --follow")
    since_unix_ms = units.parse_unix_ms(since, now_s=time.time(), option="--since") if since else 0
    with ApiClient(find_server(url, home)) as server, suggest_function(server, name):
        of = server.get(f"/api/v1/invocations/{quote(invocation, safe='')}", InvocationTrace) if invocation else None
        wanted = LogFilter(pattern=_compiled(pattern), since_unix_ms=since_unix_ms, trace=of)
        if wanted != LogFilter():
            lines = searched(server, name, wanted, tail, follow=follow)
        elif follow:
            lines = _followed(server, name, tail, Counter())
        else:
            lines = server.log_lines(name, tail=tail, follow=False)
        with suppress(KeyboardInterrupt):
            for line in lines:
                if as_json:
                    output.json_line(line)
                else:
                    output.data(format_line(line, time.time()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFilter:
    pattern: re.Pattern[str] | None = None
    since_unix_ms: int = 0
    trace: InvocationTrace | None = None

    def passes(self, line: LogLine) -> bool:
        if line.unix_ms < self.since_unix_ms or (self.pattern and not self.pattern.search(line.text)):
            return False
        return self.trace is None or belongs_to(line, self.trace)


def belongs_to(line: LogLine, trace: InvocationTrace) -> bool:
    """True if a line belongs to an invocation: it names it, or its worker printed it while the invocation ran."""
    if line.invocation:
        return line.invocation == trace.row.id
    ran = [phase for phase in trace.timeline.phases if phase.name in ("execute", "respond")]
    if not ran or line.worker != trace.row.worker:
        return False
    origin_ns = trace.timeline.origin_unix_ns
    begun_ms = (origin_ns + min(phase.started_ns for phase in ran)) // 1_000_000
    ended_ms = (origin_ns + max(phase.ended_ns for phase in ran)) // 1_000_000
    return begun_ms <= line.unix_ms <= ended_ms + PIPE_MS


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(pattern) if pattern is not None else None
    except (re.error, RecursionError, OverflowError) as error:
        raise click.BadParameter(
            f"{(pattern or '')[:80]!r} is not a regular expression: {error}", param_hint="--grep"
        ) from error


def format_line(line: LogLine, now_s: float, zone: tzinfo | None = UTC) -> str:
    """A log line with its time of the day, and its date if that is not today's. `zone` None: local time."""
    at, today = (datetime.fromtimestamp(unix_s, zone) for unix_s in (line.unix_ms / 1000, now_s))
    clock = at.strftime("%H:%M:%S.%f" if at.date() == today.date() else "%Y-%m-%d %H:%M:%S.%f")[:-3]
    mark = {"stdout": " ", "stderr": "!", "system": "·"}[line.stream]
    return f"{clock} {line.worker}@{line.version} {mark} {output.printable(line.text)}"


def searched(server: ApiClient, name: str, wanted: LogFilter, tail: int, *, follow: bool) -> Iterator[LogLine]:
    """The last `tail` lines that pass, of all that the server has, and then those that come."""
    past = list(server.log_lines(name, tail=SEARCHED, follow=False))
    yield from deque(filter(wanted.passes, past), maxlen=tail)
    if follow:
        # As many once more: any number may have come in between. Their times tell less: nodes have clocks of their own.
        yield from filter(wanted.passes, _followed(server, name, SEARCHED, Counter(past)))


def _followed(server: ApiClient, name: str, tail: int, known: Counter[LogLine]) -> Iterator[LogLine]:
    """Follows a log over restarts of the controller: reconnects, and skips lines that were shown, or are known."""
    last_ms = 0
    lost_at_s: float | None = None
    while True:
        seen_ms = last_ms
        try:
            for line in server.log_lines(name, tail=tail, follow=True):
                lost_at_s = None
                last_ms = max(last_ms, line.unix_ms)
                if known[line] > 0:
                    known[line] -= 1
                elif line.unix_ms > seen_ms:
                    yield line
        except (output.Unreachable, NotFound, Unavailable) as error:
            if isinstance(error, NotFound) and not last_ms:
                raise
            # A controller that has just begun may answer before it knows its functions again.
            lost_at_s = lost_at_s or time.monotonic()
            if time.monotonic() - lost_at_s > RECONNECT_S:
                raise
        time.sleep(PAUSE_S)
        tail = 100
