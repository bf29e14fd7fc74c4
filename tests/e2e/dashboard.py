"""The dashboard's pages and forms, as tests use them in a browser."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.browser import Page, browsing
from tests.servers import wait_until

REFUSALS = "Failed to load resource"
"""Chromium's line for any 4xx, and some are asked for."""


@contextmanager
def dashboard(url: str, folder: Path, key: str = "") -> Iterator[Page]:
    """The first page. Its console has no complaint when the block is left."""
    with browsing(folder) as page:
        page.open(f"{url}/ui/")
        if key:
            page.run(f"location.hash = '#key={key}'")
        page.shows("live")
        yield page
        assert [one for one in page.complaints if not one.startswith(REFUSALS)] == []


def go(page: Page, where: str, *texts: str) -> None:
    page.run(f"location.hash = '#/{where}'")
    for text in texts:
        page.shows(text)


def fill(page: Page, act: str, about: str = "", **values: object) -> None:
    for name, value in values.items():
        page.run(f"{_form(act, about)}.querySelector('[name={name}]').value = {json.dumps(value)}")


def submit(page: Page, act: str, about: str = "") -> None:
    """`about`: the function, key, secret or call of the form, where a page has several forms that do the same."""
    page.run(f"{_form(act, about)}.requestSubmit()")


def submit_twice(page: Page, act: str, about: str = "") -> None:
    """Submits a form that asks first, and again when it has asked."""
    submit(page, act, about)
    wait_until(lambda: "Press again" in told(page, act, about), what=f"{act} to ask")
    submit(page, act, about)


def told(page: Page, act: str, about: str = "") -> str:
    """The text that the form shows below itself; empty if it is gone."""
    return str(page.run(f"{_form(act, about)}?.querySelector('output').innerText ?? ''"))


def rows(page: Page, title: str) -> list[str]:
    """The text of each row of the card with that title."""
    card = f"[...document.querySelectorAll('section')].find((one) => one.innerText.startsWith({json.dumps(title)}))"
    return list(page.run(f"[...({card}?.querySelectorAll('tbody tr') ?? [])].map((row) => row.innerText)"))


def _form(act: str, about: str) -> str:
    selector = f"form[data-act='{act}']" + (f"[data-args*='\"{about}\"']" if about else "")
    return f"document.querySelector({json.dumps(selector)})"
