"""Errands on the dashboard of a real system, in a browser: to try, change, find, and read it on a small screen."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Page
from tests.e2e.dashboard import dashboard, fill, go, rows, submit
from tests.e2e.systems import System, running
from tests.servers import wait_until

REPEAT = """
from typing import Literal
from fleetstart.runtime import function

@function(memory="64MiB")
def repeat(text: str, times: int = 2, end: Literal["dot", "bang"] = "dot", loud: bool = False, tags: list[str] = []):
    return {"text": text * times, "end": end, "loud": loud, "tags": tags}

@function(memory="64MiB")
def count(to: int = 3):
    yield from range(to)

@function(memory="64MiB")
class Broken:
    def load(self, weights):
        raise OSError("no room for " + "/a/very/long/path" * 20)

    def __call__(self):
        return 1
"""
PAGES = {
    "": "Latest invocations",
    "f/repeat": "text string, required",
    "f/broken": "OSError: no room",
    "calls": "start_failed",
    "calls?kind=async": "None.",
    "calls?kind=dead": "No dead letters",
    "nodes": "cpu:1",
    "usage": "By function and phase",
    "access": "Audit log",
    "history": "Calls that waited for a start",
    "history?range=30d&function=repeat": "A bar is 12 hours",
    "none": "There is no page none.",
}
"""A text of each page that no other has."""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running(env={"FS_PROFILES": "python", "FS_DEVICES": "cpu:2x64MiB"}) as system:
        system.deploy_file(system.source(REPEAT, folder="errands"), "--no-probe", "--tag", f"{'z' * 63}={'z' * 63}")
        assert system.http.post("/fn/broken").status_code == 500
        wait_until(system.invocations, what="the row of the failed call")
        yield system


@pytest.fixture
def page(system: System, tmp_path: Path) -> Iterator[Page]:
    with dashboard(system.url, tmp_path) as page:
        yield page


def test_a_function_is_tried_by_a_form_made_from_its_types(page: Page) -> None:
    go(page, "f/repeat", "Try it", "text string, required", "times integer")
    fill(page, "call", text="ab", times="3", end='"bang"', tags='["x"]')
    submit(page, "call")
    page.shows("HTTP 200")
    page.shows('{"text":"ababab","end":"bang","loud":false,"tags":["x"]}')
    fill(page, "call", tags="[")
    submit(page, "call")
    page.shows("tags is no JSON")
    fill(page, "call", tags="[7]")
    submit(page, "call")
    page.shows("HTTP 400")
    page.shows("invalid_input")
    assert page.run("document.querySelector('form[data-act=call] [name=text]').value") == "ab", "what was typed stays"
    go(page, "f/count", "POST /fn/count")
    submit(page, "call")
    page.shows("data: 2")


def test_the_command_that_is_suggested_works_as_it_is(system: System, page: Page) -> None:
    for name in ("repeat", "count"):
        go(page, f"f/{name}", "Try it")
        line = page.run("document.querySelector('.empty code').innerText")
        verb, *arguments = shlex.split(line)
        assert verb == "fs", line
        system.fs(*arguments)


def test_a_call_that_no_worker_took_has_the_reason_on_its_page(page: Page) -> None:
    (call,) = {row["id"] for row in page.run("fetch('../api/v1/invocations?function=broken').then((it) => it.json())")}
    go(page, f"i/{call}", "no room for", "Longest phase")
    page.shows("none took it: start_failed")
    assert "all workers were busy" not in page.text
    go(page, "f/broken", "The last start failed")


def test_scale_and_rollback_change_the_function(system: System, page: Page) -> None:
    handler = system.source(REPEAT, folder="errands")
    system.fs("deploy", "--no-probe", f"{handler}:repeat", "--memory", "80MiB")
    go(page, "f/repeat", "version 2, deployed", "Roll back")
    fill(page, "scale", min=1, max=3)
    submit(page, "scale")
    wait_until(lambda: system.info("repeat").scale.max == 3, what="the scale")
    fill(page, "rollback", version="1")
    submit(page, "rollback")
    page.shows("version 1, deployed")
    assert system.info("repeat").version == 1
    fill(page, "scale", min=5, max=2)
    submit(page, "scale")
    page.shows("min <= max")


def test_functions_are_searched_and_pages_that_are_not_there_say_so(page: Page) -> None:
    page.shows("broken")
    fill(page, "find", q="count")
    submit(page, "find")
    wait_until(lambda: names(page) == ["count"], what="one function")
    fill(page, "find", q="nothing-like-it")
    submit(page, "find")
    page.shows("No function fits.")
    go(page, "", "repeat")
    wait_until(lambda: names(page) == ["broken", "count", "repeat"], what="all functions, by name")
    go(page, "zzz", "There is no page zzz.")
    go(page, "i/inv-none", "All functions")


def names(page: Page) -> list[str]:
    """The functions that are listed."""
    return [row.split()[0] for row in rows(page, "Functions")]


def test_functions_are_sorted_by_the_chosen_column(system: System, page: Page) -> None:
    for _ in range(20):  # more than the other tests call another one
        system.http.post("/fn/count")
    go(page, "?sort=calls", "calls/min")
    wait_until(lambda: names(page)[:1] == ["count"], what="the most called one first")
    page.run("window.column = [...document.querySelectorAll('th a')].find((link) => link.innerText === 'calls/min')")
    page.run("column.focus(), column.click()")
    wait_until(lambda: names(page)[-1:] == ["count"], what="the most called one last")
    assert page.run("document.querySelector('th[aria-sort]').getAttribute('aria-sort')") == "ascending"
    assert page.run("document.activeElement === column"), "somebody at a keyboard goes on from where they are"
    fill(page, "find", q="repeat")
    page.run("document.querySelector('[name=q]').focus()")
    submit(page, "find")
    wait_until(lambda: names(page) == ["repeat"], what="the one")
    assert "sort=calls" in page.run("location.hash"), "a search keeps the order"
    wait_until(lambda: page.run("document.activeElement.value") == "repeat", what="the focus in its field")


def test_a_link_that_was_cut_within_a_name_says_what_is_missing(page: Page) -> None:
    go(page, "access", "Audit log")
    go(page, "f/%E0%A4", "function %E0%A4 does not exist")


def test_a_time_of_another_day_has_its_date(page: Page) -> None:
    shown = "[Date.now(), Date.UTC(2025, 0, 5, 12)].map((unixMs) => it.moment(unixMs))"
    today, then = page.run(f"import('./format.js').then((it) => {shown})")
    assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", today)
    assert re.fullmatch(r"[56] Jan \d\d:\d\d:00\.000", then)


def test_a_page_that_takes_long_to_read_is_read_less_often(page: Page) -> None:
    """The usage of a month adds up millions of rows."""
    pauses = page.run("import('./client.js').then((it) => [0, 100, 1000, 10_000].map((tookMs) => it.pauseMs(tookMs)))")
    assert pauses == [2000, 2000, 4000, 40_000]


@pytest.mark.parametrize("width", [1280, 400])
def test_every_page_fits_its_window(page: Page, width: int) -> None:
    page.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    (call,) = {row["id"] for row in page.run("fetch('../api/v1/invocations?function=broken').then((it) => it.json())")}
    for where, text in {**PAGES, f"i/{call}": "Longest phase"}.items():
        go(page, where, text)
        page.shows("live")
        wide = page.run("document.documentElement.scrollWidth")
        assert wide <= width, f"{where}: {wide}"
        shown = page.text
        assert where != "usage" or not re.search(r"\$0\.\d{6}", shown), "amounts are rounded"
        assert not re.search(r"TTFT|TPOT|first token|a token", shown), f"{where}: these functions have no tokens"
        tall = page.run("Math.max(0, ...[...document.querySelectorAll('tbody tr')].map((row) => row.offsetHeight))")
        assert tall < 200, f"{where}: a row of {tall} px"
