"""Checker of a history: which promises of the platform it breaks. Pure: takes a history and the ledger's rows.

What a fault excuses is narrow and stands in `excuses`: the platform says of four things in docs that a fault may undo
them, and of everything else that none may.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tests.chaos.excuses import Excuses
from tests.chaos.history import (
    Answered,
    AnyEvent,
    Deployed,
    Fault,
    Invoked,
    Led,
    Ran,
    Revoked,
    Row,
    Settled,
    Streamed,
)

REVOKED_S = 3.0
"""A gateway follows a revocation when it reads Redis again, once a second; a busy machine gets two more."""
DEPLOYED_S = 3.0
"""The same for a version that another gateway made live."""
NOT_KEPT = frozenset({402, 425, 429, *range(500, 600)})
"""Answers after which the next call with an idempotency key runs, as docs/http.md says."""
HANDLERS = "handler_error"
"""What a handler raised is an answer, and is not repeated."""


@dataclass(frozen=True, slots=True)
class Finding:
    rule: str
    text: str


@dataclass(slots=True)
class _Index:
    """The events of a history by what rules look them up by."""

    rows: Sequence[Row]
    excuses: Excuses
    invoked: dict[str, Invoked] = field(default_factory=dict)
    answers: list[tuple[Invoked, Answered]] = field(default_factory=list)
    streams: list[Streamed] = field(default_factory=list)
    runs: list[Ran] = field(default_factory=list)
    deployed: list[Deployed] = field(default_factory=list)
    revoked: dict[str, float] = field(default_factory=dict)
    led: list[Led] = field(default_factory=list)
    settled: dict[str, Settled] = field(default_factory=dict)


def check(history: Iterable[AnyEvent], rows: Sequence[Row]) -> list[Finding]:
    """All findings, by rule. The history is in the order in which it was written."""
    index = _index(history, rows)
    return [Finding(rule.__name__, text) for rule in RULES for text in rule(index)]


def _index(history: Iterable[AnyEvent], rows: Sequence[Row]) -> _Index:
    events = list(history)
    index = _Index(rows, Excuses([event for event in events if isinstance(event, Fault)]))
    for event in events:
        match event:
            case Invoked():
                index.invoked[event.call] = event
            case Answered():
                index.answers.append((index.invoked[event.call], event))
            case Streamed():
                index.streams.append(event)
            case Ran():
                index.runs.append(event)
            case Deployed():
                index.deployed.append(event)
            case Revoked():
                index.revoked[event.token] = event.at_s
            case Led():
                index.led.append(event)
            case Settled():
                index.settled[event.request] = event
    return index


# ── rules ──────────────────────────────────────────────────────────────────────────────────────────


def one_row_a_run(index: _Index) -> Iterator[str]:
    """Each invocation that ran has one row, and no row is there twice."""
    counts = Counter(row.id for row in index.rows)
    for name, count in counts.items():
        if count > 1:
            yield f"invocation {name} has {count} rows"
    answers = {asked.ticket: (asked, answer) for asked, answer in index.answers}
    for run in index.runs:
        if run.request in counts:
            continue
        told = answers.get(run.ticket)
        if told is None or told[1].status != 0 or not _opening_may_be_lost(index, *told):
            yield f"invocation {run.request} ran and has no row"


def each_answer_billed_once(index: _Index) -> Iterator[str]:
    """A good answer has its row, which says the same of it: good, this version, this price."""
    rows = {row.id: row for row in index.rows}
    for asked, answer in index.answers:
        if answer.status != 200 or asked.kind == "probe":
            continue
        row = rows.get(answer.request)
        if row is None:
            yield f"call {asked.call} was answered as invocation {answer.request}, which has no row"
        elif row.status != 200:
            yield f"invocation {answer.request} was answered with 200, and its row says {row.status}"
        elif answer.version and row.version != answer.version:
            yield f"invocation {answer.request} was answered by version {answer.version}, billed as {row.version}"
        elif answer.cost and row.cost != answer.cost:
            if asked.key and index.excuses.two_may_answer(asked.at_s, answer.at_s):
                continue
            yield f"invocation {answer.request} was told to cost {answer.cost}, its row says {row.cost}"


def answers_are_of_runs(index: _Index) -> Iterator[str]:
    """A good answer is that of a run of this very call, which the handler wrote down before."""
    runs = {run.run: run for run in index.runs}
    for asked, answer in index.answers:
        if answer.status != 200 or not answer.run:
            continue
        run = runs.get(answer.run)
        if run is None or run.at_s > answer.at_s:
            yield f"call {asked.call} was answered with run {answer.run}, which there was not"
        elif asked.ticket not in (run.ticket, "") or answer.ticket != run.ticket:
            yield f"call {asked.call} with ticket {asked.ticket} got the answer of ticket {run.ticket}"


def sync_calls_run_once(index: _Index) -> Iterator[str]:
    """A call without a key, of a function without retries, is run once at most."""
    single = {asked.ticket for asked in index.invoked.values() if asked.kind in ("sync", "stream")}
    for ticket, count in Counter(run.ticket for run in index.runs).items():
        if ticket in single and count > 1:
            yield f"ticket {ticket} of one call was run {count} times"


def one_run_a_key(index: _Index) -> Iterator[str]:
    """Requests with one idempotency key are run once, unless the answer is not kept, or the claim lapsed.

    A run whose caller was told that it is lost may come late, after the next one: only runs with a good end count.
    """
    statuses = {row.id: row.status for row in index.rows}
    keys = {one.ticket: one.key for one in index.invoked.values() if one.kind == "keyed"}
    runs: dict[str, list[Ran]] = defaultdict(list)
    for run in index.runs:
        if run.ticket in keys and statuses.get(run.request) not in NOT_KEPT:
            runs[run.ticket].append(run)
    for ticket, mine in runs.items():
        for earlier, later in pairwise(sorted(mine, key=lambda run: run.at_s)):
            if not index.excuses.claim_may_lapse(earlier.at_s, later.at_s):
                yield f"the call with key {keys[ticket]} was run at {earlier.at_s:.3f} and {later.at_s:.3f} s"


def a_second_run_is_told(index: _Index) -> Iterator[str]:
    """The answer of a second run, which a claim that lapsed has let begin, says that there was a first one."""
    statuses = {row.id: row.status for row in index.rows}
    runs: dict[str, list[Ran]] = defaultdict(list)
    for run in index.runs:
        runs[run.ticket].append(run)
    for one, answer in index.answers:
        if one.kind != "keyed" or answer.status != 200 or answer.replayed or answer.retaken:
            continue
        earlier = [run for run in runs[one.ticket] if run.run < answer.run and statuses.get(run.request) == 200]
        if earlier:
            yield f"call {one.call} was answered with run {answer.run}, and not told of run {earlier[0].run}"


def one_answer_a_key(index: _Index) -> Iterator[str]:
    """Once a call with a key was answered well, later ones get the same run's answer, unless the claim lapsed."""
    first: dict[str, Answered] = {}
    for one, answer in sorted(index.answers, key=lambda pair: pair[1].at_s):
        if one.kind != "keyed" or answer.status != 200:
            continue
        known = first.setdefault(one.ticket, answer)
        if known.run != answer.run and not index.excuses.claim_may_lapse(_began(index, known), answer.at_s):
            yield f"key {one.key} was answered with run {known.run}, and later with run {answer.run}"


