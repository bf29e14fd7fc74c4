"""The drawn error tree has every FleetError subclass of the rooms, with its status and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module

from fleetstart.runtime.contract import errors
from fleetstart.runtime.contract.errors import FleetError
from tests.docs.pages import ROOT

DRAWN = re.compile(r"^[│├└─ ]*(\w+) +(\d{3}) +(\w+)", re.MULTILINE)
ROOMS = ("fleetstart.controller.", "fleetstart.prefetcher.", "fleetstart.runtime.")
"""The client's errors are a tree of its own; another test in this process may have imported them."""

REFUSED = ("Refused", "400", "refused")
"""Drawn with the range of its subclasses, 4xx."""


def _subclasses(root: type[FleetError]) -> Iterator[type[FleetError]]:
    for child in root.__subclasses__():
        if child.__module__.startswith(ROOMS):
            yield child
            yield from _subclasses(child)


def _import_definitions() -> None:
    """Imports every module that may define an error: each names a base of its class in parentheses."""
    bases = "|".join({"FleetError", *(error.__name__ for error in _subclasses(FleetError))})
    definition = re.compile(rf"^class \w+\((?:{bases})\)", re.MULTILINE)
    for room in ("controller", "prefetcher", "runtime"):
        for path in (ROOT / room).rglob("*.py"):
            if definition.search(path.read_text()):
                import_module(".".join(("fleetstart", *path.relative_to(ROOT).with_suffix("").parts)))


def test_every_error_of_the_rooms_is_drawn() -> None:
    assert errors.__doc__ is not None
    _import_definitions()
    found = {(error.__name__, str(error.status), error.code) for error in _subclasses(FleetError)}
    assert {*DRAWN.findall(errors.__doc__), REFUSED} == found
