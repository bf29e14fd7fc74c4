"""Lines of a worker name the call that printed them, and the node reads that back."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextvars import copy_context

from hypothesis import given
from hypothesis import strategies as st

from fleetstart.prefetcher.processes.worker_logs import LineSplitter, TaggedLine, parse_tagged_line
from fleetstart.runtime.worker_io.log_tagging import CURRENT_REQUEST_ID, TaggedStream

TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\r\x1e\x1f"), max_size=12)


def read(write: Callable[[TaggedStream], None], number: int = 1) -> list[TaggedLine]:
    """What a node reads of what was written."""
    reader, writer = os.pipe()
    stream = TaggedStream(1 if number == 1 else 2)
    saved = os.dup(number)
    os.dup2(writer, number)
    try:
        write(stream)
        stream.flush()
    finally:
        os.dup2(saved, number)
        os.close(saved)
        os.close(writer)
    with os.fdopen(reader, "rb") as found:
        splitter = LineSplitter()
        lines = [*splitter.feed(found.read()), *splitter.close()]
    return [parse_tagged_line(line) for line in lines]


def inside(call: str, work: Callable[[], None]) -> None:
    def run() -> None:
        CURRENT_REQUEST_ID.set(call)
        work()

    copy_context().run(run)


def test_lines_outside_calls_have_no_mark() -> None:
    assert read(lambda out: print("one\ntwo", file=out)) == [
        TaggedLine("stdout", "", "one"),
        TaggedLine("stdout", "", "two"),
    ]


def test_each_line_of_a_call_is_its_own() -> None:
    def write(out: TaggedStream) -> None:
        inside("inv-1", lambda: print("a\nb", file=out))
        inside("inv-2", lambda: print("c", file=out))

    assert read(write) == [
        TaggedLine("stdout", name, text) for name, text in [("inv-1", "a"), ("inv-1", "b"), ("inv-2", "c")]
    ]


def test_a_line_that_another_call_breaks_into_stays_its_own() -> None:
    def write(out: TaggedStream) -> None:
        inside("inv-1", lambda: print("half", end="", file=out))
        inside("inv-2", lambda: print("other", file=out))
        inside("inv-1", lambda: print(" rest", file=out))

    assert read(write) == [
        TaggedLine("stdout", "inv-1", "half"),
        TaggedLine("stdout", "inv-2", "other"),
        TaggedLine("stdout", "inv-1", " rest"),
    ]


def test_stderr_is_told_apart() -> None:
    assert read(lambda out: print("trouble", file=out), 2) == [TaggedLine("stderr", "", "trouble")]


def test_a_thread_of_the_call_prints_for_it() -> None:
    def write(out: TaggedStream) -> None:
        def work() -> None:
            thread = threading.Thread(target=copy_context().run, args=(print, "from a thread"), kwargs={"file": out})
            thread.start()
            thread.join()

        inside("inv-1", work)

    assert read(write) == [TaggedLine("stdout", "inv-1", "from a thread")]


@given(st.lists(st.tuples(st.sampled_from(["", "inv-1", "inv-2"]), TEXTS), max_size=12))
def test_nothing_is_lost_whoever_prints_what(prints: list[tuple[str, str]]) -> None:
    def write(out: TaggedStream) -> None:
        for call, text in prints:
            inside(call, lambda text=text: print(text, file=out))  # type: ignore[misc]

    wanted = [TaggedLine("stdout", call, line) for call, text in prints for line in text.split("\n")]
    assert read(write) == wanted


@given(st.text())
def test_any_line_is_read(line: str) -> None:
    found = parse_tagged_line(line)
    assert len(found.invocation) <= 128
    if "\x1e" not in line:
        assert found == TaggedLine("stdout", "", line)