def one_leader_a_fence(index: _Index) -> Iterator[str]:
    """A fencing token is one controller's, and tokens only rise."""
    leaders: dict[int, str] = {}
    last = 0
    for seen in index.led:
        if seen.fence < last:
            yield f"fence {seen.fence} was seen at {seen.at_s:.3f} s, after fence {last}"
        last = max(last, seen.fence)
        if seen.gateway and leaders.setdefault(seen.fence, seen.gateway) != seen.gateway:
            yield f"fence {seen.fence} was held by {leaders[seen.fence]} and by {seen.gateway}"


def revoked_is_refused(index: _Index) -> Iterator[str]:
    """A revoked key is refused within the bound at every gateway that can read Redis."""
    for asked, answer in index.answers:
        revoked_s = index.revoked.get(asked.token)
        if revoked_s is None or not 200 <= answer.status < 300:
            continue
        late_s = asked.at_s - index.excuses.informed_since(asked.gateway, revoked_s, asked.at_s)
        if late_s > REVOKED_S:
            yield f"key {asked.token} was revoked, and {asked.gateway} took it {late_s:.3f} s later"


def versions_never_go_back(index: _Index) -> Iterator[str]:
    """A gateway that has answered with a version answers no later call with an older one, nor does any gateway after
    the bound."""
    fresh = [
        (asked, answer)
        for asked, answer in index.answers
        if answer.status == 200 and answer.version and not answer.replayed and asked.kind == "sync"
    ]
    by_gateway: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for asked, answer in sorted(fresh, key=lambda pair: pair[1].at_s):
        seen = by_gateway[asked.gateway]
        newest = max((version for at_s, version in seen if at_s <= asked.at_s), default=0)
        if answer.version < newest:
            yield f"{asked.gateway} answered call {asked.call} with version {answer.version} after version {newest}"
        seen.append((answer.at_s, answer.version))
        for deployed in index.deployed:
            since_s = index.excuses.informed_since(asked.gateway, deployed.at_s, asked.at_s)
            if deployed.at_s <= asked.at_s and answer.version < deployed.version and asked.at_s - since_s > DEPLOYED_S:
                yield (
                    f"{asked.gateway} answered call {asked.call} with version {answer.version}, "
                    f"{asked.at_s - since_s:.3f} s after version {deployed.version} was live"
                )


