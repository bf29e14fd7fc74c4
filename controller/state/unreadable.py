"""Records of Redis that this release cannot read: skipped by their readers, and shown in metrics, log and status.

A later release may have written them. What was read before stays as it was: a controller that does not understand a
record neither ends what belongs to it nor takes it over.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, NamedTuple, TypeVar

from fleetstart.runtime.contract.errors import Unavailable
from fleetstart.runtime.contract.record_decoder import RecordDecoder, UnreadableRecord

Record = TypeVar("Record")

log = logging.getLogger(__name__)

KEPT_NS = 600_000_000_000
"""Time that a record of a reader that does not read everything again is shown: publications, rows of streams."""
KEPT_MAX = 1_000
ERROR_MAX = 300


class Unreadable(NamedTuple):
    """A record that could not be read. `kind` is what it should be: "function", "version", "order"."""

    kind: str
    name: str
    error: str


class UnreadableRecords:
    """The records that could not be read lately. Each is logged once."""

    def __init__(self, monotonic_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._monotonic_ns = monotonic_ns
        self._present: dict[str, dict[str, str]] = {}
        self._noted: OrderedDict[tuple[str, str], tuple[str, int]] = OrderedDict()
        self.total: Counter[str] = Counter()
        """Number of distinct records by kind since this process began."""

    def replace(self, kind: str, problems: Mapping[str, str]) -> None:
        """All records of a kind that cannot be read, after all of them were read."""
        known = self._present.get(kind, {})
        for name, error in problems.items():
            if known.get(name) != error:
                self._first(kind, name, error)
        self._present[kind] = dict(problems)

    def note(self, kind: str, name: str, error: object) -> None:
        """One record that cannot be read, by a reader that does not read all of them."""
        text = str(error)
        known = self._noted.pop((kind, name), None)
        if (known is None or known[0] != text) and self._present.get(kind, {}).get(name) != text:
            self._first(kind, name, text)
        self._noted[kind, name] = (text, self._monotonic_ns())
        while len(self._noted) > KEPT_MAX:
            self._noted.popitem(last=False)

    def _first(self, kind: str, name: str, error: str) -> None:
        self.total[kind] += 1
        log.warning(
            "a record in Redis cannot be read, and is skipped; another release may have written it",
            extra={"kind": kind, "record": name, "error": error[:ERROR_MAX]},
        )

    def names(self, kind: str) -> frozenset[str]:
        """Names of the records of a kind that could not be read when all were read last."""
        return frozenset(self._present.get(kind, ()))

    def error(self, kind: str, name: str) -> str | None:
        return self._present.get(kind, {}).get(name)

    def all(self) -> list[Unreadable]:
        """What cannot be read at present, sorted."""
        since_ns = self._monotonic_ns() - KEPT_NS
        found = {(kind, name): error for kind, of_kind in self._present.items() for name, error in of_kind.items()}
        for (kind, name), (error, at_ns) in self._noted.items():
            if at_ns >= since_ns and (kind not in self._present):
                found[kind, name] = error
        return sorted(Unreadable(kind, name, error[:ERROR_MAX]) for (kind, name), error in found.items())


def unreadable(what: str, error: object) -> Unavailable:
    """The error for a record that is needed now and cannot be read."""
    return Unavailable(
        f"{what} cannot be read by this release: {str(error)[:ERROR_MAX]}",
        hint="another release wrote it: ask a controller of that release, or upgrade this one; `fs status` lists all",
        retry_after_s=5,
    )


class DecodeCache(Generic[Record]):
    """A cache of decoded records by their bytes, so that a resync decodes only what has changed. What cannot be decoded
    is left out, and told to `UnreadableRecords`."""

    def __init__(self, what: str, kind: type[Record]) -> None:
        self._what = what
        self._decoder = RecordDecoder(kind)
        self._known: dict[bytes, Record | UnreadableRecord] = {}
        self._next: dict[bytes, Record | UnreadableRecord] = {}
        self._problems: dict[str, str] = {}
        self.decoded = 0
        """Number of records that were decoded."""

    def read(self, name: bytes | str, raw: bytes) -> Record | None:
        """The decoded record; None if it cannot be decoded."""
        value = self._known.get(raw)
        if value is None:
            self.decoded += 1
            try:
                value = self._decoder.decode(raw)
            except UnreadableRecord as error:
                value = error
        self._next[raw] = value
        if isinstance(value, UnreadableRecord):
            self._problems[name if isinstance(name, str) else name.decode(errors="replace")] = str(value)
            return None
        return value

    def turn(self, unreadable: UnreadableRecords) -> None:
        """Ends a resync: tells what could not be read, and forgets entries that it did not see."""
        unreadable.replace(self._what, self._problems)
        self._known, self._next, self._problems = self._next, {}, {}