def no_accepted_call_lost(index: _Index) -> Iterator[str]:
    """An async call that was accepted has been answered in the end, or is a dead letter that says so; and it ran."""
    ran = {run.ticket for run in index.runs}
    for asked, answer in index.answers:
        if asked.kind != "async" or answer.status != 202:
            continue
        settled = index.settled.get(answer.request)
        status, code = (settled.status, settled.code) if settled is not None else ("", "")
        told = status == "failed" and ((settled is not None and settled.dead_letter) or code == HANDLERS)
        if status != "succeeded" and not told:
            yield f"async call {answer.request} was accepted, and is {status!r} {code!r} in the end"
        elif status == "succeeded" and asked.ticket not in ran:
            yield f"async call {answer.request} has succeeded, and never ran"


def no_token_wrong(index: _Index) -> Iterator[str]:
    """A stream is a beginning of what it should be, and all of it if it ended well."""
    for stream in index.streams:
        if stream.got != stream.expected[: len(stream.got)]:
            at = next(i for i, (a, b) in enumerate(zip(stream.got, [*stream.expected, ""], strict=False)) if a != b)
            yield f"stream {stream.call} has {stream.got[at]!r} as item {at}"
        elif stream.whole and stream.got != stream.expected:
            yield f"stream {stream.call} ended well after {len(stream.got)} of {len(stream.expected)} items"


RULES: tuple[Callable[[_Index], Iterator[str]], ...] = (
    one_row_a_run,
    each_answer_billed_once,
    answers_are_of_runs,
    sync_calls_run_once,
    one_run_a_key,
    a_second_run_is_told,
    one_answer_a_key,
    one_leader_a_fence,
    revoked_is_refused,
    versions_never_go_back,
    no_accepted_call_lost,
    no_token_wrong,
)


def _opening_may_be_lost(index: _Index, asked: Invoked, answer: Answered) -> bool:
    return index.excuses.opening_may_be_lost(asked.gateway, asked.at_s, answer.at_s)


def _began(index: _Index, answer: Answered) -> float:
    return index.invoked[answer.call].at_s
